/* Cross-channel (local response) normalization, y = x d^-beta, d = k + a (sum of x^2 over a window
 * of channels), a being alpha / window; see ops/lrn.py. A tile is a run of pixels of one block, over
 * all channels: a window's channels are read once from memory and then from cache. */
#include "mpidl.h"
#include "special.h"
#include "team.h"

enum { RUN = 32 }; /* pixels of a tile */

struct job {
    const float *x, *dy;
    float *out;
    int64_t channels, pixels, runs, before, behind;
    float k, a, factor; /* factor: 2 a beta */
    double beta;
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* d^-beta, and, where `ratio` is not NULL, that divided by d. */
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

/* k + a * the sum of squares over the channels [first, stop); x: this lane of channel 0. */
INLINE vec denominator(const struct job *job, const float *x, int64_t first, int64_t stop,
                       int64_t channel_stride) {
    vec sum = zero();
    for (int64_t c = first; c < stop; c++) {
        vec v = load(x + c * channel_stride);
        sum = muladd(v, v, sum);
    }
    return muladd(sum, splat(job->a), splat(job->k));
}

#define TILE(job, tile)                                                                            \
    int64_t stride = (job)->pixels * LANES, first = (tile) % (job)->runs * RUN;                    \
    int64_t floats = least(RUN, (job)->pixels - first) * LANES;                                    \
    int64_t at = (tile) / (job)->runs * (job)->channels * stride + first * LANES

INLINE void forward(const struct job *job, int64_t tile, double beta) {
    TILE(job, tile);
    for (int64_t c = 0; c < job->channels; c++) {
        int64_t low = most(0, c - job->before), high = least(job->channels, c + job->behind + 1);
        for (int64_t i = 0; i < floats; i += WIDTH) {
            const float *x = job->x + at + i;
            vec d = denominator(job, x, low, high, stride);
            store(job->out + at + c * stride + i, load(x + c * stride) * power(d, beta, NULL));
        }
    }
}

/* own: of each of the last channels, as many as a window has, dy x d^(-beta - 1). A channel's sum of
 * them is complete `before` channels later. */
INLINE void backward(const struct job *job, int64_t tile, double beta, float *own) {
    TILE(job, tile);
    int64_t window = job->before + 1 + job->behind;
    for (int64_t c = 0; c < job->channels + job->before; c++) {
        if (c < job->channels) {
            int64_t low = most(0, c - job->before);
            int64_t high = least(job->channels, c + job->behind + 1);
            float *products = own + c % window * RUN * LANES;
            for (int64_t i = 0; i < floats; i += WIDTH) {
                const float *x = job->x + at + i;
                vec ratio, d = denominator(job, x, low, high, stride);
                vec scale = power(d, beta, &ratio), dy = load(job->dy + at + c * stride + i);
                store(products + i, dy * load(x + c * stride) * ratio);
                store(job->out + at + c * stride + i, dy * scale);
            }
        }
        int64_t of = c - job->before; /* whose sum is complete now */
        if (of < 0) continue;
        int64_t low = most(0, of - job->behind), high = least(job->channels, c + 1);
        for (int64_t i = 0; i < floats; i += WIDTH) {
            vec sum = zero();
            for (int64_t j = low; j < high; j++) sum += load(own + j % window * RUN * LANES + i);
            float *dx = job->out + at + of * stride + i;
            vec x = load(job->x + at + of * stride + i) * splat(-job->factor);
            store(dx, muladd(x, sum, load(dx)));
        }
    }
}

/* With beta a constant, the usual one has no call in its loops. */
static void norm_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
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
    return (struct job){.x = x,
                        .out = out,
                        .channels = channels,
                        .pixels = pixels,
                        .runs = (pixels + RUN - 1) / RUN,
                        .before = least((window - 1) / 2, channels - 1),
                        .behind = least(window / 2, channels - 1),
                        .k = (float)k,
                        .a = (float)(alpha / (double)window),
                        .beta = beta,
                        .factor = (float)(2 * alpha * beta / (double)window)};
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
    each_tile(blocks * job.runs, norm_dx_tile, &job,
              (job.before + 1 + job.behind) * RUN * LANES);
}
