#include "pointwise.h"

#include "mpidl.h"
#include "products.h"

enum { OFFSETS, INDICES, WEIGHTS, LEAVES }; /* scratch slots */
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
    struct pointwise job;
    int64_t rows, columns, pixels;   /* sizes of the output */
    int64_t x_row, x_pixel;          /* strides in floats between the inputs of these pixels */
    int64_t band;                    /* maximum number of pixels in a band */
    int64_t channel;                 /* stride of channels in the copy of a band */
    const int32_t *offset;           /* offset of each channel in the copy */
    const float *packed;             /* packed weights */
    struct products products;        /* layout for dweight */
    struct leaves *leaves;           /* NULL if dweight is not needed */
};

static struct pass pass_of(const struct pointwise *job, int64_t channels) {
    const struct conv *c = &job->c;
    struct pass pass = {.job = *job,
                        .rows = c->P,
                        .columns = c->Q,
                        .pixels = c->P * c->Q,
                        .x_row = c->stride_h * c->W * LANES,
                        .x_pixel = c->stride_w * LANES};
    if (c->stride_h == 1 && c->stride_w == 1) pass.rows = 1, pass.columns = pass.pixels;
    int64_t fit = BAND_BYTES / (channels * LANES * (int64_t)sizeof(float));
    fit = least(most(fit, SHORTEST), LONGEST) / SHORTEST * SHORTEST;
    pass.band = parts_of(pass.pixels, parts_of(pass.pixels, fit)); /* bands of about equal size */
    pass.channel = (pass.band | 1) * LANES; /* so that channels use different sets of a cache */
    return pass;
}

/* Set the offsets of `taps` channels in the copy of a band, and pack the weights of the outputs.
 * The weight of output k and tap t is at weight + k * output_stride + t * tap_stride. */
