/* Max and average pooling. A tile is one channel of one block. */
#include "activation.h"
#include "bytes.h"
#include "fold.h"
#include "mpidl.h"
#include "team.h"

/* The geometry of pooling; Python passes it as int64_t[12]. If count_padding, padding counts as
 * zeros in the mean of a window. */
struct windows {
    int64_t C, H, W, P, Q, R, S, stride_h, stride_w, top, left, count_padding;
};

struct job {
    const struct windows *windows;
    struct source source;
    float *y, *dx;
    const float *dy;
    uint8_t *argmax;
    double *sums;
};

/* A window along one axis. Its positions [first, stop) are not padding. `start` is the pixel at
 * position 0, which may be padding. */
struct span {
    int64_t start, first, stop;
};

INLINE struct span span_of(int64_t window, int64_t stride, int64_t before, int64_t size,
                           int64_t pixels) {
    int64_t start = window * stride - before;
    return (struct span){start, most(0, -start), least(size, pixels - start)};
}

/* Return the number by which the sum of a window is divided. */
INLINE float divisor_of(const struct windows *w, int64_t p, int64_t q) {
    if (w->count_padding) return (float)(w->R * w->S);
    struct span row = span_of(p, w->stride_h, w->top, w->R, w->H),
                column = span_of(q, w->stride_w, w->left, w->S, w->W);
    return (float)((row.stop - row.first) * (column.stop - column.first));
}

/* ---- forward ---- */

/* A vector of the lanes of a channel, and the normalization of the channel. */
struct channel {
    const float *x;
    struct norm norm;
};

INLINE vec pixel(const struct channel *c, int64_t at, int deferred) {
    vec v = load(c->x + at * LANES);
    return deferred ? activate(v, c->norm) : v;
}

/* Unroll only four times: windows of constant size are small, and other windows would not be
 * faster. */
#define FEW _Pragma("GCC unroll 4")

/* Find the largest pixel at the positions [i0, i1) x [j0, j1) of a window. The first of equal
 * pixels wins, and NaN is larger than all numbers. `at` is the pixel at position (0, 0). */
INLINE void largest(const struct channel *c, int deferred, int64_t at, int64_t width, int64_t i0,
                    int64_t i1, int64_t j0, int64_t j1, int64_t S, vec *best, ivec *place) {
    vec value = pixel(c, at + i0 * width + j0, deferred);
    ivec where = (ivec){0} + (int32_t)(i0 * S + j0);
    FEW for (int64_t i = i0; i < i1; i++) FEW for (int64_t j = j0; j < j1; j++) {
        vec v = pixel(c, at + i * width + j, deferred);
        ivec larger_one = (v > value) | (v != v);
        value = choose(larger_one, v, value);
        where = (larger_one & (int32_t)(i * S + j)) | (~larger_one & where);
    }
    *best = value, *place = where;
}

/* If R and S are constants, the compiler unrolls the loops over windows without padding. */
INLINE void max_channel(const struct windows *w, int64_t R, int64_t S, const struct channel *c,
                        int deferred, float *y, uint8_t *argmax) {
    for (int64_t p = 0; p < w->P; p++) {
        struct span row = span_of(p, w->stride_h, w->top, R, w->H);
        for (int64_t q = 0; q < w->Q; q++, y += LANES, argmax += LANES) {
            struct span column = span_of(q, w->stride_w, w->left, S, w->W);
            int64_t at = row.start * w->W + column.start;
            vec best;
            ivec place;
            if (row.stop - row.first == R && column.stop - column.first == S)
                largest(c, deferred, at, w->W, 0, R, 0, S, S, &best, &place);
            else
                largest(c, deferred, at, w->W, row.first, row.stop, column.first, column.stop, S,
                        &best, &place);
            store(y, best);
            store_bytes(argmax, place);
        }
    }
}

