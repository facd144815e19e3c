/* Elementwise passes: activation functions and their gradients. */
#include "activation.h"
#include "mpidl.h"
#include "special.h"
#include "team.h"

enum { ROWS = 1024 }; /* rows of a tile; a row is the 16 lanes of a pixel */

struct job {
    const float *x, *dy;
    float *out, scale, offset, low, high;
    const float *slope;
    int64_t rows, channels, pixels, slopes;
};

/* ---- GELU, x Phi(x), where Phi is the normal distribution function ----
 *
 * The left tail of GELU is as small as exp(-x^2 / 2), and its relative error must be small. A
 * single float near 80 may have an error of 2^-18, so an exponent is the sum of two floats. Results
 * below the smallest normal number may be 0. */

struct two {
    vec high, low;
};

/* Return a * b without rounding, as high + low, where high is the rounded product (Dekker 1971). */
INLINE struct two exact_product(vec a, vec b) {
    vec a_high = (vec)((ivec)a & ~0xfff), a_low = a - a_high; /* two halves of 12 bits each */
    vec b_high = (vec)((ivec)b & ~0xfff), b_low = b - b_high;
    vec high = a * b, low = (a_high * b_high - high) + a_high * b_low + a_low * b_high;
    return (struct two){high, low + a_low * b_low};
}

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
    vec power = (vec)(((uvec)shifted << 23) + 0x4f800000); /* 2^(k + 32) */
    return (struct exponential){muladd(r * r, exponential_terms(r), r), power};
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
INLINE vec gelu(vec x) {
    vec t = clipped_magnitude(x, 13.2f), sum = t + splat(1), quotient = t / sum;
    vec lost = (splat(1) - sum) + t; /* rounding error of the sum, which corrects the quotient */
    struct exponential gauss = large_gauss(t);
    vec ratio = muladd(lost, quotient - splat(1), tail_ratio(t));
    ratio = muladd(ratio, gauss.rest, ratio + gauss.rest);
    vec tail = muladd(quotient, ratio, quotient) * gauss.power * 0x1p-33f;
    vec negative = choose(x < -13.2f, splat(-0.0f), -tail);
    return choose(x >= 0, x - tail, negative);
}

/* Return Phi(x) + x phi(x), where phi is the normal density. The value at x is 1 minus the value at
 * -x. */
INLINE vec gelu_slope(vec x) {
    vec t = clipped_magnitude(x, 13.2f), half = splat(0.5f) / (t + splat(1));
    struct exponential gauss = large_gauss(t);
    vec mills = muladd(half, tail_ratio(t), half); /* Phi(-t) / exp(-t^2 / 2) */
    vec slope = muladd(t, splat(-0.398942280f), mills);
    slope = slope * muladd(gauss.power, gauss.rest, gauss.power) * 0x1p-32f;
    slope = choose(x < -13.2f, zero(), slope);
    return choose(x >= 0, splat(1) - slope, slope);
}

/* The tanh approximation of GELU is x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2. The
 * approximation equals x times the logistic function of twice the argument of tanh. */

/* Return 2^32 e^-w for w = b t + c t^3, b = sqrt(8 / pi), c = 0.044715 b. Each term is a sum of two
 * floats. */
INLINE struct exponential large_cubic_exponential(vec t) {
    vec b = splat(0x1.988454p0f), b_low = splat(-0x1.857936p-25f);
    vec c = splat(0x1.2444f2p-4f), c_low = splat(0x1.49b16ap-29f);
    struct two square = exact_product(t, t), cubic = exact_product(c, square.high);
    vec sum = b + cubic.high, part = sum - b;
    vec low = (b - (sum - part)) + (cubic.high - part); /* Knuth's two-sum */
    low = low + (b_low + muladd(c_low, square.high, muladd(c, square.low, cubic.low)));
    struct two product = exact_product(t, sum);
    return large_exponential(-product.high, -muladd(t, low, product.low));
}

/* Return the tanh approximation of GELU, with an error of at most 3 ulp. */
INLINE vec gelu_tanh(vec x) {
    struct exponential e = large_cubic_exponential(clipped_magnitude(x, 10.2f));
    vec power = muladd(e.power, e.rest, e.power); /* 2^32 e^-w */
    vec y = choose(x >= 0, x, x * power) / muladd(power, splat(0x1p-32f), splat(1));
    return choose(x < -10.2f, splat(-0.0f), choose(x >= 0, y, y * 0x1p-32f));
}

INLINE vec gelu_tanh_slope(vec x) {
    vec t = clipped_magnitude(x, 10.2f);
    struct exponential e = large_cubic_exponential(t);
    vec power = muladd(e.power, e.rest, e.power) * 0x1p-32f, share = splat(1) / (splat(1) + power);
    vec argument_slope = muladd(t * t, splat(0.214064474f), splat(0x1.988454p0f)); /* dw/dt */
    vec slope = power * share * muladd(-t * share, argument_slope, splat(1));
    slope = choose(x < -10.2f, zero(), slope);
    return choose(x >= 0, splat(1) - slope, slope);
}

