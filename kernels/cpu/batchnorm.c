/* Batch normalization and ReLU by themselves: the path that is not fused with the convolution. */
#include "activation.h"
#include "fold.h"
#include "mpidl.h"
#include "team.h"

/* One job for all: tiles are (block, channel). */
struct job {
    const float *x, *dy, *mean, *scale, *beta, *a, *b, *c;
    int relu; /* behind the normalization */
    float *out;
    double *rows;
    const int32_t *counts;
    int64_t channels, height, width;
};

#define PLACE(job, tile)                                                                           \
    int64_t block = tile / job->channels, channel = tile % job->channels;                          \
    int64_t pixels = job->height * job->width, at = tile * pixels * LANES;                         \
    (void)block, (void)channel, (void)pixels

static void sum_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    PLACE(job, tile);
    job->out[tile] = channel_sum(job->x + at, job->height, job->width, job->width * LANES);
}

static void moments_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    PLACE(job, tile);
    double *row = job->rows + block * (1 + 2 * job->channels);
    if (channel == 0) row[0] = (double)(pixels * job->counts[block]);
    channel_moments(job->x + at, pixels, job->counts[block], row + 1 + channel,
                    row + 1 + job->channels + channel);
}

static void apply_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    PLACE(job, tile);
    vec mean = splat(job->mean[channel]), scale = splat(job->scale[channel]),
        beta = splat(job->beta[channel]);
    const float *x = job->x + at;
    float *y = job->out + at;
    if (job->relu)
        for (int64_t i = 0; i < pixels * LANES; i += WIDTH)
            store(y + i, activate(load(x + i), mean, scale, beta));
    else
        for (int64_t i = 0; i < pixels * LANES; i += WIDTH)
            store(y + i, normalize(load(x + i), mean, scale, beta));
}

static void norm_sums_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    PLACE(job, tile);
    double *row = job->rows + block * 2 * job->channels;
    channel_norm_sums(job->dy + at, job->x + at, pixels, job->mean + channel,
                      job->scale ? job->scale + channel : NULL,
                      job->beta ? job->beta + channel : NULL, row + channel,
                      row + job->channels + channel);
}

static void dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    PLACE(job, tile);
    vec mean = splat(job->mean[channel]), a = splat(job->a[channel]), b = splat(job->b[channel]),
        c = splat(job->c[channel]);
    for (int64_t p = 0; p < LANES; p += WIDTH) {
        ivec used = lanes_below(job->counts[block], (int)p);
        const float *x = job->x + at + p, *dy = job->dy + at + p;
        float *dx = job->out + at + p;
        for (int64_t i = 0; i < pixels * LANES; i += LANES)
            store(dx + i, keep(used, normalize_back(load(dy + i), load(x + i), mean, a, b, c)));
    }
}

void mpidl_channel_sums(const float *x, float *sums, int64_t blocks, int64_t channels,
                        int64_t height, int64_t width) {
    struct job job = {.x = x, .out = sums, .channels = channels, .height = height, .width = width};
    each_tile(blocks * channels, sum_tile, &job, 0);
}

void mpidl_moments(const float *x, double *rows, const int32_t *counts, int64_t blocks,
                   int64_t channels, int64_t pixels, const int64_t *tree) {
    struct job job = {.x = x,
                      .rows = rows,
                      .counts = counts,
                      .channels = channels,
                      .height = 1,
                      .width = pixels};
    each_tile(blocks * channels, moments_tile, &job, 0);
    fold_moments(rows, channels, (const struct tree *)tree);
}

void mpidl_batchnorm(const float *x, const float *mean, const float *scale, const float *beta,
                     float *y, int64_t relu, int64_t blocks, int64_t channels, int64_t pixels) {
    struct job job = {.x = x,
                      .mean = mean,
                      .scale = scale,
                      .beta = beta,
                      .relu = relu != 0,
                      .out = y,
                      .channels = channels,
                      .height = 1,
                      .width = pixels};
    each_tile(blocks * channels, apply_tile, &job, 0);
}

void mpidl_batchnorm_sums(const float *dy, const float *x, const float *mean, const float *scale,
                          const float *beta, double *rows, int64_t blocks, int64_t channels,
                          int64_t pixels, const int64_t *tree) {
    struct job job = {.x = x,
                      .dy = dy,
                      .mean = mean,
                      .scale = scale,
                      .beta = beta,
                      .rows = rows,
                      .channels = channels,
                      .height = 1,
                      .width = pixels};
    each_tile(blocks * channels, norm_sums_tile, &job, 0);
    fold_sums(rows, 2 * channels, (const struct tree *)tree);
}

void mpidl_batchnorm_dx(const float *dy, const float *x, const float *mean, const float *a,
                        const float *b, const float *c, float *dx, const int32_t *counts,
                        int64_t blocks, int64_t channels, int64_t pixels) {
    struct job job = {.x = x,
                      .dy = dy,
                      .mean = mean,
                      .a = a,
                      .b = b,
                      .c = c,
                      .out = dx,
                      .counts = counts,
                      .channels = channels,
                      .height = 1,
                      .width = pixels};
    each_tile(blocks * channels, dx_tile, &job, 0);
}

/* A block's channel of x is a run of floats: tiles of them serve the ReLU too. */
static void relu_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    PLACE(job, tile);
    for (int64_t i = at; i < at + pixels * LANES; i += WIDTH)
        store(job->out + i, larger(zero(), load(job->x + i)));
}

static void relu_dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    PLACE(job, tile);
    for (int64_t i = at; i < at + pixels * LANES; i += WIDTH)
        store(job->out + i, relu_back(load(job->dy + i), load(job->x + i)));
}

void mpidl_relu(const float *x, float *y, int64_t blocks, int64_t channels, int64_t pixels) {
    struct job job = {.x = x, .out = y, .channels = channels, .height = 1, .width = pixels};
    each_tile(blocks * channels, relu_tile, &job, 0);
}

void mpidl_relu_dx(const float *dy, const float *y, float *dx, int64_t blocks, int64_t channels,
                   int64_t pixels) {
    struct job job = {
        .x = y, .dy = dy, .out = dx, .channels = channels, .height = 1, .width = pixels};
    each_tile(blocks * channels, relu_dx_tile, &job, 0);
}
