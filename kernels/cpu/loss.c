/* Softmax and cross-entropy, in double: what a training step reports, and where its gradient
 * begins. A loop over the 16 lanes is one the compiler makes vectors of. */
#include <math.h>

#include "fold.h"
#include "mpidl.h"
#include "special.h"
#include "team.h"

#define EACH_LANE_OF_ALL for (int lane = 0; lane < LANES; lane++)
enum { FEW = 2048 }; /* blocks * classes that are not worth waking a thread for */

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

static void softmax_dx_tile(void *argument, int64_t block, float *own) {
    const struct job *job = argument;
    (void)own;
    int64_t at = block * job->classes * LANES;
    const float *dy = job->logits + at;
    const double *p = job->p + at;
    double inner[LANES] = {0};
    for (int64_t i = 0; i < job->classes * LANES; i += LANES)
        EACH_LANE_OF_ALL inner[lane] = muladd_double(p[i + lane], dy[i + lane], inner[lane]);
    for (int64_t i = 0; i < job->classes * LANES; i += LANES)
        EACH_LANE_OF_ALL job->dlogits[at + i + lane] =
            (float)(p[i + lane] * (dy[i + lane] - inner[lane]));
}

void mpidl_softmax_dx(const float *dy, const double *p, float *dx, int64_t blocks,
                      int64_t classes) {
    struct job job = {
        .logits = dy, .p = (double *)(uintptr_t)p, .dlogits = dx, .classes = classes};
    run(softmax_dx_tile, &job, blocks);
}
