/* The transforms of Winograd's F(2, 3) and F(4, 3) along one dimension, on vectors of images.
 *
 * A product of polynomials is found from its values at points: 0, 1, -1 and infinity for F(2, 3), and
 * 0, +-NEAR, +-FAR and infinity for F(4, 3). Any points are exact with real numbers; rounding
 * depends on them. 5/8 and 3/2 have less than half the error of the classic 1 and 2
 * (tests/test_winograd.py prints what was measured), and unlike 3/5 and 7/5 all that B and A are
 * made of are float32 numbers: squares and products of small dyadic fractions.
 *
 * B^T and A below have rows of points; a pair +-p shares its even and odd parts. "Lines" are these
 * rows in groups that share work: the first point, the pairs, infinity.
 */
#ifndef MPIDL_WINOGRAD_TILES_H
#define MPIDL_WINOGRAD_TILES_H

#include "lanes.h"

#ifndef NEAR
#define NEAR 0.625f
#define FAR 1.5f
#endif
#define NEAR2 (NEAR * NEAR)
#define FAR2 (FAR * FAR)

/* Groups of points, their first point, and how many are in one. */
#define GROUPS(m) ((m) == 4 ? 4 : 3)
#define FIRST(m, group) ((group) == 0 ? 0 : 2 * (group)-1)
#define IN_GROUP(m, group) ((group) == 0 || (group) == GROUPS(m) - 1 ? 1 : 2)

/* B^T d: the values at one group of points, of m + 2 inputs. */
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

/* All m + 2 values of B^T d. */
INLINE void input_line(const vec *d, vec *out, const int m) {
    input_group(d, out, m, 0);
    input_group(d, out + 1, m, 1);
    input_group(d, out + 3, m, 2);
    if (m == 4) input_group(d, out + 5, m, 3);
}

/* A^T v: m outputs of m + 2 values. */
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

#endif
