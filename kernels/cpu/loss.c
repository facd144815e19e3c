/* Softmax, cross-entropy and error sums, computed in double precision, and the gradients that start
 * the backward pass. The compiler vectorizes loops over the 16 lanes.
 *
 * A tile has all classes of up to STRIP pixels of a block, or up to ROWS elements. Tiles do not
 * depend on the number of threads. A block's sum adds the sums of its tiles in order. */
#include <math.h>

#include "loss.h"

enum { STRIP = 16, ROWS = 1024 };

void mpidl_exp(const double *x, double *y, int64_t count) {
    for (int64_t i = 0; i < count; i++) y[i] = exponential(x[i]);
}

/* The options of the cross-entropy; see LabelRule in backends/training_interface.py. */
struct rule {
    const double *weights; /* class weights; NULL if all weights are 1 */
    double smoothing, gamma;
};

struct job {
    const float *logits, *targets; /* targets: probabilities, used instead of labels */
    const int32_t *labels, *counts;
    double *p, *sums; /* `sums`: one per tile */
    float *dlogits;
    double scale;
    int64_t classes, pixels, tiles; /* `tiles`: the number of tiles per block */
    struct rule rule;
};

static void run(tile_work *work, struct job *job, int64_t blocks) {
    int64_t own = job->pixels > 1 ? job->classes * STRIP * LANES : 0; /* for `gathered` */
    job->tiles = parts_of(job->pixels, STRIP);
    each(blocks * job->tiles, work, job, own, blocks * job->classes);
}

static void sum(tile_work *work, struct job *job, int64_t blocks, double *rows,
                const int64_t *tree) {
    job->sums = room_for_sums(blocks * parts_of(job->pixels, STRIP));
    if (blocks && !job->sums) return;
    run(work, job, blocks);
    fold_tiles(job->sums, blocks, job->tiles, rows, tree);
}

/* The position of a tile in an array (blocks, classes, pixels, 16). Adjacent classes are `far`
 * floats apart. */
struct strip {
    int64_t block, at, labels, count, far;
};

static struct strip strip_of(const struct job *job, int64_t tile) {
    int64_t block = tile / job->tiles, first = tile % job->tiles * STRIP;
    return (struct strip){.block = block,
                          .at = (block * job->classes * job->pixels + first) * LANES,
                          .labels = (block * job->pixels + first) * LANES,
                          .count = least(STRIP, job->pixels - first),
                          .far = job->pixels * LANES};
}

/* Return the logits of a strip, with adjacent classes count * 16 floats apart. If images have
 * several pixels, the logits are copied, because the distance between classes is often a large
 * power of two. Caches hold few lines at such distances. */
static const float *gathered(const struct job *job, const struct strip *s, float *own) {
    const float *x = job->logits + s->at;
    if (job->pixels == 1) return x;
    int64_t near = s->count * LANES;
    for (int64_t c = 0; c < job->classes; c++)
        memcpy(own + c * near, x + c * s->far, (size_t)near * sizeof(float));
    return own;
}

/* For the logits of one pixel, compute for each image the largest logit `top`, and the sum of
 * e^(logit - top) over the classes. Adjacent classes are `step` floats apart. */
static void normalizers(const float *x, int64_t classes, int64_t step, double *top, double *sum) {
    float largest[LANES];
    memcpy(largest, x, sizeof largest);
    for (int64_t c = 1; c < classes; c++)
        EACH_LANE_OF_ALL largest[lane] =
            x[c * step + lane] > largest[lane] ? x[c * step + lane] : largest[lane];
    EACH_LANE_OF_ALL top[lane] = largest[lane], sum[lane] = 0;
    for (int64_t c = 0; c < classes; c++)
        EACH_LANE_OF_ALL sum[lane] += exponential(x[c * step + lane] - top[lane]);
}

static void softmax_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    struct strip s = strip_of(job, tile);
    const float *x = gathered(job, &s, own);
    int64_t step = s.count * LANES;
    for (int64_t i = 0; i < step; i += LANES) {
        double *p = job->p + s.at + i, top[LANES], sum[LANES];
        normalizers(x + i, job->classes, step, top, sum);
        for (int64_t c = 0; c < job->classes; c++)
            EACH_LANE_OF_ALL p[c * s.far + lane] =
                exponential(x[c * step + i + lane] - top[lane]) / sum[lane];
    }
}

