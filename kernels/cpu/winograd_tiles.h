/* The transforms of Winograd's F(2, 3) and F(4, 3) along one dimension, on vectors of images.
 *
 * The values of a product of polynomials at enough points determine the product. The points are 0,
 * 1, -1 and infinity for F(2, 3), and 0, +-NEAR, +-FAR and infinity for F(4, 3). In exact
 * arithmetic any points work, but rounding errors depend on them. NEAR = 5/8 and FAR = 3/2 have
 * less than half the error of the classic 1 and 2. Their error is the smallest of all points tried
 * (tests/backends/cpu/test_cpu_winograd.py prints it). The elements of B and A are squares and
 * products of small dyadic fractions, so they are exact in float32.
 *
 * Each row of B^T and A below belongs to a point. The points p and -p share even and odd parts.
 * Therefore points are computed in groups: the first point, each pair, infinity.
 */
#ifndef MPIDL_WINOGRAD_TILES_H
#define MPIDL_WINOGRAD_TILES_H

#include "lanes.h"

#define NEAR 0.625f
#define FAR 1.5f
#define NEAR2 (NEAR * NEAR)
#define FAR2 (FAR * FAR)

/* Return a stride in floats of at least `lines` lines of 16 floats. The number of lines is odd, so
 * that data at such strides use different sets of a cache. */
static inline int64_t odd_lines(int64_t lines) { return (lines | 1) * LANES; }

/* Transpose a matrix of 16 x 16 floats. Rows of `from` are `row` floats apart, and rows of `to` are
 * `column` floats apart. */
INLINE void transpose_16(const float *from, int64_t row, float *to, int64_t column) {
    for (int r = 0; r < 16; r += WIDTH)
        for (int c = 0; c < 16; c += WIDTH) {
            vec v[WIDTH];
            UNROLL for (int i = 0; i < WIDTH; i++) v[i] = load(from + (r + i) * row + c);
            transpose(v);
            UNROLL for (int i = 0; i < WIDTH; i++) store(to + (c + i) * column + r, v[i]);
        }
}

/* The number of groups of points, the first point of a group, and the number of its points. */
#define GROUPS(m) ((m) == 4 ? 4 : 3)
#define FIRST(m, group) ((group) == 0 ? 0 : 2 * (group)-1)
#define IN_GROUP(m, group) ((group) == 0 || (group) == GROUPS(m) - 1 ? 1 : 2)

/* Compute the rows of B^T d for one group of points; d has m + 2 inputs. */
INLINE void input_group(const vec *d, vec *out, const int m, const int group) {
    if (m == 2 && group == 0) {
        out[0] = d[0] - d[2];
    } else if (m == 2 && group == 1) {
        out[0] = d[1] + d[2], out[1] = d[2] - d[1];
    } else if (m == 2) {
        out[0] = d[1] - d[3];
    } else if (group == 0 || group == 3) {
        const int i = group == 3;
        vec far = muladd(splat(-(NEAR2 + FAR2)), d[i + 2], d[i + 4]);
        out[0] = muladd(splat(NEAR2 * FAR2), d[i], far);
    } else {
        const float p = group == 1 ? NEAR : FAR, other = group == 1 ? FAR2 : NEAR2;
        vec even = muladd(splat(-other), d[2], d[4]), odd = muladd(splat(-other), d[1], d[3]);
        out[0] = muladd(splat(p), odd, even), out[1] = muladd(splat(-p), odd, even);
    }
}

/* Compute all m + 2 values of B^T d. */
INLINE void input_line(const vec *d, vec *out, const int m) {
    input_group(d, out, m, 0);
    input_group(d, out + 1, m, 1);
    input_group(d, out + 3, m, 2);
    if (m == 4) input_group(d, out + 5, m, 3);
}

/* Compute B^T d B for one group of rows of B^T, in `tiles` adjacent tiles that start at pixel x.
 * Tile t is written to out + place[t * PARTS], with points `point` floats apart. Adjacent tiles
 * share two columns. */
