/* Direct convolution as a sum of shifted images. One kernel covers all filter sizes, strides,
 * dilations and groups, because a table contains the offset of each tap of each channel. */
#include "conv.h"

/* The largest width of a tile whose sums and operands fit into registers. */
#if REGISTERS == 32
#define PIXELS 6
#else
#define PIXELS 3
#endif

/* Compute X pixels of a row for K outputs. Prefetch the outputs at distance `next`, unless it is 0:
 * the processor doesn't see that they will be written. */
INLINE void tile(const float *in, const int32_t *offset, int64_t taps, const float *w,
                 const float *bias, struct finish finish, value *out, int64_t out_channel,
                 int64_t out_pixel, int64_t next, const int X, const int K, const int pairs) {
    if (next)
        UNROLL for (int k = 0; k < K; k++) UNROLL for (int i = 0; i < X; i++)
            __builtin_prefetch(out + next + k * out_channel + i * out_pixel, 1);
    for (int part = 0; part < LANES; part += WIDTH) {
        vec sum[OUTPUTS][PIXELS];
        UNROLL for (int k = 0; k < K; k++) UNROLL for (int i = 0; i < X; i++) sum[k][i] =
            splat(bias && !NARROW ? bias[k] : 0);
        const float *weight = w;
        for (int64_t t = 0; t < taps; t++, weight += K) {
            const float *pixel = in + offset[t] + part;
            vec x[PIXELS];
            UNROLL for (int i = 0; i < X; i++) x[i] = load(pixel + i * LANES);
            UNROLL for (int k = 0; k < K; k++) {
                vec f = splat(weight[k]);
                UNROLL for (int i = 0; i < X; i++) sum[k][i] =
                    pairs ? add_words(f, x[i], sum[k][i]) : muladd(f, x[i], sum[k][i]);
            }
        }
        if (bias && NARROW) /* the last term: a sum with a bias may be subnormal, see value.h */
            UNROLL for (int k = 0; k < K; k++) UNROLL for (int i = 0; i < X; i++) sum[k][i] +=
                splat(bias[k]);
        if (finish.addend)
            UNROLL for (int k = 0; k < K; k++) UNROLL for (int i = 0; i < X; i++) sum[k][i] +=
                load(finish.addend + k * out_channel + i * out_pixel + part);
        vec floor = floor_of(finish);
        UNROLL for (int k = 0; k < K; k++) UNROLL for (int i = 0; i < X; i++)
            store(out + k * out_channel + i * out_pixel + part, larger(floor, sum[k][i]));
    }
}

typedef void tile_kernel(const float *, const int32_t *, int64_t, const float *, const float *,
                         struct finish, value *, int64_t, int64_t, int64_t);
#define TILE_OF(name, X, K, pairs)                                                                 \
    static void name##X##x##K(const float *in, const int32_t *offset, int64_t taps,                \
                              const float *w, const float *bias, struct finish finish, value *out, \
                              int64_t channel, int64_t pixel, int64_t next) {                      \
        tile(in, offset, taps, w, bias, finish, out, channel, pixel, next, X, K, pairs);           \
    }
#define TILE(X, K) TILE_OF(tile_, X, K, 0)
#define PAIRS_TILE(X, K) TILE_OF(pairs_, X, K, 1)

/* Define kernel(X, K) for each width X and number of outputs K, and a table of these functions. */
#define ROW_OF(kernel, X) kernel(X, 1) kernel(X, 2) kernel(X, 3) kernel(X, 4)
#define NAMES(name, X) {name##X##x1, name##X##x2, name##X##x3, name##X##x4}
#if PIXELS == 6
#define DEFINE(kernel)                                                                             \
    ROW_OF(kernel, 1) ROW_OF(kernel, 2) ROW_OF(kernel, 3)                                          \
    ROW_OF(kernel, 4) ROW_OF(kernel, 5) ROW_OF(kernel, 6)
#define TABLE(name)                                                                                \
    {NAMES(name, 1), NAMES(name, 2), NAMES(name, 3), NAMES(name, 4), NAMES(name, 5), NAMES(name, 6)}
#else
#define DEFINE(kernel) ROW_OF(kernel, 1) ROW_OF(kernel, 2) ROW_OF(kernel, 3)
#define TABLE(name) {NAMES(name, 1), NAMES(name, 2), NAMES(name, 3)}
#endif

DEFINE(TILE)
static tile_kernel *const tiles[PIXELS][OUTPUTS] = TABLE(tile_);
#if PER_WORD == 2
DEFINE(PAIRS_TILE)
static tile_kernel *const pairs_tiles[PIXELS][OUTPUTS] = TABLE(pairs_);
#else
#define pairs_tiles tiles /* no copy has pairs */
#endif

