/* Passes of batch normalization and ReLU that are not fused with a convolution. */
#include <math.h>

#include "activation.h"
#include "fold.h"
#include "mpidl.h"
#include "team.h"

/* The arguments of all passes. A tile is one channel of one block. */
struct job {
    struct source x; /* `scale` is NULL if no activation follows */
    const value *dy;
    const float *a, *b, *c;
    value *out;
    double *rows;
    const int32_t *counts;
    int64_t channels, pixels;
};

#define PLACE(job, tile)                                                                           \
    int64_t block = tile / job->channels, channel = tile % job->channels;                          \
    int64_t pixels = job->pixels, at = tile * pixels * LANES;                                     \
    (void)block, (void)channel, (void)pixels

static void each_channel(tile_work *work, struct job job, int64_t blocks, int64_t channels,
                         int64_t pixels) {
    job.channels = channels, job.pixels = pixels;
    each_tile(blocks * channels, work, &job, 0);
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
    const value *x = job->x.x + at;
    value *y = job->out + at;
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
        const value *x = job->x.x + at + p, *dy = job->dy + at + p;
        value *dx = job->out + at + p;
        for (int64_t i = 0; i < pixels * LANES; i += LANES)
            store(dx + i, keep(used, normalize_back(load(dy + i), load(x + i), mean, a, b, c)));
    }
}

void mpidl_moments(const value *x, double *rows, const int32_t *counts, int64_t blocks,
                   int64_t channels, int64_t pixels, const int64_t *tree) {
    struct job job = {.x.x = x, .rows = rows, .counts = counts};
    each_channel(moments_tile, job, blocks, channels, pixels);
    fold_moments(rows, channels, (const struct tree *)tree);
}

void mpidl_batchnorm(const value *x, const float *mean, const float *scale, const float *beta,
                     float low, float high, value *y, int64_t blocks, int64_t channels,
                     int64_t pixels) {
    struct job job = {.x = {x, mean, scale, beta, low, high}, .out = y};
    each_channel(apply_tile, job, blocks, channels, pixels);
}

void mpidl_batchnorm_sums(const value *dy, const value *x, const float *mean, const float *scale,
                          const float *beta, float low, float high, double *rows, int64_t blocks,
                          int64_t channels, int64_t pixels, const int64_t *tree) {
    struct job job = {.x = {x, mean, scale, beta, low, high}, .dy = dy, .rows = rows};
    each_channel(norm_sums_tile, job, blocks, channels, pixels);
    fold_sums(rows, 2 * channels, (const struct tree *)tree);
}

void mpidl_batchnorm_dx(const value *dy, const value *x, const float *mean, const float *a,
                        const float *b, const float *c, value *dx, const int32_t *counts,
                        int64_t blocks, int64_t channels, int64_t pixels) {
    struct job job = {
        .x = {.x = x, .mean = mean}, .dy = dy, .a = a, .b = b, .c = c, .out = dx, .counts = counts};
    each_channel(dx_tile, job, blocks, channels, pixels);
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

void mpidl_relu(const value *x, value *y, int64_t blocks, int64_t channels, int64_t pixels) {
    each_channel(relu_tile, (struct job){.x.x = x, .out = y}, blocks, channels, pixels);
}

void mpidl_relu_dx(const value *dy, const value *y, value *dx, int64_t blocks, int64_t channels,
                   int64_t pixels) {
    struct job job = {.x.x = y, .dy = dy, .out = dx};
    each_channel(relu_dx_tile, job, blocks, channels, pixels);
}
