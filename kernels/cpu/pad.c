/* Padding and cropping of images. A tile is one channel of one block. */
#include "lanes.h"
#include "mpidl.h"
#include "team.h"

/* The geometry; Python passes it as int64_t[6]. Pixel (0, 0) of x becomes pixel (top, left) of y,
 * where top and left may be negative. */
struct geometry {
    int64_t H, W, P, Q, top, left;
};

struct job {
    const struct geometry *geometry;
    const float *x;
    float *y, value;
};

static void fill(float *y, int64_t pixels, vec value) {
    for (int64_t i = 0; i < pixels * LANES; i += WIDTH) store(y + i, value);
}

static void pad_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct geometry *g = job->geometry;
    (void)own;
    const float *x = job->x + tile * g->H * g->W * LANES;
    float *y = job->y + tile * g->P * g->Q * LANES;
    vec value = splat(job->value);
    int64_t first = most(0, g->left), stop = most(first, least(g->Q, g->left + g->W));
    for (int64_t p = 0; p < g->P; p++, y += g->Q * LANES) {
        int64_t row = p - g->top;
        if (row < 0 || row >= g->H) {
            fill(y, g->Q, value);
            continue;
        }
        const float *pixels = x + (row * g->W + first - g->left) * LANES;
        fill(y, first, value);
        memcpy(y + first * LANES, pixels, (size_t)((stop - first) * LANES) * sizeof *y);
        fill(y + stop * LANES, g->Q - stop, value);
    }
}

void mpidl_pad2d(const float *x, float *y, float value, int64_t channels, const int64_t *shape) {
    struct job job = {.geometry = (const struct geometry *)shape, .x = x, .y = y, .value = value};
    each_tile(channels, pad_tile, &job, 0);
}
