/* Forward and backward passes of a convolution over a rank's blocks. A pass also does work that is
 * cheap while a block is in cache. The forward pass applies the preceding activation to its input
 * and computes the moments of its output. The backward pass backpropagates through the following
 * activation and computes the sums that the preceding batch normalization needs. */
#include "conv.h"

#include "depthwise.h"
#include "mpidl.h"
#include "pointwise.h"
#include "products.h"
#include "winograd.h"

enum { OFFSETS, INDICES, WEIGHTS, LEAVES, PHASES, SPREAD }; /* scratch slots */

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
    struct gradient dy;
    const float *weight;
    const float *bias;    /* forward: added to y; backward: added to dx; or NULL */
    value *y, *dx;
    struct finish finish; /* applied to y */
    double *rows;         /* forward: moments of y; backward: batch-norm sums of dx; or NULL */
    const int32_t *counts;
    struct winograd shape; /* convolution of one group for y or dx; m_h is 0 if direct */
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
    int64_t out_at, pairs_at; /* offsets of dy, and of its pairs of channels, in this scratch */
    enum form over_channels; /* form of dy that dx reads */
    struct padded pairs;  /* layout of the copy in this form, if dy has another form */
    int in_place;         /* whether x is read without a copy */
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

static void lay_out(struct padded *p, enum form form, int64_t rows, int64_t columns,
                    int64_t phases) {
    p->form = form, p->rows = rows, p->phases = phases;
    p->columns = parts_of(columns, phases) * phases;
    p->row_stride = p->columns * LANES;
    p->channel_stride = p->rows * p->row_stride;
}

/* Return the number of floats of a padded copy of `channels` channels, in groups of `group`. */
static int64_t padded_floats(const struct padded *p, int64_t channels, int64_t group) {
    return floats_of(p->form, channels / group * item_channels(p->form, group) * p->channel_stride);
}

/* Return the number of rows or columns of a tile, which Python passes as 10 * rows + columns. */
static int rows_of(int64_t tile) { return (int)(tile / 10); }
static int columns_of(int64_t tile) { return (int)(tile % 10); }

/* The next functions return the arguments of Winograd convolutions of one group, see winograd.h. */
static struct winograd winograd_forward(const struct conv *c, int64_t tile) {
    const int64_t s = c->stride_h;
    return (struct winograd){.inputs = c->C / c->groups * s * s,
                             .outputs = c->K / c->groups,
                             .rows = c->P,
                             .columns = c->Q,
                             .m_h = rows_of(tile),
                             .m_w = columns_of(tile),
                             .r = (int)phase_taps(c->R, s, 0),
                             .step = s,
                             .taps = c->R};
}

static struct winograd winograd_backward(const struct conv *c, int64_t tile) {
    const int64_t s = c->stride_h;
    const int64_t r = most(phase_taps(c->R, s, c->top), phase_taps(c->R, s, c->left));
    return (struct winograd){.inputs = c->K / c->groups,
                             .outputs = c->C / c->groups * s * s,
                             .rows = c->H,
                             .columns = c->W,
                             .m_h = rows_of(tile),
                             .m_w = columns_of(tile),
                             .r = (int)r,
                             .backward = 1,
                             .step = s,
                             .taps = c->R,
                             .top = c->top,
                             .left = c->left};
}

enum { MOST_FILTER = 25 }; /* the largest number of taps of a phase */

