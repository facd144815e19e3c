/* Sums of products for gradients with respect to weights, on vectors of outputs:
 *
 *     S[output][input] = sum over terms of V[input][term] * D[output][term]
 *
 * The terms are the images of consecutive pixels or tiles. The layouts are:
 *
 *     V[input][term], inputs `channel` floats apart
 *     D[panel of outputs][term][output of the panel], see place_of
 *     S[16 outputs][input][output]
 *
 * V and S have room for inputs up to the next multiple of four. The widths of panels do not affect
 * the sums. */
#ifndef MPIDL_PRODUCTS_H
#define MPIDL_PRODUCTS_H

#include "lanes.h"

struct products {
    int64_t inputs; /* rounded up to a multiple of four */
    int64_t most;   /* number of terms for which D has memory */
    int64_t channel, panel;
};

/* Return the struct for a number of outputs that is a multiple of 16. */
INLINE struct products products_of(int64_t inputs, int64_t outputs, int64_t most, int64_t channel) {
    int64_t panel = 16;
    if (WIDTH == 16) panel = outputs % 48 == 0 ? 48 : outputs % 32 == 0 ? 32 : 16;
    return (struct products){parts_of(inputs, 4) * 4, most, channel, panel};
}

/* Return the position in D of one term of 16 adjacent outputs. The next term is `panel` floats
 * further. */
INLINE int64_t place_of(const struct products *p, int64_t output, int64_t term) {
    return output / p->panel * p->panel * p->most + term * p->panel + output % p->panel;
}

/* Compute S for `inputs` inputs and `vectors` vectors of outputs, or add to S. */
INLINE void add_product_tile(const struct products *p, const float *V, const float *D,
                             int64_t terms, float *S, int add, const int inputs,
                             const int vectors) {
    vec sum[8][4];
    UNROLL for (int i = 0; i < inputs; i++)
        UNROLL for (int v = 0; v < vectors; v++) sum[i][v] = zero();
    for (int64_t term = 0; term < terms; term++, D += p->panel) {
        vec d[4];
        UNROLL for (int v = 0; v < vectors; v++) d[v] = load(D + v * WIDTH);
        UNROLL for (int i = 0; i < inputs; i++) {
            vec x = splat(V[i * p->channel + term]);
            UNROLL for (int v = 0; v < vectors; v++) sum[i][v] = muladd(x, d[v], sum[i][v]);
        }
    }
    UNROLL for (int i = 0; i < inputs; i++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *to = S + (v * WIDTH / LANES * p->inputs + i) * LANES + v * WIDTH % LANES;
            if (add) sum[i][v] += load(to);
            store(to, sum[i][v]);
        }
}

/* Compute S for the first `inputs` inputs and the outputs [first, stop), which form whole panels,
 * or add to S. */
static inline void add_products(const struct products *p, int64_t inputs, const float *V,
                                const float *D, int64_t terms, int64_t first, int64_t stop,
                                float *S, int add) {
    for (int64_t o = first; o < stop; o += p->panel)
        for (int64_t i = 0; i < inputs; i += 4) {
            const float *v = V + i * p->channel, *d = D + o * p->most;
            float *s = S + (o / LANES * p->inputs + i) * LANES;
#define MULTIPLY(at, inputs, vectors)                                                              \
    add_product_tile(p, v, d + (at), terms, s + (at), add, inputs, vectors)
#if WIDTH == 16
            if (i + 4 < inputs) { /* wide panels would not stay in the first-level cache */
                if (p->panel == 48) MULTIPLY(0, 8, 3);
                else if (p->panel == 32) MULTIPLY(0, 8, 2);
                else MULTIPLY(0, 8, 1);
                i += 4;
            } else {
                if (p->panel == 48) MULTIPLY(0, 4, 3);
                else if (p->panel == 32) MULTIPLY(0, 4, 2);
                else MULTIPLY(0, 4, 1);
            }
#else
            enum { VECTORS = REGISTERS == 32 ? 4 : 2 };
            for (int64_t at = 0; at < p->panel; at += VECTORS * WIDTH) MULTIPLY(at, 4, VECTORS);
#endif
#undef MULTIPLY
        }
}

#endif
