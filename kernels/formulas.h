/* The elementwise functions with their gradients, and the steps of optimizers, once for C and for
 * CUDA.
 *
 * In C, a `vec` is a vector of lanes.h. In CUDA, it is the float of a thread, and the few words of
 * lanes.h that the formulas use are defined below. Both do the same IEEE and FMA operations in the
 * same order, so the results on a GPU have the bytes of CPUs with FMA. Bounds of errors hold with
 * FMA. No compiler may contract other expressions.
 *
 * A new function NAME consists of NAME_y, NAME_dx and its name in EACH_FUNCTION. `a` and `b` are its
 * numbers, such as a slope. A new step consists of a function and a line in EACH_STEP. */
#ifndef MPIDL_FORMULAS_H
#define MPIDL_FORMULAS_H

#ifdef __cplusplus
#define INLINE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define JOINED(name, part) name##part
#define PART(name, part) JOINED(name, part) /* of a name that is itself a macro */
typedef float vec;
#endif

struct two {
    vec high, low;
};

#ifdef __cplusplus
INLINE unsigned bits_of(vec x) { return __float_as_uint(x); }
INLINE vec of_bits(unsigned bits) { return __uint_as_float(bits); }
INLINE vec splat(float x) { return x; }
INLINE vec zero() { return 0.f; }
INLINE vec muladd(vec a, vec b, vec c) { return fmaf(a, b, c); }
INLINE vec keep(bool mask, vec v) { return mask ? v : 0.f; }
INLINE vec choose(bool mask, vec a, vec b) { return mask ? a : b; }
INLINE vec larger(vec a, vec b) { return a > b ? a : b; }
INLINE vec root(vec v) { return __fsqrt_rn(v); }

INLINE struct two exact_product(vec a, vec b) {
    const vec high = a * b;
    return {high, fmaf(a, b, -high)};
}
#else
typedef uint32_t uvec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

INLINE uvec bits_of(vec x) { return (uvec)x; }
INLINE vec of_bits(uvec bits) { return (vec)bits; }

INLINE vec root(vec v) {
#if defined(__AVX512F__)
    return (vec)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
    return (vec)_mm256_sqrt_ps((__m256)v);
#else
    UNROLL for (int i = 0; i < WIDTH; i++) v[i] = sqrtf(v[i]);
    return v;
#endif
}

/* Return a * b without rounding, as high + low, where high is the rounded product (Dekker 1971). */
INLINE struct two exact_product(vec a, vec b) {
    vec a_high = of_bits(bits_of(a) & ~0xfffu), a_low = a - a_high; /* two halves of 12 bits */
    vec b_high = of_bits(bits_of(b) & ~0xfffu), b_low = b - b_high;
    vec high = a * b, low = (a_high * b_high - high) + a_high * b_low + a_low * b_high;
    return (struct two){high, low + a_low * b_low};
}
#endif

INLINE vec magnitude(vec x) { return of_bits(bits_of(x) & 0x7fffffffu); }
INLINE vec with_sign_of(vec x, vec sign) { return of_bits(bits_of(x) | (bits_of(sign) & 1u << 31)); }

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
 * near the smallest normal number.
 *
 * x = k ln 2 + r with |r| <= ln 2 / 2, and e^x = 2^k e^r. The Taylor series of e^r has terms up to
 * r^7 / 7!; the next term is below 2^-27. As in fdlibm's e_exp.c, ln 2 is split into a number of 10
 * bits, whose product with k is exact, and a remainder. */
INLINE vec exponential_of_negative(vec x) {
    vec shift = splat(0x1.8p23f); /* rounds a sum to an integer in its low bits */
    x = larger(splat(-87.3f), x); /* this order of arguments keeps NaN */
    vec shifted = muladd(x, splat(0x1.715476p0f), shift), k = shifted - shift;
    vec r = muladd(k, splat(-0.693359375f), x);
    r = muladd(k, splat(2.12194440e-4f), r);
    vec y = muladd(exponential_terms(r), r, splat(1));
    y = muladd(y, r, splat(1));
    return y * of_bits((bits_of(shifted) << 23) + 0x3f800000u); /* 2^k */
}

/* Return the hyperbolic tangent, with an error of at most 2 ulp. For |x| below 0.625, use the
 * polynomial of Cephes' tanhf, else (1 - e) / (1 + e) with e = exp(-2 |x|). */
