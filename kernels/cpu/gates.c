/* Products of two values with broadcasting, as in squeeze-and-excite gates, and a learnable factor
 * for each channel.
 *
 * A sum of products adds the pixels of a row in runs of CHUNK, each with four accumulators, and
 * rows in runs of RUN. So no accumulator adds more than a few dozen numbers one after the other, and
 * the order depends only on the shapes. */
#include "activation.h"
#include "conv.h"
#include "fold.h"
#include "mpidl.h"
#include "team.h"

enum { CHUNK = 64, RUN = 16 };

/* The axes of a product, in which neighbouring axes are merged if the operands treat them equally.
 * The steps of an operand are in pixels, and 0 along an axis that it lacks. */
struct axes {
    int64_t size[3], first[3], second[3];
};

struct job {
    const value *a, *b;
    value *out;
    const float *factor;
    const struct axes *axes;
    struct leaves *leaves;
    int64_t channels, pixels, chunks;
};

/* Return the number of pixels of an operand with these steps. */
static int64_t pixels_of(const int64_t *size, const int64_t *step) {
    int64_t count = 1;
    for (int i = 0; i < 3; i++) count *= step[i] ? size[i] : 1;
    return count;
}

/* A tile is CHUNK * RUN pixels of a row. */
static void multiply_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct axes *axes = job->axes;
    const int64_t *size = axes->size, *to_a = axes->first, *to_b = axes->second;
    const int64_t row = tile / job->chunks, first = tile % job->chunks * CHUNK * RUN;
    const int64_t count = least(size[2] - first, CHUNK * RUN);
    const int64_t block = row / (size[0] * size[1]);
    const int64_t i = row / size[1] % size[0], j = row % size[1];
    const int64_t of_a = block * pixels_of(size, to_a), of_b = block * pixels_of(size, to_b);
    const int64_t step_a = to_a[2] * LANES, step_b = to_b[2] * LANES;
    const value *a = job->a + (of_a + i * to_a[0] + j * to_a[1] + first * to_a[2]) * LANES;
    const value *b = job->b + (of_b + i * to_b[0] + j * to_b[1] + first * to_b[2]) * LANES;
    value *y = job->out + (row * size[2] + first) * LANES;
    for (int64_t d = 0; d < count; d++, a += step_a, b += step_b, y += LANES)
        UNROLL for (int part = 0; part < LANES; part += WIDTH)
            store(y + part, load(a + part) * load(b + part));
}

void mpidl_multiply(const value *a, const value *b, value *y, int64_t blocks, const int64_t *axes) {
    struct job job = {.a = a, .b = b, .out = y, .axes = (const struct axes *)axes};
    const int64_t *size = job.axes->size;
    job.chunks = parts_of(size[2], CHUNK * RUN);
    each_tile(blocks * size[0] * size[1] * job.chunks, multiply_tile, &job, 0);
}

/* Return the sum of the products of `count` pixels of dy and x, for WIDTH lanes. */
INLINE vec sum_of_products(const value *dy, const value *x, int64_t count, int64_t step) {
    vec total = zero();
    for (int64_t first = 0; first < count; first += CHUNK) {
        const int64_t stop = least(first + CHUNK, count);
        vec a[4] = {zero(), zero(), zero(), zero()};
        int64_t d = first;
        for (; d + 4 <= stop; d += 4) UNROLL for (int i = 0; i < 4; i++)
            a[i] = muladd(load(dy + (d + i) * LANES), load(x + (d + i) * step), a[i]);
        for (int i = 0; d < stop; d++, i++)
            a[i] = muladd(load(dy + d * LANES), load(x + d * step), a[i]);
        total += four(a);
    }
    return total;
}

/* The places of the terms of an output: rows of dy, and of the other operand. */
struct rows {
    const value *dy, *x;
    int64_t count[2], dy_step[2], x_step[2];
};

INLINE const value *dy_row(const struct rows *r, int64_t n) {
    return r->dy + (n / r->count[1] * r->dy_step[0] + n % r->count[1] * r->dy_step[1]) * LANES;
}

INLINE const value *x_row(const struct rows *r, int64_t n) {
    return r->x + (n / r->count[1] * r->x_step[0] + n % r->count[1] * r->x_step[1]) * LANES;
}

/* The output has one pixel for each of these rows. */
INLINE void reduce_rows(const struct rows *r, int64_t count, int64_t step, value *out) {
    const int64_t rows = r->count[0] * r->count[1];
    for (int part = 0; part < LANES; part += WIDTH) {
        vec total = zero();
        for (int64_t n = 0; n < rows;) {
            vec run = zero();
            for (const int64_t stop = least(n + RUN, rows); n < stop; n++)
                run += sum_of_products(dy_row(r, n) + part, x_row(r, n) + part, count, step);
            total += run;
        }
        store(out + part, total);
    }
}

