/* The transforms of Winograd's F(m, r) along one dimension, on vectors of images.
 *
 * The values at enough points determine a product of polynomials. F(m, r) computes m outputs of a
 * filter with r coefficients from n = m + r - 1 inputs, at n points: 0 if n is even, pairs of p and
 * -p, and infinity. In exact arithmetic any points work, but rounding errors depend on the points.
 * Of all points tried, the points in POINT have the smallest error: for n = 6, less than half the
 * error of the classic points 1 and 2 (tests/backends/cpu/test_cpu_winograd.py prints the errors).
 * The elements of B and A are sums of products of small dyadic fractions, so they are exact in
 * float32.
 *
 * Each row of B^T and A below belongs to a point. The points p and -p share even and odd parts.
 * Therefore points are computed in groups: the point 0, each pair, and infinity.
 */
#ifndef MPIDL_WINOGRAD_TILES_H
#define MPIDL_WINOGRAD_TILES_H

#include "value.h"

enum { MOST_POINTS = 8, MOST_PAIRS = 3, MOST_TAPS = 5 }; /* maximum sizes along one dimension */

/* Whether 0 is a point, the number of pairs, and the positive point of pair 0, 1, ... */
#define ZERO(n) (1 - (n) % 2)
#define PAIRS_OF(n) (((n)-1) / 2)
#define POINT(n, pair)                                                                             \
    ((n) <= 4   ? 1                                                                                \
     : (n) == 5 ? POINT_OF_5(pair)                                                                 \
     : (n) == 6 ? POINT_OF_6(pair)                                                                 \
     : (n) == 7 ? POINT_OF_7(pair)                                                                 \
                : POINT_OF_8(pair))
#define POINT_OF_5(pair) ((pair) == 0 ? 0.4375f : 1.375f)
#define POINT_OF_6(pair) ((pair) == 0 ? 0.625f : 1.5f)
#define POINT_OF_7(pair) ((pair) == 0 ? 0.375f : (pair) == 1 ? 0.875f : 1.75f)
#define POINT_OF_8(pair) ((pair) == 0 ? 0.5f : (pair) == 1 ? 1.0f : 2.0f)
#define SQUARE(n, pair) (POINT(n, pair) * POINT(n, pair))

/* Return the positive point of a pair, raised to a power. */
INLINE float power_of(const int n, const int pair, const int exponent) {
    float power = 1;
    UNROLL for (int i = 0; i < exponent; i++) power *= POINT(n, pair);
    return power;
}

/* The number of groups of points, the first point of a group, and the number of its points. The
 * pair of a group is group - ZERO(n). */
#define GROUPS(n) (ZERO(n) + PAIRS_OF(n) + 1)
#define FIRST(n, group) ((group) == 0 ? 0 : 2 * (group)-ZERO(n))
#define IN_GROUP(n, group) (((group) == 0 && ZERO(n)) || (group) == GROUPS(n) - 1 ? 1 : 2)

/* Apply a polynomial to d[0], d[2], d[4] and so on. The roots of the polynomial are the squares of
 * the points outside `pair`, or of all points if `pair` is PAIRS_OF(n). */
INLINE vec without(const vec *d, const int n, const int pair) {
    float root[MOST_PAIRS];
    int roots = 0;
    UNROLL for (int i = 0; i < PAIRS_OF(n); i++)
        if (i != pair) root[roots++] = SQUARE(n, i);
    if (roots == 0) return d[0];
    if (roots == 1) return muladd(splat(-root[0]), d[0], d[2]);
    if (roots == 2)
        return muladd(splat(root[0] * root[1]), d[0],
                      muladd(splat(-(root[0] + root[1])), d[2], d[4]));
    float pairs = root[0] * root[1] + root[0] * root[2] + root[1] * root[2];
    vec high = muladd(splat(-(root[0] + root[1] + root[2])), d[4], d[6]);
    return muladd(splat(-root[0] * root[1] * root[2]), d[0], muladd(splat(pairs), d[2], high));
}

