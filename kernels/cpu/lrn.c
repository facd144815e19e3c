/* Cross-channel (local response) normalization: y = x d^-beta, where d = k + a (sum of x^2 over a
 * window of channels) and a = alpha / window; see ops/lrn.py. A tile is a run of pixels of one
 * block with all channels. Each channel is read once from memory, and later from cache. */
#include "mpidl.h"
#include "special.h"
#include "team.h"

enum { RUN = 32, USUAL = 5 }; /* RUN: pixels per tile; USUAL: the window size with unrolled loops */
#define FEW _Pragma("GCC unroll 8")

struct job {
    const float *x, *dy;
    float *out;
    int64_t channels, pixels, runs, before, behind;
    int64_t mask; /* number of rows in the ring buffer, minus 1; see `backward` */
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

/* Return k + a * (sum of squares over `count` channels). x points to the first channel. */
INLINE vec denominator(const struct job *job, const float *x, int64_t count, int64_t stride) {
    vec sum = zero();
    FEW for (int64_t c = 0; c < count; c++) {
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

INLINE void forward_channel(const float *x, float *y, const struct job *job, int64_t floats,
                            int64_t stride, int64_t own, int64_t count, double beta) {
    for (int64_t i = 0; i < floats; i += WIDTH) {
        vec d = denominator(job, x + i, count, stride);
        store(y + i, load(x + own + i) * power(d, beta, NULL));
    }
}

INLINE void forward(const struct job *job, int64_t tile, double beta) {
    TILE(job, tile);
    for (int64_t c = 0; c < job->channels; c++) {
        struct channels w = around(job, c, job->before, job->behind);
        const float *x = job->x + at + w.low * stride;
        float *y = job->out + at + c * stride;
        int64_t own = (c - w.low) * stride;
        if (w.high - w.low == USUAL)
            forward_channel(x, y, job, floats, stride, own, USUAL, beta);
        else
            forward_channel(x, y, job, floats, stride, own, w.high - w.low, beta);
    }
}

/* For channel c, compute the products dy x d^(-beta - 1), and the first term of the gradient,
 * dy d^-beta. */
INLINE void products_channel(const float *x, const float *dy, float *dx, float *products,
                             const struct job *job, int64_t floats, int64_t stride, int64_t own,
                             int64_t count, double beta) {
    for (int64_t i = 0; i < floats; i += WIDTH) {
        vec ratio, scale = power(denominator(job, x + i, count, stride), beta, &ratio);
        vec d = load(dy + i);
        store(products + i, d * load(x + own + i) * ratio);
        store(dx + i, d * scale);
    }
}

/* Subtract factor * x * sum from dx, where sum adds up `count` rows of products in the ring,
 * starting at row `low`. */
INLINE void sum_channel(const float *x, float *dx, const float *ring, const struct job *job,
                        int64_t floats, int64_t low, int64_t count) {
    for (int64_t i = 0; i < floats; i += WIDTH) {
        vec sum = zero();
        FEW for (int64_t j = 0; j < count; j++)
            sum += load(ring + ((low + j) & job->mask) * RUN * LANES + i);
        store(dx + i, muladd(load(x + i) * splat(-job->factor), sum, load(dx + i)));
    }
}

/* Compute the gradient of a tile. `own` is a ring buffer for the products of the most recent
 * channels. The number of rows is a power of two and at least the size of a window. The sum for a
 * channel is complete `before` channels later. */
INLINE void backward(const struct job *job, int64_t tile, double beta, float *own) {
    TILE(job, tile);
    for (int64_t c = 0; c < job->channels + job->before; c++) {
        if (c < job->channels) {
            struct channels w = around(job, c, job->before, job->behind);
            const float *x = job->x + at + w.low * stride, *dy = job->dy + at + c * stride;
            float *dx = job->out + at + c * stride;
            float *products = own + (c & job->mask) * RUN * LANES;
            int64_t mine = (c - w.low) * stride, count = w.high - w.low;
            if (count == USUAL)
                products_channel(x, dy, dx, products, job, floats, stride, mine, USUAL, beta);
            else
                products_channel(x, dy, dx, products, job, floats, stride, mine, count, beta);
        }
        int64_t complete = c - job->before;
        if (complete < 0) continue;
        struct channels w = around(job, complete, job->behind, job->before);
        const float *x = job->x + at + complete * stride;
        float *dx = job->out + at + complete * stride;
        if (w.high - w.low == USUAL)
            sum_channel(x, dx, own, job, floats, w.low, USUAL);
        else
            sum_channel(x, dx, own, job, floats, w.low, w.high - w.low);
    }
}

/* The usual beta is passed as a constant, so that the loops contain no function call. */
static void norm_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    if (job->beta == 0.75)
        forward(job, tile, 0.75);
    else
        forward(job, tile, job->beta);
}

static void norm_dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    if (job->beta == 0.75)
        backward(job, tile, 0.75, own);
    else
        backward(job, tile, job->beta, own);
}

static struct job job_of(const float *x, float *out, int64_t channels, int64_t pixels,
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

void mpidl_cross_channel_norm(const float *x, float *y, int64_t blocks, int64_t channels,
                              int64_t pixels, int64_t window, double alpha, double beta,
                              double k) {
    struct job job = job_of(x, y, channels, pixels, window, alpha, beta, k);
    each_tile(blocks * job.runs, norm_tile, &job, 0);
}

void mpidl_cross_channel_norm_dx(const float *dy, const float *x, float *dx, int64_t blocks,
                                 int64_t channels, int64_t pixels, int64_t window, double alpha,
                                 double beta, double k) {
    struct job job = job_of(x, dx, channels, pixels, window, alpha, beta, k);
    job.dy = dy;
    each_tile(blocks * job.runs, norm_dx_tile, &job, (job.mask + 1) * RUN * LANES);
}