INLINE vec hyperbolic_tangent(vec x) {
    vec size = magnitude(x), z = x * x;
    vec p = muladd(splat(-5.70498872745e-3f), z, splat(2.06390887954e-2f));
    p = muladd(p, z, splat(-5.37397155531e-2f));
    p = muladd(p, z, splat(1.33314422036e-1f));
    p = muladd(p, z, splat(-3.33332819422e-1f));
    vec small = muladd(p * z, x, x), e = exponential_of_negative(-2 * size);
    vec large = (splat(1) - e) / (splat(1) + e);
    return choose(size < 0.625f, small, with_sign_of(large, x));
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
    vec y = of_bits(0x4f584000u - (bits_of(x) >> 2));
    UNROLL for (int i = 0; i < 3; i++) {
        vec square = y * y;
        y = y * muladd(x * splat(-0.25f), square * square, splat(1.25f));
    }
    return y;
}

/* ---- GELU, x Phi(x), where Phi is the normal distribution function ----
 *
 * The left tail of GELU is as small as exp(-x^2 / 2), and its relative error must be small. A
 * single float near 80 may have an error of 2^-18, so an exponent is the sum of two floats. Results
 * below the smallest normal number may be 0. */

struct exponential {
    vec rest, power; /* (1 + rest) * power */
};

/* Return 2^32 e^(high + low) for a sum from -92 to 0. The factor 2^32 is needed because e^-92 is
 * subnormal. The method is the same as in `exponential_of_negative`, but the rounding error of
 * `rest` is below 2^-25. */
INLINE struct exponential large_exponential(vec high, vec low) {
    vec shift = splat(0x1.8p23f);
    vec shifted = muladd(high, splat(0x1.715476p0f), shift), k = shifted - shift;
    vec r = muladd(k, splat(-0.693359375f), high);
    r = r + muladd(k, splat(2.12194440e-4f), low);
    vec power = of_bits((bits_of(shifted) << 23) + 0x4f800000u); /* 2^(k + 32) */
    struct exponential y = {muladd(r * r, exponential_terms(r), r), power};
    return y;
}

INLINE vec clipped_magnitude(vec x, float most) { /* NaN stays NaN */
    return -larger(splat(-most), -magnitude(x));
}

/* Return 2^32 exp(-t^2 / 2). */
INLINE struct exponential large_gauss(vec t) {
    struct two square = exact_product(t, t);
    return large_exponential(square.high * -0.5f, square.low * -0.5f);
}

/* Return 2 (1 + t) Phi(-t) exp(t^2 / 2) - 1, which is between -0.15 and 0.05 for t from 0 to 13.2.
 * The error of the rational function is at most 2^-27. */
INLINE vec tail_ratio(vec t) {
    vec p = muladd(splat(-0x1.3c896cp-9f), t, splat(-0x1.a6f19cp-7f));
    p = muladd(p, t, splat(-0x1.5bf8dp-6f));
    p = muladd(p, t, splat(0x1.76bd76p-5f));
    p = muladd(p, t, splat(0x1.9deec4p-3f));
    vec q = muladd(splat(0x1.878abp-7f), t, splat(0x1.c6b3f6p-4f));
    q = muladd(q, t, splat(0x1.fc83bcp-2f));
    q = muladd(q, t, splat(0x1.3e1ff2p0f));
    q = muladd(q, t, splat(0x1.b33ea6p0f));
    q = muladd(q, t, splat(1));
    return p * t / q;
}

/* Return x Phi(x), with an error of at most 2.5 ulp. For t = |x|, t Phi(-t) = t / (1 + t) / 2 (1 +
 * ratio) exp(-t^2 / 2). */
INLINE vec gelu_y(vec x, vec a, vec b) {
    vec t = clipped_magnitude(x, 13.2f), sum = t + splat(1), quotient = t / sum;
    vec lost = (splat(1) - sum) + t; /* rounding error of the sum, which corrects the quotient */
    struct exponential gauss = large_gauss(t);
    vec ratio = muladd(lost, quotient - splat(1), tail_ratio(t));
    ratio = muladd(ratio, gauss.rest, ratio + gauss.rest);
    vec tail = muladd(quotient, ratio, quotient) * gauss.power * 0x1p-33f;
    vec negative = choose(x < -13.2f, splat(-0.0f), -tail);
    return choose(x >= 0, x - tail, negative);
}