/* Compute the rows of B^T d for one group of points; d has n inputs. */
INLINE void input_group(const vec *d, vec *out, const int n, const int group) {
    if (n == 4 && group == 0) {
        out[0] = d[0] - d[2];
    } else if (n == 4 && group == 1) {
        out[0] = d[1] + d[2], out[1] = d[2] - d[1];
    } else if (n == 4) {
        out[0] = d[1] - d[3];
    } else if (IN_GROUP(n, group) == 1) { /* 0 or infinity */
        out[0] = without(group == 0 ? d : d + ZERO(n), n, PAIRS_OF(n));
    } else {
        const int pair = group - ZERO(n);
        const float p = POINT(n, pair);
        vec even = without(d + ZERO(n) + 1, n, pair), odd = without(d + ZERO(n), n, pair);
        out[0] = muladd(splat(p), odd, even), out[1] = muladd(splat(-p), odd, even);
    }
}

/* Compute all n values of B^T d. */
INLINE void input_line(const vec *d, vec *out, const int n) {
    UNROLL for (int group = 0; group < GROUPS(n); group++)
        input_group(d, out + FIRST(n, group), n, group);
}

/* The inputs and outputs of input_row are floats. If `narrow`, they are operands of bfloat16
 * products over images: the inputs are bfloat16 numbers, and so are the outputs if words hold two of
 * them. */
INLINE vec load_input(const void *x, int64_t at, const int narrow) {
    return narrow ? load((const uint16_t *)x + at) : load((const float *)x + at);
}
INLINE void store_input(void *out, int64_t at, vec v, const int narrow) {
    if (narrow && PER_WORD == 2) store((uint16_t *)out + at, v);
    else store((float *)out + at, narrow ? rounded(v) : v);
}

/* Compute B^T d B for one group of rows of B^T, in `tiles` adjacent tiles that start at the offset
 * `pixel` in x. Tile t is written to the offset first + place[t * PARTS] in out, with points `point`
 * numbers apart, except that the point infinity of columns is written to first + last[t * PARTS], or
 * not at all if this last offset is negative. Adjacent tiles share r - 1 columns. */
INLINE void input_row(const void *x, int64_t pixel, int64_t row, int64_t tiles, void *out,
                      int64_t first, int64_t point, const int64_t *place, const int64_t *last,
                      const int m_h, const int m_w, const int r, const int group,
                      const int narrow) {
    const int n_h = m_h + r - 1, n_w = m_w + r - 1, lines = IN_GROUP(n_h, group);
    vec t[2][MOST_POINTS], d[MOST_POINTS], v[MOST_POINTS];
    UNROLL for (int c = 0; c < r - 1; c++) {
        UNROLL for (int i = 0; i < n_h; i++)
            d[i] = load_input(x, pixel + i * row + c * LANES, narrow);
        input_group(d, v, n_h, group);
        UNROLL for (int line = 0; line < lines; line++) t[line][m_w + c] = v[line];
    }
    for (int64_t tile = 0; tile < tiles; tile++, pixel += m_w * LANES) {
        UNROLL for (int line = 0; line < lines; line++)
            UNROLL for (int c = 0; c < r - 1; c++) t[line][c] = t[line][m_w + c];
        UNROLL for (int c = r - 1; c < n_w; c++) {
            UNROLL for (int i = 0; i < n_h; i++)
                d[i] = load_input(x, pixel + i * row + c * LANES, narrow);
            input_group(d, v, n_h, group);
            UNROLL for (int line = 0; line < lines; line++) t[line][c] = v[line];
        }
        const int64_t to = first + place[tile * PARTS], end = last[tile * PARTS];
        UNROLL for (int line = 0; line < lines; line++) {
            input_line(t[line], v, n_w);
            UNROLL for (int c = 0; c < n_w - 1; c++)
                store_input(out, to + (line * n_w + c) * point, v[c], narrow);
            if (end >= 0)
                store_input(out, first + end + (line * n_w + n_w - 1) * point, v[n_w - 1], narrow);
        }
    }
}