INLINE void input_row(const float *x, int64_t row, int64_t tiles, float *out, int64_t point,
                      const int64_t *place, const int m, const int group) {
    const int n = m + 2, lines = IN_GROUP(m, group);
    vec t[2][6], d[6], v[6];
    UNROLL for (int c = 0; c < 2; c++) {
        UNROLL for (int r = 0; r < n; r++) d[r] = load(x + r * row + c * LANES);
        input_group(d, v, m, group);
        UNROLL for (int line = 0; line < lines; line++) t[line][m + c] = v[line];
    }
    for (int64_t tile = 0; tile < tiles; tile++, x += m * LANES) {
        UNROLL for (int line = 0; line < lines; line++)
            t[line][0] = t[line][m], t[line][1] = t[line][m + 1];
        UNROLL for (int c = 2; c < n; c++) {
            UNROLL for (int r = 0; r < n; r++) d[r] = load(x + r * row + c * LANES);
            input_group(d, v, m, group);
            UNROLL for (int line = 0; line < lines; line++) t[line][c] = v[line];
        }
        float *to = out + place[tile * PARTS];
        UNROLL for (int line = 0; line < lines; line++) {
            input_line(t[line], v, m);
            UNROLL for (int c = 0; c < n; c++) store(to + (line * n + c) * point, v[c]);
        }
    }
}

/* Compute A^T v: m outputs from m + 2 values. */
INLINE void output_line(const vec *v, vec *out, const int m) {
    if (m == 2) {
        out[0] = v[0] + v[1] + v[2];
        out[1] = v[1] - v[2] - v[3];
    } else {
        vec sum1 = v[1] + v[2], sum2 = v[3] + v[4], far1 = v[1] - v[2], far2 = v[3] - v[4];
        out[0] = v[0] + sum1 + sum2;
        out[1] = muladd(splat(NEAR), far1, splat(FAR) * far2);
        out[2] = muladd(splat(NEAR2), sum1, splat(FAR2) * sum2);
        out[3] = muladd(splat(NEAR2 * NEAR), far1, muladd(splat(FAR2 * FAR), far2, v[5]));
    }
}

/* Compute A dy for one group of points; dy has the gradients of 4 outputs. F(4, 3) only. */
INLINE void gradient_group(const vec *d, vec *out, const int group) {
    if (group == 0) {
        out[0] = d[0];
    } else if (group == 3) {
        out[0] = d[3];
    } else {
        const float p = group == 1 ? NEAR : FAR;
        vec even = muladd(splat(p * p), d[2], d[0]), odd = muladd(splat(p * p), d[3], d[1]);
        out[0] = muladd(splat(p), odd, even), out[1] = muladd(splat(-p), odd, even);
    }
}

INLINE void gradient_line(const vec *d, vec *out) {
    gradient_group(d, out, 0);
    gradient_group(d, out + 1, 1);
    gradient_group(d, out + 3, 2);
    gradient_group(d, out + 5, 3);
}

/* Reciprocals of products of differences of points, which scale the rows of G of F(4, 3). */
#define SCALE0 ((float)(1 / ((double)NEAR2 * FAR2)))
#define SCALE1 ((float)(1 / (2 * (double)NEAR2 * (NEAR2 - FAR2))))
#define SCALE2 ((float)(1 / (2 * (double)FAR2 * (FAR2 - NEAR2))))

/* Compute G g: the values of a filter at the points, from its three coefficients. */
INLINE void filter_line(const vec *g, vec *out, const int m) {
    if (m == 2) {
        vec even = splat(0.5f) * (g[0] + g[2]), odd = splat(0.5f) * g[1];
        out[0] = g[0], out[1] = even + odd, out[2] = even - odd, out[3] = g[2];
    } else {
        vec even1 = splat(SCALE1) * muladd(splat(NEAR2), g[2], g[0]);
        vec even2 = splat(SCALE2) * muladd(splat(FAR2), g[2], g[0]);
        vec odd1 = splat(SCALE1 * NEAR) * g[1], odd2 = splat(SCALE2 * FAR) * g[1];
        out[0] = splat(SCALE0) * g[0];
        out[1] = even1 + odd1, out[2] = even1 - odd1;
        out[3] = even2 + odd2, out[4] = even2 - odd2;
        out[5] = g[2];
    }
}

/* Compute G^T v of F(4, 3): the three coefficients of the filter's gradient. */
INLINE void filter_sums(const vec *v, vec *out) {
    vec even1 = splat(SCALE1) * (v[1] + v[2]), odd1 = splat(SCALE1 * NEAR) * (v[1] - v[2]);
    vec even2 = splat(SCALE2) * (v[3] + v[4]), odd2 = splat(SCALE2 * FAR) * (v[3] - v[4]);
    out[0] = muladd(splat(SCALE0), v[0], even1 + even2);
    out[1] = odd1 + odd2;
    out[2] = muladd(splat(NEAR2), even1, muladd(splat(FAR2), even2, v[5]));
}

#endif
