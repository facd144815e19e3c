/* Winograd convolution with r x r filters at stride 1, dilation 1, on one block of 16 images.
 *
 * F(m x m, r x r) computes a tile of m x m outputs from n x n inputs, n = m + r - 1. F needs n^2
 * products per input and output channel instead of m^2 r^2 (Lavin and Gray 2016):
 *
 *     Y = A^T [ sum over channels of (G g G^T) . (B^T d B) ] A        g: filter, d: input tile
 *
 * For r = 3, this saves a factor of 2.25 for m = 2 and of 4 for m = 4. For r = 5, the factors are
 * 2.78 and 6.25. Tiles need not be square: F(2 x 4, 3 x 3) saves a factor of 3.
 *
 * Strides: a convolution with stride s and R x R filters is a convolution with stride 1 and r x r
 * filters, r = ceil(R / s), of the s x s phases of its input. A phase consists of the pixels with
 * one pair of remainders of row and column modulo s. Likewise, the gradient of the input is a
 * convolution of dy whose outputs are the phases of dx. If s does not divide R, the first or last
 * taps of the filters of some phases are zero, and so are their products at the points 0 or
 * infinity. These products are not computed. For R = 3 and s = 2, F(4 x 4, 2 x 2) computes a tile
 * of 16 outputs with 81 instead of 144 products per channel.
 *
 * With -DBF16, the products of backward passes are of bfloat16 numbers (see value.h): the inputs are
 * bfloat16 numbers, the transforms compute floats, and the transformed numbers are rounded. Forward
 * passes multiply floats, because rounding there would change which ReLUs are active.
 *
 * All members of a team (see team.h) call these functions for a block with the same arguments. The
 * inputs must be complete, so callers first `meet`. The outputs are complete after the caller's
 * next `meet`. */
#ifndef MPIDL_WINOGRAD_H
#define MPIDL_WINOGRAD_H

#include <stdint.h>

#include "activation.h"
#include "products.h"
#include "team.h"

/* A convolution of one block, or of one group of its channels. Tiles cover each phase of the
 * output, starting at its first pixel. Tiles at the right and the bottom may extend beyond the
 * output. In these parts of tiles, x must be zero, and so must dy for dweight. A phase of x has at
 * least winograd_extent(...) rows and columns. */
struct winograd {
    int64_t inputs, outputs; /* numbers of channels, or of channels times phases */
    int64_t rows, columns;   /* pixels of the output */
    int m_h, m_w, r;         /* a triple of EACH_SIZE; m_h is 0 if there is no such convolution */
    int backward;            /* whether the output is dx, or else y */
    int64_t step, taps;      /* stride and side of the original filter */
    int64_t top, left;       /* if backward, the padding before x, or else 0 */
};

/* Whether winograd_conv multiplies bfloat16 numbers. With -DBF16, winograd_dweight always does. */
static inline int is_narrow(const struct winograd *shape) { return NARROW && shape->backward; }

/* Expand SIZE(m_h, m_w, r) for each size of tiles and filters, with n = 3 to 8, and NARROW_SIZE for
 * those of passes whose products are of bfloat16 numbers. */
#ifdef BF16
#define EACH_SIZE(SIZE, NARROW_SIZE)                                                               \
    SIZE(4, 4, 3) SIZE(4, 4, 5) NARROW_SIZE(4, 4, 3) NARROW_SIZE(2, 2, 5)
#else
#define EACH_SIZE(SIZE, NARROW_SIZE)                                                               \
    SIZE(2, 2, 2) SIZE(4, 4, 2) SIZE(2, 2, 3) SIZE(2, 4, 3) SIZE(4, 4, 3) SIZE(2, 2, 4)            \
    SIZE(4, 4, 4) SIZE(2, 2, 5) SIZE(4, 4, 5)
#endif
enum { MOST_OUTPUTS = 4 }; /* the largest m_h and m_w */

/* The pixels of a block, 16 numbers each: floats, or bfloat16 numbers where the products are of
 * those. Strides are in numbers. Adjacent phases are phase_row and phase_column numbers apart. */
struct pixels {
    const void *at; /* channel 0, row 0, column 0 */
    int64_t channel, row; /* strides of channels, and of rows of one phase */
    int64_t phase_row, phase_column;
};

/* The outputs of a block, like struct pixels. Strides are in values; columns of one phase are
 * `pixel` apart. */
struct outputs {
    value *at;
    int64_t channel, row, pixel;
    int64_t phase_row, phase_column;
};

/* Of the original filter's taps in one dimension, tap i belongs to the phase (i - before) mod step.
 * It becomes tap floor((i - before) / step) + ceil(before / step) of the phase's filter. `before`
 * is `top` or `left`. Return i, or -1 if tap `tap` of a phase's filter is zero. */
