/* The binary cross-entropy of logits, its gradient, and the count of correct answers, computed in
 * double precision. A tile has up to ROWS elements of a block; an element has 16 lanes. */
#include <math.h>

#include "loss.h"

enum { ROWS = 1024 };

struct job {
    const float *logits, *targets;
    const int32_t *labels, *counts; /* `labels`: the targets if `targets` is NULL */
    const double *weights;          /* weight of positive targets per class; NULL means 1 */
    double *sums;                   /* one sum per tile */
    float *dlogits;
    double scale, gamma;
    int64_t classes, pixels, tiles; /* `tiles`: the number of tiles per block */
};

/* The block of a tile, and its elements [first, stop) in the block. */
struct range {
    int64_t block, first, stop;
};

static struct range range_of(const struct job *job, int64_t tile) {
    int64_t first = tile % job->tiles * ROWS;
    return (struct range){tile / job->tiles, first,
                          least(job->classes * job->pixels, first + ROWS)};
}

/* The factors of -log p and -log (1 - p) for 16 images. */
struct weights {
    double positive[LANES], negative[LANES];
};

/* Compute the factors for the element at index i. Labels other than 0 and 1 get factors of zero. */
static void weights_of(const struct job *job, int64_t i, int64_t class, struct weights *w) {
    double weight = job->weights ? job->weights[class] : 1;
    if (job->labels)
        EACH_LANE_OF_ALL {
            int32_t label = job->labels[i + lane];
            w->positive[lane] = label == 1 ? weight : 0;
            w->negative[lane] = label == 0;
        }
    else
        EACH_LANE_OF_ALL {
            double target = job->targets[i + lane];
            w->positive[lane] = weight * target;
            w->negative[lane] = 1 - target;
        }
}

/* Return log(1 + u) for 0 <= u <= 1. The quotient corrects the rounding of 1 + u. */
INLINE double logarithm_of_1_plus(double u) {
    double sum = 1 + u, rest = sum - 1;
    return rest > 0 ? logarithm(sum) * (u / (rest > 0 ? rest : 1)) : u;
}

/* p = 1 / (1 + e^-x), q = 1 - p, and their negative logarithms. */
struct chances {
    double p, q, minus_log_p, minus_log_q;
};

INLINE struct chances chances_of(double x) {
    double e = exponential(x < 0 ? x : -x), larger = 1 / (1 + e), smaller = e / (1 + e);
    double log = logarithm_of_1_plus(e);
    if (x != x) log = x; /* keep NaN */
    return (struct chances){.p = x >= 0 ? larger : smaller,
                            .q = x >= 0 ? smaller : larger,
                            .minus_log_p = log + (x < 0 ? -x : 0),
                            .minus_log_q = log + (x > 0 ? x : 0)};
}

static void loss_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    struct range r = range_of(job, tile);
    double sums[LANES] = {0}, total = 0, gamma = job->gamma;
    for (int64_t element = r.first; element < r.stop; element++) {
        int64_t i = (r.block * job->classes * job->pixels + element) * LANES;
        struct weights w;
        weights_of(job, i, element / job->pixels, &w);
        if (gamma > 0)
            EACH_LANE_OF_ALL {
                struct chances c = chances_of(job->logits[i + lane]);
                sums[lane] += w.positive[lane] * power_of(c.q, gamma) * c.minus_log_p +
                              w.negative[lane] * power_of(c.p, gamma) * c.minus_log_q;
            }
        else
            EACH_LANE_OF_ALL {
                struct chances c = chances_of(job->logits[i + lane]);
                sums[lane] +=
                    w.positive[lane] * c.minus_log_p + w.negative[lane] * c.minus_log_q;
            }
    }
    for (int lane = 0; lane < job->counts[r.block]; lane++) total += sums[lane];
    job->sums[tile] = total;
}

static void dlogits_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    struct range r = range_of(job, tile);
    double gamma = job->gamma;
    for (int64_t element = r.first; element < r.stop; element++) {
        int64_t i = (r.block * job->classes * job->pixels + element) * LANES;
        float *d = job->dlogits + i;
        struct weights w;
        weights_of(job, i, element / job->pixels, &w);
        EACH_LANE_OF_ALL {
            struct chances c = chances_of(job->logits[i + lane]);
            double up = c.p, down = c.q;
            if (gamma > 0) {
                up = power_of(c.p, gamma) * (c.p + gamma * c.q * c.minus_log_q);
                down = power_of(c.q, gamma) * (c.q + gamma * c.p * c.minus_log_p);
            }
            double slope = w.negative[lane] * up - w.positive[lane] * down;
            d[lane] = (float)(slope * job->scale);
        }
        for (int lane = job->counts[r.block]; lane < LANES; lane++) d[lane] = 0;
    }
}

static void correct_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    struct range r = range_of(job, tile);
    double right = 0;
    for (int64_t element = r.first; element < r.stop; element++) {
        int64_t i = (r.block * job->classes * job->pixels + element) * LANES;
        for (int lane = 0; lane < job->counts[r.block]; lane++) {
            int label = job->labels ? job->labels[i + lane] : job->targets[i + lane] > 0.5f;
            float logit = job->logits[i + lane];
            if (logit != logit && (label == 0 || label == 1)) right = NAN;
            right += (logit > 0) == label;
        }
    }
    job->sums[tile] = right;
}

static struct job job_of(const float *logits, const float *targets, const int32_t *labels,
                         const int32_t *counts, int64_t classes, int64_t pixels) {
    return (struct job){.logits = logits,
                        .targets = targets,
                        .labels = labels,
                        .counts = counts,
                        .classes = classes,
                        .pixels = pixels,
                        .tiles = parts_of(classes * pixels, ROWS)};
}

static void run(tile_work *work, struct job *job, int64_t blocks) {
    each(blocks * job->tiles, work, job, 0, blocks * job->classes * job->pixels);
}

static void sum(tile_work *work, struct job *job, int64_t blocks, double *rows,
                const int64_t *tree) {
    job->sums = room_for_sums(blocks * job->tiles);
    if (blocks && !job->sums) return;
    run(work, job, blocks);
    fold_tiles(job->sums, blocks, job->tiles, rows, tree);
}

void mpidl_binary_cross_entropy(const float *logits, const float *targets, const int32_t *labels,
                                const int32_t *counts, double *rows, int64_t blocks,
                                int64_t classes, int64_t pixels, const int64_t *tree,
                                const double *positive_weights, double gamma) {
    struct job job = job_of(logits, targets, labels, counts, classes, pixels);
    job.weights = positive_weights, job.gamma = gamma;
    sum(loss_tile, &job, blocks, rows, tree);
}

void mpidl_binary_cross_entropy_dlogits(const float *logits, const float *targets,
                                        const int32_t *labels, const int32_t *counts, double scale,
                                        float *dlogits, int64_t blocks, int64_t classes,
                                        int64_t pixels, const double *positive_weights,
                                        double gamma) {
    struct job job = job_of(logits, targets, labels, counts, classes, pixels);
    job.weights = positive_weights, job.gamma = gamma;
    job.scale = scale, job.dlogits = dlogits;
    run(dlogits_tile, &job, blocks);
}

void mpidl_binary_correct_count(const float *logits, const float *targets, const int32_t *labels,
                                const int32_t *counts, double *rows, int64_t blocks,
                                int64_t classes, int64_t pixels, const int64_t *tree) {
    struct job job = job_of(logits, targets, labels, counts, classes, pixels);
    sum(correct_tile, &job, blocks, rows, tree);
}
