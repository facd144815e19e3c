/* Passes over values element by element: activations, and the sum of two values. */
#include "activation.h"
#include "mpidl.h"
#include "special.h"
#include "team.h"

enum { ROWS = 1024 }; /* of a tile, each the 16 lanes of a pixel */

struct job {
    const float *x, *dy;
    struct source a, b;
    float *out, scale;
    int64_t rows, channels, pixels;
};

/* A tile that sets `out` to an expression of the vectors x and, in gradients, dy. */
#define EACH_ELEMENT(name, ...)                                                                    \
    static void name(void *argument, int64_t tile, float *own) {                                   \
        const struct job *job = argument;                                                          \
        (void)own;                                                                                 \
        vec scale = splat(job->scale);                                                             \
        (void)scale;                                                                               \
        int64_t stop = least(job->rows, (tile + 1) * ROWS) * LANES;                                \
        for (int64_t i = tile * ROWS * LANES; i < stop; i += WIDTH) {                              \
            vec x = load(job->x + i);                                                              \
            store(job->out + i, __VA_ARGS__);                                                      \
        }                                                                                          \
    }
#define DY load(job->dy + i)

EACH_ELEMENT(leaky_relu_tile, choose(x > 0, x, x * scale))
EACH_ELEMENT(leaky_relu_dx_tile, choose(x > 0, DY, DY * scale))
EACH_ELEMENT(tanh_tile, hyperbolic_tangent(x))
EACH_ELEMENT(tanh_dx_tile, DY * muladd(-x, x, splat(1)))
EACH_ELEMENT(sigmoid_tile, logistic(x))
EACH_ELEMENT(sigmoid_dx_tile, DY * x * (splat(1) - x))

static void each_row(tile_work *work, struct job job, int64_t rows) {
    job.rows = rows;
    each_tile((rows + ROWS - 1) / ROWS, work, &job, 0);
}

void mpidl_leaky_relu(const float *x, float *y, float scale, int64_t rows) {
    each_row(leaky_relu_tile, (struct job){.x = x, .out = y, .scale = scale}, rows);
}

void mpidl_leaky_relu_dx(const float *dy, const float *y, float *dx, float scale, int64_t rows) {
    each_row(leaky_relu_dx_tile, (struct job){.x = y, .dy = dy, .out = dx, .scale = scale}, rows);
}

void mpidl_tanh(const float *x, float *y, int64_t rows) {
    each_row(tanh_tile, (struct job){.x = x, .out = y}, rows);
}

void mpidl_tanh_dx(const float *dy, const float *y, float *dx, int64_t rows) {
    each_row(tanh_dx_tile, (struct job){.x = y, .dy = dy, .out = dx}, rows);
}

void mpidl_sigmoid(const float *x, float *y, int64_t rows) {
    each_row(sigmoid_tile, (struct job){.x = x, .out = y}, rows);
}

void mpidl_sigmoid_dx(const float *dy, const float *y, float *dx, int64_t rows) {
    each_row(sigmoid_dx_tile, (struct job){.x = y, .dy = dy, .out = dx}, rows);
}

/* ---- the sum of two values, each of which may be an activation that is not stored ---- */

INLINE vec value(vec x, int deferred, struct norm n) { return deferred ? activate(x, n) : x; }

static void add_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    int64_t row = tile * ROWS, stop = least(job->rows, row + ROWS);
    while (row < stop) { /* channel by channel */
        int64_t channel = row / job->pixels;
        int64_t end = least(stop, (channel + 1) * job->pixels) * LANES;
        const float *x = job->a.x, *y = job->b.x;
        struct norm a = norm_of(&job->a, channel % job->channels);
        struct norm b = norm_of(&job->b, channel % job->channels);
        int a_deferred = job->a.mean != NULL, b_deferred = job->b.mean != NULL;
        if (a_deferred || b_deferred)
            for (int64_t i = row * LANES; i < end; i += WIDTH)
                store(job->out + i, value(load(x + i), a_deferred, a) +
                                        value(load(y + i), b_deferred, b));
        else
            for (int64_t i = row * LANES; i < end; i += WIDTH)
                store(job->out + i, load(x + i) + load(y + i));
        row = end / LANES;
    }
}

void mpidl_add(const float *a, const float *a_mean, const float *a_scale, const float *a_beta,
               const float *b, const float *b_mean, const float *b_scale, const float *b_beta,
               float *y, int64_t blocks, int64_t channels, int64_t pixels) {
    struct job job = {.a = {a, a_mean, a_scale, a_beta},
                      .b = {b, b_mean, b_scale, b_beta},
                      .out = y,
                      .channels = channels,
                      .pixels = pixels};
    if (!a_mean && !b_mean) job.channels = 1, job.pixels = blocks * channels * pixels;
    each_row(add_tile, job, blocks * channels * pixels);
}