#ifdef BF16
/* Compute B^T d B of a pair of channels, of which `odd` may be NULL, in `tiles` adjacent tiles.
 * Write the words of tile t to out + place[t * PARTS]; if words hold single numbers, the odd channel
 * goes there, and the even channel to out + even_place[t * PARTS]. */
INLINE void input_words(const value *even, const value *odd, int64_t row, int64_t tiles, float *out,
                        int64_t point, const int64_t *place, const int64_t *even_place,
                        const int m_h, const int m_w, const int r) {
    enum { CHUNK = 6, COLUMNS = CHUNK * 4 + MOST_TAPS - 1 }; /* tiles in the first-level cache */
    const int n_h = m_h + r - 1, n_w = m_w + r - 1;
    vec t[2][MOST_POINTS][COLUMNS], d[MOST_POINTS], v[2][MOST_POINTS];
    for (int64_t first = 0; first < tiles; first += CHUNK) {
        const int64_t chunk = least(tiles - first, CHUNK), columns = chunk * m_w + r - 1;
        for (int channel = 0; channel < 2; channel++) {
            const value *x = channel ? odd : even;
            if (x) x += first * m_w * LANES;
            for (int64_t c = 0; c < columns; c++) {
                UNROLL for (int i = 0; i < n_h; i++)
                    d[i] = x ? load(x + i * row + c * LANES) : zero();
                input_line(d, v[0], n_h);
                UNROLL for (int i = 0; i < n_h; i++) t[channel][i][c] = v[0][i];
            }
        }
        for (int line = 0; line < n_h; line++)
            for (int64_t tile = 0; tile < chunk; tile++) {
                float *to = out + line * n_w * point;
                input_line(&t[0][line][tile * m_w], v[0], n_w);
                input_line(&t[1][line][tile * m_w], v[1], n_w);
                const int64_t at = place[(first + tile) * PARTS];
                const int64_t even_at = even_place[(first + tile) * PARTS];
                UNROLL for (int c = 0; c < n_w; c++) {
                    if (PER_WORD == 2) {
                        store(to + at + c * point, paired(v[0][c], v[1][c]));
                    } else {
                        if (odd) store(to + at + c * point, rounded(v[1][c]));
                        store(to + even_at + c * point, rounded(v[0][c]));
                    }
                }
            }
    }
}
#endif

/* Return the sum over pairs of x[pair] times the point's power, plus `last` if it is not NULL. */
INLINE vec sum_of_powers(const vec *x, const vec *last, const int n, const int exponent) {
    vec sum = splat(power_of(n, PAIRS_OF(n) - 1, exponent)) * x[PAIRS_OF(n) - 1];
    if (last) sum = muladd(splat(power_of(n, PAIRS_OF(n) - 1, exponent)), x[PAIRS_OF(n) - 1], *last);
    UNROLL for (int i = PAIRS_OF(n) - 2; i >= 0; i--)
        sum = muladd(splat(power_of(n, i, exponent)), x[i], sum);
    return sum;
}

/* Compute A^T v: m outputs from n = m + r - 1 values. */
INLINE void output_line(const vec *v, vec *out, const int m, const int r) {
    const int n = m + r - 1;
    if (n == 4) {
        out[0] = v[0] + v[1] + v[2];
        out[1] = v[1] - v[2] - v[3];
        return;
    }
    vec sum[MOST_PAIRS], difference[MOST_PAIRS];
    UNROLL for (int i = 0; i < PAIRS_OF(n); i++) {
        const vec *pair = v + ZERO(n) + 2 * i;
        sum[i] = pair[0] + pair[1], difference[i] = pair[0] - pair[1];
        if (i > 0) out[0] += sum[i];
        else if (ZERO(n)) out[0] = v[0] + sum[0];
        else out[0] = sum[0];
    }
    UNROLL for (int j = 1; j < m; j++)
        out[j] = sum_of_powers(j % 2 ? difference : sum, j == m - 1 ? &v[n - 1] : NULL, n, j);
}

