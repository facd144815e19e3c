/* Backward pass of a convolution over a rank's blocks. The pass also backpropagates through the
 * activation that follows, and computes the sums that the preceding batch normalization needs. */
#include "conv_pass.h"
#include "depthwise.h"
#include "mpidl.h"
#include "pointwise.h"

enum {
    FEW_OUTPUTS = 8,       /* minimum outputs of a group for vectors of outputs in dweight */
    CHUNK = 64,            /* taps that a member adds up at a time, a multiple of 8 */
    D_BYTES = 256 << 10,   /* maximum size of D for more than one row */
};

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
    pass->before = most(reach_h, 0) / c->stride_h;
    pass->left = most(reach_w, 0) / c->stride_w;
    const struct winograd *w = &pass->winograd;
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
    if (form != over_channels) lay_out(&pass->dy_for_dx, over_channels, rows, columns, 1);
}

/* Choose the memory for the gradient of y. If no pass needs a border, the gradient of y may
 * overwrite dy; without an activation, dy is this gradient. dx must not be in the same memory. */
static void place_dy(struct pass *pass, value *dy_out) {
    const struct conv *c = &pass->c;
    if (!pass->dy.y.x) dy_out = (value *)pass->dy.dy; /* only read */
    int has_border = pass->out.rows != c->P || pass->out.columns != c->Q;
    if (!NARROW && !has_border && dy_out != pass->dx) pass->dy_out = dy_out;
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

/* Find the phases of dx, one for each pair of remainders modulo the strides, and the taps of each
 * phase. */
static void find_phases(struct pass *pass) {
    const struct conv *c = &pass->c;
    const struct padded *from = pass->dy_for_dx_at ? &pass->dy_for_dx : &pass->out;
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
 * are copies over images, and begin at the group and the first pixel. Each row of dy is summed, and
 * the sums of the rows are added in order. */
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
    /* skip the border */
    dy += floats_of(pass->out.form, pass->before * pass->out.row_stride + pass->left * LANES);
    for (int64_t g = 0; g < c->groups; g++) {
        const float *from = x + floats_of(pass->in.form, g * inputs * pass->in.channel_stride);
        const float *to = dy + floats_of(pass->out.form, g * outputs * pass->out.channel_stride);
        float *group = leaf + g * outputs * pass->taps;
        if (pass->products.panel) {
            dweight_products(team, pass, from, to, group);
            continue;
        }
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
    const struct rows all = {c->top, 0, c->H};
    const float *x = pass->leaves ? bring_x(team, pass, block, all, out.keep_border) : NULL;
    meet(team);
    tick();
    if (leaf) dweight_block(team, pass, x, out.data, leaf);
    tick();
    if (pass->dx) {
        struct padded from = out;
        if (pass->dy_for_dx_at) {
            from = pass->dy_for_dx, from.data = team->shared + pass->dy_for_dx_at;
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
                        .winograd = winograd_backward(&c, tile),
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
    /* If there are several inputs, a single channel of dy is rounded, too: then dx does not depend on
     * whether dweight is needed. */
    const enum form single = inputs > 1 ? ROUNDED : FLOATS;
    if (dx) channels = !NARROW ? FLOATS : tile ? HALVES : outputs > 1 ? OVER_CHANNELS : single;
    else channels = images;
    /* The copy of dy has the form that dweight reads. If dx reads another form, it is converted. */
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
    if (form != channels) {
        pass.dy_for_dx_at = pass.winograd_at;
        pass.winograd_at += padded_floats(&pass.dy_for_dx, c.K, outputs);
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
            if (mpidl_missing_bytes) return;
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