INLINE void average_channel(const struct windows *w, const struct channel *c, int deferred,
                            float *y) {
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

INLINE void pool_channel(const struct windows *w, const struct channel *c, int deferred, float *y,
                         uint8_t *argmax) {
    if (!argmax)
        average_channel(w, c, deferred, y);
    else if (w->R == 2 && w->S == 2)
        max_channel(w, 2, 2, c, deferred, y, argmax);
    else if (w->R == 3 && w->S == 3)
        max_channel(w, 3, 3, c, deferred, y, argmax);
    else
        max_channel(w, w->R, w->S, c, deferred, y, argmax);
}

static void pool_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct windows *w = job->windows;
    const struct source *s = &job->source;
    int64_t at = tile % w->C, out = tile * w->P * w->Q * LANES;
    struct channel c = {.norm = norm_of(s, at)};
    for (int64_t part = 0; part < LANES; part += WIDTH) {
        c.x = s->x + tile * w->H * w->W * LANES + part;
        float *y = job->y + out + part;
        uint8_t *argmax = job->argmax ? job->argmax + out + part : NULL;
        if (s->mean)
            pool_channel(w, &c, 1, y, argmax);
        else
            pool_channel(w, &c, 0, y, argmax);
    }
}

/* ---- backward ---- */

/* Return the gradient that a window passes to the pixel at position `place`. For average pooling,
 * dy is already divided by the size of the window. */
INLINE vec handed(const float *dy, const uint8_t *argmax, int64_t window, int64_t place) {
    vec d = load(dy + window * LANES);
    return argmax ? keep(load_bytes(argmax + window * LANES) == (int32_t)place, d) : d;
}

/* Compute dx for windows that do not overlap: each window writes its own pixels. */
INLINE void spread(const struct windows *w, int64_t R, int64_t S, const float *dy,
                   const uint8_t *argmax, float *dx) {
    for (int64_t p = 0; p < w->P; p++) {
        struct span row = span_of(p, w->stride_h, w->top, R, w->H);
        for (int64_t q = 0; q < w->Q; q++) {
            struct span column = span_of(q, w->stride_w, w->left, S, w->W);
            float *pixels = dx + (row.start * w->W + column.start) * LANES;
            int64_t window = p * w->Q + q;
            if (row.stop - row.first == R && column.stop - column.first == S) {
                FEW for (int64_t i = 0; i < R; i++) FEW for (int64_t j = 0; j < S; j++)
                    store(pixels + (i * w->W + j) * LANES, handed(dy, argmax, window, i * S + j));
            } else {
                for (int64_t i = row.first; i < row.stop; i++)
                    for (int64_t j = column.first; j < column.stop; j++)
                        store(pixels + (i * w->W + j) * LANES,
                              handed(dy, argmax, window, i * S + j));
            }
        }
    }
}

/* The windows [first, last] along one axis that contain the pixel `at`. `at` counts from the start
 * of the border. */
struct holders {
    int64_t first, last;
};

INLINE struct holders holders_of(int64_t at, int64_t stride, int64_t size, int64_t windows) {
    int64_t before = at - size; /* windows that start here or earlier end before `at` */
    return (struct holders){before < 0 ? 0 : before / stride + 1, least(windows - 1, at / stride)};
}

/* Compute dx for windows that overlap: each pixel sums over the windows that contain it. The sum
 * starts with the last window, so that the pixel's positions in the windows increase. */
INLINE void collect_pixel(const struct windows *w, const float *dy, const uint8_t *argmax,
                          int64_t h, struct holders rows, int64_t v, float *dx) {
    struct holders columns = holders_of(v, w->stride_w, w->S, w->Q);
    vec sum = zero();
    for (int64_t p = rows.last; p >= rows.first; p--)
        for (int64_t q = columns.last; q >= columns.first; q--)
            sum += handed(dy, argmax, p * w->Q + q,
                          (h - p * w->stride_h) * w->S + v - q * w->stride_w);
    store(dx, sum);
}

INLINE void collect(const struct windows *w, const float *dy, const uint8_t *argmax, float *dx) {
    for (int64_t h = w->top; h < w->top + w->H; h++) {
        struct holders rows = holders_of(h, w->stride_h, w->R, w->P);
        for (int64_t v = w->left; v < w->left + w->W; v++, dx += LANES)
            collect_pixel(w, dy, argmax, h, rows, v, dx);
    }
}

/* Like collect_pixel, for two adjacent pixels and 3x3 windows at stride 2. Windows q and q - 1
 * contain the first pixel, 2 * q. Only window q contains the second pixel. */
