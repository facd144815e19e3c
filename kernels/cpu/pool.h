/* Windows of pooling: the largest pixel of each window, and the gradient that windows pass back. */
#ifndef MPIDL_POOL_H
#define MPIDL_POOL_H

#include "activation.h"
#include "bytes.h"

/* The geometry of pooling; Python passes it as int64_t[12]. If count_padding, padding counts as
 * zeros in the mean of a window. */
struct windows {
    int64_t C, H, W, P, Q, R, S, stride_h, stride_w, top, left, count_padding;
};

/* Whether no two windows overlap. */
INLINE int are_apart(const struct windows *w) {
    return w->stride_h >= w->R && w->stride_w >= w->S;
}

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

/* ---- forward ---- */

/* A vector of the lanes of a channel, starting at pixel row `first`, and the normalization of the
 * channel. */
struct channel {
    const value *x;
    int64_t first;
    struct norm norm;
};

INLINE vec pixel(const struct channel *c, int64_t at, int deferred) {
    vec v = load(c->x + at * LANES);
    return deferred ? activate(v, c->norm) : v;
}

/* Unroll only four times: windows of constant size are small, and other windows would not be
 * faster. */
#define FEW_PIXELS _Pragma("GCC unroll 4")

/* Find the largest pixel at the positions [i0, i1) x [j0, j1) of a window. The first of equal
 * pixels wins, and NaN is larger than all numbers. `at` is the pixel at position (0, 0). */
INLINE void largest(const struct channel *c, int deferred, int64_t at, int64_t width, int64_t i0,
                    int64_t i1, int64_t j0, int64_t j1, int64_t S, vec *best, ivec *place) {
    vec most = pixel(c, at + i0 * width + j0, deferred);
    ivec where = (ivec){0} + (int32_t)(i0 * S + j0);
    FEW_PIXELS for (int64_t i = i0; i < i1; i++) FEW_PIXELS for (int64_t j = j0; j < j1; j++) {
        vec v = pixel(c, at + i * width + j, deferred);
        ivec larger_one = (v > most) | (v != v);
        most = choose(larger_one, v, most);
        where = (larger_one & (int32_t)(i * S + j)) | (~larger_one & where);
    }
    *best = most, *place = where;
}

/* Compute rows [p0, p1) of the output for one vector of lanes. If R and S are constants, the
 * compiler unrolls the loops over windows without padding. */
INLINE void max_rows(const struct windows *w, int64_t R, int64_t S, const struct channel *c,
                     int deferred, int64_t p0, int64_t p1, value *y, uint8_t *argmax) {
    for (int64_t p = p0; p < p1; p++) {
        struct span row = span_of(p, w->stride_h, w->top, R, w->H);
        for (int64_t q = 0; q < w->Q; q++, y += LANES, argmax += LANES) {
            struct span column = span_of(q, w->stride_w, w->left, S, w->W);
            int64_t at = (row.start - c->first) * w->W + column.start;
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

INLINE void max_pool(const struct windows *w, const struct channel *c, int deferred, int64_t p0,
                     int64_t p1, value *y, uint8_t *argmax) {
    if (w->R == 2 && w->S == 2)
        max_rows(w, 2, 2, c, deferred, p0, p1, y, argmax);
    else if (w->R == 3 && w->S == 3)
        max_rows(w, 3, 3, c, deferred, p0, p1, y, argmax);
    else
        max_rows(w, w->R, w->S, c, deferred, p0, p1, y, argmax);
}

/* ---- backward ---- */

/* The gradients of a channel of pooled pixels: for max pooling, dy and the positions of the largest
 * pixels; for average pooling, `shares`, which are dy divided by the sizes of the windows. */
struct pooled {
    const value *dy;
    const uint8_t *argmax;
    const float *shares;
};

/* Return the gradient that a window passes to the pixel at position `place`. */
INLINE vec handed(struct pooled from, int64_t window, int64_t place) {
    if (!from.argmax) return load(from.shares + window * LANES);
    return keep(load_bytes(from.argmax + window * LANES) == (int32_t)place,
                load(from.dy + window * LANES));
}

/* Pixels [h0, h1) x [v0, v1), counted from the start of the border. */
struct rectangle {
    int64_t h0, h1, v0, v1;
};

/* The windows [first, last] along one axis that contain the pixel `at`. `at` counts from the start
 * of the border. */
struct holders {
    int64_t first, last;
};

INLINE struct holders holders_of(int64_t at, int64_t stride, int64_t size, int64_t windows) {
    int64_t before = at - size; /* windows that start here or earlier end before `at` */
    return (struct holders){before < 0 ? 0 : before / stride + 1, least(windows - 1, at / stride)};
}

/* Compute dx of a pixel: the sum over the windows that contain it. The sum starts with the last
 * window, so that the pixel's positions in the windows increase. If windows do not overlap, there
 * is no sum, which would turn -0 into 0. */
INLINE void collect_pixel(const struct windows *w, struct pooled from, int64_t h,
                          struct holders rows, int64_t v, value *dx) {
    struct holders columns = holders_of(v, w->stride_w, w->S, w->Q);
    vec sum = zero();
    for (int64_t p = rows.last; p >= rows.first; p--)
        for (int64_t q = columns.last; q >= columns.first; q--) {
            vec d = handed(from, p * w->Q + q,
                           (h - p * w->stride_h) * w->S + v - q * w->stride_w);
            if (are_apart(w))
                sum = d;
            else
                sum += d;
        }
    store(dx, sum);
}

/* Compute dx of a rectangle; its rows are consecutive in dx. */
INLINE void collect(const struct windows *w, struct rectangle r, struct pooled from, value *dx) {
    for (int64_t h = r.h0; h < r.h1; h++) {
        struct holders rows = holders_of(h, w->stride_h, w->R, w->P);
        for (int64_t v = r.v0; v < r.v1; v++, dx += LANES)
            collect_pixel(w, from, h, rows, v, dx);
    }
}

/* Like `collect`, for 3x3 windows at stride 2, which process two adjacent pixels together. Windows
 * q and q - 1 contain the first pixel, 2 * q. Only window q contains the second pixel. */
INLINE void collect_3x3_2(const struct windows *w, struct rectangle r, struct pooled from,
                          value *dx) {
    for (int64_t h = r.h0; h < r.h1; h++) {
        struct holders rows = holders_of(h, 2, 3, w->P);
        for (int64_t v = r.v0; v < r.v1;) {
            int64_t q = v / 2;
            if (v % 2 || q < 1 || q >= w->Q || v + 2 > r.v1) {
                collect_pixel(w, from, h, rows, v++, dx);
                dx += LANES;
                continue;
            }
            vec first = zero(), second = zero();
            for (int64_t p = rows.last; p >= rows.first; p--) {
                int64_t window = p * w->Q + q, place = (h - p * 2) * 3;
                first += handed(from, window, place);
                first += handed(from, window - 1, place + 2);
                second += handed(from, window, place + 1);
            }
            store(dx, first), store(dx + LANES, second);
            v += 2, dx += 2 * LANES;
        }
    }
}

INLINE void collect_rectangle(const struct windows *w, struct rectangle r, struct pooled from,
                              value *dx) {
    if (w->R == 3 && w->S == 3 && w->stride_h == 2 && w->stride_w == 2)
        collect_3x3_2(w, r, from, dx);
    else
        collect(w, r, from, dx);
}

#endif
