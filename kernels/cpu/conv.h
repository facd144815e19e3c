/* Declarations for convolutions: shapes, copies of blocks to padded scratch memory, and direct
 * kernels. */
#ifndef MPIDL_CONV_H
#define MPIDL_CONV_H

#include "activation.h"
#include "fold.h"
#include "team.h"

/* The scratch slots of a convolution, see team.h. */
enum { OFFSETS, INDICES, WEIGHTS, LEAVES, PHASES, FILTERS };

/* The geometry of a convolution of (C, H, W) images; Python passes it as int64_t[17]. */
struct conv {
    int64_t C, H, W, K, P, Q, R, S;
    int64_t stride_h, stride_w, top, bottom, left, right, dilation_h, dilation_w, groups;
};

/* The items of a padded copy. FLOATS: a float for each number. ROUNDED: the same, with the number
 * rounded to bfloat16. HALVES: a bfloat16 number (uint16_t), in the order of the stored images, so
 * that a word holds two adjacent images. PAIRS: a word for the numbers of two adjacent channels. */
enum form { FLOATS, ROUNDED, HALVES, PAIRS };

/* The forms of the operands of bfloat16 products over channels, and over images. */
#define OVER_CHANNELS (PER_WORD == 2 ? PAIRS : ROUNDED)
#define OVER_IMAGES (PER_WORD == 2 ? HALVES : ROUNDED)

/* Return how many channels of items hold `channels` channels. */
INLINE int64_t item_channels(enum form form, int64_t channels) {
    return form == PAIRS ? parts_of(channels, 2) : channels;
}

/* Return how many floats hold `items` items. */
INLINE int64_t floats_of(enum form form, int64_t items) {
    return form == HALVES ? parts_of(items, 2) : items;
}

/* The layout of a block's images with a border. `data` points to the first pixel of the border.
 * `rows` and `columns` include the border. If `phases` is not 1, pixels with equal column % phases
 * are adjacent in a row, so that a strided kernel reads adjacent pixels. Each phase is `columns /
 * phases` wide. If `keep_border`, the border is already zero, because the memory holds a copy of
 * another block. */
struct padded {
    void *data;
    enum form form;
    int64_t rows, columns, phases, row_stride, channel_stride; /* strides in items, see enum form */
    int keep_border;
};

/* The gradient of a convolution's output y. If y.x is NULL, the gradient is dy itself. If y.mean is
 * not NULL, dy is backpropagated through the activation and batch normalization that follow (see
 * normalize_back); if y.scale is NULL, no activation follows. Otherwise, dy is backpropagated
 * through a ReLU whose output is y.x. */
struct gradient {
    const value *dy;
    struct source y;
    const float *a, *b, *c;
};

/* The arguments of a pass, as in mpidl.h. */
struct arguments {
    struct conv c;
    struct source x;
    struct gradient dy;
    const float *weight, *bias;
    value *y, *dx;
    struct finish finish;
    double *rows; /* forward: moments of y; backward: batch-norm sums of dx; or NULL */
    const int32_t *counts;
    float *dweight; /* NULL if not needed */
    int64_t nodes;
    const struct tree *tree;
};

/* The images that a copy reads. Channels are `stride` values apart. Channel 0 of the copy's items
 * belongs to the image's channel 0; a group has `group` channels, and no pair of channels crosses
 * groups. The border has `top` rows and `left` columns. */
struct picture {
    int64_t group, stride, height, width, top, left;
};

/* Copy one channel of items of one block, whose channel 0 begins at x or dy, into `p`. */
void fill_source(const struct padded *p, int64_t item_channel, const struct source *source,
                 const value *x, struct picture picture);
/* The form of the items is not PAIRS. */
void fill_gradient(const struct padded *p, int64_t channel, const struct gradient *gradient,
                   const value *dy, const value *y, int valid, struct picture picture);
/* Set one channel of items of `to` from a copy of the same images in another form, which has no
 * pairs and `group` channels in each group. */