INLINE void collect_3x3_2(const struct windows *w, const float *dy, const uint8_t *argmax,
                          float *dx) {
    int64_t right = w->left + w->W;
    for (int64_t h = w->top; h < w->top + w->H; h++) {
        struct holders rows = holders_of(h, 2, 3, w->P);
        for (int64_t v = w->left; v < right;) {
            int64_t q = v / 2;
            if (v % 2 || q < 1 || q >= w->Q || v + 2 > right) {
                collect_pixel(w, dy, argmax, h, rows, v++, dx);
                dx += LANES;
                continue;
            }
            vec first = zero(), second = zero();
            for (int64_t p = rows.last; p >= rows.first; p--) {
                int64_t window = p * w->Q + q, place = (h - p * 2) * 3;
                first += handed(dy, argmax, window, place);
                first += handed(dy, argmax, window - 1, place + 2);
                second += handed(dy, argmax, window, place + 1);
            }
            store(dx, first), store(dx + LANES, second);
            v += 2, dx += 2 * LANES;
        }
    }
}

INLINE void channel_dx(const struct windows *w, const float *dy, const uint8_t *argmax,
                       float *dx) {
    if (w->stride_h >= w->R && w->stride_w >= w->S) {
        if (w->R == 2 && w->S == 2)
            spread(w, 2, 2, dy, argmax, dx);
        else
            spread(w, w->R, w->S, dy, argmax, dx);
    } else if (w->R == 3 && w->S == 3 && w->stride_h == 2 && w->stride_w == 2) {
        collect_3x3_2(w, dy, argmax, dx);
    } else {
        collect(w, dy, argmax, dx);
    }
}

static void pool_dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct windows *w = job->windows;
    const struct source *s = &job->source;
    int64_t pixels = w->H * w->W, at = tile % w->C, out = w->P * w->Q * LANES;
    const float *dy = job->dy + tile * out;
    float *dx = job->dx + tile * pixels * LANES;
    const uint8_t *argmax = job->argmax ? job->argmax + tile * out : NULL;
    int apart = w->stride_h >= w->R && w->stride_w >= w->S;
    int tiled = w->stride_h == w->R && w->stride_w == w->S && w->top == 0 && w->left == 0 &&
                w->P * w->R == w->H && w->Q * w->S == w->W;
    if (apart && !tiled) /* some pixels are in no window */
        memset(dx, 0, (size_t)(pixels * LANES) * sizeof *dx);
    if (!argmax) {
        float *part = own;
        for (int64_t p = 0; p < w->P; p++)
            for (int64_t q = 0; q < w->Q; q++) {
                vec count = splat(divisor_of(w, p, q));
                for (int64_t stop = LANES; stop; stop -= WIDTH, part += WIDTH, dy += WIDTH)
                    store(part, load(dy) / count);
            }
        dy = own;
    }
    for (int64_t part = 0; part < LANES; part += WIDTH) {
        if (argmax)
            channel_dx(w, dy + part, argmax + part, dx + part);
        else
            channel_dx(w, dy + part, NULL, dx + part);
    }
    if (job->sums) {
        double *row = job->sums + tile / w->C * 2 * w->C;
        channel_norm_sums(dx, s->x + tile * pixels * LANES, pixels, s, at, row + at,
                          row + w->C + at);
    }
}

void mpidl_pool2d(const float *x, const float *mean, const float *scale, const float *beta,
                  float *y, uint8_t *argmax, int64_t blocks, const int64_t *shape) {
    const struct windows *w = (const struct windows *)shape;
    struct job job = {.windows = w, .source = {x, mean, scale, beta}, .y = y, .argmax = argmax};
    each_tile(blocks * w->C, pool_tile, &job, 0);
}

void mpidl_pool2d_dx(const float *dy, const uint8_t *argmax, const float *x, const float *mean,
                     const float *scale, const float *beta, float *dx, double *sums,
                     int64_t blocks, const int64_t *shape, const int64_t *tree) {
    const struct windows *w = (const struct windows *)shape;
    struct job job = {.windows = w,
                      .source = {x, mean, scale, beta},
                      .dy = dy,
                      .dx = dx,
                      .argmax = (uint8_t *)(uintptr_t)argmax,
                      .sums = sums};
    each_tile(blocks * w->C, pool_dx_tile, &job, argmax ? 0 : w->P * w->Q * LANES);
    if (sums) fold_sums(sums, 2 * w->C, (const struct tree *)tree);
}