static inline int64_t original_tap(const struct winograd *w, int64_t before, int64_t phase,
                                   int64_t tap) {
    const int64_t i = before + phase + w->step * (tap - parts_of(before, w->step));
    return i >= 0 && i < w->taps ? i : -1;
}

/* Return how many taps the filters of the phases have along one dimension. */
static inline int64_t phase_taps(int64_t taps, int64_t step, int64_t before) {
    return parts_of(before, step) + parts_of(taps - before, step);
}

/* In a forward pass, the filters of the first `whole` rows and columns of phases have no zeros. In
 * the other rows and columns, the last tap is zero. */
static inline int64_t whole_phases(const struct winograd *w) {
    return w->backward ? w->step : w->taps - w->step * (w->r - 1);
}

/* The channel and the phase of an input of a forward pass, or of an output of a backward pass. */
struct place {
    int64_t channel, row, column;
};

/* Return the place of an input or output. Inputs of a forward pass are ordered so that those with
 * nonzero weights are adjacent at each point: the whole rows come first, with the whole columns
 * last; the other rows follow, with the whole columns first. */
static inline struct place place_of_phase(const struct winograd *w, int64_t index) {
    const int64_t channels = (w->backward ? w->outputs : w->inputs) / (w->step * w->step);
    const int64_t whole = whole_phases(w), rest = w->step - whole;
    const int64_t sizes[4] = {whole * rest, whole * whole, rest * whole, rest * rest};
    int64_t phase = index / channels;
    int kind = 0;
    while (phase >= sizes[kind]) phase -= sizes[kind++];
    const int64_t columns = kind % 3 ? whole : rest;
    return (struct place){index % channels, (kind < 2 ? 0 : whole) + phase / columns,
                          (kind % 3 ? 0 : whole) + phase % columns};
}

/* Return the inputs whose filters are not zero at a point. */
static inline struct range inputs_at(const struct winograd *shape, int row, int column) {
    const int64_t step = shape->step, whole = whole_phases(shape), rest = step - whole;
    if (shape->backward || rest == 0) return (struct range){0, shape->inputs};
    const int last_row = row == shape->m_h + shape->r - 2;
    const int last_column = column == shape->m_w + shape->r - 2;
    const int64_t stop = last_row ? whole * step : whole * (step + rest);
    const int64_t channels = shape->inputs / (step * step);
    return (struct range){last_column ? whole * rest * channels : 0,
                          last_row || last_column ? stop * channels : shape->inputs};
}

/* Return the offset of a channel and phase from p->at. */
static inline int64_t input_offset(const struct pixels *p, struct place place) {
    return place.channel * p->channel + place.row * p->phase_row + place.column * p->phase_column;
}

static inline value *output_at(const struct outputs *p, struct place place) {
    return p->at + place.channel * p->channel + place.row * p->phase_row +
           place.column * p->phase_column;
}

/* Return how many rows or columns of the padded input the tiles read for `outputs` rows or columns
 * of output. */
static inline int64_t winograd_extent(int64_t outputs, int m, int r) {
    return (outputs + m - 1) / m * m + r - 1;
}

/* Compute the transformed weights u of a pass from w (K, C, r, r). In the forward pass, u maps C
 * inputs to K outputs. In the backward pass (the gradient with respect to the input), u maps K
 * inputs to C outputs. The work consists of independent tiles, for each_tile. */
int64_t winograd_weights_floats(const struct winograd *shape);
int64_t winograd_weights_tiles(int64_t outputs);
void winograd_weights(const struct winograd *shape, const float *w, float *u, int64_t tile);

/* Compute y, the convolution of x plus bias (or NULL), and apply `finish`. x is padded. y is not
 * padded: pixels outside its rows and columns are not written. `scratch` has winograd_conv_floats
 * floats of the team's scratch memory. */
int64_t winograd_conv_floats(const struct winograd *shape);
void winograd_conv(const struct team *team, const struct winograd *shape, struct pixels x,
                   const float *u, const float *bias, struct outputs y, struct finish finish,
                   float *scratch);

/* Compute dweight (outputs, inputs, r, r), the block's gradient with respect to the weights of the
 * forward pass `shape`; m_h and m_w are 4, or 2 with -DBF16 and r = 5. Taps outside the original
 * filter are not defined. x is padded. `dy` starts at its first pixel, and is zero beyond its rows
 * and columns up to the end of the tiles. */
int64_t winograd_dweight_floats(const struct winograd *shape);
void winograd_dweight(const struct team *team, const struct winograd *shape, struct pixels x,
                      struct pixels dy, float *dweight, float *scratch);

#endif
