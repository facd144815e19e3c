#include "pointwise.h"

#include "mpidl.h"
#include "products.h"

enum {
    BAND_BYTES = 512 << 10, /* maximum size of the copies of a band longer than SHORTEST */
    SHORTEST = 6,           /* minimum pixels of a band; a multiple of every build's widest tile */
    LONGEST = 96,           /* maximum pixels of a band */
};

int is_pointwise(const struct conv *c) {
    return c->R == 1 && c->S == 1 && c->groups == 1 &&
           !(c->top | c->bottom | c->left | c->right);
}

/* The gradient with respect to weights computes vectors of 16 outputs. */
int is_pointwise_backward(const struct conv *c) {
    return is_pointwise(c) && c->K % LANES == 0 && c->C >= 8;
}

/* A pass, and how its pixels are divided. A row has `columns` adjacent output pixels; if the stride
 * is 1, the whole image is one row. */
struct pass {
    struct arguments job;
    int64_t rows, columns, pixels;   /* sizes of the output */
    int64_t x_row, x_pixel;          /* strides in floats between the inputs of these pixels */
    int64_t band;                    /* maximum number of pixels in a band */
    enum form over_channels, over_images; /* forms of the copies, for y or dx and for dweight */
    int64_t channel;                 /* stride of channels in a copy over channels, in floats */
    int64_t image_channel;           /* the same for a copy over images */
    int64_t taps;                    /* channels of items that a sum over channels reads */
    const int32_t *offset;           /* offset of each tap in the copy */
    const float *packed;             /* packed weights */
    struct products products;        /* layout for dweight */
    int64_t s_floats;                /* number of floats of S; 0 if dweight is not needed */
    struct leaves *leaves;           /* NULL if dweight is not needed */
};

static struct pass pass_of(const struct arguments *job, int64_t channels) {
    const struct conv *c = &job->c;
    struct pass pass = {.job = *job,
                        .rows = c->P,
                        .columns = c->Q,
                        .pixels = c->P * c->Q,
                        .x_row = c->stride_h * c->W * LANES,
                        .x_pixel = c->stride_w * LANES,
                        .over_channels = NARROW ? OVER_CHANNELS : FLOATS,
                        .over_images = NARROW ? OVER_IMAGES : FLOATS};
    if (c->stride_h == 1 && c->stride_w == 1) pass.rows = 1, pass.columns = pass.pixels;
    int64_t fit = BAND_BYTES / (channels * LANES * (int64_t)sizeof(value));
    fit = least(most(fit, SHORTEST), LONGEST) / SHORTEST * SHORTEST;
    pass.band = parts_of(pass.pixels, parts_of(pass.pixels, fit)); /* bands of about equal size */
    /* channels use different sets of a cache */
    pass.channel = odd_lines(pass.band);
    pass.image_channel =
        pass.over_images == HALVES ? odd_lines(parts_of(pass.band, 2)) : pass.channel;
    return pass;
}

/* Set the offsets of the taps of `channels` channels in the copy of a band, and pack the weights of
 * the outputs. The weight of output k and channel c is at weight + k * output_stride + c *
 * channel_stride. */
static void prepare(struct pass *pass, int64_t outputs, int64_t output_stride, int64_t channels,
                    int64_t channel_stride) {
    const int64_t taps = item_channels(pass->over_channels, channels);
    int32_t *offset = (int32_t *)scratch(OFFSETS, taps);
    int32_t *index = (int32_t *)scratch(INDICES, channels + 1);
    float *packed = scratch(WEIGHTS, outputs * taps);
    if (!offset || !index || !packed) return;
    struct taps order = {.form = pass->over_channels, .offset = offset, .index = index};
    for (int64_t c = 0; c < channels; c += channel_step(order.form))
        add_tap(&order, c, channels, pass->channel, channel_stride, 0, 0);
    pack_weights(&(struct packing){pass->over_channels, packed, pass->job.weight, 1, 0, outputs,
                                   output_stride, taps, index});
    pass->taps = taps, pass->offset = offset, pass->packed = packed;
}

/* The pixels [first, first + count) of a row; `row` is the number of the row. */
struct run {
    int64_t row, first, count;
};

/* For a band of `count` pixels that starts at pixel `first`, return the part in the row of `first`.
 */
static struct run next_run(const struct pass *pass, int64_t first, int64_t count) {
    int64_t row = first / pass->columns, column = first % pass->columns;
    return (struct run){row, column, least(count, pass->columns - column)};
}

/* Copy the inputs of a band in one channel of items, and compute their activation. x begins at
 * channel 0. */
static void copy_inputs(const struct pass *pass, enum form form, int64_t channel, const value *x,
                        int64_t first, int64_t count, float *to) {
    const struct conv *c = &pass->job.c;
    while (count > 0) {
        struct run run = next_run(pass, first, count);
        copy_pixels(form, to, channel, &pass->job.x,
                    x + run.row * pass->x_row + run.first * pass->x_pixel, c->C,
                    c->H * c->W * LANES, pass->x_pixel, run.count);
        first += run.count, count -= run.count, to += floats_of(form, run.count * LANES);
    }
}

