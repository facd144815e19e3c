/* Max and average pooling. A tile is one channel of one block. */
#include "pool.h"

#include "fold.h"
#include "mpidl.h"
#include "team.h"

struct job {
    const struct windows *windows;
    struct source source;
    value *y, *dx;
    const value *dy;
    uint8_t *argmax;
    double *sums;
};

/* Return the number by which the sum of a window is divided. */
INLINE float divisor_of(const struct windows *w, int64_t p, int64_t q) {
    if (w->count_padding) return (float)(w->R * w->S);
    struct span row = span_of(p, w->stride_h, w->top, w->R, w->H),
                column = span_of(q, w->stride_w, w->left, w->S, w->W);
    return (float)((row.stop - row.first) * (column.stop - column.first));
}

/* ---- forward ---- */

INLINE void average_channel(const struct windows *w, const struct channel *c, int deferred,
                            value *y) {
    for (int64_t p = 0; p < w->P; p++)
        for (int64_t q = 0; q < w->Q; q++, y += LANES) {
            struct span row = span_of(p, w->stride_h, w->top, w->R, w->H),
                        column = span_of(q, w->stride_w, w->left, w->S, w->W);
            vec sum = zero();
            for (int64_t i = row.first; i < row.stop; i++) {
                vec of_row = zero(); /* one sum over a large window would lose accuracy */
                for (int64_t j = column.first; j < column.stop; j++)
                    of_row += pixel(c, (row.start + i) * w->W + column.start + j, deferred);
                sum += of_row;
            }
            store(y, sum / splat(divisor_of(w, p, q)));
        }
}

INLINE void pool_channel(const struct windows *w, const struct channel *c, int deferred, value *y,
                         uint8_t *argmax) {
    if (argmax)
        max_pool(w, c, deferred, 0, w->P, y, argmax);
    else
        average_channel(w, c, deferred, y);
}

static void pool_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct windows geometry = *job->windows, *w = &geometry;
    const struct source *s = &job->source;
    int64_t at = tile % w->C, out = tile * w->P * w->Q * LANES;
    struct channel c = {.norm = norm_of(s, at)};
    for (int64_t part = 0; part < LANES; part += WIDTH) {
        c.x = s->x + tile * w->H * w->W * LANES + part;
        value *y = job->y + out + part;
        uint8_t *argmax = job->argmax ? job->argmax + out + part : NULL;
        if (s->mean)
            pool_channel(w, &c, 1, y, argmax);
        else
            pool_channel(w, &c, 0, y, argmax);
    }
}

/* ---- backward ---- */

/* Compute dx for windows that do not overlap: each window writes its own pixels. */
INLINE void spread(const struct windows *w, int64_t R, int64_t S, struct pooled from, value *dx) {
    for (int64_t p = 0; p < w->P; p++) {
        struct span row = span_of(p, w->stride_h, w->top, R, w->H);
        for (int64_t q = 0; q < w->Q; q++) {
            struct span column = span_of(q, w->stride_w, w->left, S, w->W);
            value *pixels = dx + (row.start * w->W + column.start) * LANES;
            int64_t window = p * w->Q + q;
            if (row.stop - row.first == R && column.stop - column.first == S) {
                FEW_PIXELS for (int64_t i = 0; i < R; i++)
                    FEW_PIXELS for (int64_t j = 0; j < S; j++)
                        store(pixels + (i * w->W + j) * LANES, handed(from, window, i * S + j));
            } else {
                for (int64_t i = row.first; i < row.stop; i++)
                    for (int64_t j = column.first; j < column.stop; j++)
                        store(pixels + (i * w->W + j) * LANES, handed(from, window, i * S + j));
            }
        }
    }
}

INLINE void channel_dx(const struct windows *w, struct pooled from, value *dx) {
    struct rectangle all = {w->top, w->top + w->H, w->left, w->left + w->W};
    if (!are_apart(w))
        collect_rectangle(w, all, from, dx);
    else if (w->R == 2 && w->S == 2)
        spread(w, 2, 2, from, dx);
    else
        spread(w, w->R, w->S, from, dx);
}

static void pool_dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct windows geometry = *job->windows, *w = &geometry;
    const struct source *s = &job->source;
    int64_t pixels = w->H * w->W, at = tile % w->C, out = w->P * w->Q * LANES;
    const value *dy = job->dy + tile * out;
    value *dx = job->dx + tile * pixels * LANES;
    const uint8_t *argmax = job->argmax ? job->argmax + tile * out : NULL;
    int tiled = w->stride_h == w->R && w->stride_w == w->S && w->top == 0 && w->left == 0 &&
                w->P * w->R == w->H && w->Q * w->S == w->W;
    if (are_apart(w) && !tiled) /* some pixels are in no window */
        memset(dx, 0, (size_t)(pixels * LANES) * sizeof *dx);
    if (!argmax) {
        float *share = own;
        for (int64_t p = 0; p < w->P; p++)
            for (int64_t q = 0; q < w->Q; q++) {
                vec count = splat(divisor_of(w, p, q));
                for (int64_t stop = LANES; stop; stop -= WIDTH, share += WIDTH, dy += WIDTH)
                    store(share, load(dy) / count);
            }
    }
    for (int64_t part = 0; part < LANES; part += WIDTH) {
        if (argmax)
            channel_dx(w, (struct pooled){dy + part, argmax + part, NULL}, dx + part);
        else
            channel_dx(w, (struct pooled){NULL, NULL, own + part}, dx + part);
    }
    if (job->sums) {
        double *row = job->sums + tile / w->C * 2 * w->C;
        channel_norm_sums(dx, s->x + tile * pixels * LANES, pixels, s, at, row + at,
                          row + w->C + at);
    }
}

void mpidl_pool2d(const value *x, const float *mean, const float *scale, const float *beta,
                  float low, float high, value *y, uint8_t *argmax, int64_t blocks,
                  const int64_t *shape) {
    const struct windows *w = (const struct windows *)shape;
    struct job job = {.windows = w,
                      .source = {x, mean, scale, beta, low, high},
                      .y = y,
                      .argmax = argmax};
    each_tile(blocks * w->C, pool_tile, &job, 0);
}

void mpidl_pool2d_dx(const value *dy, const uint8_t *argmax, const value *x, const float *mean,
                     const float *scale, const float *beta, float low, float high, value *dx,
                     double *sums, int64_t blocks, const int64_t *shape, const int64_t *tree) {
    const struct windows *w = (const struct windows *)shape;
    struct job job = {.windows = w,
                      .source = {x, mean, scale, beta, low, high},
                      .dy = dy,
                      .dx = dx,
                      .argmax = (uint8_t *)(uintptr_t)argmax,
                      .sums = sums};
    each_tile(blocks * w->C, pool_dx_tile, &job, argmax ? 0 : w->P * w->Q * LANES);
    if (sums) fold_sums(sums, 2 * w->C, (const struct tree *)tree);
}
