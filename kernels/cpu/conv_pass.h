/* The state of a forward or backward pass of a convolution over a rank's blocks, and what the two
 * passes share. */
#ifndef MPIDL_CONV_PASS_H
#define MPIDL_CONV_PASS_H

#include "conv.h"
#include "products.h"
#include "winograd.h"

/* A phase consists of the output pixels whose row and column, modulo the step of the pass, are
 * `row` and `column`. A phase is computed by a direct convolution with the filter's taps that reach
 * these pixels. A forward pass has one phase. */
struct phase {
    int64_t row, column, rows, columns, taps;
    const int32_t *offset;
    const float *weight; /* packed weights of all groups */
};

struct pass {
    struct conv c;
    struct source x;
    const value *more;    /* the channels of x from `joined` on, or NULL if x.x has all channels */
    int64_t joined;
    struct gradient dy;
    const float *weight;
    const float *bias;    /* forward: added to y; backward: added to dx; or NULL */
    value *y, *dx;
    struct finish finish; /* applied to y */
    double *rows;         /* forward: moments of y; backward: batch-norm sums of dx; or NULL */
    const int32_t *counts;
    struct winograd winograd; /* convolution of one group for y or dx; m_h is 0 if direct */
    struct winograd dweight; /* weight gradient of one group; m_h is 0 if direct */
    int backward;
    int64_t step_h, step_w; /* steps between the output pixels of a phase */
    int64_t in_step;        /* step between the input rows of these pixels */
    const float *filters; /* weights, spread if the stride is not 1 */
    const float *packed;  /* transformed weights, `packed_group` floats per group */
    int64_t packed_group;
    int64_t winograd_at;  /* offset of Winograd's scratch in the team's scratch */
    int64_t spread_at;    /* offset of the spread weight gradients in the team's scratch */
    struct padded in, out; /* layouts of x and dy in the team's scratch */
    int64_t out_at, dy_for_dx_at; /* offsets of dy, and of its copy for dx, in this scratch */
    enum form over_channels; /* form of dy that dx reads */
    struct padded dy_for_dx; /* layout of the copy in this form, if dy has another form */
    int in_place;         /* whether x is read without a copy */
    int64_t strip;        /* forward: rows of y that are computed from one copy of rows of x */
    value *dy_out;        /* the gradient of y, without a border; NULL: in the team's scratch */
    int64_t before, left; /* rows and columns of the border before dy */
    int64_t taps;         /* number of taps in the forward and dweight passes */
    int32_t *offset;
    struct products products; /* layout for direct sums over images */
    int64_t products_at, band; /* offset of D and S in the team's scratch; rows of dy in D */
    const struct phase *phases;
    int64_t phase_count;
    struct leaves *leaves; /* NULL if dweight is not needed */
};

/* Set the layout of a padded copy. (This and the functions until convolve are in conv_pass.c.) */
void lay_out(struct padded *p, enum form form, int64_t rows, int64_t columns, int64_t phases);

/* Return the number of floats of a padded copy of `channels` channels, in groups of `group`. */
int64_t padded_floats(const struct padded *p, int64_t channels, int64_t group);

/* Set the layout of x in scratch. `w` is the Winograd convolution that reads x; w->m_h is 0 if there
 * is none. */
void lay_out_x(struct pass *pass, const struct winograd *w, enum form form);

/* Return the offset of a tap (channel of items, r, s) in padded x for output pixel (0, 0). */
int32_t offset_of(const struct pass *pass, int64_t channel, int64_t r, int64_t s);

/* The rows of a padded copy: `top` rows of the border, then `count` rows of x from row `first`. */
struct rows {
    int64_t top, first, count;
};

/* Return a block's x as the kernels read it: a padded copy of the rows in scratch, or all of x in
 * place. If `keep_border`, the border is already zero (see struct padded). */
const float *bring_x(const struct team *team, const struct pass *pass, int64_t block,
                     struct rows rows, int keep_border);

/* Compute the block's y from padded x, or the block's dx from padded dy: as many rows as the phases
 * and the Winograd convolution of the pass have. The addend of `finish` starts at the first row. */
void convolve(const struct team *team, const struct pass *pass, const struct padded *from,
              const float *in, struct finish finish, value *out);

/* Return the arguments of the Winograd convolution of one group, see winograd.h. Python passes a
 * tile as 10 * rows + columns; 0 means none. (This and the next functions are in conv_filters.c.) */
struct winograd winograd_forward(const struct conv *c, int64_t tile);
struct winograd winograd_backward(const struct conv *c, int64_t tile);

/* Return where Winograd convolutions with stride s find the pixels of a padded copy of a group. */
INLINE struct pixels pixels_of(const struct padded *p, const float *group, int64_t s) {
    return (struct pixels){.at = group,
                           .channel = p->channel_stride,
                           .row = s * p->row_stride,
                           .phase_row = p->row_stride,
                           .phase_column = p->columns / s * LANES};
}

/* If the stride is not 1, the filters (K, C / groups, R, S) are spread over phases and channels:
 *
 *     spread[k][phase][c][r][s] = weight[k][c][tap of row][tap of column], or 0; see original_tap
 *
 * Return the number of floats in the spread filters of one output. */
INLINE int64_t spread_floats(const struct winograd *w) {
    return (w->backward ? w->outputs : w->inputs) * w->r * w->r;
}

/* Copy the spread filters of one output to weight (C / groups, R, S). */
void gather_filters(const struct winograd *w, const float *spread, float *weight);

/* Transform the weights for Winograd. Return the number of scratch floats that winograd_conv needs.
 */
int64_t transform_weights(struct pass *pass);

#endif