/* Compute A dy for one group of points; dy has the gradients of m outputs. */
INLINE void gradient_group(const vec *d, vec *out, const int m, const int n, const int group) {
    if (IN_GROUP(n, group) == 1) { /* 0 or infinity */
        out[0] = group == 0 ? d[0] : d[m - 1];
    } else {
        const float p = POINT(n, group - ZERO(n));
        vec even = d[0], odd = d[1];
        if (m > 2) even = muladd(splat(p * p), d[2], d[0]);
        if (m > 3) odd = muladd(splat(p * p), d[3], d[1]);
        out[0] = muladd(splat(p), odd, even), out[1] = muladd(splat(-p), odd, even);
    }
}

INLINE void gradient_line(const vec *d, vec *out, const int m, const int n) {
    UNROLL for (int group = 0; group < GROUPS(n); group++)
        gradient_group(d, out + FIRST(n, group), m, n, group);
}

/* Return the factor of a row of G: the reciprocal of the product of the differences between its
 * point and the other finite points. Pair -1 stands for the point 0. Without the point 0, the
 * factor of -p is the negative of the factor of p, which is returned. */
INLINE float scale_of(const int n, const int pair) {
    double product = pair < 0 ? 1 : 2 * (double)(ZERO(n) ? SQUARE(n, pair) : POINT(n, pair));
    UNROLL for (int i = 0; i < PAIRS_OF(n); i++)
        if (i != pair) product *= (pair < 0 ? 0 : (double)SQUARE(n, pair)) - SQUARE(n, i);
    return (float)(1 / product);
}

/* Return g[first] + p^2 g[first + 2] + ... with r coefficients in g. */
INLINE vec every_other(const vec *g, const int first, const int r, const float square) {
    const int last = first + (r - 1 - first) / 2 * 2;
    vec sum = g[last];
    UNROLL for (int i = last - 2; i >= first; i -= 2) sum = muladd(splat(square), sum, g[i]);
    return sum;
}

/* Compute G g: the values of a filter at the points, from its r coefficients. */
INLINE void filter_line(const vec *g, vec *out, const int m, const int r) {
    const int n = m + r - 1;
    if (n == 4) {
        vec even = splat(0.5f) * (g[0] + g[2]), odd = splat(0.5f) * g[1];
        out[0] = g[0], out[1] = even + odd, out[2] = even - odd, out[3] = g[2];
        return;
    }
    if (ZERO(n)) out[0] = splat(scale_of(n, -1)) * g[0];
    UNROLL for (int i = 0; i < PAIRS_OF(n); i++) {
        vec even = splat(scale_of(n, i)) * every_other(g, 0, r, SQUARE(n, i));
        vec odd = splat(scale_of(n, i) * POINT(n, i)) * every_other(g, 1, r, SQUARE(n, i));
        vec *pair = out + ZERO(n) + 2 * i;
        pair[0] = even + odd, pair[1] = ZERO(n) ? even - odd : odd - even;
    }
    out[n - 1] = g[r - 1];
}

/* Compute G^T v: the r coefficients of the filter's gradient. */
INLINE void filter_sums(const vec *v, vec *out, const int m, const int r) {
    const int n = m + r - 1;
    vec even[MOST_PAIRS], odd[MOST_PAIRS];
    UNROLL for (int i = 0; i < PAIRS_OF(n); i++) {
        const vec *pair = v + ZERO(n) + 2 * i;
        vec sum = pair[0] + pair[1], difference = pair[0] - pair[1];
        even[i] = splat(scale_of(n, i)) * (ZERO(n) ? sum : difference);
        odd[i] = splat(scale_of(n, i) * POINT(n, i)) * (ZERO(n) ? difference : sum);
    }
    out[0] = even[0], out[1] = odd[0];
    UNROLL for (int i = 1; i < PAIRS_OF(n); i++) out[0] += even[i], out[1] += odd[i];
    if (ZERO(n)) out[0] = muladd(splat(scale_of(n, -1)), v[0], out[0]);
    if (r == 2) out[1] += v[n - 1];
    UNROLL for (int j = 2; j < r; j++)
        out[j] = sum_of_powers(j % 2 ? odd : even, j == r - 1 ? &v[n - 1] : NULL, n, j / 2 * 2);
}

#endif