/* The output has as many pixels as a row: the sums of `count` of them over the rows. */
INLINE void add_rows(const struct rows *r, int64_t count, int64_t step, float *own, value *out) {
    const int64_t rows = r->count[0] * r->count[1];
    float *run = own, *total = own + CHUNK * LANES;
    memset(total, 0, (size_t)(count * LANES) * sizeof *total);
    for (int64_t n = 0; n < rows;) {
        memset(run, 0, (size_t)(count * LANES) * sizeof *run);
        for (const int64_t stop = least(n + RUN, rows); n < stop; n++) {
            const value *dy = dy_row(r, n), *x = x_row(r, n);
            for (int64_t d = 0; d < count; d++)
                UNROLL for (int part = 0; part < LANES; part += WIDTH) {
                    float *sum = run + d * LANES + part;
                    store(sum, muladd(load(dy + d * LANES + part), load(x + d * step + part),
                                      load(sum)));
                }
        }
        for (int64_t i = 0; i < count * LANES; i += WIDTH)
            store(total + i, load(total + i) + load(run + i));
    }
    for (int64_t i = 0; i < count * LANES; i += WIDTH) store(out + i, load(total + i));
}

/* A tile is a pixel of the first two axes of the result and, if the result has the third axis, a
 * chunk of this axis. `first` has the steps of the other operand, and `second` those of the result.
 * Steps of dy follow from the sizes. */
static void multiply_dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct axes *axes = job->axes;
    const int64_t *size = axes->size, *to_x = axes->first, *to_out = axes->second;
    const int64_t kept[2] = {to_out[0] ? size[0] : 1, to_out[1] ? size[1] : 1};
    const int64_t first = tile % job->chunks * CHUNK, place = tile / job->chunks;
    const int64_t block = place / (kept[0] * kept[1]);
    const int64_t i = place / kept[1] % kept[0], j = place % kept[1];
    const int64_t dy_step[2] = {size[1] * size[2], size[2]};
    const int64_t pixel = block * size[0] * dy_step[0] + i * dy_step[0] + j * dy_step[1] + first;
    const int64_t other = block * pixels_of(size, to_x) + i * to_x[0] + j * to_x[1];
    const int64_t result =
        block * pixels_of(size, to_out) + i * to_out[0] + j * to_out[1] + first * to_out[2];
    const struct rows rows = {.dy = job->a + pixel * LANES,
                              .x = job->b + (other + first * to_x[2]) * LANES,
                              .count = {size[0] / kept[0], size[1] / kept[1]},
                              .dy_step = {dy_step[0], dy_step[1]},
                              .x_step = {to_x[0], to_x[1]}};
    value *out = job->out + result * LANES;
    if (to_out[2])
        add_rows(&rows, least(size[2] - first, CHUNK), to_x[2] * LANES, own, out);
    else
        reduce_rows(&rows, size[2], to_x[2] * LANES, out);
}

void mpidl_multiply_dx(const value *dy, const value *x, value *dx, int64_t blocks,
                       const int64_t *axes) {
    struct job job = {.a = dy, .b = x, .out = dx, .axes = (const struct axes *)axes};
    const int64_t *size = job.axes->size, *to_dx = job.axes->second;
    job.chunks = to_dx[2] ? parts_of(size[2], CHUNK) : 1;
    const int64_t rows = (to_dx[0] ? size[0] : 1) * (to_dx[1] ? size[1] : 1);
    each_tile(blocks * rows * job.chunks, multiply_dx_tile, &job, 2 * CHUNK * LANES);
}

/* ---- a factor for each channel ---- */

static void scale_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const vec factor = splat(job->factor[tile % job->channels]);
    const int64_t stop = (tile + 1) * job->pixels * LANES;
    for (int64_t i = tile * job->pixels * LANES; i < stop; i += WIDTH)
        store(job->out + i, load(job->a + i) * factor);
}

void mpidl_scale_channels(const value *x, const float *factor, value *y, int64_t blocks,
                          int64_t channels, int64_t pixels) {
    struct job job = {
        .a = x, .out = y, .factor = factor, .channels = channels, .pixels = pixels};
    each_tile(blocks * channels, scale_tile, &job, 0);
}

static void dfactor_block(const struct team *team, void *argument, int64_t block) {
    const struct job *job = argument;
    float *leaf = leaf_of(team, job->leaves, block);
    EACH_TILE(team, channel, job->channels) {
        const int64_t at = (block * job->channels + channel) * job->pixels * LANES;
        vec total[PARTS];
        for (int p = 0; p < PARTS; p++) {
            const int64_t part = at + p * WIDTH;
            total[p] = sum_of_products(job->a + part, job->b + part, job->pixels, LANES);
        }
        leaf[channel] = lanes_total(total);
    }
    leaf_done(team, job->leaves, block);
}

void mpidl_scale_channels_dfactor(const value *dy, const value *x, float *nodes, int64_t count,
                                  const int64_t *tree, int64_t channels, int64_t pixels) {
    struct leaves leaves;
    struct job job = {
        .a = dy, .b = x, .leaves = &leaves, .channels = channels, .pixels = pixels};
    leaves_begin(&leaves, (const struct tree *)tree, channels, nodes, count, LEAVES);
    each_block(leaves.tree->stop - leaves.tree->first, dfactor_block, &job, 0, 0);
    if (mpidl_missing_bytes) return;
    leaves_end(&leaves);
}
