/* Softmax and cross-entropy, in double: what a training step reports, and where its gradient
 * begins. A loop over the 16 lanes is one the compiler makes vectors of. */
#include <math.h>

#include "fold.h"
#include "lanes.h"
#include "mpidl.h"
#include "team.h"

#define EACH_LANE_OF_ALL for (int lane = 0; lane < LANES; lane++)
enum { FEW = 2048 }; /* blocks * classes that are not worth waking a thread for */

INLINE double muladd_double(double a, double b, double c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

/* e to the x, for x <= 709; below -708 that of -708, which is next to nothing. At most 1 ulp off,
 * 1.2 without FMA.
 *
 * x = k ln 2 + r with |r| <= ln 2 / 2, and e^x = 2^k e^r by the Taylor series up to r^13 / 13!,
 * whose next term is below 2^-57. ln 2 is the sum of a number with 33 bits, whose product with k is
 * exact, and the rest, as in fdlibm's e_exp.c. */
INLINE double exponential(double x) {
    const double shift = 0x1.8p52; /* a sum with it is rounded to an integer, in its low bits */
    static const double inverse_factorial[] = {
        1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
        1.0 / 40320,      1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,
        1.0 / 6,          1.0 / 2,         1.0,            1.0};
    x = x < -708 ? -708 : x;
    double shifted = muladd_double(x, 0x1.71547652b82fep0, shift), k = shifted - shift;
    double r = muladd_double(k, -6.93147180369123816490e-01, x);
    r = muladd_double(k, -1.90821492927058770002e-10, r);
    double y = inverse_factorial[0];
    UNROLL for (int i = 1; i < 14; i++) y = muladd_double(y, r, inverse_factorial[i]);
    int64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (int64_t)((uint64_t)bits << 52) + 0x3ff0000000000000; /* 2^k */
    double power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

void mpidl_exp(const double *x, double *y, int64_t count) {
    for (int64_t i = 0; i < count; i++) y[i] = exponential(x[i]);
}

struct job {
    const float *logits;
    const int32_t *labels, *counts;
    double *p, *rows;
    float *dlogits;
    double scale;
    int64_t classes;
};

static void run(tile_work *work, struct job *job, int64_t blocks) {
    if (blocks * job->classes > FEW) {
        each_tile(blocks, work, job, 0);
    } else {
        for (int64_t block = 0; block < blocks; block++) work(job, block, NULL);
        tick();
    }
}

/* top: of each image the largest of its logits; sum: of e^(logit - top) over the classes. */
static void normalizers(const float *x, int64_t classes, double *top, double *sum) {
    float largest[LANES];
    memcpy(largest, x, sizeof largest);
    for (int64_t c = 1; c < classes; c++)
        EACH_LANE_OF_ALL largest[lane] =
            x[c * LANES + lane] > largest[lane] ? x[c * LANES + lane] : largest[lane];
    EACH_LANE_OF_ALL top[lane] = largest[lane], sum[lane] = 0;
    for (int64_t c = 0; c < classes; c++)
        EACH_LANE_OF_ALL sum[lane] += exponential(x[c * LANES + lane] - top[lane]);
}

static void softmax_tile(void *argument, int64_t block, float *own) {
    const struct job *job = argument;
    (void)own;
    const float *x = job->logits + block * job->classes * LANES;
    double *p = job->p + block * job->classes * LANES, top[LANES], sum[LANES];
    normalizers(x, job->classes, top, sum);
    for (int64_t i = 0; i < job->classes * LANES; i += LANES)
        EACH_LANE_OF_ALL p[i + lane] = exponential(x[i + lane] - top[lane]) / sum[lane];
}

static void loss_tile(void *argument, int64_t block, float *own) {
    const struct job *job = argument;
    (void)own;
    const float *x = job->logits + block * job->classes * LANES;
    const int32_t *label = job->labels + block * LANES;
    double top[LANES], sum[LANES], total = 0;
    normalizers(x, job->classes, top, sum);
    for (int lane = 0; lane < job->counts[block]; lane++)
        total += log(sum[lane]) - (x[label[lane] * LANES + lane] - top[lane]);
    job->rows[block] = total;
}

static void dlogits_tile(void *argument, int64_t block, float *own) {
    const struct job *job = argument;
    (void)own;
    const float *x = job->logits + block * job->classes * LANES;
    float *d = job->dlogits + block * job->classes * LANES;
    double top[LANES], sum[LANES], label[LANES], scale[LANES];
    normalizers(x, job->classes, top, sum);
    EACH_LANE_OF_ALL label[lane] = job->labels[block * LANES + lane];
    EACH_LANE_OF_ALL scale[lane] = job->scale;
    for (int64_t c = 0; c < job->classes; c++)
        EACH_LANE_OF_ALL {
            double p = exponential(x[c * LANES + lane] - top[lane]) / sum[lane];
            d[c * LANES + lane] = (float)((p - (label[lane] == c ? 1.0 : 0.0)) * scale[lane]);
        }
    for (int lane = job->counts[block]; lane < LANES; lane++)
        for (int64_t c = 0; c < job->classes; c++) d[c * LANES + lane] = 0;
}

/* The first of equal logits counts, and one that is not a number before all. */
static void correct_tile(void *argument, int64_t block, float *own) {
    const struct job *job = argument;
    (void)own;
    const float *x = job->logits + block * job->classes * LANES;
    float largest[LANES];
    int32_t class[LANES] = {0};
    int right = 0;
    memcpy(largest, x, sizeof largest);
    for (int64_t c = 1; c < job->classes; c++)
        EACH_LANE_OF_ALL {
            float value = x[c * LANES + lane];
            int larger_one = value > largest[lane] ||
                             (value != value && largest[lane] == largest[lane]);
            largest[lane] = larger_one ? value : largest[lane];
            class[lane] = larger_one ? (int32_t)c : class[lane];
        }
    for (int lane = 0; lane < job->counts[block]; lane++)
        right += class[lane] == job->labels[block * LANES + lane];
    job->rows[block] = right;
}

void mpidl_softmax(const float *logits, double *p, int64_t blocks, int64_t classes) {
    struct job job = {.logits = logits, .p = p, .classes = classes};
    run(softmax_tile, &job, blocks);
}

void mpidl_cross_entropy(const float *logits, const int32_t *labels, const int32_t *counts,
                         double *rows, int64_t blocks, int64_t classes, const int64_t *tree) {
    struct job job = {
        .logits = logits, .labels = labels, .counts = counts, .rows = rows, .classes = classes};
    run(loss_tile, &job, blocks);
    fold_sums(rows, 1, (const struct tree *)tree);
}

void mpidl_cross_entropy_dlogits(const float *logits, const int32_t *labels,
                                 const int32_t *counts, double scale, float *dlogits,
                                 int64_t blocks, int64_t classes) {
    struct job job = {.logits = logits,
                      .labels = labels,
                      .counts = counts,
                      .scale = scale,
                      .dlogits = dlogits,
                      .classes = classes};
    run(dlogits_tile, &job, blocks);
}

void mpidl_correct_count(const float *logits, const int32_t *labels, const int32_t *counts,
                         double *rows, int64_t blocks, int64_t classes, const int64_t *tree) {
    struct job job = {
        .logits = logits, .labels = labels, .counts = counts, .rows = rows, .classes = classes};
    run(correct_tile, &job, blocks);
    fold_sums(rows, 1, (const struct tree *)tree);
}
