/* Declarations for fully connected layers: y = weight x + bias with x (blocks, features, 16),
 * weight (outputs, features), bias (outputs) or NULL, y (blocks, outputs, 16).
 *
 * No sum is one long chain, because a long chain has larger rounding errors. The forward pass
 * divides a sum over features into segments of SEGMENT consecutive features. The pass sums each
 * segment from first to last, then adds the segments to the bias in order. The backward pass
 * divides a sum over outputs in the same way, into groups of about the same size and of at most
 * GROUP outputs. A sum over the images of a block, from image 0 to image 15, is a leaf of the tree.
 * The sizes of tiles affect when terms are added, but not in which order. Therefore no result
 * depends on the sizes of tiles.
 *
 * With -DBF16, x and dx are bfloat16 numbers, and x, the weights and dy are rounded before they are
 * multiplied. A sum adds two products at a time, in the order of value.h: of the features, outputs
 * or images 2 i and 2 i + 1. Groups start at even outputs. A part of the weights is rounded to
 * scratch memory, which stays in cache for all blocks, because a rounded copy of all weights would
 * have to be read from memory as well. */
#ifndef MPIDL_DENSE_H
#define MPIDL_DENSE_H

#include "activation.h"
#include "fold.h"
#include "team.h"

enum { SEGMENT = 256, GROUP = NARROW ? 32 : 8 };

/* The number of features and the number of blocks that are computed together. */
enum { PANEL = 512, MANY_BLOCKS = 8 };

/* The number of rows of weights whose sums for two vectors of images fit into the registers. */
#if REGISTERS == 32
enum { ROWS = 8 };
#else
enum { ROWS = 6 };
#endif

struct dense {
    struct source x;
    const float *weight, *bias;
    const float *dy;       /* for dx: the terms of sums over outputs; see round_dy */
    const float *dy_images; /* for the gradient of the weights: the terms of sums over images */
    float *y;
    value *dx;
    double *sums; /* (blocks, 2 * channels): mpidl_batchnorm_sums of dx, or NULL */
    float *nodes; /* (nodes, outputs, features): gradient with respect to weight */
    const struct tree *tree;
    int64_t blocks, features, outputs, channels; /* a channel has features / channels pixels */
};

/* Return the arguments of a backward pass. The caller sets members that only some passes use. */
static inline struct dense backward_of(struct source x, const float *dy, const int64_t *tree,
                                       int64_t features, int64_t channels, int64_t outputs) {
    const struct tree *t = (const struct tree *)tree;
    return (struct dense){.x = x,
                          .dy = dy,
                          .dy_images = dy,
                          .tree = t,
                          .blocks = t->stop - t->first,
                          .features = features,
                          .outputs = outputs,
                          .channels = channels};
}

/* Cases of a switch over the rows of a tile, 1 .. ROWS. */
#if REGISTERS == 32
#define EACH_ROWS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#else
#define EACH_ROWS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif

/* Return the start of part i if `count` is divided into `parts` parts of about the same size. */
INLINE int64_t part(int64_t count, int64_t i, int64_t parts) { return count * i / parts; }

/* Return the number of terms of a sum of `count` products. A term is a word of value.h. In bfloat16,
 * there is an even number of products; the last may be zero. */
INLINE int64_t terms_of(int64_t count) {
    return NARROW ? parts_of(count, 2) * 2 / PER_WORD : count;
}

/* Return where group g of `groups` groups of outputs starts. */
INLINE int64_t group_start(int64_t outputs, int64_t g, int64_t groups) {
    if (NARROW) return least(part(parts_of(outputs, 2), g, groups) * 2, outputs);
    return part(outputs, g, groups);
}

/* Return the features [first, first + count) of a block. If the features are an activation that
 * must be computed, store them in `room` (count, 16) and return `room`. */
static inline const value *read_features(const struct dense *d, int64_t block, int64_t first,
                                         int64_t count, value *room) {
    const value *x = d->x.x + (block * d->features + first) * LANES;
    if (!d->x.mean) return x;
    int64_t pixels = d->features / d->channels;
    for (int64_t f = 0; f < count;) {
        int64_t c = (first + f) / pixels, stop = least(count, (c + 1) * pixels - first);
        struct norm n = norm_of(&d->x, c);
        for (; f < stop; f++)
            UNROLL for (int p = 0; p < LANES; p += WIDTH)
                store(room + f * LANES + p, activate(load(x + f * LANES + p), n));
    }
    return room;
}

#ifdef BF16
/* Write the terms of a sum over the rows 2 i and 2 i + 1 of 16 rounded numbers. */
INLINE void put_pair(float *to, vec even, vec odd) {
#if PER_WORD == 2
    store(to, joined(even, odd));
#else
    store(to, even), store(to + LANES, odd);
#endif
}
#endif

/* Set the members dy and dy_images to rounded copies in scratch memory, for passes that compute dx
 * and the gradient of the weights. In float, the terms are dy itself. */
void round_dy(struct dense *d, int for_dx, int for_dweight);

/* Round the weights of `count` features, starting at feature f, of the outputs [k, stop): write the
 * terms of sums over outputs, in rows that are `row` floats apart. Only for bfloat16 (in
 * dense_dx.c). */
void pack_outputs(const struct dense *d, int64_t k, int64_t stop, int64_t f, int64_t count,
                  float *to, int64_t row);
/* Compute dx for `count` features, starting at feature f, in `blocks` blocks, starting at block
 * `first`. `own` is scratch memory of dense_dx_floats floats. If there is only one group of outputs,
 * its weights may already be packed, in rows that are `row` floats apart; else `packed` is NULL. */
void dense_dx_panel(const struct dense *d, int64_t f, int64_t count, int64_t first, int64_t blocks,
                    const float *packed, int64_t row, float *own);
int64_t dense_dx_floats(const struct dense *d, int64_t blocks);
/* Compute the batch-norm sums of the channels whose features are in [first, stop), in one block. dx
 * must already be complete. */
void dense_sums(const struct dense *d, int64_t block, int64_t first, int64_t stop);
/* Return the number of features in a tile, about PANEL. Tiles consist of whole channels if the sums
 * of the channels are needed. */
int64_t dense_tile(const struct dense *d);

#endif
