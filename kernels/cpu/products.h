/* Sums of products for gradients with respect to weights, on vectors of outputs:
 *
 *     S[output][input] = sum over terms of V[input][term] * D[output][term]
 *
 * The terms are the images of consecutive pixels or tiles. The layouts are:
 *
 *     V[input][term], inputs at the offsets `place`, or `channel` floats apart
 *     D[panel of outputs][term][output of the panel], see place_of
 *     S[16 outputs][input][output]
 *
 * V and S have room for inputs up to the next multiple of four. The widths of panels do not affect
 * the sums. With -DBF16, the numbers are rounded to bfloat16, and the products of two adjacent
 * images are added in the order of value.h; if words hold pairs, a term is such a word. */
#ifndef MPIDL_PRODUCTS_H
#define MPIDL_PRODUCTS_H

#include "value.h"

struct products {
    int64_t inputs; /* rounded up to a multiple of four */
    int64_t most;   /* number of terms for which D has memory */
    int64_t channel, panel;
    const int32_t *place; /* or NULL */
};

/* Return the struct for a number of outputs that is a multiple of 16. */
INLINE struct products products_of(int64_t inputs, int64_t outputs, int64_t most, int64_t channel) {
    int64_t panel = 16;
    if (WIDTH == 16) panel = outputs % 48 == 0 ? 48 : outputs % 32 == 0 ? 32 : 16;
    return (struct products){parts_of(inputs, 4) * 4, most, channel, panel, NULL};
}

/* Return the position in D of one term of 16 adjacent outputs. The next term is `panel` floats
 * further. */
INLINE int64_t place_of(const struct products *p, int64_t output, int64_t term) {
    return output / p->panel * p->panel * p->most + term * p->panel + output % p->panel;
}

/* Write D for `pixels` adjacent pixels of 16 outputs, whose channels are `channel` floats apart.
 * Words are transposed for two pixels at a time, so dy and D have room for an even number. */
INLINE void transpose_terms(const float *dy, int64_t channel, int64_t pixels, float *D,
                            int64_t panel) {
    for (int64_t term = 0; term < pixels * TERMS_PER_PIXEL; term += LANES)
        transpose_16(dy + term, channel, D + term * panel, panel);
}

/* Compute S for `inputs` inputs and `vectors` vectors of outputs, or add to S. */
INLINE void add_product_tile(const struct products *p, const float *V, int64_t input,
                             const float *D, int64_t terms, float *S, int add, const int inputs,
                             const int vectors) {
    vec sum[8][4];
    const float *row[8];
    UNROLL for (int i = 0; i < inputs; i++) row[i] =
        V + (p->place ? p->place[input + i] : (input + i) * p->channel);
    UNROLL for (int i = 0; i < inputs; i++)
        UNROLL for (int v = 0; v < vectors; v++) sum[i][v] = zero();
    for (int64_t n = 0; n < terms; n++) {
        const int64_t term = n ^ SWAP;
        vec d[4];
        UNROLL for (int v = 0; v < vectors; v++) d[v] = load(D + term * p->panel + v * WIDTH);
        UNROLL for (int i = 0; i < inputs; i++) {
            vec x = splat(row[i][term]);
            UNROLL for (int v = 0; v < vectors; v++) sum[i][v] = add_words(x, d[v], sum[i][v]);
        }
    }
    UNROLL for (int i = 0; i < inputs; i++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *to = S + (v * WIDTH / LANES * p->inputs + i) * LANES + v * WIDTH % LANES;
            if (add) sum[i][v] += load(to);
            store(to, sum[i][v]);
        }
}

/* Outputs or inputs, from the first to before the last. */
struct range {
    int64_t first, stop;
};

/* Compute S, or add to S. The outputs form whole panels, and inputs start at a multiple of eight. */
static inline void add_products(const struct products *p, const float *V, const float *D,
                                int64_t terms, struct range outputs, struct range inputs,
                                float *S, int add) {
    for (int64_t o = outputs.first; o < outputs.stop; o += p->panel)
        for (int64_t i = inputs.first; i < inputs.stop; i += 4) {
            const float *d = D + o * p->most;
            float *s = S + (o / LANES * p->inputs + i) * LANES;
#define MULTIPLY(at, inputs, vectors)                                                              \
    add_product_tile(p, V, i, d + (at), terms, s + (at), add, inputs, vectors)
#if WIDTH == 16
            if (i + 4 < inputs.stop) { /* wide panels would not stay in the first-level cache */
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

/* Write S of the outputs [16 * tile, 16 * (tile + 1)) to leaf (outputs, inputs). */
static inline void write_sums(const struct products *p, const float *S, int64_t tile,
                              int64_t outputs, int64_t inputs, float *leaf) {
    const int64_t high = least(outputs - tile * LANES, LANES);
    float square[LANES * LANES] __attribute__((aligned(64)));
    S += tile * p->inputs * LANES, leaf += tile * LANES * inputs;
    for (int64_t i = 0; i < inputs; i += LANES) {
        const int64_t wide = least(inputs - i, LANES);
        if (high == LANES && wide == LANES) {
            transpose_16(S + i * LANES, LANES, leaf + i, inputs);
            continue;
        }
        for (int64_t o = 0; o < high; o++)
            for (int64_t j = 0; j < wide; j++) square[o * LANES + j] = S[(i + j) * LANES + o];
        for (int64_t o = 0; o < high; o++)
            memcpy(leaf + o * inputs + i, square + o * LANES, (size_t)wide * sizeof(float));
    }
}

#endif