static const struct team alone = {.members = 1};

/* Compute four channels of y or dx in a band, from the band's copy. `out` points to pixel (0, 0) of
 * channel 0. */
static void multiply_band(const struct pass *pass, int64_t quad, int64_t outputs,
                          const float *copy, int64_t first, int64_t count, struct finish finish,
                          value *out, int64_t channel, int64_t row, int64_t pixel) {
    const int64_t k = quad * OUTPUTS;
    while (count > 0) {
        struct run run = next_run(pass, first, count);
        int64_t at = k * channel + run.row * row + run.first * pixel;
        struct direct d = {.pairs = pass->over_channels == PAIRS,
                           .taps = pass->taps,
                           .offset = pass->offset,
                           .weight = pass->packed + k * pass->taps,
                           .bias = pass->job.bias ? pass->job.bias + k : NULL,
                           .outputs = least(OUTPUTS, outputs - k),
                           .out = out + at,
                           .finish = finish,
                           .out_channel = channel,
                           .out_pixel = pixel,
                           .rows = 1,
                           .columns = run.count,
                           .in = copy,
                           .next = k + OUTPUTS < outputs ? OUTPUTS * channel : 0};
        if (finish.addend) d.finish.addend += at;
        direct_rows(&alone, &d);
        first += run.count, count -= run.count, copy += run.count * LANES;
    }
}

static void forward_block(const struct team *team, void *argument, int64_t block) {
    const struct pass *pass = argument;
    const struct arguments *job = &pass->job;
    const struct conv *c = &job->c;
    const int64_t channel = pass->pixels * LANES, bands = parts_of(pass->pixels, pass->band);
    const value *x = job->x.x + block * c->C * c->H * c->W * LANES;
    value *y = job->y + block * c->K * channel;
    struct finish finish = job->finish;
    if (finish.addend) finish.addend += block * c->K * channel;
    for (int64_t band = 0; band < bands; band++) {
        int64_t first = pass->pixels * band / bands;
        int64_t count = pass->pixels * (band + 1) / bands - first;
        EACH_TILE(team, t, pass->taps)
        copy_inputs(pass, pass->over_channels, t, x, first, count,
                    team->shared + t * pass->channel);
        meet(team);
        EACH_TILE(team, quad, parts_of(c->K, OUTPUTS))
        multiply_band(pass, quad, c->K, team->shared, first, count, finish, y, channel,
                      pass->columns * LANES, LANES);
        meet(team);
    }
    if (job->rows) block_moments(team, c, y, job->rows, job->counts, block);
}

void pointwise_forward(const struct arguments *job, int64_t blocks) {
    const struct conv *c = &job->c;
    struct pass pass = pass_of(job, c->C);
    prepare(&pass, c->K, c->C, c->C, 1);
    each_block(blocks, forward_block, &pass, pass.taps * pass.channel, 0);
}

/* The backward pass. The scratch of a team holds the copies of dy and x over images, the sums for
 * the bias, S (see products.h), and the copy of dy over channels, unless it has the same form. The
 * scratch of a member holds D. */

/* Add a band of one channel of dy to the four accumulators of channel_sum, (4, 16); column q
 * belongs to accumulator q % 4. */
static void add_to_bias(const struct pass *pass, const float *dy, int64_t first, int64_t count,
                        float *sums) {
    const uint16_t *halves = pass->over_images == HALVES ? (const uint16_t *)dy : NULL;
    int64_t column = first % pass->job.c.Q;
    if (first == 0) memset(sums, 0, 4 * LANES * sizeof(float));
    for (int64_t i = 0; i < count * LANES; i += LANES) {
        float *sum = sums + column % 4 * LANES;
        for (int part = 0; part < LANES; part += WIDTH)
            store(sum + part, load(sum + part) +
                                  (halves ? load(halves + i + part) : load(dy + i + part)));
        column = column + 1 < pass->job.c.Q ? column + 1 : 0;
    }
}

static float total_of_bias(const float *sums) {
    vec total[PARTS];
    for (int p = 0; p < PARTS; p++) {
        vec a[4];
        UNROLL for (int i = 0; i < 4; i++) a[i] = load(sums + i * LANES + p * WIDTH);
        total[p] = four(a);
    }
    return lanes_total(total);
}

/* Add the products of a band to S for one panel of outputs. dy and x are the copies of the band. */
static void add_panel(const struct pass *pass, int64_t number, const float *dy, const float *x,
                      int64_t count, float *S, int add, float *D) {
    const struct products *p = &pass->products;
    const int64_t first = number * p->panel;
    for (int64_t o = 0; o < p->panel; o += LANES)
        transpose_terms(dy + (first + o) * pass->image_channel, pass->image_channel, count,
                        D + place_of(p, o, 0), p->panel);
    add_products(p, x, D, count * TERMS_PER_PIXEL, (struct range){0, p->panel},
                 (struct range){0, p->inputs}, S + first * p->inputs, add);
}