static struct pixels pixels_of(const struct padded *p, const float *group, int64_t s) {
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
static int64_t spread_floats(const struct winograd *w) {
    return (w->backward ? w->outputs : w->inputs) * w->r * w->r;
}

/* Find the taps of the channels that begin with spread channel `index`: for each tap of their
 * filters, its position in the original filter, or -1. */
static void find_spread_taps(const struct winograd *w, int64_t index, int64_t *position) {
    const struct place phase = place_of_phase(w, index);
    for (int64_t r = 0; r < w->r; r++)
        for (int64_t s = 0; s < w->r; s++) {
            const int64_t row = original_tap(w, w->top, phase.row, r);
            const int64_t column = original_tap(w, w->left, phase.column, s);
            *position++ = row < 0 || column < 0 ? -1 : row * w->taps + column;
        }
}

/* The next two functions copy the filters of one output to spread, and back. */
static void spread_filters(const struct winograd *w, const float *weight, float *spread) {
    const int64_t phases = w->step * w->step, filter = w->taps * w->taps;
    const int64_t channels = (w->backward ? w->outputs : w->inputs) / phases;
    int64_t position[MOST_FILTER];
    for (int64_t phase = 0; phase < phases; phase++) {
        find_spread_taps(w, phase * channels, position);
        for (int64_t c = 0; c < channels; c++)
            for (int tap = 0; tap < w->r * w->r; tap++)
                *spread++ = position[tap] < 0 ? 0 : weight[c * filter + position[tap]];
    }
}

static void gather_filters(const struct winograd *w, const float *spread, float *weight) {
    const int64_t phases = w->step * w->step, filter = w->taps * w->taps;
    const int64_t channels = w->inputs / phases;
    int64_t position[MOST_FILTER];
    for (int64_t phase = 0; phase < phases; phase++) {
        find_spread_taps(w, phase * channels, position);
        for (int64_t c = 0; c < channels; c++)
            for (int tap = 0; tap < w->r * w->r; tap++, spread++)
                if (position[tap] >= 0) weight[c * filter + position[tap]] = *spread;
    }
}

/* Set the layout of x in scratch. `w` is the Winograd convolution that reads x; w->m_h is 0 if there
 * is none. */
static void lay_out_x(struct pass *pass, const struct winograd *w, enum form form) {
    const struct conv *c = &pass->c;
    int64_t rows = most(c->H + c->top + c->bottom, (c->P - 1) * c->stride_h + 1);
    int64_t columns = most(c->W + c->left + c->right, (c->Q - 1) * c->stride_w + 1);
    if (w->m_h) {
        rows = most(rows, c->stride_h * winograd_extent(c->P, w->m_h, w->r));
        columns = most(columns, c->stride_w * winograd_extent(c->Q, w->m_w, w->r));
    }
    lay_out(&pass->in, form, rows, columns, c->stride_w);
    pass->in_place =
        !NARROW && !pass->x.mean && c->stride_w == 1 && rows == c->H && columns == c->W;
}

/* Return the offset of a tap (channel of items, r, s) in padded x for output pixel (0, 0). */
static int32_t offset_of(const struct pass *pass, int64_t channel, int64_t r, int64_t s) {
    const struct conv *c = &pass->c;
    const int64_t wide = pass->in.columns / c->stride_w, column = s * c->dilation_w;
    return (int32_t)(channel * pass->in.channel_stride +
                     r * c->dilation_h * pass->in.row_stride +
                     (column % c->stride_w * wide + column / c->stride_w) * LANES);
}

/* Set the offsets of the taps of a group in padded x, in the order of its weights. */
static void find_taps(struct pass *pass) {
    const struct conv *c = &pass->c;
    int32_t *offset = (int32_t *)scratch(OFFSETS, pass->taps + 3);
    if (!offset) return;
    pass->offset = offset;
    for (int64_t ci = 0; ci < c->C / c->groups; ci++)
        for (int64_t r = 0; r < c->R; r++)
            for (int64_t s = 0; s < c->S; s++) *offset++ = offset_of(pass, ci, r, s);
}

#ifndef ODD_FIRST
#define ODD_FIRST 1 /* a test compiles the wrong order */
#endif

/* The taps of a direct sum, in the order in which they are added: for a pair of channels, first all
 * taps of the filter. */
struct taps {
    enum form form;
    int64_t count;
    int32_t *offset, *index; /* see struct direct and pack_weights */
};

static void add_tap(struct taps *taps, int64_t channel, int64_t channels, int64_t of_channel,
                    int64_t per_channel, int64_t index, int64_t offset) {
    /* of_channel: items between channels; per_channel: weights between channels */
    const int64_t second = channel + 1 < channels;
    if (taps->form == PAIRS) {
        taps->index[2 * taps->count] = (int32_t)(channel * per_channel + index);
        taps->index[2 * taps->count + 1] =
            second ? (int32_t)((channel + 1) * per_channel + index) : -1;
        taps->offset[taps->count++] = (int32_t)(channel / 2 * of_channel + offset);
        return;
    }
    const int64_t last = taps->form == ROUNDED ? second : 0;
    for (int64_t n = 0; n <= last; n++) {
        const int64_t i = ODD_FIRST ? last - n : n;
        taps->index[taps->count] = (int32_t)((channel + i) * per_channel + index);
        taps->offset[taps->count++] = (int32_t)((channel + i) * of_channel + offset);
    }
}

/* Return the number of channels that add_tap adds together. */
static int64_t channel_step(enum form form) { return form == FLOATS ? 1 : 2; }

/* Return a block's x as the kernels read it: a padded copy in scratch, or x in place. */
static const float *bring_x(const struct team *team, const struct pass *pass, int64_t block) {
    const struct conv *c = &pass->c;
    const value *x = pass->x.x + block * c->C * c->H * c->W * LANES;
    if (pass->in_place) return (const float *)x;
    struct padded in = pass->in;
    const int64_t group = c->C / c->groups;
    const struct picture picture = {group, c->H * c->W * LANES, c->H, c->W, c->top, c->left};
    in.data = team->shared, in.keep_border = block != team->first;
    EACH_TILE(team, ci, c->groups * item_channels(in.form, group)) {
        fill_source(&in, ci, &pass->x, x, picture);
        if (ci % 8 == 0) tick();
    }
    return in.data;
}

static void spread_tile(void *job, int64_t k, float *own) {
    const struct pass *pass = job;
    const struct conv *c = &pass->c;
    spread_filters(&pass->shape, pass->weight + k * c->C / c->groups * c->R * c->S,
                   (float *)pass->filters + k * spread_floats(&pass->shape));
}

static void transform_tile(void *job, int64_t tile, float *own) {
    const struct pass *pass = job;
    const struct winograd *w = &pass->shape;
    int64_t each = winograd_weights_tiles(w->outputs);
    winograd_weights(w, pass->filters + tile / each * w->inputs * w->outputs * w->r * w->r,
                     (float *)pass->packed + tile / each * pass->packed_group,
                     tile % each);
}

/* Transform the weights for Winograd. Return the number of scratch floats that winograd_conv needs.
 */
static int64_t transform_weights(struct pass *pass) {
    const struct winograd *w = &pass->shape;
    pass->filters = pass->weight;
    if (pass->c.stride_h > 1) {
        pass->filters = scratch(SPREAD, pass->c.K * spread_floats(w));
        each_tile(pass->c.K, spread_tile, pass, 0);
    }
    pass->packed_group = winograd_weights_floats(w);
    pass->packed = scratch(WEIGHTS, pass->c.groups * pass->packed_group);
    each_tile(pass->c.groups * winograd_weights_tiles(w->outputs), transform_tile, pass, 0);
    return winograd_conv_floats(w);
}

/* Compute the block's y from padded x, or the block's dx from padded dy. The addend of `finish`
 * starts at this block. */
static void convolve(const struct team *team, const struct pass *pass, const struct padded *from,
                     const float *in, struct finish finish, value *out) {
    const struct conv *c = &pass->c;
    const struct winograd *w = &pass->shape;
    const int64_t outputs = (pass->backward ? c->C : c->K) / c->groups;
    const int64_t inputs = (pass->backward ? c->K : c->C) / c->groups;
    const int64_t row = w->columns * LANES, channel = w->rows * row;
    for (int64_t g = 0; g < c->groups; g++) {
        const float *group =
            in + floats_of(from->form,
                           g * item_channels(from->form, inputs) * from->channel_stride);
        const float *bias = pass->bias ? pass->bias + g * outputs : NULL;
        value *to = out + g * outputs * channel;
        struct finish last = finish;
        if (finish.addend) last.addend += to - out;
        if (w->m_h) {
            const int64_t step = pass->backward ? c->stride_h : 1; /* between pixels of a phase */
            const struct outputs y = {to, channel, step * row, step * LANES, row, LANES};
            winograd_conv(team, w, pixels_of(from, group, pass->backward ? 1 : c->stride_h),
                          pass->packed + g * pass->packed_group, bias, y, last,
                          team->shared + pass->winograd_at);
        }
        for (int64_t i = 0; i < pass->phase_count; i++) {
            const struct phase *phase = &pass->phases[i];
            int64_t first = phase->row * row + phase->column * LANES;
            struct finish of_phase = {last.addend ? last.addend + first : NULL, last.relu};
            struct direct d = {.pairs = from->form == PAIRS,
                               .taps = phase->taps,
                               .offset = phase->offset,
                               .weight = phase->weight + g * outputs * phase->taps,
                               .bias = bias,
                               .outputs = outputs,
                               .out = to + first,
                               .finish = of_phase,
                               .out_channel = channel,
                               .out_row = pass->step_h * row,
                               .out_pixel = pass->step_w * LANES,
                               .rows = phase->rows,
                               .columns = phase->columns,
                               .in = group,
                               .in_row = pass->in_step * from->row_stride};
            direct_rows(team, &d);
        }
    }
}

void block_moments(const struct team *team, const struct conv *c, const value *y, double *rows,
                   const int32_t *counts, int64_t block) {
    const int64_t pixels = c->P * c->Q;
    double *row = rows + block * (1 + 2 * c->K);
    meet(team);
    if (team->member == 0) row[0] = (double)(pixels * counts[block]);
    EACH_TILE(team, k, c->K)
    channel_moments(y + k * pixels * LANES, pixels, counts[block], row + 1 + k, row + 1 + c->K + k);
}

void block_norm_sums(const struct team *team, const struct conv *c, const value *dx,
                     const struct source *x, double *rows, int64_t block) {
    double *row = rows + block * 2 * c->C;
    meet(team);
    EACH_TILE(team, ci, c->C) {
        int64_t channel = (block * c->C + ci) * c->H * c->W * LANES;
        channel_norm_sums(dx + channel, x->x + channel, c->H * c->W, x, ci, row + ci,
                          row + c->C + ci);
    }
}

static void forward_block(const struct team *team, void *job, int64_t block) {
    const struct pass *pass = job;
    const struct conv *c = &pass->c;
    int64_t pixels = c->P * c->Q * LANES;
    value *y = pass->y + block * c->K * pixels;
    const float *in = bring_x(team, pass, block);
    meet(team);
    struct finish finish = pass->finish;
    if (finish.addend) finish.addend += block * c->K * pixels;
    convolve(team, pass, &pass->in, in, finish, y);
    if (pass->rows) block_moments(team, c, y, pass->rows, pass->counts, block);
}

void mpidl_conv2d(const value *x, const float *mean, const float *scale, const float *beta,
                  float low, float high, const float *weight, const float *bias, value *y,
                  double *moments, const int32_t *counts, int64_t blocks, const int64_t *shape,
                  const int64_t *tree, int64_t tile, const value *addend, int64_t relu) {
    struct conv c = *(const struct conv *)shape;
    int64_t outputs = c.K / c.groups, inputs = c.C / c.groups, extra = 0;
    const struct winograd winograd = winograd_forward(&c, tile);
    struct pass pass = {.c = c,
                        .x = {x, mean, scale, beta, low, high},
                        .weight = weight,
                        .bias = bias,
                        .finish = {addend, (int)relu},
                        .y = y,
                        .rows = moments,
                        .counts = counts,
                        .shape = winograd,
                        .step_h = 1,
                        .step_w = 1,
                        .in_step = c.stride_h,
                        .taps = inputs * c.R * c.S};
    if (blocks == 0) return;
    /* floats without an activation are read in place */
    const int is_in_place = !NARROW && !mean && c.stride_h == 1 && c.stride_w == 1;
    const int by_pixel = is_pointwise(&c) && !is_in_place, by_channel = is_depthwise(&c) && !tile;
    if (by_pixel || by_channel) {
        const struct arguments job = {.c = c,
                                      .x = pass.x,
                                      .weight = weight,
                                      .bias = bias,
                                      .y = y,
                                      .finish = pass.finish,
                                      .rows = moments,
                                      .counts = counts};
        (by_pixel ? pointwise_forward : depthwise_forward)(&job, blocks);
        if (moments) fold_moments(moments, c.K, (const struct tree *)tree);
        return;
    }
    lay_out_x(&pass, &winograd, NARROW && !tile && inputs > 1 ? OVER_CHANNELS : FLOATS);
    pass.winograd_at = pass.in_place ? 0 : padded_floats(&pass.in, c.C, inputs);
    struct phase phase = {.rows = c.P, .columns = c.Q};
    if (tile) {
        extra = transform_weights(&pass);
    } else {
        struct taps taps = {.form = pass.in.form,
                            .offset = (int32_t *)scratch(OFFSETS, pass.taps),
                            .index = (int32_t *)scratch(INDICES, 2 * pass.taps)};
        float *packed = scratch(WEIGHTS, c.K * pass.taps);
        if (!taps.index || !taps.offset || !packed) return;
        for (int64_t ci = 0; ci < inputs; ci += channel_step(taps.form))
            for (int64_t r = 0; r < c.R; r++)
                for (int64_t s = 0; s < c.S; s++)
                    add_tap(&taps, ci, inputs, pass.in.channel_stride, c.R * c.S, r * c.S + s,
                            offset_of(&pass, 0, r, s));
        phase.taps = taps.count, phase.offset = taps.offset, phase.weight = packed;
        pack_weights(&(struct packing){taps.form, packed, weight, c.groups, outputs * pass.taps,
                                       outputs, pass.taps, taps.count, taps.index});
        pass.phases = &phase, pass.phase_count = 1;
    }
    each_block(blocks, forward_block, &pass, pass.winograd_at + extra, 0);
    if (moments) fold_moments(moments, c.K, (const struct tree *)tree);
}

/* The backward pass */

enum {
    FEW_OUTPUTS = 8,       /* minimum outputs of a group for vectors of outputs in dweight */
    CHUNK = 64,            /* taps that a member adds up at a time, a multiple of 8 */
    D_BYTES = 256 << 10,   /* maximum size of D for more than one row */
};

/* Whether a copy in one form must be converted to the other. */
static int converts(enum form form, enum form to) {
    return to != form && !(form == ROUNDED && to == FLOATS);
}

/* Plan the sums over images for dweight. Return their number of scratch floats for a team. */
static int64_t plan_products(struct pass *pass) {
    const struct conv *c = &pass->c;
    const int64_t outputs = parts_of(c->K / c->groups, LANES) * LANES;
    const int64_t most_terms = parts_of(c->Q, 2) * 2 * TERMS_PER_PIXEL, row = outputs * most_terms;
    pass->products = products_of(pass->taps, outputs, most_terms, 0);
    pass->products.place = pass->offset;
    for (int64_t t = 0; t < pass->products.inputs; t++)
        pass->offset[t] = t < pass->taps ? (int32_t)floats_of(pass->in.form, pass->offset[t]) : 0;
    pass->band = most(least(D_BYTES / (row * (int64_t)sizeof(float)), c->P), 1);
    return pass->band * row + pass->products.inputs * outputs;
}

/* Set the layout of dy in scratch. The border covers the pixels outside dy that the taps of dx
 * read. Rows and columns are rounded up to whole Winograd tiles. */
static void lay_out_dy(struct pass *pass, enum form form, enum form over_channels) {
    const struct conv *c = &pass->c;
    int64_t reach_h = (c->R - 1) * c->dilation_h - c->top,
            reach_w = (c->S - 1) * c->dilation_w - c->left;
    int64_t after = (c->H - 1 + c->top) / c->stride_h - (c->P - 1);
    int64_t right = (c->W - 1 + c->left) / c->stride_w - (c->Q - 1);
    if (!pass->dx) reach_h = reach_w = after = right = 0;
    pass->before = reach_h > 0 ? parts_of(reach_h, c->stride_h) : 0;
    pass->left = reach_w > 0 ? parts_of(reach_w, c->stride_w) : 0;
    const struct winograd *w = &pass->shape;
    const int tiles = pass->dx && w->m_h;
    if (tiles) { /* what tiles read before the first pixel of dy */
        pass->before = w->r - 1 - parts_of(c->top, w->step);
        pass->left = w->r - 1 - parts_of(c->left, w->step);
    }
    int64_t rows = pass->before + c->P + most(after, 0);
    int64_t columns = pass->left + c->Q + most(right, 0);
    if (tiles) {
        rows = most(rows, winograd_extent(parts_of(c->H, w->step), w->m_h, w->r));
        columns = most(columns, winograd_extent(parts_of(c->W, w->step), w->m_w, w->r));
    }
    const int64_t m_h = pass->dweight.m_h, m_w = pass->dweight.m_w;
    if (pass->leaves && m_h) {
        rows = most(rows, pass->before + parts_of(c->P, m_h) * m_h);
        columns = most(columns, pass->left + parts_of(c->Q, m_w) * m_w);
    }
    /* channels begin at cache lines */
    if (form == HALVES || over_channels == HALVES) columns = parts_of(columns, 2) * 2;
    lay_out(&pass->out, form, rows, columns, 1);
    if (converts(form, over_channels)) lay_out(&pass->pairs, over_channels, rows, columns, 1);
}

/* Choose the memory for the gradient of y. If no pass needs a border, the gradient of y may
 * overwrite dy; without an activation, dy is this gradient. dx must not be in the same memory. */
static void place_dy(struct pass *pass, value *dy_out) {
    const struct conv *c = &pass->c;
    if (!pass->dy.y.x) dy_out = (value *)pass->dy.dy; /* only read */
    int has_border = pass->out.rows != c->P || pass->out.columns != c->Q;
    if (!NARROW && !has_border && dy_out != pass->dx) pass->dy_out = dy_out;
}

/* Find the phases of dx, one for each pair of remainders modulo the strides, and the taps of each
 * phase. */
static void find_phases(struct pass *pass) {
    const struct conv *c = &pass->c;
    const struct padded *from = pass->pairs_at ? &pass->pairs : &pass->out;
    int64_t outputs = c->K / c->groups, inputs = c->C / c->groups, filter = c->R * c->S;
    int32_t *offset = (int32_t *)scratch(OFFSETS, pass->taps + 3 + outputs * filter);
    int32_t *index = (int32_t *)scratch(INDICES, 2 * outputs * filter);
    float *packed = scratch(WEIGHTS, c->K * inputs * filter);
    struct phase *phases = (struct phase *)scratch(
        PHASES, least(c->stride_h, c->H) * least(c->stride_w, c->W) *
                    (int64_t)(sizeof *phases / sizeof(float)));
    if (!offset || !index || !packed || !phases) return;
    offset += pass->taps + 3; /* find_taps writes the first offsets */
    pass->phases = phases;
    for (int64_t row = 0; row < c->stride_h && row < c->H; row++)
        for (int64_t column = 0; column < c->stride_w && column < c->W; column++) {
            struct phase *phase = &phases[pass->phase_count++];
            *phase = (struct phase){.row = row,
                                    .column = column,
                                    .rows = parts_of(c->H - row, c->stride_h),
                                    .columns = parts_of(c->W - column, c->stride_w),
                                    .offset = offset,
                                    .weight = packed};
            struct taps taps = {.form = pass->over_channels, .offset = offset, .index = index};
            for (int64_t k = 0; k < outputs; k += channel_step(taps.form))
                for (int64_t r = 0; r < c->R; r++)
                    for (int64_t s = 0; s < c->S; s++) {
                        int64_t p = row + c->top - r * c->dilation_h;
                        int64_t q = column + c->left - s * c->dilation_w;
                        if (p % c->stride_h || q % c->stride_w) continue;
                        p = p / c->stride_h + pass->before, q = q / c->stride_w + pass->left;
                        add_tap(&taps, k, outputs, from->channel_stride, inputs * filter,
                                r * c->S + s, p * from->row_stride + q * LANES);
                    }
            phase->taps = taps.count;
            pack_weights(&(struct packing){taps.form, packed, pass->weight, c->groups,
                                           outputs * inputs * filter, inputs, filter, taps.count,
                                           index});
            packed += c->C * taps.count, offset += taps.count;
        }
}

/* Compute the gradient of the weights of one group, (outputs, taps), by sums over images: dy and x
 * are copies over images, and begin at the group and the first pixel. The sums run over the rows of
 * dy, and each row is a sum of its own. */
static void dweight_products(const struct team *team, const struct pass *pass, const float *x,
                             const float *dy, float *leaf) {
    const struct conv *c = &pass->c;
    const struct products *p = &pass->products;
    const int64_t outputs = c->K / c->groups, tiles = parts_of(outputs, LANES);
    const int64_t channel = floats_of(pass->out.form, pass->out.channel_stride);
    const int64_t row = floats_of(pass->out.form, pass->out.row_stride);
    const int64_t x_row = floats_of(pass->in.form, c->stride_h * pass->in.row_stride);
    const int64_t D_row = tiles * LANES * p->most, chunks = parts_of(p->inputs, CHUNK);
    float *D = team->shared + pass->products_at, *S = D + pass->band * D_row;
    for (int64_t first = 0; first < c->P; first += pass->band) {
        const int64_t rows = least(pass->band, c->P - first);
        EACH_TILE(team, item, tiles * rows) {
            const int64_t o = item / rows * LANES, r = item % rows;
            transpose_terms(dy + o * channel + (first + r) * row, channel, c->Q,
                            D + r * D_row + place_of(p, o, 0), p->panel);
        }
        meet(team);
        EACH_TILE(team, item, tiles * LANES / p->panel * chunks) {
            const int64_t o = item / chunks * p->panel, i = item % chunks * CHUNK;
            const struct range outs = {o, o + p->panel}, ins = {i, least(i + CHUNK, p->inputs)};
            for (int64_t r = 0; r < rows; r++)
                add_products(p, x + (first + r) * x_row, D + r * D_row, c->Q * TERMS_PER_PIXEL,
                             outs, ins, S, first + r > 0);
        }
        meet(team);
        tick();
    }
    EACH_TILE(team, tile, tiles) write_sums(p, S, tile, outputs, pass->taps, leaf);
    meet(team);
}

static void dweight_block(const struct team *team, const struct pass *pass, const float *x,
                          const float *dy, float *leaf) {
    const struct conv *c = &pass->c;
    int64_t outputs = c->K / c->groups, inputs = c->C / c->groups;
    if (pass->products.panel) {
        for (int64_t g = 0; g < c->groups; g++)
            dweight_products(team, pass,
                             x + floats_of(pass->in.form, g * inputs * pass->in.channel_stride),
                             dy + floats_of(pass->out.form,
                                            g * outputs * pass->out.channel_stride +
                                                pass->before * pass->out.row_stride +
                                                pass->left * LANES),
                             leaf + g * outputs * pass->taps);
        return;
    }
    /* skip the border */
    dy += floats_of(pass->out.form, pass->before * pass->out.row_stride + pass->left * LANES);
    for (int64_t g = 0; g < c->groups; g++) {
        const float *from = x + floats_of(pass->in.form, g * inputs * pass->in.channel_stride);
        const float *to = dy + floats_of(pass->out.form, g * outputs * pass->out.channel_stride);
        float *group = leaf + g * outputs * pass->taps;
        const struct winograd *w = &pass->dweight;
        if (w->m_h) {
            float *spread = c->stride_h > 1 ? team->shared + pass->spread_at : group;
            winograd_dweight(team, w, pixels_of(&pass->in, from, c->stride_h),
                             pixels_of(&pass->out, to, 1), spread,
                             team->shared + pass->winograd_at);
            meet(team); /* wait before the scratch is reused */
            if (c->stride_h > 1) {
                EACH_TILE(team, k, outputs)
                gather_filters(w, spread + k * spread_floats(w), group + k * pass->taps);
                meet(team);
            }
            continue;
        }
        struct direct_dweight d = {.taps = pass->taps,
                                   .outputs = outputs,
                                   .offset = pass->offset,
                                   .dy = to,
                                   .dy_channel = pass->out.channel_stride,
                                   .dy_row = pass->out.row_stride,
                                   .in = from,
                                   .in_row = c->stride_h * pass->in.row_stride,
                                   .rows = c->P,
                                   .columns = c->Q,
                                   .leaf = group};
        EACH_TILE(team, t, parts_of(outputs, OUTPUTS)) direct_dweight_tile(&d, t, team->own);
    }
}

/* Return the sum over the pixels of channel k of dy, from its copy. */
static float sum_of_copy(const struct pass *pass, const struct padded *out, int64_t k) {
    const struct conv *c = &pass->c;
    const int64_t at = k * out->channel_stride + pass->before * out->row_stride +
                       pass->left * LANES;
    if (out->form == HALVES)
        return channel_sum_of_halves((const uint16_t *)out->data + at, c->P, c->Q,
                                     out->row_stride);
    return channel_sum((const float *)out->data + at, c->P, c->Q, out->row_stride);
}

static void backward_block(const struct team *team, void *job, int64_t block) {
    const struct pass *pass = job;
    const struct conv *c = &pass->c;
    int64_t pixels = c->P * c->Q * LANES, at = block * c->K * pixels;
    struct padded out = pass->out;
    if (pass->dy_out) out.data = pass->dy_out + at;
    else out.data = team->shared + pass->out_at;
    out.keep_border = block != team->first;
    float *leaf = pass->leaves ? leaf_of(team, pass->leaves, block) : NULL;
    const struct picture picture = {c->K, pixels, c->P, c->Q, pass->before, pass->left};
    const value *y = pass->dy.y.x ? pass->dy.y.x + at : NULL;
    EACH_TILE(team, k, c->K) {
        if (pass->dy_out != pass->dy.dy || pass->dy.y.x)
            fill_gradient(&out, k, &pass->dy, pass->dy.dy + at, y, pass->counts[block], picture);
        if (leaf) /* the gradient of the bias follows the gradient of the weights */
            leaf[c->K * pass->taps + k] = sum_of_copy(pass, &out, k);
    }
    const float *x = pass->leaves ? bring_x(team, pass, block) : NULL;
    meet(team);
    tick();
    if (leaf) dweight_block(team, pass, x, out.data, leaf);
    tick();
    if (pass->dx) {
        struct padded from = out;
        if (pass->pairs_at) {
            from = pass->pairs, from.data = team->shared + pass->pairs_at;
            EACH_TILE(team, k, c->groups * item_channels(from.form, c->K / c->groups))
            convert_copy(&from, k, &out, c->K / c->groups);
            meet(team);
        }
        convolve(team, pass, &from, from.data, (struct finish){0},
                 pass->dx + block * c->C * c->H * c->W * LANES);
    }
    if (pass->rows) block_norm_sums(team, c, pass->dx, &pass->x, pass->rows, block);
    if (leaf) leaf_done(team, pass->leaves, block);
}

void mpidl_conv2d_backward(const value *dy, const value *y, const float *y_mean,
                           const float *y_scale, const float *y_beta, float y_low, float y_high,
                           const float *a, const float *b, const float *c_, const value *x,
                           const float *mean, const float *scale, const float *beta, float low,
                           float high, const float *weight, const float *bias, value *dy_out,
                           value *dx, double *sums, float *dweight, int64_t nodes,
                           const int32_t *counts, int64_t blocks, const int64_t *shape,
                           const int64_t *tree, int64_t tile, int64_t dweight_tile) {
    struct leaves leaves;
    struct conv c = *(const struct conv *)shape;
    int64_t outputs = c.K / c.groups, inputs = c.C / c.groups, own = 0, extra = 0, spread = 0;
    struct pass pass = {.c = c,
                        .x = {x, mean, scale, beta, low, high},
                        .dy = {dy, {y, y_mean, y_scale, y_beta, y_low, y_high}, a, b, c_},
                        .weight = weight,
                        .bias = bias,
                        .dx = dx,
                        .rows = sums,
                        .counts = counts,
                        .shape = winograd_backward(&c, tile),
                        .backward = 1,
                        .step_h = c.stride_h,
                        .step_w = c.stride_w,
                        .in_step = 1,
                        .taps = inputs * c.R * c.S,
                        .leaves = dweight ? &leaves : NULL};
    if (blocks == 0) return;
    const int by_pixel = is_pointwise_backward(&c);
    if (by_pixel || (is_depthwise(&c) && !tile && !dweight_tile)) {
        const struct arguments job = {.c = c,
                                      .x = pass.x,
                                      .dy = pass.dy,
                                      .weight = weight,
                                      .bias = bias,
                                      .dx = dx,
                                      .rows = sums,
                                      .counts = counts,
                                      .dweight = dweight,
                                      .nodes = nodes,
                                      .tree = (const struct tree *)tree};
        (by_pixel ? pointwise_backward : depthwise_backward)(&job, blocks);
        if (sums) fold_sums(sums, 2 * c.C, (const struct tree *)tree);
        return;
    }
    if (dweight) pass.dweight = winograd_forward(&c, dweight_tile);
    const int uses_products = NARROW && dweight && !dweight_tile && outputs >= FEW_OUTPUTS;
    enum form images = uses_products ? OVER_IMAGES : FLOATS, channels;
    if (NARROW && dweight && dweight_tile) images = HALVES;
    if (dx) channels = !NARROW ? FLOATS : tile ? HALVES : outputs > 1 ? OVER_CHANNELS : FLOATS;
    else channels = images;
    /* dy is copied over images if a pass needs that, and else only over channels */
    const enum form form = !dweight ? (channels == PAIRS ? HALVES : channels) : images;
    pass.over_channels = channels;
    lay_out_x(&pass, &pass.dweight, images);
    lay_out_dy(&pass, form, channels);
    place_dy(&pass, dy_out);
    pass.out_at = dweight ? padded_floats(&pass.in, c.C, inputs) : 0;
    pass.winograd_at = pass.out_at;
    if (!pass.dy_out) /* transposing reads 16 channels of a group at a time, and pairs of pixels */
        pass.winograd_at +=
            LANES + padded_floats(&pass.out, c.K - outputs + parts_of(outputs, LANES) * LANES, 1);
    if (converts(form, channels)) {
        pass.pairs_at = pass.winograd_at;
        pass.winograd_at += padded_floats(&pass.pairs, c.K, outputs);
    }
    if (dx && tile)
        extra = transform_weights(&pass);
    else if (dx)
        find_phases(&pass);
    if (dweight) {
        if (dweight_tile) {
            extra = most(extra, winograd_dweight_floats(&pass.dweight));
            if (c.stride_h > 1) spread = outputs * spread_floats(&pass.dweight);
        } else {
            find_taps(&pass);
            if (uses_products) extra = most(extra, plan_products(&pass));
            else own = direct_dweight_floats(pass.taps);
        }
        leaves_begin(&leaves, (const struct tree *)tree, c.K * pass.taps + c.K, dweight, nodes,
                     LEAVES);
    }
    pass.products_at = pass.winograd_at;
    pass.spread_at = pass.winograd_at + extra;
    each_block(blocks, backward_block, &pass, pass.spread_at + spread, own);
    if (mpidl_missing_bytes) return;
    if (dweight) leaves_end(&leaves);
    if (sums) fold_sums(sums, 2 * c.C, (const struct tree *)tree);
}