/* Return x clipped to [low, high]. NaN stays NaN. */
INLINE vec clip(vec x, vec low, vec high) { return -larger(-high, -larger(low, x)); }

INLINE vec hard_sigmoid(vec x, vec scale, vec offset) {
    return clip(muladd(x, scale, offset), zero(), splat(1));
}

INLINE vec hard_swish_slope(vec x) {
    vec slope = choose(x < 3, muladd(x, splat(1.0f / 3), splat(0.5f)), splat(1));
    return keep(x > -3, slope);
}

/* Return x / (1 + e^-x), with an error of at most 3.5 ulp. Return 0 for x < -87.3. */
INLINE vec swish(vec x) { return keep(~(x < -87.3f), x * logistic(x)); }

INLINE vec swish_slope(vec x) {
    vec s = logistic(x);
    vec slope = s * muladd(x, splat(1) - s, splat(1));
    return choose(x < -87.3f, zero(), choose(x > 87.3f, splat(1), slope));
}

/* ---- tiles ---- */

/* Define a tile function that sets `out` to an expression in x and, for gradients, dy. */
#define EACH_ELEMENT(name, ...)                                                                    \
    static void name(void *argument, int64_t tile, float *own) {                                   \
        const struct job *job = argument;                                                          \
        (void)own;                                                                                 \
        vec scale = splat(job->scale), offset = splat(job->offset);                                \
        vec low = splat(job->low), high = splat(job->high);                                        \
        (void)scale, (void)offset, (void)low, (void)high;                                          \
        int64_t stop = least(job->rows, (tile + 1) * ROWS) * LANES;                                \
        for (int64_t i = tile * ROWS * LANES; i < stop; i += WIDTH) {                              \
            vec x = load(job->x + i);                                                              \
            store(job->out + i, __VA_ARGS__);                                                      \
        }                                                                                          \
    }
#define DY load(job->dy + i)

EACH_ELEMENT(leaky_relu_tile, choose(x > 0, x, x * scale))
EACH_ELEMENT(leaky_relu_dx_tile, choose(x > 0, DY, DY * scale))
EACH_ELEMENT(tanh_tile, hyperbolic_tangent(x))
EACH_ELEMENT(tanh_dx_tile, DY * muladd(-x, x, splat(1)))
EACH_ELEMENT(sigmoid_tile, logistic(x))
EACH_ELEMENT(sigmoid_dx_tile, DY * x * (splat(1) - x))
EACH_ELEMENT(gelu_tile, gelu(x))
EACH_ELEMENT(gelu_dx_tile, DY * gelu_slope(x))
EACH_ELEMENT(gelu_tanh_tile, gelu_tanh(x))
EACH_ELEMENT(gelu_tanh_dx_tile, DY * gelu_tanh_slope(x))
EACH_ELEMENT(swish_tile, swish(x))
EACH_ELEMENT(swish_dx_tile, DY * swish_slope(x))
EACH_ELEMENT(clip_tile, clip(x, low, high))
EACH_ELEMENT(clip_dx_tile, keep((x > low) & (x < high), DY))
EACH_ELEMENT(hard_sigmoid_tile, hard_sigmoid(x, scale, offset))
EACH_ELEMENT(hard_sigmoid_dx_tile, keep((x > 0) & (x < 1), DY * scale))
EACH_ELEMENT(hard_swish_tile, x * hard_sigmoid(x, splat(1.0f / 6), splat(0.5f)))
EACH_ELEMENT(hard_swish_dx_tile, DY * hard_swish_slope(x))
EACH_ELEMENT(prelu_products_tile, choose(x > 0, zero(), DY * x))

static void each_row(tile_work *work, struct job job, int64_t rows) {
    job.rows = rows;
    each_tile((rows + ROWS - 1) / ROWS, work, &job, 0);
}

void mpidl_leaky_relu(const float *x, float *y, float scale, int64_t rows) {
    each_row(leaky_relu_tile, (struct job){.x = x, .out = y, .scale = scale}, rows);
}

void mpidl_leaky_relu_dx(const float *dy, const float *y, float *dx, float scale, int64_t rows) {
    each_row(leaky_relu_dx_tile, (struct job){.x = y, .dy = dy, .out = dx, .scale = scale}, rows);
}

void mpidl_tanh(const float *x, float *y, int64_t rows) {
    each_row(tanh_tile, (struct job){.x = x, .out = y}, rows);
}

void mpidl_tanh_dx(const float *dy, const float *y, float *dx, int64_t rows) {
    each_row(tanh_dx_tile, (struct job){.x = y, .dy = dy, .out = dx}, rows);
}

