/* Elementary functions of doubles and vectors, computed only from sums and products, because the
 * results of the C library's functions differ between its versions. */
#ifndef MPIDL_SPECIAL_H
#define MPIDL_SPECIAL_H

#include "lanes.h"

typedef uint32_t uvec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

INLINE double muladd_double(double a, double b, double c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

/* Return e^x for x <= 709. Below -708, return e^-708. The error is at most 1 ulp, or 1.2 ulp
 * without FMA.
 *
 * x = k ln 2 + r with |r| <= ln 2 / 2, and e^x = 2^k e^r. The Taylor series of e^r has terms up to
 * r^13 / 13!; the next term is below 2^-57. As in fdlibm's e_exp.c, ln 2 is split into a number of
 * 33 bits, whose product with k is exact, and a remainder. */
INLINE double exponential(double x) {
    const double shift = 0x1.8p52; /* rounds a sum to an integer in its low bits */
    static const double inverse_factorial[] = {
        1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
        1.0 / 40320,      1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,
        1.0 / 6,          1.0 / 2,         1.0,            1.0};
    x = x < -708 ? -708 : x;
    double shifted = muladd_double(x, 0x1.71547652b82fep0, shift), k = shifted - shift;
    double r = muladd_double(k, -6.93147180369123816490e-01, x);
    r = muladd_double(k, -1.90821492927058770002e-10, r);
    double y = inverse_factorial[0];
    UNROLL for (int i = 1; i < 14; i++) y = muladd_double(y, r, inverse_factorial[i]);
    int64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (int64_t)((uint64_t)bits << 52) + 0x3ff0000000000000; /* 2^k */
    double power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

/* Return the natural logarithm of a normal, finite x > 0, with an error of at most 1e-16 or 1 ulp,
 * whichever is larger.
 *
 * x = 2^k m with m between sqrt(1/2) and sqrt(2). Then ln m = 2 atanh(s) with s = (m - 1) / (m +
 * 1). The series of atanh has terms up to s^21 / 21; the next term is below 2^-60. */
INLINE double logarithm(double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    double k = (double)((bits >> 52) - 1023), m;
    bits = (bits & 0x000fffffffffffff) | 0x3ff0000000000000;
    memcpy(&m, &bits, sizeof m);
    int upper = m > 0x1.6a09e667f3bcdp0;
    m = upper ? m / 2 : m, k = upper ? k + 1 : k;
    double s = (m - 1) / (m + 1), z = s * s, y = 1.0 / 21;
    UNROLL for (int i = 19; i >= 3; i -= 2) y = muladd_double(y, z, 1.0 / i);
    y = muladd_double(2 * s * z, y, muladd_double(k, 1.90821492927058770002e-10, 2 * s));
    return muladd_double(k, 6.93147180369123816490e-01, y);
}

INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }
INLINE vec with_sign_of(vec x, vec sign) { return (vec)((ivec)x | ((ivec)sign & INT32_MIN)); }

/* Return (e^r - 1 - r) / r^2 for |r| <= log(2) / 2: the terms of e^r from r^2 / 2! to r^7 / 7!. */
INLINE vec exponential_terms(vec r) {
    vec y = splat(1.0f / 5040);
    y = muladd(y, r, splat(1.0f / 720));
    y = muladd(y, r, splat(1.0f / 120));
    y = muladd(y, r, splat(1.0f / 24));
    y = muladd(y, r, splat(1.0f / 6));
    return muladd(y, r, splat(0.5f));
}

/* Return e^x for x <= 0, with an error of at most 1.5 ulp. Below -87.3, return e^-87.3, which is
 * near the smallest normal number. The method is the same as in `exponential`, with terms up to r^7
 * / 7!; the next term is below 2^-27. */
INLINE vec exponential_of_negative(vec x) {
    vec shift = splat(0x1.8p23f);
    x = larger(splat(-87.3f), x); /* this order of arguments keeps NaN */
    vec shifted = muladd(x, splat(0x1.715476p0f), shift), k = shifted - shift;
    vec r = muladd(k, splat(-0.693359375f), x); /* 10 bits: the product is exact */
    r = muladd(k, splat(2.12194440e-4f), r);
    vec y = muladd(exponential_terms(r), r, splat(1));
    y = muladd(y, r, splat(1));
    return y * (vec)(((uvec)shifted << 23) + 0x3f800000); /* 2^k */
}

/* Return the hyperbolic tangent, with an error of at most 2 ulp. For |x| below 0.625, use the
 * polynomial of Cephes' tanhf, else (1 - e) / (1 + e) with e = exp(-2 |x|). */
INLINE vec hyperbolic_tangent(vec x) {
    vec a = magnitude(x), z = x * x;
    vec p = muladd(splat(-5.70498872745e-3f), z, splat(2.06390887954e-2f));
    p = muladd(p, z, splat(-5.37397155531e-2f));
    p = muladd(p, z, splat(1.33314422036e-1f));
    p = muladd(p, z, splat(-3.33332819422e-1f));
    vec small = muladd(p * z, x, x), e = exponential_of_negative(-2 * a);
    vec large = (splat(1) - e) / (splat(1) + e);
    return choose(a < 0.625f, small, with_sign_of(large, x));
}

/* Return 1 / (1 + e^-x), with an error of at most 2.5 ulp if the result is at least 2^-125. */
INLINE vec logistic(vec x) {
    vec e = exponential_of_negative(-magnitude(x));
    return choose(x >= 0, splat(1), e) / (splat(1) + e);
}

/* Return x^(-1/4) for normal x > 0, with an error of at most 1.5 ulp. The first guess, computed
 * from the exponent, has a relative error e of 3 %. Each of three steps of Newton's method reduces
 * e to 5/2 e^2. */
INLINE vec inverse_fourth_root(vec x) {
    vec y = (vec)(0x4f584000u - ((uvec)x >> 2));
    UNROLL for (int i = 0; i < 3; i++) {
        vec square = y * y;
        y = y * muladd(x * splat(-0.25f), square * square, splat(1.25f));
    }
    return y;
}

#endif
