/* A loss of the overlap of regions, in double precision, and its gradient; see OverlapRule in
 * backends/training_interface.py. A tile is one class of a block. */
#include "loss.h"

struct job {
    const double *p, *weights;
    const int32_t *labels, *counts;
    double *sums, *slopes; /* sums (blocks, classes, 3, 16): sums of p g, p p (or p), and g */
    double *rows;
    float *dp;
    double smooth, above, below, chances, labelled, scale;
    int64_t classes, pixels, generalized, is_squared;
};

static int is_valid(const struct job *job, int32_t label) {
    return label >= 0 && label < most(job->classes, 2);
}

/* The label of a class; a single class is labelled 1. */
static int32_t label_of(const struct job *job, int64_t class) {
    return (int32_t)class + (job->classes == 1);
}

static void sums_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    int64_t block = tile / job->classes;
    int32_t class = label_of(job, tile % job->classes);
    double *overlap = job->sums + tile * 3 * LANES, *powers = overlap + LANES;
    double *labelled = powers + LANES;
    memset(overlap, 0, 3 * LANES * sizeof(double));
    for (int64_t pixel = 0; pixel < job->pixels; pixel++) {
        const double *p = job->p + (tile * job->pixels + pixel) * LANES;
        const int32_t *label = job->labels + (block * job->pixels + pixel) * LANES;
        EACH_LANE_OF_ALL {
            double chance = is_valid(job, label[lane]) ? p[lane] : 0;
            double is_labelled = label[lane] == class;
            overlap[lane] = muladd_double(chance, is_labelled, overlap[lane]);
            powers[lane] = muladd_double(chance, job->is_squared ? chance : 1, powers[lane]);
            labelled[lane] += is_labelled;
        }
    }
}

static double weight_of(const struct job *job, int64_t class) {
    return job->weights ? job->weights[class] : 1;
}

/* The weight v of a class in the generalized loss. */
static double factor_of(const struct job *job, int64_t class, double labelled, double smallest) {
    double pixels = labelled > 0 ? labelled : smallest;
    return weight_of(job, class) / (pixels * pixels);
}

/* The smallest class of an image that has pixels, in pixels, or 1 if all classes are empty. */
static double smallest_class(const struct job *job, const double *sums) {
    double smallest = 0;
    for (int64_t c = 0; c < job->classes; c++) {
        double labelled = sums[(c * 3 + 2) * LANES];
        if (labelled > 0 && (smallest == 0 || labelled < smallest)) smallest = labelled;
    }
    return smallest > 0 ? smallest : 1;
}

/* The numerator and the denominator of a class's similarity, without smoothing. */
static double above_of(const struct job *job, const double *sums) { return job->above * sums[0]; }

static double below_of(const struct job *job, const double *sums) {
    return job->chances * sums[LANES] + job->labelled * sums[2 * LANES] + job->below * sums[0];
}

/* Compute the loss and the slopes of one image of a block. The sums of adjacent classes are 3 * 16
 * elements apart. */
static double loss_of(const struct job *job, const double *sums, double *slopes,
                      double all_weights) {
    double loss = 0, above = 0, below = 0, twice = job->is_squared ? 2 : 1;
    double smallest = job->generalized ? smallest_class(job, sums) : 1;
    for (int64_t c = 0; job->generalized && c < job->classes; c++) {
        const double *own = sums + c * 3 * LANES;
        double factor = factor_of(job, c, own[2 * LANES], smallest);
        above += factor * above_of(job, own);
        below += factor * below_of(job, own);
    }
    for (int64_t c = 0; c < job->classes; c++) {
        const double *own = sums + c * 3 * LANES;
        double factor = weight_of(job, c) / all_weights;
        if (job->generalized)
            factor = factor_of(job, c, own[2 * LANES], smallest);
        else
            above = above_of(job, own), below = below_of(job, own);
        double smoothed = below + job->smooth, inverse = smoothed == 0 ? 0 : 1 / smoothed;
        double similarity = (above + job->smooth) * inverse;
        double missing = smoothed == 0 ? 0 : 1 - similarity; /* NaN stays NaN */
        loss = job->generalized ? missing : loss + factor * missing;
        slopes[c * LANES] = (job->below * similarity - job->above) * factor * inverse;
        slopes[(job->classes + c) * LANES] =
            twice * job->chances * factor * similarity * inverse;
    }
    return loss;
}

static void losses_tile(void *argument, int64_t block, float *own) {
    const struct job *job = argument;
    double all_weights = 0, total = 0;
    for (int64_t c = 0; c < job->classes; c++) all_weights += weight_of(job, c);
    for (int lane = 0; lane < LANES; lane++) {
        double loss = loss_of(job, job->sums + block * job->classes * 3 * LANES + lane,
                              job->slopes + block * 2 * job->classes * LANES + lane, all_weights);
        if (lane < job->counts[block]) total += loss;
    }
    job->rows[block] = total;
}

static void dp_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    int64_t block = tile / job->classes, class = tile % job->classes;
    int32_t label_of_class = label_of(job, class);
    const double *of_class = job->slopes + (block * 2 * job->classes + class) * LANES;
    const double *of_p = of_class + job->classes * LANES;
    for (int64_t pixel = 0; pixel < job->pixels; pixel++) {
        int64_t i = (tile * job->pixels + pixel) * LANES;
        const int32_t *label = job->labels + (block * job->pixels + pixel) * LANES;
        EACH_LANE_OF_ALL {
            double slope = label[lane] == label_of_class ? of_class[lane] : 0;
            slope = muladd_double(of_p[lane], job->is_squared ? job->p[i + lane] : 1, slope);
            job->dp[i + lane] = is_valid(job, label[lane]) ? (float)(slope * job->scale) : 0;
        }
        for (int lane = job->counts[block]; lane < LANES; lane++) job->dp[i + lane] = 0;
    }
}

void mpidl_overlap(const double *p, const int32_t *labels, const int32_t *counts, double *slopes,
                   double *rows, int64_t blocks, int64_t classes, int64_t pixels,
                   const int64_t *tree, const double *class_weights, double smooth,
                   int64_t generalized, int64_t is_squared, double above, double below,
                   double chances, double labelled) {
    struct job job = {.p = p,
                      .weights = class_weights,
                      .labels = labels,
                      .counts = counts,
                      .sums = room_for_sums(blocks * classes * 3 * LANES),
                      .slopes = slopes,
                      .rows = rows,
                      .smooth = smooth,
                      .above = above,
                      .below = below,
                      .chances = chances,
                      .labelled = labelled,
                      .classes = classes,
                      .pixels = pixels,
                      .generalized = generalized,
                      .is_squared = is_squared};
    if (blocks && !job.sums) return;
    each(blocks * classes, sums_tile, &job, 0, blocks * classes * pixels);
    each(blocks, losses_tile, &job, 0, blocks * classes);
    fold_sums(rows, 1, (const struct tree *)tree);
}

void mpidl_overlap_dp(const double *p, const int32_t *labels, const int32_t *counts,
                      const double *slopes, double scale, float *dp, int64_t blocks,
                      int64_t classes, int64_t pixels, int64_t is_squared) {
    struct job job = {.p = p,
                      .labels = labels,
                      .counts = counts,
                      .slopes = (double *)(uintptr_t)slopes,
                      .dp = dp,
                      .scale = scale,
                      .classes = classes,
                      .pixels = pixels,
                      .is_squared = is_squared};
    each(blocks * classes, dp_tile, &job, 0, blocks * classes * pixels);
}