void direct_rows(const struct team *team, const struct direct *d) {
    /* the widths of tiles differ by at most one pixel: 32 = 6 + 6 + 5 + 5 + 5 + 5 */
    int64_t across = parts_of(d->columns, PIXELS);
    EACH_TILE(team, p, d->rows) {
        for (int64_t i = 0; i < across; i++) {
            int64_t q = d->columns * i / across, width = d->columns * (i + 1) / across - q;
            const float *in = d->in + p * d->in_row + q * LANES;
            int64_t pixel = p * d->out_row + q * d->out_pixel;
            for (int64_t k = 0; k < d->outputs; k += OUTPUTS) {
                int64_t high = least(d->outputs - k, OUTPUTS), at = pixel + k * d->out_channel;
                struct finish finish = d->finish;
                if (finish.addend) finish.addend += at;
                tile_kernel *kernel = tiles[width - 1][high - 1];
                if (d->pairs) kernel = pairs_tiles[width - 1][high - 1];
                kernel(in, d->offset, d->taps, d->weight + k * d->taps,
                       d->bias ? d->bias + k : NULL, finish, d->out + at, d->out_channel,
                       d->out_pixel, d->next);
            }
        }
        tick();
    }
}

/* ---- gradients of weights ---- */

/* Add the products of `rows` rows of pixels to the sums [K][stride][16] of N taps and K outputs. */
INLINE void dweight_tile(const float *dy, int64_t dy_channel, int64_t dy_row, const float *in,
                         const int32_t *offset, int64_t in_row, int64_t rows, int64_t columns,
                         float *sums, int64_t stride, int first, const int N, const int K) {
    for (int part = 0; part < LANES; part += WIDTH) {
        vec sum[OUTPUTS][PIXELS];
        UNROLL for (int k = 0; k < K; k++) UNROLL for (int n = 0; n < N; n++) sum[k][n] =
            first ? zero() : load(sums + (k * stride + n) * LANES + part);
        for (int64_t p = 0; p < rows; p++) {
            const float *d = dy + p * dy_row + part, *x = in + p * in_row + part;
            for (int64_t q = 0; q < columns; q++, d += LANES, x += LANES) {
                vec grad[OUTPUTS];
                UNROLL for (int k = 0; k < K; k++) grad[k] = load(d + k * dy_channel);
                UNROLL for (int n = 0; n < N; n++) {
                    vec v = load(x + offset[n]);
                    UNROLL for (int k = 0; k < K; k++) sum[k][n] = muladd(grad[k], v, sum[k][n]);
                }
            }
        }
        UNROLL for (int k = 0; k < K; k++) UNROLL for (int n = 0; n < N; n++)
            store(sums + (k * stride + n) * LANES + part, sum[k][n]);
    }
}

typedef void dweight_kernel(const float *, int64_t, int64_t, const float *, const int32_t *,
                            int64_t, int64_t, int64_t, float *, int64_t, int);
#define DWEIGHT(N, K)                                                                              \
    static void dweight_##N##x##K(const float *dy, int64_t dy_channel, int64_t dy_row,             \
                                  const float *in, const int32_t *offset, int64_t in_row,          \
                                  int64_t rows, int64_t columns, float *sums, int64_t stride,      \
                                  int first) {                                                     \
        int32_t fixed[N]; /* a copy that no store can alias: it stays in registers */             \
        UNROLL for (int n = 0; n < N; n++) fixed[n] = offset[n];                                   \
        dweight_tile(dy, dy_channel, dy_row, in, fixed, in_row, rows, columns, sums, stride,       \
                     first, N, K);                                                                 \
    }

DEFINE(DWEIGHT)
static dweight_kernel *const dweights[PIXELS][OUTPUTS] = TABLE(dweight_);

int64_t direct_dweight_floats(int64_t taps) {
    return (OUTPUTS * taps + LANES) * LANES; /* lane_sums reads 16 rows at a time */
}

void direct_dweight_tile(const struct direct_dweight *d, int64_t index, float *own) {
    int64_t k = index * OUTPUTS, taps = d->taps;
    int64_t high = least(d->outputs - k, OUTPUTS);
    /* bands of rows: dy of a band stays in the first-level cache for all taps */
    int64_t band = most(80 / d->columns, 1);
    int64_t groups = parts_of(taps, PIXELS);
    for (int64_t p = 0; p < d->rows; p += band) {
        int64_t rows = least(d->rows - p, band);
        for (int64_t g = 0; g < groups; g++) {
            int64_t t = taps * g / groups, width = taps * (g + 1) / groups - t;
            dweights[width - 1][high - 1](d->dy + k * d->dy_channel + p * d->dy_row, d->dy_channel,
                                          d->dy_row, d->in + p * d->in_row, d->offset + t,
                                          d->in_row, rows, d->columns, own + t * LANES, taps,
                                          p == 0);
        }
        tick();
    }
    for (int64_t i = 0; i < high * taps; i += LANES) {
        float sums[LANES];
        lane_sums(own + i * LANES, sums);
        int64_t count = least(high * taps - i, LANES);
        memcpy(d->leaf + k * taps + i, sums, (size_t)count * sizeof(float));
    }
}
