/* Padding and cropping of images. A tile is one channel of one block. */
#include "mpidl.h"
#include "team.h"
#include "value.h"

/* The geometry; Python passes it as int64_t[6]. Pixel (0, 0) of x becomes pixel (top, left) of y,
 * where top and left may be negative. */
struct geometry {
    int64_t H, W, P, Q, top, left;
};

struct job {
    const struct geometry *geometry;
    const value *x;
    value *y;
    float border;
};

static void fill(value *y, int64_t pixels, vec border) {
    for (int64_t i = 0; i < pixels * LANES; i += WIDTH) store(y + i, border);
}

static void pad_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct geometry *g = job->geometry;
    (void)own;
    const value *x = job->x + tile * g->H * g->W * LANES;
    value *y = job->y + tile * g->P * g->Q * LANES;
    vec border = splat(job->border);
    int64_t first = most(0, g->left), stop = most(first, least(g->Q, g->left + g->W));
    for (int64_t p = 0; p < g->P; p++, y += g->Q * LANES) {
        int64_t row = p - g->top;
        if (row < 0 || row >= g->H) {
            fill(y, g->Q, border);
            continue;
        }
        const value *pixels = x + (row * g->W + first - g->left) * LANES;
        fill(y, first, border);
        memcpy(y + first * LANES, pixels, (size_t)((stop - first) * LANES) * sizeof *y);
        fill(y + stop * LANES, g->Q - stop, border);
    }
}

void mpidl_pad2d(const value *x, value *y, float border, int64_t channels, const int64_t *shape) {
    struct job job = {.geometry = (const struct geometry *)shape, .x = x, .y = y, .border = border};
    each_tile(channels, pad_tile, &job, 0);
}
