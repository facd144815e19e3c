/* Forward pass of a convolution over a rank's blocks. The pass also does work that is cheap while a
 * block is in cache: it applies the preceding activation to its input, and computes the moments of
 * its output. */
#include "conv_pass.h"
#include "depthwise.h"
#include "mpidl.h"
#include "pointwise.h"

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
