/* Convolutions: shapes, copies of blocks in padded scratch, direct kernels. */
#ifndef MPIDL_CONV_H
#define MPIDL_CONV_H

#include "activation.h"
#include "team.h"

/* A convolution of one (C, H, W) image, int64_t[17] in Python. */
struct conv {
    int64_t C, H, W, K, P, Q, R, S;
    int64_t stride_h, stride_w, top, bottom, left, right, dilation_h, dilation_w, groups;
};

/* Images of a block with a border: `data` is the first pixel of the border. Rows and columns
 * include the border. If `phases` is not 1, a row keeps the pixels of equal column % phases
 * together (phase by phase, each `columns / phases` wide), so that a strided kernel reads
 * neighbours.
 */
struct padded {
    float *data;
    int64_t rows, columns, phases, row_stride, channel_stride; /* strides in floats */
};

/* The gradient of a convolution's output y: dy itself or, if y.mean is not NULL, dy taken back
 * through the ReLU and batch normalization that follow (see normalize_back). */
struct gradient {
    const float *dy;
    struct source y;
    const float *a, *b, *c;
};

/* One channel of one block, which begins at x, with a border of `top` rows and `left` columns. */
void fill_source(const struct padded *p, int64_t channel, const struct source *source,
                 const float *x, int64_t height, int64_t width, int64_t top, int64_t left);
void fill_gradient(const struct padded *p, int64_t channel, const struct gradient *gradient,
                   const float *dy, const float *y, int valid, int64_t height, int64_t width,
                   int64_t top, int64_t left);

/* Outputs that share a tile of weights; the last tile may have fewer. */
enum { OUTPUTS = 4 };

/* A sum of shifted images: out[k] = bias[k] + sum over t of weight[t][k] * image at offset[t]. */
struct direct {
    int64_t taps;            /* channels of the group times taps of the filter */
    const int32_t *offset;   /* of each tap, in floats from the pixel */
    const float *weight;     /* [outputs / 4][taps][4], the last tile narrower */
    const float *bias;       /* or NULL */
    int64_t outputs;
    float *out;              /* first pixel of the first output */
    int64_t out_channel, out_row, out_pixel; /* strides in floats */
    int64_t rows, columns;   /* of the output */
    const float *in;         /* the input at output pixel (0, 0) */
    int64_t in_row;          /* stride in floats from one output row to the next */
};

/* Compute the rows that EACH_TILE deals to this member. */
void direct_rows(const struct team *team, const struct direct *d);

/* Pack weight rows for `direct`: out[taps][tile] of outputs k .. k + tile - 1. `place(k, t)` of the
 * weight is weight + k * output_stride + index[t]. */
void pack_weights(float *out, const float *weight, int64_t outputs, int64_t output_stride,
                  int64_t taps, const int32_t *index);

/* leaf[k * taps + t] = sum over pixels and lanes of dy[k] * image at offset[t], for the output tile
 * k .. k + 3; `own`: direct_dweight_floats(taps) floats. */
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
