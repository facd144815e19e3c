/* Cross-channel (local response) normalization: y = x d^-beta, where d = k + a (sum of x^2 over a
 * window of channels) and a = alpha / window; see ops/lrn.py. A tile is a run of pixels of one
 * block with all channels. Each channel is read once from memory, and later from cache.
 *
 * Two functions also compute the max pooling that follows. They keep the normalized pixels in the
 * first-level cache, and never write them to memory. */
#include "mpidl.h"
#include "pool.h"
#include "special.h"
#include "team.h"

enum {
    RUN = 32,   /* pixels per tile */
    BAND = 512, /* pixels that a tile normalizes before it pools them, if windows are small */
    USUAL = 5   /* the window size with unrolled loops */
};
#define EIGHT_TIMES _Pragma("GCC unroll 8")
/* A function of its own, for whose loops the compiler has all registers. It copies its job, because
 * the compiler must assume that a store of a vector changes what a pointer points to. */
#define APART static __attribute__((noinline))

struct job {
    const value *x, *dy;
    value *out;
    const struct windows *windows; /* of the max pooling that follows, with its argmax */
    uint8_t *argmax;
    int64_t channels, pixels, runs, before, behind;
    int64_t height, width; /* of a tile, with max pooling */
    int64_t mask;          /* number of rows in a ring buffer, minus 1; see `rings` */
    float k, a, factor; /* `factor` is 2 a beta */
    double beta;
};

/* Return d^-beta. If `ratio` is not NULL, set it to d^-beta / d. */
INLINE vec power(vec d, double beta, vec *ratio) {
    if (beta == 0.75) {
        vec root = inverse_fourth_root(d), square = root * root, cube = square * root;
        if (ratio) *ratio = cube * (square * square);
        return cube;
    }
    vec result;
    for (int i = 0; i < WIDTH; i++)
        result[i] = (float)exponential(-beta * logarithm(d[i]));
    if (ratio) *ratio = result / d;
    return result;
}

/* Return k + a * (sum of squares over `count` channels). x points to the first channel. Prefetch the
 * next channel. */
INLINE vec denominator(const struct job *job, const value *x, int64_t count, int64_t stride) {
    __builtin_prefetch(x + count * stride);
    vec sum = zero();
    EIGHT_TIMES for (int64_t c = 0; c < count; c++) {
        vec v = load(x + c * stride);
        sum = muladd(v, v, sum);
    }
    return muladd(sum, splat(job->a), splat(job->k));
}

/* The channels [low, high) of the window of channel c. In the backward pass, these are the channels
 * whose windows contain channel c. */
struct channels {
    int64_t low, high;
};

INLINE struct channels around(const struct job *job, int64_t c, int64_t before, int64_t behind) {
    return (struct channels){most(0, c - before), least(job->channels, c + behind + 1)};
}

#define TILE(job, tile)                                                                            \
    int64_t stride = (job)->pixels * LANES, first = (tile) % (job)->runs * RUN;                    \
    int64_t floats = least(RUN, (job)->pixels - first) * LANES;                                    \
    int64_t at = (tile) / (job)->runs * (job)->channels * stride + first * LANES

INLINE void forward_pixels(const value *x, value *y, const struct job *job, int64_t floats,
                           int64_t stride, int64_t own, int64_t count, double beta) {
    for (int64_t i = 0; i < floats; i += WIDTH) {
        vec d = denominator(job, x + i, count, stride);
        store(y + i, load(x + own + i) * power(d, beta, NULL));
    }
}

/* Normalize pixels of channel c. `x` points to the pixels in channel 0. The usual window and beta
 * are passed as constants, so that the loop contains neither another loop nor a function call. */
APART void forward_channel(const struct job *argument, const value *x, int64_t c, int64_t floats,
                           value *y) {
    const struct job copy = *argument, *job = &copy;
    int64_t stride = job->pixels * LANES;
    struct channels w = around(job, c, job->before, job->behind);
    int64_t own = (c - w.low) * stride, count = w.high - w.low;
    x += w.low * stride;
    if (count == USUAL && job->beta == 0.75)
        forward_pixels(x, y, job, floats, stride, own, USUAL, 0.75);
    else if (job->beta == 0.75)
        forward_pixels(x, y, job, floats, stride, own, count, 0.75);
    else
        forward_pixels(x, y, job, floats, stride, own, count, job->beta);
}

static void norm_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    TILE(job, tile);
    for (int64_t c = 0; c < job->channels; c++)
        forward_channel(job, job->x + at, c, floats, job->out + at + c * stride);
}

/* Buffers for the most recent channels of a tile: the products dy x d^(-beta - 1), and the first
 * terms of the gradient, dy d^-beta. Row c & mask belongs to channel c. The number of rows is a
 * power of two and at least the size of a window. */
struct rings {
    float *products, *terms;
};

INLINE struct rings rings_at(const struct job *job, float *own) {
    return (struct rings){own, own + (job->mask + 1) * RUN * LANES};
}