/* Return whether a label is a class. Pixels with other labels are ignored. */
static int is_class(const struct job *job, int32_t label) {
    return label >= 0 && label < job->classes;
}

static double weight_of(const struct rule *rule, int64_t class) {
    return rule->weights ? rule->weights[class] : 1;
}

/* Return the sum of the class weights, added in the order of the classes. */
static double sum_of_weights(const struct rule *rule, int64_t classes) {
    double total = 0;
    for (int64_t c = 0; c < classes; c++) total += weight_of(rule, c);
    return total;
}

static void loss_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct rule *rule = &job->rule;
    struct strip s = strip_of(job, tile);
    const float *x = gathered(job, &s, own);
    int64_t step = s.count * LANES;
    double total = 0, share = rule->smoothing / (double)job->classes;
    for (int64_t i = 0; i < step; i += LANES) {
        const int32_t *label = job->labels + s.labels + i;
        double top[LANES], sum[LANES], smooth[LANES] = {0};
        normalizers(x + i, job->classes, step, top, sum);
        if (rule->smoothing > 0)
            for (int64_t c = 0; c < job->classes; c++)
                EACH_LANE_OF_ALL smooth[lane] +=
                    weight_of(rule, c) * (x[c * step + i + lane] - top[lane] - log(sum[lane]));
        for (int lane = 0; lane < job->counts[s.block]; lane++) {
            if (!is_class(job, label[lane])) continue;
            double loss = log(sum[lane]) - (x[label[lane] * step + i + lane] - top[lane]);
            if (rule->gamma > 0) loss *= power_of(1 - exponential(-loss), rule->gamma);
            loss *= (1 - rule->smoothing) * weight_of(rule, label[lane]);
            total += loss - share * smooth[lane];
        }
    }
    job->sums[tile] = total;
}

/* The gradient of an image's or pixel's loss with respect to the logit of class c is
 * push * p[c] - share * w[c], minus `pull` if c is the label's class. */
struct slopes {
    double push[LANES], pull[LANES], share[LANES];
};

/* Compute the slopes of 16 images, given the logits x of one pixel. Lanes that are unused, or whose
 * label is not a class, get slopes of zero. */
static void slopes_of(const struct job *job, const int32_t *label, int images, const float *x,
                      int64_t step, const double *top, const double *sum, double all_weights,
                      struct slopes *slopes) {
    const struct rule *rule = &job->rule;
    memset(slopes, 0, sizeof *slopes);
    for (int lane = 0; lane < images; lane++) {
        if (!is_class(job, label[lane])) continue;
        double slope = 1, weight = weight_of(rule, label[lane]);
        if (rule->gamma > 0) {
            double z = x[label[lane] * step + lane] - top[lane];
            double p = exponential(z) / sum[lane], rest = 1 - p;
            double power = power_of(rest, rule->gamma), log_p = z - logarithm(sum[lane]);
            slope = rest < 0x1p-1022 ? 0 : power - rule->gamma * p * power / rest * log_p;
        }
        slopes->pull[lane] = (1 - rule->smoothing) * weight * slope;
        slopes->share[lane] = rule->smoothing / (double)job->classes;
        slopes->push[lane] = slopes->pull[lane] + slopes->share[lane] * all_weights;
    }
}

static void dlogits_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    struct strip s = strip_of(job, tile);
    const float *x = gathered(job, &s, own);
    int64_t step = s.count * LANES;
    double top[LANES], sum[LANES], label[LANES], scale[LANES];
    double all_weights = sum_of_weights(&job->rule, job->classes);
    struct slopes slopes;
    EACH_LANE_OF_ALL scale[lane] = job->scale;
    for (int64_t i = 0; i < step; i += LANES) {
        const int32_t *labels = job->labels + s.labels + i;
        float *d = job->dlogits + s.at + i;
        normalizers(x + i, job->classes, step, top, sum);
        EACH_LANE_OF_ALL label[lane] = labels[lane];
        slopes_of(job, labels, job->counts[s.block], x + i, step, top, sum, all_weights, &slopes);
        for (int64_t c = 0; c < job->classes; c++) {
            double weight = weight_of(&job->rule, c);
            EACH_LANE_OF_ALL {
                double p = exponential(x[c * step + i + lane] - top[lane]) / sum[lane];
                double slope = slopes.push[lane] * p - (label[lane] == c ? slopes.pull[lane] : 0);
                d[c * s.far + lane] = (float)((slope - slopes.share[lane] * weight) * scale[lane]);
            }
        }
        for (int lane = job->counts[s.block]; lane < LANES; lane++)
            for (int64_t c = 0; c < job->classes; c++) d[c * s.far + lane] = 0;
    }
}

