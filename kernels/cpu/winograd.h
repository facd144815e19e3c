/* Winograd convolution with r x r filters at stride 1, dilation 1, on one block of 16 images.
 *
 * F(m x m, r x r) computes a tile of m x m outputs from n x n inputs, n = m + r - 1. F needs n^2
 * products per input and output channel instead of m^2 r^2 (Lavin and Gray 2016):
 *
 *     Y = A^T [ sum over channels of (G g G^T) . (B^T d B) ] A        g: filter, d: input tile
 *
 * For r = 3, this saves a factor of 2.25 for m = 2 and of 4 for m = 4. For r = 5, the factors are
 * 2.78 and 6.25. Tiles need not be square: F(2 x 4, 3 x 3) saves a factor of 3. A filter of stride s is computed as a filter of stride 1 on s x s times as many
 * channels; each channel has every s-th row and column of an image (see struct pixels). All members
 * of a team (see team.h) call these functions for a block with the same arguments. The inputs must
 * be complete, so callers first `meet`. The outputs are complete after the caller's next `meet`. */
#ifndef MPIDL_WINOGRAD_H
#define MPIDL_WINOGRAD_H

#include <stdint.h>

#include "activation.h"
#include "team.h"

/* A convolution of one block, or of one group of its channels. Tiles cover the output, starting at
 * its first pixel. Tiles at the right and the bottom may extend beyond the output. In these parts
 * of tiles, x must be zero, and so must dy for dweight. x has at least winograd_extent(rows, m_h, r)
 * rows and winograd_extent(columns, m_w, r) columns. */
struct winograd {
    int64_t inputs, outputs; /* numbers of channels */
    int64_t rows, columns;   /* pixels of the output */
    int m_h, m_w, r;         /* a triple of EACH_SIZE; m_h is 0 if there is no such convolution */
};

/* Expand SIZE(m_h, m_w, r) for each size of tiles and filters, with n = 4, 6 or 8. */
#define EACH_SIZE(SIZE) SIZE(2, 2, 3) SIZE(2, 4, 3) SIZE(4, 4, 3) SIZE(2, 2, 5) SIZE(4, 4, 5)
enum { MOST_OUTPUTS = 4 }; /* the largest m_h and m_w */

/* The pixels of a block, 16 floats each. Strides are in floats. If `phases` is not 1, each channel
 * of an image is divided into phases^2 channels. Each of these channels holds the pixels with one
 * pair of remainders of row and column modulo `phases`. Adjacent phases are phase_row and
 * phase_column floats apart. */
struct pixels {
    float *at; /* channel 0, row 0, column 0 */
    int64_t channel, row; /* strides of the image's channels and of the rows of one phase */
    int64_t phases, phase_row, phase_column;
};

/* The outputs of a block; strides in values. */
struct outputs {
    value *at;
    int64_t channel, row;
};

static inline const float *channel_of(const struct pixels *p, int64_t c) {
    const int64_t phase = c % (p->phases * p->phases);
    return p->at + c / (p->phases * p->phases) * p->channel +
           phase / p->phases * p->phase_row + phase % p->phases * p->phase_column;
}

/* Return how many rows or columns of the padded input the tiles read for `outputs` rows or columns
 * of output. */
static inline int64_t winograd_extent(int64_t outputs, int m, int r) {
    return (outputs + m - 1) / m * m + r - 1;
}

/* Compute the transformed weights u of a pass from w (K, C, r, r). In the forward pass, u maps C
 * inputs to K outputs. If `backward` (the gradient with respect to the input), u maps K inputs to C
 * outputs. The work consists of independent tiles, for each_tile. */
int64_t winograd_weights_floats(const struct winograd *shape);
int64_t winograd_weights_tiles(int64_t outputs);
void winograd_weights(const struct winograd *shape, const float *w, float *u, int backward,
                      int64_t tile);

/* Compute y, the convolution of x plus bias (or NULL), and apply `finish`. x is padded. y is not
 * padded: pixels outside its rows and columns are not written. `scratch` has winograd_conv_floats
 * floats of the team's scratch memory. */
int64_t winograd_conv_floats(const struct winograd *shape);
void winograd_conv(const struct team *team, const struct winograd *shape, struct pixels x,
                   const float *u, const float *bias, struct outputs y, struct finish finish,
                   float *scratch);

/* Compute dweight (outputs, inputs, r, r), the block's gradient with respect to the weights; m_h
 * and m_w are 4. x is padded. `dy` starts at its first pixel and is zero beyond its rows and columns up to the
 * end of the tiles (a multiple of 4). */
int64_t winograd_dweight_floats(const struct winograd *shape);
void winograd_dweight(const struct team *team, const struct winograd *shape, struct pixels x,
                      struct pixels dy, float *dweight, float *scratch);

#endif
