/* Batch normalization and activation of one channel of one block. Fused and separate passes call
 * these functions, so the results of both are equal bit for bit.
 *
 * A sum over pixels adds pixel i to accumulator i % 4, separately in each lane. The sum over lanes
 * uses the tree of lanes.h. Sums of values leave out unused lanes. Gradients are zero in unused
 * lanes. */
#ifndef MPIDL_ACTIVATION_H
#define MPIDL_ACTIVATION_H

#include <math.h>

#include "value.h"

/* An input of a kernel. If mean is NULL, the input is x. Otherwise the input is the activation
 * min(max((x - mean) * scale + beta, low), high) per channel, computed when it is read and never
 * stored. */
struct source {
    const value *x;
    const float *mean, *scale, *beta;
    float low, high; /* 0 and infinity for ReLU */
};

/* The normalization of one channel, equal in all lanes; zeros if there is none. */
struct norm {
    vec mean, scale, beta, low, high;
};

INLINE struct norm norm_of(const struct source *s, int64_t channel) {
    struct norm n = {zero(), zero(), zero(), splat(s->low), splat(s->high)};
    if (s->mean) n.mean = splat(s->mean[channel]);
    if (s->scale) n.scale = splat(s->scale[channel]), n.beta = splat(s->beta[channel]);
    return n;
}

/* The operations on a convolution's output before it is stored. `addend` (same layout as the
 * output, or NULL) is added, and then ReLU follows if `relu`. */
struct finish {
    const value *addend;
    int relu;
};

/* Return the largest value that ReLU replaces, or minus infinity if there is no ReLU. */
INLINE vec floor_of(struct finish f) { return splat(f.relu ? 0.0f : -INFINITY); }

INLINE vec normalize(vec x, struct norm n) { return muladd(x - n.mean, n.scale, n.beta); }

INLINE vec activate(vec x, struct norm n) {
    return smaller(n.high, larger(n.low, normalize(x, n))); /* this order of arguments keeps NaN */
}

/* Backpropagate dy through ReLU. y may be its input or its result. */
INLINE vec relu_back(vec dy, vec y) { return keep(y > 0, dy); }

/* Backpropagate dy through an activation to the normalized value. */
INLINE vec activate_back(vec dy, vec normalized, struct norm n) {
    return keep((normalized > n.low) & (normalized < n.high), dy);
}

/* Return dx of batch normalization: a * dz + b * (x - mean) + c, see ops/batchnorm.py. */
INLINE vec normalize_back(vec dz, vec x, vec mean, vec a, vec b, vec c) {
    return muladd(a, dz, muladd(x - mean, b, c));
}

INLINE float lanes_total(const vec *parts) {
    float row[LANES];
    for (int p = 0; p < PARTS; p++) store(row + p * WIDTH, parts[p]);
    return lane_sum(row);
}

INLINE vec four(const vec *a) { return (a[0] + a[1]) + (a[2] + a[3]); }

/* Define a function that sums `rows` x `columns` pixels of 16 lanes. Rows are `stride` numbers apart.
 * Column j is added to accumulator j % 4. */
#define CHANNEL_SUM(name, number)                                                                  \
    static inline float name(const number *x, int64_t rows, int64_t columns, int64_t stride) {     \
        vec total[PARTS];                                                                          \
        for (int p = 0; p < PARTS; p++) {                                                          \
            vec a[4] = {zero(), zero(), zero(), zero()};                                           \
            for (int64_t r = 0; r < rows; r++) {                                                   \
                const number *row = x + r * stride + p * WIDTH;                                    \
                int64_t j = 0;                                                                     \
                for (; j + 4 <= columns; j += 4)                                                   \
                    UNROLL for (int i = 0; i < 4; i++) a[i] += load(row + (j + i) * LANES);        \
                for (int i = 0; j < columns; j++, i++) a[i] += load(row + j * LANES);              \
            }                                                                                      \
            total[p] = four(a);                                                                    \
        }                                                                                          \
        return lanes_total(total);                                                                 \
    }