void mpidl_sigmoid(const float *x, float *y, int64_t rows) {
    each_row(sigmoid_tile, (struct job){.x = x, .out = y}, rows);
}

void mpidl_sigmoid_dx(const float *dy, const float *y, float *dx, int64_t rows) {
    each_row(sigmoid_dx_tile, (struct job){.x = y, .dy = dy, .out = dx}, rows);
}

void mpidl_gelu(const float *x, float *y, int64_t rows) {
    each_row(gelu_tile, (struct job){.x = x, .out = y}, rows);
}

void mpidl_gelu_dx(const float *dy, const float *x, float *dx, int64_t rows) {
    each_row(gelu_dx_tile, (struct job){.x = x, .dy = dy, .out = dx}, rows);
}

void mpidl_gelu_tanh(const float *x, float *y, int64_t rows) {
    each_row(gelu_tanh_tile, (struct job){.x = x, .out = y}, rows);
}

void mpidl_gelu_tanh_dx(const float *dy, const float *x, float *dx, int64_t rows) {
    each_row(gelu_tanh_dx_tile, (struct job){.x = x, .dy = dy, .out = dx}, rows);
}

void mpidl_swish(const float *x, float *y, int64_t rows) {
    each_row(swish_tile, (struct job){.x = x, .out = y}, rows);
}

void mpidl_swish_dx(const float *dy, const float *x, float *dx, int64_t rows) {
    each_row(swish_dx_tile, (struct job){.x = x, .dy = dy, .out = dx}, rows);
}

void mpidl_clip_range(const float *x, float *y, float low, float high, int64_t rows) {
    each_row(clip_tile, (struct job){.x = x, .out = y, .low = low, .high = high}, rows);
}

void mpidl_clip_range_dx(const float *dy, const float *y, float *dx, float low, float high,
                         int64_t rows) {
    struct job job = {.x = y, .dy = dy, .out = dx, .low = low, .high = high};
    each_row(clip_dx_tile, job, rows);
}

void mpidl_hard_sigmoid(const float *x, float *y, float alpha, float beta, int64_t rows) {
    each_row(hard_sigmoid_tile, (struct job){.x = x, .out = y, .scale = alpha, .offset = beta},
             rows);
}

void mpidl_hard_sigmoid_dx(const float *dy, const float *y, float *dx, float alpha, int64_t rows) {
    each_row(hard_sigmoid_dx_tile, (struct job){.x = y, .dy = dy, .out = dx, .scale = alpha}, rows);
}

void mpidl_hard_swish(const float *x, float *y, int64_t rows) {
    each_row(hard_swish_tile, (struct job){.x = x, .out = y}, rows);
}

void mpidl_hard_swish_dx(const float *dy, const float *x, float *dx, int64_t rows) {
    each_row(hard_swish_dx_tile, (struct job){.x = x, .dy = dy, .out = dx}, rows);
}

/* ---- PReLU: a tile is one channel of one block ---- */

static void prelu_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    /* in the forward pass, where dy is NULL, the slope multiplies x */
    const float *positive = job->dy ? job->dy : job->x;
    vec slope = splat(job->slope[tile % job->slopes]);
    int64_t stop = (tile + 1) * job->pixels * LANES;
    for (int64_t i = tile * job->pixels * LANES; i < stop; i += WIDTH) {
        vec value = load(positive + i);
        store(job->out + i, choose(load(job->x + i) > 0, value, value * slope));
    }
}

static void each_channel(struct job job, int64_t blocks, int64_t channels) {
    each_tile(blocks * channels, prelu_tile, &job, 0);
}

void mpidl_prelu(const float *x, const float *slope, int64_t slopes, float *y, int64_t blocks,
                 int64_t channels, int64_t pixels) {
    struct job job = {.x = x, .out = y, .slope = slope, .slopes = slopes, .pixels = pixels};
    each_channel(job, blocks, channels);
}

void mpidl_prelu_dx(const float *dy, const float *x, const float *slope, int64_t slopes, float *dx,
                    int64_t blocks, int64_t channels, int64_t pixels) {
    struct job job = {
        .x = x, .dy = dy, .out = dx, .slope = slope, .slopes = slopes, .pixels = pixels};
    each_channel(job, blocks, channels);
}

void mpidl_prelu_products(const float *dy, const float *x, float *products, int64_t rows) {
    each_row(prelu_products_tile, (struct job){.x = x, .dy = dy, .out = products}, rows);
}

void mpidl_copy(const float *from, float *to, int64_t floats) {
    int64_t i = 0;
    for (; i + 4 * WIDTH <= floats; i += 4 * WIDTH)
        UNROLL for (int j = 0; j < 4; j++) store(to + i + j * WIDTH, load(from + i + j * WIDTH));
    for (; i < floats; i++) to[i] = from[i];
}

void mpidl_zero(float *to, int64_t floats) { memset(to, 0, (size_t)floats * sizeof(float)); }