static void prepare(struct pass *pass, int64_t outputs, int64_t output_stride, int64_t taps,
                    int64_t tap_stride) {
    int32_t *offset = (int32_t *)scratch(OFFSETS, taps);
    int32_t *index = (int32_t *)scratch(INDICES, taps);
    float *packed = scratch(WEIGHTS, outputs * taps);
    if (!offset || !index || !packed) return;
    for (int64_t t = 0; t < taps; t++) {
        offset[t] = (int32_t)(t * pass->channel);
        index[t] = (int32_t)(t * tap_stride);
    }
    pack_weights(packed, pass->job.weight, outputs, output_stride, taps, index);
    pass->offset = offset, pass->packed = packed;
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

/* Copy the inputs of a band in one channel, which begins at x, and compute their activation. */
static void copy_inputs(const struct pass *pass, int64_t channel, const float *x, int64_t first,
                        int64_t count, float *to) {
    const struct source *source = &pass->job.x;
    const struct norm n = norm_of(source, channel);
    const int64_t step = pass->x_pixel;
    while (count > 0) {
        struct run run = next_run(pass, first, count);
        const float *from = x + run.row * pass->x_row + run.first * step;
        first += run.count, count -= run.count;
        if (source->mean)
            for (; run.count > 0; run.count--, from += step, to += LANES)
                for (int part = 0; part < LANES; part += WIDTH)
                    store(to + part, activate(load(from + part), n));
        else
            for (; run.count > 0; run.count--, from += step, to += LANES)
                for (int part = 0; part < LANES; part += WIDTH)
                    store(to + part, load(from + part));
    }
}

static const struct team alone = {.members = 1};

/* Compute four channels of y or dx in a band, from the band's copy. `out` points to pixel (0, 0) of
 * channel 0. */
static void multiply_band(const struct pass *pass, int64_t quad, int64_t outputs, int64_t taps,
                          const float *copy, int64_t first, int64_t count, struct finish finish,
                          float *out, int64_t channel, int64_t row, int64_t pixel) {
    const int64_t k = quad * OUTPUTS;
    while (count > 0) {
        struct run run = next_run(pass, first, count);
        int64_t at = k * channel + run.row * row + run.first * pixel;
        struct direct d = {.taps = taps,
                           .offset = pass->offset,
                           .weight = pass->packed + k * taps,
                           .bias = pass->job.bias ? pass->job.bias + k : NULL,
                           .outputs = least(OUTPUTS, outputs - k),
                           .out = out + at,
                           .finish = finish,
                           .out_channel = channel,
                           .out_pixel = pixel,
                           .rows = 1,
                           .columns = run.count,
                           .in = copy};
        if (finish.addend) d.finish.addend += at;
        direct_rows(&alone, &d);
        first += run.count, count -= run.count, copy += run.count * LANES;
    }
}

static void forward_block(const struct team *team, void *argument, int64_t block) {
    const struct pass *pass = argument;
    const struct pointwise *job = &pass->job;
    const struct conv *c = &job->c;
    const int64_t channel = pass->pixels * LANES, bands = parts_of(pass->pixels, pass->band);
    const float *x = job->x.x + block * c->C * c->H * c->W * LANES;
    float *y = job->y + block * c->K * channel;
    struct finish finish = job->finish;
    if (finish.addend) finish.addend += block * c->K * channel;
    for (int64_t band = 0; band < bands; band++) {
        int64_t first = pass->pixels * band / bands;
        int64_t count = pass->pixels * (band + 1) / bands - first;
        EACH_TILE(team, ci, c->C)
        copy_inputs(pass, ci, x + ci * c->H * c->W * LANES, first, count,
                    team->shared + ci * pass->channel);
        meet(team);
        EACH_TILE(team, quad, parts_of(c->K, OUTPUTS))
        multiply_band(pass, quad, c->K, c->C, team->shared, first, count, finish, y, channel,
                      pass->columns * LANES, LANES);
        meet(team);
    }
    if (job->rows) block_moments(team, c, y, job->rows, job->counts, block);
}

void pointwise_forward(const struct pointwise *job, int64_t blocks) {
    const struct conv *c = &job->c;
    struct pass pass = pass_of(job, c->C);
    prepare(&pass, c->K, c->C, c->C, 1);
    each_block(blocks, forward_block, &pass, c->C * pass.channel, 0);
}

/* The backward pass. The scratch of a team holds the copies of dy and x, the sums for the bias, and
 * S (see products.h). The scratch of a member holds D. */

/* Add a band of one channel of dy to the four accumulators of channel_sum, (4, 16); column q
 * belongs to accumulator q % 4. */
static void add_to_bias(const struct pass *pass, const float *dy, int64_t first, int64_t count,
                        float *sums) {
    int64_t column = first % pass->job.c.Q;
    if (first == 0) memset(sums, 0, 4 * LANES * sizeof(float));
    for (int64_t i = 0; i < count; i++, dy += LANES) {
        float *sum = sums + column % 4 * LANES;
        for (int part = 0; part < LANES; part += WIDTH)
            store(sum + part, load(sum + part) + load(dy + part));
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
        for (int64_t pixel = 0; pixel < count; pixel++)
            transpose_16(dy + (first + o) * pass->channel + pixel * LANES, pass->channel,
                         D + place_of(p, o, pixel * LANES), p->panel);
    add_products(p, p->inputs, x, D, count * LANES, 0, p->panel, S + first * p->inputs, add);
}

/* Write the gradient with respect to the weights of 16 outputs, (16, C), from S. */
static void write_weights(const struct pass *pass, int64_t tile, const float *S, float *leaf) {
    const int64_t C = pass->job.c.C, inputs = pass->products.inputs;
    float square[LANES * LANES] __attribute__((aligned(64)));
    S += tile * inputs * LANES, leaf += tile * LANES * C;
    for (int64_t i = 0; i < C; i += LANES) {
        const int64_t count = least(C - i, LANES);
        if (count == LANES) {
            transpose_16(S + i * LANES, LANES, leaf + i, C);
            continue;
        }
        for (int64_t o = 0; o < LANES; o++)
            for (int64_t j = 0; j < count; j++) square[o * LANES + j] = S[(i + j) * LANES + o];
        for (int64_t o = 0; o < LANES; o++)
            memcpy(leaf + o * C + i, square + o * LANES, (size_t)count * sizeof(float));
    }
}

/* Set dx of one channel to the bias, or to zero: a strided pass writes only some pixels of dx. */
static void clear_channel(const struct pass *pass, int64_t ci, float *dx) {
    const struct conv *c = &pass->job.c;
    const vec value = pass->job.bias ? splat(pass->job.bias[ci]) : zero();
    for (int64_t i = 0; i < c->H * c->W * LANES; i += WIDTH) store(dx + i, value);
}

static void backward_block(const struct team *team, void *argument, int64_t block) {
    const struct pass *pass = argument;
    const struct pointwise *job = &pass->job;
    const struct conv *c = &job->c;
    const int64_t bands = parts_of(pass->pixels, pass->band);
    const int64_t y_channel = pass->pixels * LANES, x_channel = c->H * c->W * LANES;
    const int64_t at = block * c->K * y_channel;
    const float *x = job->x.x + block * c->C * x_channel;
    float *dx = job->dx ? job->dx + block * c->C * x_channel : NULL;
    float *leaf = pass->leaves ? leaf_of(team, pass->leaves, block) : NULL;
    struct padded copy = {.data = team->shared,
                          .rows = 1,
                          .phases = 1,
                          .row_stride = pass->channel,
                          .channel_stride = pass->channel};
    float *inputs = copy.data + c->K * pass->channel;
    float *biases = inputs + pass->products.inputs * pass->channel;
    float *S = biases + 4 * LANES * c->K;
    if (dx && pass->rows * pass->columns < c->H * c->W)
        EACH_TILE(team, ci, c->C) clear_channel(pass, ci, dx + ci * x_channel);
    for (int64_t band = 0; band < bands; band++) {
        const int64_t first = pass->pixels * band / bands;
        const int64_t count = pass->pixels * (band + 1) / bands - first;
        copy.columns = count;
        EACH_TILE(team, k, c->K) {
            const int64_t from = at + k * y_channel + first * LANES;
            fill_gradient(&copy, k, &job->dy, job->dy.dy + from,
                          job->dy.y.mean ? job->dy.y.x + from : NULL, job->counts[block], 1, count,
                          0, 0);
            float *dy = copy.data + k * pass->channel, *bias = biases + 4 * LANES * k;
            if (leaf) add_to_bias(pass, dy, first, count, bias);
            if (leaf && band + 1 == bands) leaf[c->K * c->C + k] = total_of_bias(bias);
        }
        if (leaf)
            EACH_TILE(team, ci, c->C)
            copy_inputs(pass, ci, x + ci * x_channel, first, count, inputs + ci * pass->channel);
        meet(team);
        if (dx)
            EACH_TILE(team, quad, parts_of(c->C, OUTPUTS))
            multiply_band(pass, quad, c->C, c->K, copy.data, first, count, (struct finish){0}, dx,
                          x_channel, pass->x_row, pass->x_pixel);
        if (leaf)
            EACH_TILE(team, panel, c->K / pass->products.panel)
            add_panel(pass, panel, copy.data, inputs, count, S, band > 0, team->own);
        meet(team);
        tick();
    }
    if (leaf) EACH_TILE(team, tile, c->K / LANES) write_weights(pass, tile, S, leaf);
    if (job->rows) block_norm_sums(team, c, job->dx, &job->x, job->rows, block);
    if (leaf) leaf_done(team, pass->leaves, block);
}

void pointwise_backward(const struct pointwise *job, int64_t blocks) {
    const struct conv *c = &job->c;
    struct leaves leaves;
    struct pass pass = pass_of(job, job->dweight ? c->C + c->K : c->K);
    pass.products = products_of(c->C, c->K, pass.band * LANES, pass.channel);
    int64_t floats = c->K * pass.channel, own = 0;
    if (job->dx) prepare(&pass, c->C, 1, c->K, c->C);
    if (job->dweight) {
        pass.leaves = &leaves;
        floats += pass.products.inputs * (pass.channel + c->K) + 4 * LANES * c->K;
        own = pass.products.panel * pass.products.most;
        leaves_begin(&leaves, job->tree, c->K * c->C + c->K, job->dweight, job->nodes, LEAVES);
    }
    each_block(blocks, backward_block, &pass, floats, own);
    if (mpidl_missing_bytes) return;
    if (job->dweight) leaves_end(&leaves);
}