CHANNEL_SUM(channel_sum, float)
CHANNEL_SUM(channel_sum_of_halves, uint16_t)

/* Compute the mean and M2 of a channel over `pixels` pixels of `valid` lanes. M2 is the sum of
 * squared differences from the rounded mean, corrected for the rounding of the mean. */
static inline void channel_moments(const value *x, int64_t pixels, int valid, double *mean,
                                   double *m2) {
    vec total[PARTS], error[PARTS], square[PARTS];
    double count = (double)pixels * valid;
    for (int p = 0; p < PARTS; p++) {
        vec a[4] = {zero(), zero(), zero(), zero()};
        const value *lane = x + p * WIDTH;
        int64_t j = 0;
        for (; j + 4 <= pixels; j += 4)
            UNROLL for (int i = 0; i < 4; i++) a[i] += load(lane + (j + i) * LANES);
        for (int i = 0; j < pixels; j++, i++) a[i] += load(lane + j * LANES);
        total[p] = keep(lanes_below(valid, p * WIDTH), four(a));
    }
    float about = (float)(lanes_total(total) / count);
    for (int p = 0; p < PARTS; p++) {
        vec e[4] = {zero(), zero(), zero(), zero()}, q[4] = {zero(), zero(), zero(), zero()};
        const value *lane = x + p * WIDTH;
        int64_t j = 0;
        for (; j + 4 <= pixels; j += 4) UNROLL for (int i = 0; i < 4; i++) {
                vec d = load(lane + (j + i) * LANES) - splat(about);
                e[i] += d, q[i] = muladd(d, d, q[i]);
            }
        for (int i = 0; j < pixels; j++, i++) {
            vec d = load(lane + j * LANES) - splat(about);
            e[i] += d, q[i] = muladd(d, d, q[i]);
        }
        error[p] = keep(lanes_below(valid, p * WIDTH), four(e));
        square[p] = keep(lanes_below(valid, p * WIDTH), four(q));
    }
    double off = lanes_total(error) / count;
    *mean = about + off;
    *m2 = lanes_total(square) - count * off * off;
}

/* Compute *sum, the sum of dz over a channel's pixels, and *product, the sum of dz * (x - mean). If
 * source->scale is NULL, dz is da. Otherwise dz is da at pixels whose normalized value is between
 * the limits of the activation, and 0 at the other pixels. x points to this channel. */
static inline void channel_norm_sums(const value *da, const value *x, int64_t pixels,
                                     const struct source *source, int64_t channel, double *sum,
                                     double *product) {
    vec sums[PARTS], products[PARTS];
    struct norm n = norm_of(source, channel);
    for (int p = 0; p < PARTS; p++) {
        vec s[4] = {zero(), zero(), zero(), zero()}, q[4] = {zero(), zero(), zero(), zero()};
        const value *d = da + p * WIDTH, *v = x + p * WIDTH;
#define PIXEL(i, dz)                                                                               \
    {                                                                                              \
        vec z = dz;                                                                                \
        s[i] += z, q[i] = muladd(z, load(v + (j + i) * LANES) - n.mean, q[i]);                     \
    }
#define PIXELS(dz)                                                                                 \
    {                                                                                              \
        int64_t j = 0;                                                                             \
        for (; j + 4 <= pixels; j += 4) UNROLL for (int i = 0; i < 4; i++) PIXEL(i, dz)            \
        for (int i = 0; j + i < pixels; i++) PIXEL(i, dz)                                          \
    }
        if (source->scale)
            PIXELS(activate_back(load(d + (j + i) * LANES),
                                 normalize(load(v + (j + i) * LANES), n), n))
        else
            PIXELS(load(d + (j + i) * LANES))
#undef PIXELS
#undef PIXEL
        sums[p] = four(s), products[p] = four(q);
    }
    *sum = lanes_total(sums), *product = lanes_total(products);
}

#endif
