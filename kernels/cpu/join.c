/* The sum of two values, optionally followed by ReLU, as at the end of a residual block, and the
 * gradient. Each value may be a batch normalization and an activation that are not stored. */
#include "activation.h"
#include "fold.h"
#include "mpidl.h"
#include "team.h"

enum { ROWS = 1024 }; /* minimum number of pixels per tile, if there are that many */

struct job {
    struct source a, b;
    const value *dy, *more_dy, *y;
    value *out;
    int relu; /* whether ReLU follows the sum */
    double *sums[2];
    int64_t channels, pixels, all; /* `all`: channels of all blocks together */
    int64_t group; /* channels per tile */
};

static void each_group(tile_work *work, struct job *job, int64_t blocks) {
    job->all = blocks * job->channels;
    job->group = most(ROWS / most(job->pixels, 1), 1);
    each_tile(parts_of(job->all, job->group), work, job, 0);
}

#define EACH_CHANNEL(job, tile, number)                                                            \
    for (int64_t number = tile * job->group; number < least(job->all, (tile + 1) * job->group);    \
         number++)

INLINE vec read_addend(vec x, int is_normalized, struct norm n) {
    return is_normalized ? activate(x, n) : x;
}

INLINE void add_channel(const struct job *job, int64_t number, const int a_normalized,
                        const int b_normalized) {
    const int64_t channel = number % job->channels, first = number * job->pixels * LANES;
    const int64_t stop = first + job->pixels * LANES;
    const value *x = job->a.x, *y = job->b.x;
    const struct norm a = norm_of(&job->a, channel), b = norm_of(&job->b, channel);
    const vec floor = floor_of((struct finish){NULL, job->relu});
    for (int64_t i = first; i < stop; i += WIDTH)
        store(job->out + i, larger(floor, read_addend(load(x + i), a_normalized, a) +
                                              read_addend(load(y + i), b_normalized, b)));
}

static void add_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const int a = job->a.mean != NULL, b = job->b.mean != NULL;
    (void)own;
    EACH_CHANNEL(job, tile, number) {
        if (a && b) add_channel(job, number, 1, 1);
        else if (a) add_channel(job, number, 1, 0);
        else if (b) add_channel(job, number, 0, 1);
        else add_channel(job, number, 0, 0);
    }
}

void mpidl_add(const value *a, const float *a_mean, const float *a_scale, const float *a_beta,
               float a_low, float a_high, const value *b, const float *b_mean, const float *b_scale,
               const float *b_beta, float b_low, float b_high, value *y, int64_t relu,
               int64_t blocks, int64_t channels, int64_t pixels) {
    struct job job = {.a = {a, a_mean, a_scale, a_beta, a_low, a_high},
                      .b = {b, b_mean, b_scale, b_beta, b_low, b_high},
                      .out = y,
                      .relu = (int)relu,
                      .channels = channels,
                      .pixels = pixels};
    each_group(add_tile, &job, blocks);
}

/* Compute one channel of a block. The sums read the gradient while it is still in the cache. */
static void add_relu_dx_channel(const struct job *job, int64_t number) {
    const int64_t block = number / job->channels, channel = number % job->channels;
    const int64_t first = number * job->pixels * LANES, stop = first + job->pixels * LANES;
    if (job->more_dy)
        for (int64_t i = first; i < stop; i += WIDTH)
            store(job->out + i,
                  relu_back(load(job->dy + i) + load(job->more_dy + i), load(job->y + i)));
    else
        for (int64_t i = first; i < stop; i += WIDTH)
            store(job->out + i, relu_back(load(job->dy + i), load(job->y + i)));
    for (int n = 0; n < 2; n++) {
        if (!job->sums[n]) continue;
        const struct source *source = n ? &job->b : &job->a;
        double *row = job->sums[n] + block * 2 * job->channels;
        channel_norm_sums(job->out + first, source->x + first, job->pixels, source, channel,
                          row + channel, row + job->channels + channel);
    }
}

static void add_relu_dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    EACH_CHANNEL(job, tile, number) add_relu_dx_channel(job, number);
}

void mpidl_add_relu_dx(const value *dy, const value *more_dy, const value *y, value *dz,
                       const value *a, const float *a_mean, double *a_sums, const value *b,
                       const float *b_mean, double *b_sums, int64_t blocks, int64_t channels,
                       int64_t pixels, const int64_t *tree) {
    struct job job = {.a = {.x = a, .mean = a_mean},
                      .b = {.x = b, .mean = b_mean},
                      .dy = dy,
                      .more_dy = more_dy,
                      .y = y,
                      .out = dz,
                      .sums = {a_sums, b_sums},
                      .channels = channels,
                      .pixels = pixels};
    each_group(add_relu_dx_tile, &job, blocks);
    for (int n = 0; n < 2; n++)
        if (job.sums[n]) fold_sums(job.sums[n], 2 * channels, (const struct tree *)tree);
}