/* Add up the class weights of a block's labels. Here, a tile is a whole block. */
static void weight_tile(void *argument, int64_t block, float *own) {
    const struct job *job = argument;
    double total = 0;
    for (int64_t pixel = 0; pixel < job->pixels; pixel++) {
        const int32_t *label = job->labels + (block * job->pixels + pixel) * LANES;
        for (int lane = 0; lane < job->counts[block]; lane++)
            if (is_class(job, label[lane])) total += weight_of(&job->rule, label[lane]);
    }
    job->sums[block] = total;
}

/* For the logits of one pixel, find the prediction for each image: the class with the largest
 * logit. Ties go to the first class. `largest` is this logit, or NaN if any logit is NaN. */
static void predictions(const float *x, int64_t classes, int64_t step, int32_t *class,
                        float *largest) {
    memcpy(largest, x, LANES * sizeof(float));
    EACH_LANE_OF_ALL class[lane] = 0;
    for (int64_t c = 1; c < classes; c++)
        EACH_LANE_OF_ALL {
            float value = x[c * step + lane];
            int larger_one = value > largest[lane] ||
                             (value != value && largest[lane] == largest[lane]);
            largest[lane] = larger_one ? value : largest[lane];
            class[lane] = larger_one ? (int32_t)c : class[lane];
        }
}

/* Add up the target probabilities of the predictions, or count correct predictions of labels. The
 * sum is NaN if the logits of an image or pixel that is not ignored include NaN. */
static void correct_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    struct strip s = strip_of(job, tile);
    const float *x = gathered(job, &s, own);
    int64_t step = s.count * LANES;
    double right = 0;
    for (int64_t i = 0; i < step; i += LANES) {
        int32_t class[LANES];
        float largest[LANES];
        predictions(x + i, job->classes, step, class, largest);
        for (int lane = 0; lane < job->counts[s.block]; lane++) {
            if (job->labels && !is_class(job, job->labels[s.labels + i + lane])) continue;
            if (largest[lane] != largest[lane])
                right = NAN;
            else
                right += job->targets ? job->targets[s.at + class[lane] * s.far + i + lane]
                                      : class[lane] == job->labels[s.labels + i + lane];
        }
    }
    job->sums[tile] = right;
}

/* The target probability of a class after label smoothing. */
INLINE double smoothed(const struct job *job, float target) {
    double smoothing = job->rule.smoothing;
    return (1 - smoothing) * target + smoothing / (double)job->classes;
}

static void soft_loss_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    struct strip s = strip_of(job, tile);
    const float *x = gathered(job, &s, own);
    int64_t step = s.count * LANES;
    double total = 0;
    for (int64_t i = 0; i < step; i += LANES) {
        const float *target = job->targets + s.at + i;
        double top[LANES], sum[LANES], loss[LANES] = {0};
        normalizers(x + i, job->classes, step, top, sum);
        EACH_LANE_OF_ALL sum[lane] = log(sum[lane]);
        for (int64_t c = 0; c < job->classes; c++)
            EACH_LANE_OF_ALL loss[lane] += smoothed(job, target[c * s.far + lane]) *
                                           (sum[lane] - (x[c * step + i + lane] - top[lane]));
        for (int lane = 0; lane < job->counts[s.block]; lane++) total += loss[lane];
    }
    job->sums[tile] = total;
}

/* The gradient with respect to the logit of class c is p[c] times the sum of the targets, minus
 * the target of c. */
static void soft_dlogits_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    struct strip s = strip_of(job, tile);
    const float *x = gathered(job, &s, own);
    int64_t step = s.count * LANES;
    for (int64_t i = 0; i < step; i += LANES) {
        const float *target = job->targets + s.at + i;
        float *d = job->dlogits + s.at + i;
        double top[LANES], sum[LANES], all_targets[LANES] = {0};
        normalizers(x + i, job->classes, step, top, sum);
        for (int64_t c = 0; c < job->classes; c++)
            EACH_LANE_OF_ALL all_targets[lane] += smoothed(job, target[c * s.far + lane]);
        for (int64_t c = 0; c < job->classes; c++)
            EACH_LANE_OF_ALL {
                double p = exponential(x[c * step + i + lane] - top[lane]) / sum[lane];
                double slope = p * all_targets[lane] - smoothed(job, target[c * s.far + lane]);
                d[c * s.far + lane] = (float)(slope * job->scale);
            }
        for (int lane = job->counts[s.block]; lane < LANES; lane++)
            for (int64_t c = 0; c < job->classes; c++) d[c * s.far + lane] = 0;
    }
}