INLINE float *row_of(const struct job *job, float *ring, int64_t c) {
    return ring + (c & job->mask) * RUN * LANES;
}

INLINE void products_of_pixels(const value *x, const value *dy, float *terms, float *products,
                               const struct job *job, int64_t floats, int64_t stride, int64_t own,
                               int64_t count, double beta) {
    for (int64_t i = 0; i < floats; i += WIDTH) {
        vec ratio, scale = power(denominator(job, x + i, count, stride), beta, &ratio);
        vec d = load(dy + i);
        store(products + i, d * load(x + own + i) * ratio);
        store(terms + i, d * scale);
    }
}

/* Compute the rows of channel c in the rings. `x` and `dx` point to the tile's pixels in channel 0.
 */
APART void products_of_channel(const struct job *argument, const value *x, const value *dy,
                               int64_t c, int64_t floats, struct rings rings, value *dx) {
    const struct job copy = *argument, *job = &copy;
    int64_t stride = job->pixels * LANES;
    struct channels w = around(job, c, job->before, job->behind);
    const value *next = dx + most(0, c - job->before) * stride; /* prefetch what is written next */
    for (int64_t i = 0; i < floats; i += LANES) __builtin_prefetch(next + i, 1);
    float *products = row_of(job, rings.products, c), *terms = row_of(job, rings.terms, c);
    int64_t own = (c - w.low) * stride, count = w.high - w.low;
    x += w.low * stride;
    if (count == USUAL && job->beta == 0.75)
        products_of_pixels(x, dy, terms, products, job, floats, stride, own, USUAL, 0.75);
    else if (job->beta == 0.75)
        products_of_pixels(x, dy, terms, products, job, floats, stride, own, count, 0.75);
    else
        products_of_pixels(x, dy, terms, products, job, floats, stride, own, count, job->beta);
}

/* Compute dx = term - factor * x * sum, where sum adds up the products of channels [w.low,
 * w.high). If a ReLU computed x, also apply its gradient. */
INLINE void sum_of_pixels(const value *x, const float *terms, value *dx, const float *ring,
                          const struct job *job, int64_t floats, int64_t low, int64_t count,
                          int relu) {
    for (int64_t i = 0; i < floats; i += WIDTH) {
        vec sum = zero(), v = load(x + i);
        EIGHT_TIMES for (int64_t j = 0; j < count; j++)
            sum += load(ring + ((low + j) & job->mask) * RUN * LANES + i);
        vec result = muladd(v * splat(-job->factor), sum, load(terms + i));
        store(dx + i, relu ? relu_back(result, v) : result);
    }
}

/* If the sum of channel c - job->before is complete when channel c is, compute dx of this channel.
 * `x` and `dx` point to the tile's pixels in channel 0. */
APART void sum_of_channel(const struct job *argument, const value *x, int64_t c, int64_t floats,
                          int relu, struct rings rings, value *dx) {
    const struct job copy = *argument, *job = &copy;
    int64_t complete = c - job->before, stride = job->pixels * LANES;
    if (complete < 0) return;
    struct channels w = around(job, complete, job->behind, job->before);
    const float *terms = row_of(job, rings.terms, complete);
    x += complete * stride, dx += complete * stride;
    if (w.high - w.low == USUAL)
        sum_of_pixels(x, terms, dx, rings.products, job, floats, w.low, USUAL, relu);
    else
        sum_of_pixels(x, terms, dx, rings.products, job, floats, w.low, w.high - w.low, relu);
}

static void norm_dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    TILE(job, tile);
    struct rings rings = rings_at(job, own);
    const value *x = job->x + at;
    for (int64_t c = 0; c < job->channels + job->before; c++) {
        if (c < job->channels)
            products_of_channel(job, x, job->dy + at + c * stride, c, floats, rings,
                                job->out + at);
        sum_of_channel(job, x, c, floats, 0, rings, job->out + at);
    }
}

/* ---- with max pooling ---- */

/* Normalize and pool a band of `height` rows of the output of one block. `own` holds the normalized
 * pixels of one channel. */
static void norm_max_pool_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct windows geometry = *job->windows, *w = &geometry;
    int64_t p0 = tile % job->runs * job->height, p1 = least(w->P, p0 + job->height);
    struct span first = span_of(p0, w->stride_h, w->top, w->R, w->H),
                last = span_of(p1 - 1, w->stride_h, w->top, w->R, w->H);
    int64_t h0 = first.start + first.first, h1 = last.start + last.stop, block = tile / job->runs;
    const value *x = job->x + (block * w->C * w->H + h0) * w->W * LANES;
    value *normalized = (value *)own;
    for (int64_t c = 0; c < w->C; c++) {
        forward_channel(job, x, c, (h1 - h0) * w->W * LANES, normalized);
        int64_t out = ((block * w->C + c) * w->P + p0) * w->Q * LANES;
        for (int64_t part = 0; part < LANES; part += WIDTH) {
            struct channel channel = {.x = normalized + part, .first = h0};
            max_pool(w, &channel, 0, p0, p1, job->out + out + part, job->argmax + out + part);
        }
    }
}

