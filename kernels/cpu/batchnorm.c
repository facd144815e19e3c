/* Passes of batch normalization and ReLU that are not fused with a convolution. */
#include <math.h>

#include "activation.h"
#include "fold.h"
#include "mpidl.h"
#include "team.h"

/* The arguments of all passes. A tile is one channel of one block. */
struct job {
    struct source x; /* `scale` is NULL if no activation follows */
    const float *dy, *a, *b, *c;
    float *out;
    double *rows;
    const int32_t *counts;
    int64_t channels, height, width;
};

#define PLACE(job, tile)                                                                           \
    int64_t block = tile / job->channels, channel = tile % job->channels;                          \
    int64_t pixels = job->height * job->width, at = tile * pixels * LANES;                         \
    (void)block, (void)channel, (void)pixels

static void each_channel(tile_work *work, struct job job, int64_t blocks, int64_t channels,
                         int64_t height, int64_t width) {
    job.channels = channels, job.height = height, job.width = width;
    each_tile(blocks * channels, work, &job, 0);
}

static void sum_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    PLACE(job, tile);
    job->out[tile] = channel_sum(job->x.x + at, job->height, job->width, job->width * LANES);
}

static void moments_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    PLACE(job, tile);
    double *row = job->rows + block * (1 + 2 * job->channels);
    if (channel == 0) row[0] = (double)(pixels * job->counts[block]);
    channel_moments(job->x.x + at, pixels, job->counts[block], row + 1 + channel,
                    row + 1 + job->channels + channel);
}

static void apply_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    PLACE(job, tile);
    struct norm n = norm_of(&job->x, channel);
    const float *x = job->x.x + at;
    float *y = job->out + at;
      for (int64_t i = 0; i < pixels * LANES; i += WIDTH)
        store(y + i, activate(load(x + i), n));
}

static void norm_sums_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    PLACE(job, tile);
    double *row = job->rows + block * 2 * job->channels;
    channel_norm_sums(job->dy + at, job->x.x + at, pixels, &job->x, channel, row + channel,
                      row + job->channels + channel);
}

static void dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    PLACE(job, tile);
    vec mean = splat(job->x.mean[channel]), a = splat(job->a[channel]), b = splat(job->b[channel]),
        c = splat(job->c[channel]);
    for (int64_t p = 0; p < LANES; p += WIDTH) {
        ivec used = lanes_below(job->counts[block], (int)p);
        const float *x = job->x.x + at + p, *dy = job->dy + at + p;
        float *dx = job->out + at + p;
        for (int64_t i = 0; i < pixels * LANES; i += LANES)
            store(dx + i, keep(used, normalize_back(load(dy + i), load(x + i), mean, a, b, c)));
    }
}

void mpidl_channel_sums(const float *x, float *sums, int64_t blocks, int64_t channels,
                        int64_t height, int64_t width) {
    struct job job = {.x.x = x, .out = sums};
    each_channel(sum_tile, job, blocks, channels, height, width);
}

void mpidl_moments(const float *x, double *rows, const int32_t *counts, int64_t blocks,
                   int64_t channels, int64_t pixels, const int64_t *tree) {
    struct job job = {.x.x = x, .rows = rows, .counts = counts};
    each_channel(moments_tile, job, blocks, channels, 1, pixels);
    fold_moments(rows, channels, (const struct tree *)tree);
}

void mpidl_batchnorm(const float *x, const float *mean, const float *scale, const float *beta,
                     float low, float high, float *y, int64_t blocks, int64_t channels,
                     int64_t pixels) {
    struct job job = {.x = {x, mean, scale, beta, low, high}, .out = y};
    each_channel(apply_tile, job, blocks, channels, 1, pixels);
}

void mpidl_batchnorm_sums(const float *dy, const float *x, const float *mean, const float *scale,
                          const float *beta, float low, float high, double *rows, int64_t blocks,
                          int64_t channels, int64_t pixels, const int64_t *tree) {
    struct job job = {.x = {x, mean, scale, beta, low, high}, .dy = dy, .rows = rows};
    each_channel(norm_sums_tile, job, blocks, channels, 1, pixels);
    fold_sums(rows, 2 * channels, (const struct tree *)tree);
}

void mpidl_batchnorm_dx(const float *dy, const float *x, const float *mean, const float *a,
                        const float *b, const float *c, float *dx, const int32_t *counts,
                        int64_t blocks, int64_t channels, int64_t pixels) {
    struct job job = {
        .x = {.x = x, .mean = mean}, .dy = dy, .a = a, .b = b, .c = c, .out = dx, .counts = counts};
    each_channel(dx_tile, job, blocks, channels, 1, pixels);
}

/* The arithmetic between the passes is in double precision. Only the results are rounded to float.
 */
void mpidl_statistics(const double *moments, const float *gamma, double epsilon, double *rstd,
                      double *variance, float *shift, float *scale, int64_t channels) {
    double count = moments[0] > 1 ? moments[0] : 1;
    const double *mean = moments + 1, *m2 = mean + channels;
    for (int64_t c = 0; c < channels; c++) {
        variance[c] = m2[c] / count;
        rstd[c] = 1 / sqrt(variance[c] + epsilon);
        shift[c] = (float)mean[c];
        scale[c] = (float)(gamma[c] * rstd[c]);
    }
}

/* sums (2 * channels): the sums of dy, then of dy * (x - mean); see backends/reference/batchnorm.py
 */
void mpidl_batchnorm_factors(const double *sums, const float *gamma, const double *count,
                             const double *rstd, float *a, float *b, float *c, float *dgamma,
                             float *dbeta, int64_t channels) {
    double n = *count > 1 ? *count : 1;
    const double *products = sums + channels;
    for (int64_t i = 0; i < channels; i++) {
        double factor = gamma[i] * rstd[i];
        a[i] = (float)factor;
        b[i] = (float)(-factor * rstd[i] * rstd[i] * products[i] / n);
        c[i] = (float)(-factor * sums[i] / n);
        dgamma[i] = (float)(products[i] * rstd[i]);
        dbeta[i] = (float)sums[i];
    }
}

void mpidl_running(const float *old, const double *value, double decay, float *updated,
                   int64_t channels) {
    for (int64_t c = 0; c < channels; c++)
        updated[c] = (float)(old[c] + decay * (value[c] - old[c]));
}

void mpidl_predict_scale(const float *gamma, const float *variance, double epsilon, float *scale,
                         int64_t channels) {
    for (int64_t c = 0; c < channels; c++)
        scale[c] = (float)(gamma[c] / sqrt(variance[c] + epsilon));
}

/* The tiles of ReLU are also one channel of one block. */
static void relu_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    PLACE(job, tile);
    for (int64_t i = at; i < at + pixels * LANES; i += WIDTH)
        store(job->out + i, larger(zero(), load(job->x.x + i)));
}

static void relu_dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    PLACE(job, tile);
    for (int64_t i = at; i < at + pixels * LANES; i += WIDTH)
        store(job->out + i, relu_back(load(job->dy + i), load(job->x.x + i)));
}

void mpidl_relu(const float *x, float *y, int64_t blocks, int64_t channels, int64_t pixels) {
    each_channel(relu_tile, (struct job){.x.x = x, .out = y}, blocks, channels, 1, pixels);
}

void mpidl_relu_dx(const float *dy, const float *y, float *dx, int64_t blocks, int64_t channels,
                   int64_t pixels) {
    struct job job = {.x.x = y, .dy = dy, .out = dx};
    each_channel(relu_dx_tile, job, blocks, channels, 1, pixels);
}