void mpidl_softmax(const float *logits, double *p, int64_t blocks, int64_t classes,
                   int64_t pixels) {
    struct job job = {.logits = logits, .p = p, .classes = classes, .pixels = pixels};
    run(softmax_tile, &job, blocks);
}

static struct job of_labels(const float *logits, const int32_t *labels, const int32_t *counts,
                            int64_t classes, int64_t pixels) {
    return (struct job){.logits = logits,
                        .labels = labels,
                        .counts = counts,
                        .classes = classes,
                        .pixels = pixels};
}

void mpidl_cross_entropy(const float *logits, const int32_t *labels, const int32_t *counts,
                         double *rows, int64_t blocks, int64_t classes, int64_t pixels,
                         const int64_t *tree, const double *class_weights, double smoothing,
                         double gamma) {
    struct job job = of_labels(logits, labels, counts, classes, pixels);
    job.rule = (struct rule){class_weights, smoothing, gamma};
    sum(loss_tile, &job, blocks, rows, tree);
}

void mpidl_cross_entropy_dlogits(const float *logits, const int32_t *labels,
                                 const int32_t *counts, double scale, float *dlogits,
                                 int64_t blocks, int64_t classes, int64_t pixels,
                                 const double *class_weights, double smoothing, double gamma) {
    struct job job = of_labels(logits, labels, counts, classes, pixels);
    job.rule = (struct rule){class_weights, smoothing, gamma};
    job.scale = scale;
    job.dlogits = dlogits;
    run(dlogits_tile, &job, blocks);
}

void mpidl_label_weight(const int32_t *labels, const int32_t *counts, double *rows, int64_t blocks,
                        int64_t classes, int64_t pixels, const int64_t *tree,
                        const double *class_weights) {
    struct job job = of_labels(NULL, labels, counts, classes, pixels);
    job.sums = rows, job.rule.weights = class_weights;
    each(blocks, weight_tile, &job, 0, blocks * pixels);
    fold_sums(rows, 1, (const struct tree *)tree);
}

void mpidl_correct_count(const float *logits, const int32_t *labels, const int32_t *counts,
                         double *rows, int64_t blocks, int64_t classes, int64_t pixels,
                         const int64_t *tree) {
    struct job job = of_labels(logits, labels, counts, classes, pixels);
    sum(correct_tile, &job, blocks, rows, tree);
}

static struct job of_targets(const float *logits, const float *targets, const int32_t *counts,
                             int64_t classes, int64_t pixels, double smoothing) {
    struct job job = of_labels(logits, NULL, counts, classes, pixels);
    job.targets = targets, job.rule.smoothing = smoothing;
    return job;
}

void mpidl_soft_cross_entropy(const float *logits, const float *targets, const int32_t *counts,
                              double *rows, int64_t blocks, int64_t classes, int64_t pixels,
                              const int64_t *tree, double smoothing) {
    struct job job = of_targets(logits, targets, counts, classes, pixels, smoothing);
    sum(soft_loss_tile, &job, blocks, rows, tree);
}

void mpidl_soft_cross_entropy_dlogits(const float *logits, const float *targets,
                                      const int32_t *counts, double scale, float *dlogits,
                                      int64_t blocks, int64_t classes, int64_t pixels,
                                      double smoothing) {
    struct job job = of_targets(logits, targets, counts, classes, pixels, smoothing);
    job.scale = scale, job.dlogits = dlogits;
    run(soft_dlogits_tile, &job, blocks);
}

void mpidl_soft_correct_count(const float *logits, const float *targets, const int32_t *counts,
                              double *rows, int64_t blocks, int64_t classes, int64_t pixels,
                              const int64_t *tree) {
    struct job job = of_targets(logits, targets, counts, classes, pixels, 0);
    sum(correct_tile, &job, blocks, rows, tree);
}