void convert_copy(const struct padded *to, int64_t item_channel, const struct padded *from,
                  int64_t group);
/* Copy `count` pixels of a channel of items, which are `step` values apart in x, to adjacent items.
 * x points to the first pixel of channel 0. */
void copy_pixels(enum form form, void *to, int64_t item_channel, const struct source *source,
                 const value *x, int64_t group, int64_t stride, int64_t step, int64_t count);

/* Compute the row of a block: the moments of the block's y, or the batch-norm sums of its part of
 * the rank's dx. The functions first wait for all members of the team, which compute y or dx. */
void block_moments(const struct team *team, const struct conv *c, const value *y, double *rows,
                   const int32_t *counts, int64_t block);
void block_norm_sums(const struct team *team, const struct conv *c, const value *dx,
                     const struct source *x, double *rows, int64_t block);

/* The number of outputs that share a tile of weights. The last tile may have fewer outputs. */
enum { OUTPUTS = 4 };

/* The arguments of a sum of shifted images: out[k] = bias[k] + sum over t of weight[t][k] * image
 * at offset[t]; with -DBF16, the bias is added last. `finish` is applied to the sum. */
struct direct {
    int pairs;               /* whether the items are pairs: a tap then has two products */
    int64_t taps;            /* channels of items of the group times taps of the filter */
    const int32_t *offset;   /* offset of each tap from the pixel, in floats */
    const float *weight;     /* [outputs / 4][taps][4]; the last tile may be narrower */
    const float *bias;       /* NULL for no bias */
    int64_t outputs;
    value *out;              /* first pixel of the first output */
    struct finish finish;    /* the addend starts at the same pixel as `out` */
    int64_t out_channel, out_row, out_pixel; /* strides in values */
    int64_t rows, columns;   /* size of the output */
    const float *in;         /* the input for output pixel (0, 0) */
    int64_t in_row;          /* floats between the inputs for adjacent output rows */
    int64_t next;            /* if not 0, the outputs of the next call are this far from `out` */
};

/* Compute the rows that EACH_TILE assigns to this member. */
void direct_rows(const struct team *team, const struct direct *d);

/* The taps of a direct sum, in the order in which they are added: for a pair of channels, first all
 * taps of the filter. */
struct taps {
    enum form form;
    int64_t count;
    int32_t *offset, *index; /* see struct direct and struct packing */
};

/* Add a tap of a channel, or of a pair of channels. `of_channel` is the number of items between
 * channels, and `per_channel` the number of weights between channels. */
void add_tap(struct taps *taps, int64_t channel, int64_t channels, int64_t of_channel,
             int64_t per_channel, int64_t index, int64_t offset);

/* Return the number of channels that add_tap adds together. */
INLINE int64_t channel_step(enum form form) { return form == FLOATS ? 1 : 2; }

/* Weights to pack for `struct direct`. For each group, and each tile of four outputs, `out` gets
 * words [taps][outputs of the tile]. The weight of output k and tap t of a group is at `index[t]`,
 * counted from weight + group * group_stride + k * output_stride. If the items are pairs, a tap has
 * the weights index[2 * t] and index[2 * t + 1], which is -1 if there is no second channel. */
struct packing {
    enum form form;
    float *out;
    const float *weight;
    int64_t groups, group_stride, outputs, output_stride, taps;
    const int32_t *index;
};
void pack_weights(const struct packing *packing); /* in pack.c, as is add_tap */

/* The arguments of direct_dweight_tile, which computes leaf[k * taps + t] = sum over pixels and
 * lanes of dy[k] * image at offset[t], for the four outputs k of a tile. `own` has
 * direct_dweight_floats(taps) floats. */
struct direct_dweight {
    int64_t taps, outputs;
    const int32_t *offset;
    const float *dy;
    int64_t dy_channel, dy_row;
    const float *in;
    int64_t in_row;
    int64_t rows, columns;
    float *leaf;
};
int64_t direct_dweight_floats(int64_t taps);
void direct_dweight_tile(const struct direct_dweight *d, int64_t tile, float *own);

#endif