/* The derivative is Phi(x) + x phi(x), where phi is the normal density. The value at x is 1 minus
 * the value at -x. */
INLINE vec gelu_dx(vec dy, vec x, vec a, vec b) {
    vec t = clipped_magnitude(x, 13.2f), half = splat(0.5f) / (t + splat(1));
    struct exponential gauss = large_gauss(t);
    vec mills = muladd(half, tail_ratio(t), half); /* Phi(-t) / exp(-t^2 / 2) */
    vec slope = muladd(t, splat(-0.398942280f), mills);
    slope = slope * muladd(gauss.power, gauss.rest, gauss.power) * 0x1p-32f;
    slope = choose(x < -13.2f, zero(), slope);
    return dy * choose(x >= 0, splat(1) - slope, slope);
}

/* The tanh approximation of GELU is x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2. The
 * approximation equals x times the logistic function of twice the argument of tanh. */

/* Return 2^32 e^-w for w = s t + c t^3, s = sqrt(8 / pi), c = 0.044715 s. Each term is a sum of two
 * floats. */
INLINE struct exponential large_cubic_exponential(vec t) {
    vec s = splat(0x1.988454p0f), s_low = splat(-0x1.857936p-25f);
    vec c = splat(0x1.2444f2p-4f), c_low = splat(0x1.49b16ap-29f);
    struct two square = exact_product(t, t), cubic = exact_product(c, square.high);
    vec sum = s + cubic.high, part = sum - s;
    vec low = (s - (sum - part)) + (cubic.high - part); /* Knuth's two-sum */
    low = low + (s_low + muladd(c_low, square.high, muladd(c, square.low, cubic.low)));
    struct two product = exact_product(t, sum);
    return large_exponential(-product.high, -muladd(t, low, product.low));
}

/* Return the tanh approximation of GELU, with an error of at most 3 ulp. */
INLINE vec gelu_tanh_y(vec x, vec a, vec b) {
    struct exponential e = large_cubic_exponential(clipped_magnitude(x, 10.2f));
    vec power = muladd(e.power, e.rest, e.power); /* 2^32 e^-w */
    vec y = choose(x >= 0, x, x * power) / muladd(power, splat(0x1p-32f), splat(1));
    return choose(x < -10.2f, splat(-0.0f), choose(x >= 0, y, y * 0x1p-32f));
}

INLINE vec gelu_tanh_dx(vec dy, vec x, vec a, vec b) {
    vec t = clipped_magnitude(x, 10.2f);
    struct exponential e = large_cubic_exponential(t);
    vec power = muladd(e.power, e.rest, e.power) * 0x1p-32f, share = splat(1) / (splat(1) + power);
    vec argument_slope = muladd(t * t, splat(0.214064474f), splat(0x1.988454p0f)); /* dw/dt */
    vec slope = power * share * muladd(-t * share, argument_slope, splat(1));
    slope = choose(x < -10.2f, zero(), slope);
    return dy * choose(x >= 0, splat(1) - slope, slope);
}

/* ---- the other functions ---- */

INLINE vec leaky_relu_y(vec x, vec a, vec b) { return choose(x > 0, x, x * a); }
INLINE vec leaky_relu_dx(vec dy, vec y, vec a, vec b) { return choose(y > 0, dy, dy * a); }

INLINE vec tanh_y(vec x, vec a, vec b) { return hyperbolic_tangent(x); }
INLINE vec tanh_dx(vec dy, vec y, vec a, vec b) { return dy * muladd(-y, y, splat(1)); }

INLINE vec sigmoid_y(vec x, vec a, vec b) { return logistic(x); }
INLINE vec sigmoid_dx(vec dy, vec y, vec a, vec b) { return dy * y * (splat(1) - y); }

/* Return x / (1 + e^-x), with an error of at most 3.5 ulp. Return 0 for x < -87.3. */
INLINE vec swish_y(vec x, vec a, vec b) { return choose(x < -87.3f, zero(), x * logistic(x)); }

