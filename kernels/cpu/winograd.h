/* Winograd convolution with 3x3 filters at stride 1, dilation 1, on one block of 16 images.
 *
 * F(m x m, 3x3) makes a tile of m x m outputs from (m + 2) x (m + 2) inputs with (m + 2)^2 products
 * an input and output channel, in place of 9 m^2 (Lavin and Gray 2016):
 *
 *     Y = A^T [ sum over channels of (G g G^T) . (B^T d B) ] A        g 3x3, d a tile of the input
 *
 * 2.25 times fewer for m = 2, 4 times fewer for m = 4. All members of a team call these functions
 * for a block (see team.h) with the same arguments. Their inputs must be complete (`meet` before),
 * and their outputs are complete after the caller's next `meet`.
 */
#ifndef MPIDL_WINOGRAD_H
#define MPIDL_WINOGRAD_H

#include <stdint.h>

#include "team.h"

/* A convolution of one block, or of one group of its channels. Tiles cover the output from its
 * first pixel. Tiles at the right and the bottom may extend beyond it; x (and dy for dweight) is
 * zero there: x has at least winograd_extent(rows, m) rows and winograd_extent(columns, m)
 * columns. */
struct winograd {
    int64_t inputs, outputs; /* channels */
    int64_t rows, columns;   /* pixels of the output */
    int m;                   /* 2 or 4 */
};

/* A block's pixels: 16 floats each; the strides are in floats. */
struct pixels {
    float *at; /* channel 0, row 0, column 0 */
    int64_t channel, row;
};

/* Rows or columns of padded input that the tiles of `outputs` rows or columns of output read. */
static inline int64_t winograd_extent(int64_t outputs, int m) {
    return (outputs + m - 1) / m * m + 2;
}

/* The transformed weights u of a pass. w (K, C, 3, 3) as it is makes K outputs of C inputs;
 * backward, for the gradient with respect to the input, makes C outputs of K inputs. u is made in
 * independent tiles, for each_tile. */
int64_t winograd_weights_floats(int64_t inputs, int64_t outputs, int m);
int64_t winograd_weights_tiles(int64_t outputs);
void winograd_weights(const float *w, float *u, int64_t K, int64_t C, int m, int backward,
                      int64_t tile);

/* y = convolution of x + bias (NULL: none). x is padded, y is not: the pixels of y outside its rows
 * and columns are not written. `scratch` is the team's, of winograd_conv_floats floats. */
int64_t winograd_conv_floats(const struct winograd *shape);
void winograd_conv(const struct team *team, const struct winograd *shape, struct pixels x,
                   const float *u, const float *bias, struct pixels y, float *scratch);

/* dweight (outputs, inputs, 3, 3) = the block's gradient with respect to the weights, by
 * F(4x4, 3x3) (m = 4) from the padded x and from dy, which begins at its first pixel and is zero
 * beyond its rows and columns as far as the tiles go (a multiple of 4). */
int64_t winograd_dweight_floats(const struct winograd *shape);
void winograd_dweight(const struct team *team, const struct winograd *shape, struct pixels x,
                      struct pixels dy, float *dweight, float *scratch);

#endif