/* Compute the gradient of a tile of `height` x `width` pixels from the gradient of the pooled
 * pixels. The tile is a part of one row, or consists of whole rows. */
static void norm_max_pool_relu_dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct windows geometry = *job->windows, *w = &geometry;
    int64_t across = parts_of(w->W, job->width), block = tile / job->runs;
    int64_t h = tile % job->runs / across * job->height, v = tile % job->runs % across * job->width;
    int64_t h1 = least(w->H, h + job->height), v1 = least(w->W, v + job->width);
    struct rectangle pixels = {h + w->top, h1 + w->top, v + w->left, v1 + w->left};
    int64_t floats = (h1 - h) * (v1 - v) * LANES, pooled = w->P * w->Q * LANES;
    int64_t at = ((block * w->C * w->H + h) * w->W + v) * LANES;
    struct rings rings = rings_at(job, own);
    value *dy = (value *)(own + 2 * (job->mask + 1) * RUN * LANES);
    for (int64_t c = 0; c < w->C + job->before; c++) {
        if (c < w->C) {
            int64_t from = (block * w->C + c) * pooled;
            for (int64_t part = 0; part < LANES; part += WIDTH) {
                struct pooled of_part = {job->dy + from + part, job->argmax + from + part, NULL};
                collect_rectangle(w, pixels, of_part, dy + part);
            }
            products_of_channel(job, job->x + at, dy, c, floats, rings, job->out + at);
        }
        sum_of_channel(job, job->x + at, c, floats, 1, rings, job->out + at);
    }
}

static struct job job_of(const value *x, value *out, int64_t channels, int64_t pixels,
                         int64_t window, double alpha, double beta, double k) {
    struct job job = {.x = x,
                      .out = out,
                      .channels = channels,
                      .pixels = pixels,
                      .runs = parts_of(pixels, RUN),
                      .before = least((window - 1) / 2, channels - 1),
                      .behind = least(window / 2, channels - 1),
                      .k = (float)k,
                      .a = (float)(alpha / (double)window),
                      .beta = beta,
                      .factor = (float)(2 * alpha * beta / (double)window)};
    while (job.mask < job.before + job.behind) job.mask = 2 * job.mask + 1;
    return job;
}

void mpidl_cross_channel_norm(const value *x, value *y, int64_t blocks, int64_t channels,
                              int64_t pixels, int64_t window, double alpha, double beta,
                              double k) {
    struct job job = job_of(x, y, channels, pixels, window, alpha, beta, k);
    each_tile(blocks * job.runs, norm_tile, &job, 0);
}

void mpidl_cross_channel_norm_dx(const value *dy, const value *x, value *dx, int64_t blocks,
                                 int64_t channels, int64_t pixels, int64_t window, double alpha,
                                 double beta, double k) {
    struct job job = job_of(x, dx, channels, pixels, window, alpha, beta, k);
    job.dy = dy;
    each_tile(blocks * job.runs, norm_dx_tile, &job, 2 * (job.mask + 1) * RUN * LANES);
}

void mpidl_norm_max_pool(const value *x, value *y, uint8_t *argmax, int64_t blocks,
                         const int64_t *shape, int64_t window, double alpha, double beta,
                         double k) {
    const struct windows *w = (const struct windows *)shape;
    struct job job = job_of(x, y, w->C, w->H * w->W, window, alpha, beta, k);
    int64_t most_rows = most(w->R, BAND / w->W);
    job.height = (most_rows - w->R) / w->stride_h + 1;
    job.runs = parts_of(w->P, job.height);
    job.height = parts_of(w->P, job.runs); /* bands of about the same height */
    job.windows = w, job.argmax = argmax;
    each_tile(blocks * job.runs, norm_max_pool_tile, &job, most_rows * w->W * LANES);
}

void mpidl_norm_max_pool_relu_dx(const value *dy, const uint8_t *argmax, const value *x, value *dz,
                                 int64_t blocks, const int64_t *shape, int64_t window,
                                 double alpha, double beta, double k) {
    const struct windows *w = (const struct windows *)shape;
    struct job job = job_of(x, dz, w->C, w->H * w->W, window, alpha, beta, k);
    job.width = parts_of(w->W, parts_of(w->W, RUN)); /* parts of about the same width */
    job.height = most(1, RUN / w->W);
    job.runs = parts_of(w->H, job.height) * parts_of(w->W, job.width);
    job.windows = w, job.dy = dy, job.argmax = (uint8_t *)(uintptr_t)argmax;
    each_tile(blocks * job.runs, norm_max_pool_relu_dx_tile, &job,
              (2 * (job.mask + 1) + 1) * RUN * LANES);
}
