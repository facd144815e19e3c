/* Elementary functions of doubles, computed only from sums and products, because the results of the
 * C library's functions differ between its versions. formulas.h has those of vectors. */
#ifndef MPIDL_SPECIAL_H
#define MPIDL_SPECIAL_H

#include <math.h>

#include "lanes.h"

#include "../formulas.h"

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

#endif
