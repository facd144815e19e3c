/* Declarations for convolutions: shapes, copies of blocks to padded scratch memory, and direct
 * kernels. */
#ifndef MPIDL_CONV_H
#define MPIDL_CONV_H

#include "activation.h"
#include "team.h"

/* The geometry of a convolution of (C, H, W) images; Python passes it as int64_t[17]. */
struct conv {
    int64_t C, H, W, K, P, Q, R, S;
    int64_t stride_h, stride_w, top, bottom, left, right, dilation_h, dilation_w, groups;
};

/* The layout of a block's images with a border. `data` points to the first pixel of the border.
 * `rows` and `columns` include the border. If `phases` is not 1, pixels with equal column % phases
 * are adjacent in a row, so that a strided kernel reads adjacent pixels. Each phase is `columns /
 * phases` wide. If `keep_border`, the border is already zero, because the memory holds a copy of
 * another block. */
struct padded {
    float *data;
    int64_t rows, columns, phases, row_stride, channel_stride; /* strides in floats */
    int keep_border;
};

/* The gradient of a convolution's output y. The gradient is dy itself or, if y.mean is not NULL, dy
 * backpropagated through the ReLU and batch normalization that follow (see normalize_back). If
 * y.scale is NULL, no ReLU follows. */
struct gradient {
    const float *dy;
    struct source y;
    const float *a, *b, *c;
};

/* Copy one channel of one block, which begins at x or dy, into `p`, with a border of `top` rows and
 * `left` columns. */
void fill_source(const struct padded *p, int64_t channel, const struct source *source,
                 const float *x, int64_t height, int64_t width, int64_t top, int64_t left);
void fill_gradient(const struct padded *p, int64_t channel, const struct gradient *gradient,
                   const float *dy, const float *y, int valid, int64_t height, int64_t width,
                   int64_t top, int64_t left);

/* Compute the row of a block: the moments of the block's y, or the batch-norm sums of its part of
 * the rank's dx. The functions first wait for all members of the team, which compute y or dx. */
void block_moments(const struct team *team, const struct conv *c, const float *y, double *rows,
                   const int32_t *counts, int64_t block);
void block_norm_sums(const struct team *team, const struct conv *c, const float *dx,
                     const struct source *x, double *rows, int64_t block);

/* The number of outputs that share a tile of weights. The last tile may have fewer outputs. */
enum { OUTPUTS = 4 };

/* The arguments of a sum of shifted images: out[k] = bias[k] + sum over t of weight[t][k] * image
 * at offset[t]. `finish` is applied to the sum. */
struct direct {
    int64_t taps;            /* channels of the group times taps of the filter */
    const int32_t *offset;   /* offset of each tap from the pixel, in floats */
    const float *weight;     /* [outputs / 4][taps][4]; the last tile may be narrower */
    const float *bias;       /* NULL for no bias */
    int64_t outputs;
    float *out;              /* first pixel of the first output */
    struct finish finish;    /* the addend starts at the same pixel as `out` */
    int64_t out_channel, out_row, out_pixel; /* strides in floats */
    int64_t rows, columns;   /* size of the output */
    const float *in;         /* the input for output pixel (0, 0) */
    int64_t in_row;          /* floats between the inputs for adjacent output rows */
};

/* Compute the rows that EACH_TILE assigns to this member. */
void direct_rows(const struct team *team, const struct direct *d);

/* Pack weights for `struct direct`, tile by tile: out[taps][outputs of the tile]. The weight of
 * output k and tap t is at weight + k * output_stride + index[t]. */
void pack_weights(float *out, const float *weight, int64_t outputs, int64_t output_stride,
                  int64_t taps, const int32_t *index);

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