static void softmax_dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    struct strip s = strip_of(job, tile);
    for (int64_t i = s.at; i < s.at + s.count * LANES; i += LANES) {
        const float *dy = job->logits + i;
        const double *p = job->p + i;
        double inner[LANES] = {0};
        for (int64_t c = 0; c < job->classes * s.far; c += s.far)
            EACH_LANE_OF_ALL inner[lane] = muladd_double(p[c + lane], dy[c + lane], inner[lane]);
        for (int64_t c = 0; c < job->classes * s.far; c += s.far)
            EACH_LANE_OF_ALL job->dlogits[i + c + lane] =
                (float)(p[c + lane] * (dy[c + lane] - inner[lane]));
    }
}

void mpidl_softmax_dx(const float *dy, const double *p, float *dx, int64_t blocks, int64_t classes,
                      int64_t pixels) {
    struct job job = of_labels(dy, NULL, NULL, classes, pixels);
    job.p = (double *)(uintptr_t)p, job.dlogits = dx;
    run(softmax_dx_tile, &job, blocks);
}

/* ---- errors: sums of |y - target| or of (y - target)^2, and the gradients ---- */

struct errors {
    const float *y, *target;
    const int32_t *counts;
    double *sums;
    float *dy;
    double scale;
    int64_t elements, tiles;
    int squared;
};

/* The block of a tile, and the range [first, stop) of the tile's floats in the array. */
struct range {
    int64_t block, first, stop;
};

static struct range range_of(const struct errors *job, int64_t tile) {
    int64_t block = tile / job->tiles, row = tile % job->tiles * ROWS, at = block * job->elements;
    return (struct range){
        block, (at + row) * LANES, (at + least(job->elements, row + ROWS)) * LANES};
}

static struct errors errors_of(const float *y, const float *target, int64_t power,
                               const int32_t *counts, int64_t elements) {
    return (struct errors){.y = y,
                           .target = target,
                           .counts = counts,
                           .elements = elements,
                           .tiles = parts_of(elements, ROWS),
                           .squared = power == 2};
}

static void errors_tile(void *argument, int64_t tile, float *own) {
    const struct errors *job = argument;
    struct range r = range_of(job, tile);
    double sums[LANES] = {0}, total = 0;
    if (job->squared)
        for (int64_t i = r.first; i < r.stop; i += LANES)
            EACH_LANE_OF_ALL {
                double error = (double)job->y[i + lane] - job->target[i + lane];
                sums[lane] = muladd_double(error, error, sums[lane]);
            }
    else
        for (int64_t i = r.first; i < r.stop; i += LANES)
            EACH_LANE_OF_ALL sums[lane] += fabs((double)job->y[i + lane] - job->target[i + lane]);
    for (int lane = 0; lane < job->counts[r.block]; lane++) total += sums[lane];
    job->sums[tile] = total;
}

static void errors_dy_tile(void *argument, int64_t tile, float *own) {
    const struct errors *job = argument;
    struct range r = range_of(job, tile);
    for (int64_t i = r.first; i < r.stop; i += LANES) {
        EACH_LANE_OF_ALL {
            double error = (double)job->y[i + lane] - job->target[i + lane];
            double sign = error > 0 ? 1 : error < 0 ? -1 : error; /* keep NaN */
            job->dy[i + lane] = (float)((job->squared ? error : sign) * job->scale);
        }
        for (int lane = job->counts[r.block]; lane < LANES; lane++) job->dy[i + lane] = 0;
    }
}

void mpidl_errors(const float *y, const float *target, int64_t power, const int32_t *counts,
                  double *rows, int64_t blocks, int64_t elements, const int64_t *tree) {
    struct errors job = errors_of(y, target, power, counts, elements);
    job.sums = room_for_sums(blocks * job.tiles);
    if (blocks && !job.sums) return;
    each(blocks * job.tiles, errors_tile, &job, 0, blocks * elements);
    fold_tiles(job.sums, blocks, job.tiles, rows, tree);
}

void mpidl_errors_dy(const float *y, const float *target, int64_t power, double scale,
                     const int32_t *counts, float *dy, int64_t blocks, int64_t elements) {
    struct errors job = errors_of(y, target, power, counts, elements);
    job.dy = dy, job.scale = scale;
    each(blocks * job.tiles, errors_dy_tile, &job, 0, blocks * elements);
}
