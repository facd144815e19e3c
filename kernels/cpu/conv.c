/* Forward pass of a convolution over a rank's blocks. The pass also does work that is cheap while a
 * block is in cache: it applies the preceding activation to its input, and computes the moments of
 * its output. */
#include "conv_pass.h"
#include "depthwise.h"
#include "mpidl.h"
#include "pointwise.h"

/* A copy of all rows of large images would need more memory than the images: a strip of rows has
 * at most this size, or SHORTEST rows. Smaller images are one strip. */
enum { STRIP_FLOATS = 1 << 23, SHORTEST = 16 };

/* Lay out the copy of x for strips, and return how many rows of y a strip has. They are a multiple
 * of MOST_OUTPUTS, so that strips have the Winograd tiles of the whole image. */
static int64_t lay_out_strips(struct pass *pass) {
    const struct conv *c = &pass->c;
    const struct winograd *w = &pass->winograd;
    const int64_t floats = padded_floats(&pass->in, c->C, c->C / c->groups);
    if (pass->in_place || floats <= STRIP_FLOATS) return c->P;
    const int64_t beyond = (c->R - 1) * c->dilation_h + 1 - c->stride_h; /* rows that strips share */
    const int64_t fit = (STRIP_FLOATS / parts_of(floats, pass->in.rows) - beyond) / c->stride_h;
    const int64_t strip = most(fit / MOST_OUTPUTS * MOST_OUTPUTS, SHORTEST);
    if (strip >= c->P) return c->P;
    int64_t rows = strip * c->stride_h + beyond;
    if (w->m_h) rows = most(rows, c->stride_h * winograd_extent(strip, w->m_h, w->r));
    lay_out(&pass->in, pass->in.form, rows, pass->in.columns, c->stride_w);
    return strip;
}

/* Return the rows of x that the copy for the rows of y from row `first` on has. */
static struct rows rows_from(const struct pass *pass, int64_t first) {
    const struct conv *c = &pass->c;
    const int64_t start = first * c->stride_h - c->top; /* below 0 in the border */
    const int64_t top = least(most(-start, 0), pass->in.rows), begin = most(start, 0);
    return (struct rows){top, begin, most(least(c->H - begin, pass->in.rows - top), 0)};
}

static void forward_block(const struct team *team, void *job, int64_t block) {
    const struct pass *pass = job;
    const struct conv *c = &pass->c;
    const int64_t row = c->Q * LANES, pixels = c->P * row;
    value *y = pass->y + block * c->K * pixels;
    for (int64_t first = 0; first < c->P; first += pass->strip) {
        struct pass part = *pass;
        struct phase phase;
        part.winograd.rows = least(pass->strip, c->P - first);
        if (pass->phase_count) {
            phase = *pass->phases, phase.rows = part.winograd.rows, part.phases = &phase;
        }
        if (first) meet(team); /* wait before the copy is overwritten */
        const int keep_border = pass->strip == c->P && block != team->first;
        const float *in = bring_x(team, pass, block, rows_from(pass, first), keep_border);
        meet(team);
        struct finish finish = pass->finish;
        if (finish.addend) finish.addend += block * c->K * pixels + first * row;
        convolve(team, &part, &pass->in, in, finish, y + first * row);
    }
    if (pass->rows) block_moments(team, c, y, pass->rows, pass->counts, block);
}

void mpidl_conv2d(const value *x, const float *mean, const float *scale, const float *beta,
                  float low, float high, const float *weight, const float *bias, value *y,
                  double *moments, const int32_t *counts, int64_t blocks, const int64_t *shape,
                  const int64_t *tree, int64_t tile, const value *addend, int64_t relu,
                  const value *more, int64_t joined) {
    struct conv c = *(const struct conv *)shape;
    int64_t outputs = c.K / c.groups, inputs = c.C / c.groups, extra = 0;
    const struct winograd winograd = winograd_forward(&c, tile);
    struct pass pass = {.c = c,
                        .x = {x, mean, scale, beta, low, high},
                        .more = more,
                        .joined = joined,
                        .weight = weight,
                        .bias = bias,
                        .finish = {addend, (int)relu},
                        .y = y,
                        .rows = moments,
                        .counts = counts,
                        .winograd = winograd,
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
    pass.strip = lay_out_strips(&pass);
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