/* Set dx of one channel to the bias, or to zero: a strided pass writes only some pixels of dx. */
static void clear_channel(const struct pass *pass, int64_t ci, value *dx) {
    const struct conv *c = &pass->job.c;
    const vec bias = pass->job.bias ? splat(pass->job.bias[ci]) : zero();
    for (int64_t i = 0; i < c->H * c->W * LANES; i += WIDTH) store(dx + i, bias);
}

static void backward_block(const struct team *team, void *argument, int64_t block) {
    const struct pass *pass = argument;
    const struct arguments *job = &pass->job;
    const struct conv *c = &job->c;
    const int64_t bands = parts_of(pass->pixels, pass->band);
    const int64_t y_channel = pass->pixels * LANES, x_channel = c->H * c->W * LANES;
    const int64_t at = block * c->K * y_channel;
    const value *x = job->x.x + block * c->C * x_channel;
    value *dx = job->dx ? job->dx + block * c->C * x_channel : NULL;
    float *leaf = pass->leaves ? leaf_of(team, pass->leaves, block) : NULL;
    struct padded copy = {.data = team->shared, .form = pass->over_images, .rows = 1, .phases = 1};
    copy.row_stride = copy.channel_stride =
        pass->image_channel * (pass->over_images == HALVES ? 2 : 1);
    float *inputs = team->shared + c->K * pass->image_channel;
    float *biases = inputs + (leaf ? pass->products.inputs * pass->image_channel : 0);
    float *S = biases + (leaf ? 4 * LANES * c->K : 0), *pairs = S + pass->s_floats;
    if (dx && pass->rows * pass->columns < c->H * c->W)
        EACH_TILE(team, ci, c->C) clear_channel(pass, ci, dx + ci * x_channel);
    for (int64_t band = 0; band < bands; band++) {
        const int64_t first = pass->pixels * band / bands;
        const int64_t count = pass->pixels * (band + 1) / bands - first;
        const struct picture picture = {c->K, y_channel, 1, count, 0, 0};
        const value *y = job->dy.y.x ? job->dy.y.x + at + first * LANES : NULL;
        copy.columns = count;
        EACH_TILE(team, k, c->K) {
            fill_gradient(&copy, k, &job->dy, job->dy.dy + at + first * LANES, y,
                          job->counts[block], picture);
            float *dy = team->shared + k * pass->image_channel, *bias = biases + 4 * LANES * k;
            if (leaf) add_to_bias(pass, dy, first, count, bias);
            if (leaf && band + 1 == bands) leaf[c->K * c->C + k] = total_of_bias(bias);
        }
        if (leaf)
            EACH_TILE(team, ci, c->C)
            copy_inputs(pass, pass->over_images, ci, x, first, count,
                        inputs + ci * pass->image_channel);
        meet(team);
        const float *from = team->shared;
        if (dx && pass->over_channels != pass->over_images) {
            struct padded for_dx = {pairs, pass->over_channels, 1, count, 1, pass->channel,
                                    pass->channel, 0};
            from = pairs;
            EACH_TILE(team, t, pass->taps) convert_copy(&for_dx, t, &copy, c->K);
            meet(team);
        }
        if (dx)
            EACH_TILE(team, quad, parts_of(c->C, OUTPUTS))
            multiply_band(pass, quad, c->C, from, first, count, (struct finish){0}, dx, x_channel,
                          pass->x_row, pass->x_pixel);
        if (leaf)
            EACH_TILE(team, panel, c->K / pass->products.panel)
            add_panel(pass, panel, team->shared, inputs, count, S, band > 0, team->own);
        meet(team);
        tick();
    }
    if (leaf) EACH_TILE(team, tile, c->K / LANES)
        write_sums(&pass->products, S, tile, c->K, c->C, leaf);
    if (job->rows) block_norm_sums(team, c, job->dx, &job->x, job->rows, block);
    if (leaf) leaf_done(team, pass->leaves, block);
}

void pointwise_backward(const struct arguments *job, int64_t blocks) {
    const struct conv *c = &job->c;
    struct leaves leaves;
    struct pass pass = pass_of(job, job->dweight ? c->C + c->K : c->K);
    pass.products = products_of(c->C, c->K, parts_of(pass.band, 2) * 2 * TERMS_PER_PIXEL,
                                pass.image_channel);
    int64_t floats = c->K * pass.image_channel, own = 0;
    if (job->dx) prepare(&pass, c->C, 1, c->K, c->C);
    if (job->dx && pass.over_channels != pass.over_images) floats += pass.taps * pass.channel;
    if (job->dweight) {
        pass.leaves = &leaves, pass.s_floats = pass.products.inputs * c->K;
        floats += pass.products.inputs * pass.image_channel + pass.s_floats + 4 * LANES * c->K;
        own = pass.products.panel * pass.products.most;
        leaves_begin(&leaves, job->tree, c->K * c->C + c->K, job->dweight, job->nodes, LEAVES);
    }
    each_block(blocks, backward_block, &pass, floats, own);
    if (mpidl_missing_bytes) return;
    if (job->dweight) leaves_end(&leaves);
}