INLINE vec swish_dx(vec dy, vec x, vec a, vec b) {
    vec s = logistic(x);
    vec slope = s * muladd(x, splat(1) - s, splat(1));
    return dy * choose(x < -87.3f, zero(), choose(x > 87.3f, splat(1), slope));
}

/* Return x clipped to [a, b]. NaN stays NaN. */
INLINE vec clip_range_y(vec x, vec a, vec b) { return -larger(-b, -larger(a, x)); }
INLINE vec clip_range_dx(vec dy, vec y, vec a, vec b) { return keep((y > a) & (y < b), dy); }

INLINE vec hard_sigmoid_y(vec x, vec a, vec b) {
    return clip_range_y(muladd(x, a, b), zero(), splat(1));
}
INLINE vec hard_sigmoid_dx(vec dy, vec y, vec a, vec b) { return keep((y > 0) & (y < 1), dy * a); }

INLINE vec hard_swish_y(vec x, vec a, vec b) {
    return x * hard_sigmoid_y(x, splat(1.0f / 6), splat(0.5f));
}
INLINE vec hard_swish_dx(vec dy, vec x, vec a, vec b) {
    vec slope = choose(x < 3, muladd(x, splat(1.0f / 3), splat(0.5f)), splat(1));
    return dy * keep(x > -3, slope);
}

#define EACH_FUNCTION(f)                                                                           \
    f(leaky_relu) f(tanh) f(sigmoid) f(gelu) f(gelu_tanh) f(swish) f(clip_range) f(hard_sigmoid)   \
        f(hard_swish)

/* ---- the steps of optimizers: the formulas of backends/reference/optimizer.py ----
 *
 * A step returns the new weights and updates the arrays that the optimizer keeps. `rate` is the
 * parameter's learning rate, and `numbers` are the formula's numbers after the learning rate. */

INLINE vec regularized(vec w, vec g, float decay) {
    if (decay != 0) g = g + decay * w;
    return g;
}

INLINE vec sgdm(vec w, vec g, float decay, float rate, const float *numbers, vec *kept) {
    float momentum = numbers[0];
    kept[0] = momentum * kept[0] - rate * regularized(w, g, decay);
    return w + kept[0];
}

INLINE vec nesterov(vec w, vec g, float decay, float rate, const float *numbers, vec *kept) {
    float momentum = numbers[0];
    vec change = rate * regularized(w, g, decay);
    kept[0] = momentum * kept[0] - change;
    return w + (momentum * kept[0] - change);
}

/* Update the means of g and of its square, and return Adam's direction. */
INLINE vec adam_direction(vec g, const float *numbers, vec *kept) {
    float mean_decay = numbers[0], mean_share = numbers[1], epsilon = numbers[4];
    float square_decay = numbers[2], square_share = numbers[3];
    kept[0] = mean_decay * kept[0] + mean_share * g;
    kept[1] = square_decay * kept[1] + square_share * (g * g);
    return kept[0] / (root(kept[1]) + epsilon);
}

INLINE vec adam(vec w, vec g, float decay, float rate, const float *numbers, vec *kept) {
    return w - rate * adam_direction(regularized(w, g, decay), numbers, kept);
}

INLINE vec adamw(vec w, vec g, float decay, float rate, const float *numbers, vec *kept) {
    float correction = numbers[5];
    return w - rate * regularized(w, correction * adam_direction(g, numbers, kept), decay);
}

INLINE vec rmsprop(vec w, vec g, float decay, float rate, const float *numbers, vec *kept) {
    float square_decay = numbers[0], square_share = numbers[1], epsilon = numbers[2];
    g = regularized(w, g, decay);
    kept[0] = square_decay * kept[0] + square_share * (g * g);
    return w - rate * (g / (root(kept[0]) + epsilon));
}

/* A moving average of the weights, which do not change. */
INLINE vec average(vec w, vec g, float decay, float rate, const float *numbers, vec *kept) {
    kept[0] = kept[0] + rate * (w - kept[0]);
    return w;
}

/* The step, its numbers including the learning rate, and the arrays that it keeps. */
#define EACH_STEP(f)                                                                               \
    f(sgdm, 2, 1) f(nesterov, 2, 1) f(adam, 6, 2) f(adamw, 7, 2) f(rmsprop, 4, 1) f(average, 1, 1)
enum { MOST_NUMBERS = 7, MOST_KEPT = 2 };

#endif
