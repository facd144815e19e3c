/* Normalization within an image: y = (x - mean) * rstd * gamma + beta, where the mean and the
 * variance are those of a set of numbers of one image. A set is a group of whole channels, or, if
 * `groups` is 0, all channels of one pixel. `statistics` (blocks, 2, sets, 16) holds the means and
 * then rstd = 1 / sqrt(variance + epsilon). The variance is the mean of squared differences from
 * the rounded mean, corrected for the rounding.
 *
 * gamma and beta are per channel, or per element of an image; NULL stands for 1 and 0. A leaf of
 * their gradients holds the sums of dy * (x - mean) * rstd and then of dy. dy is 0 in unused lanes.
 *
 * A float never adds up more than a RUN of numbers: doubles add up the runs of a channel, and other
 * floats those of a pixel. */
#include <math.h>

#include "fold.h"
#include "mpidl.h"
#include "special.h"

enum { RUN = 32 };
enum { LEAVES }; /* scratch slots */

struct job {
    const value *x, *dy;
    const float *gamma, *beta;
    float *statistics;
    value *out; /* y or dx; NULL if dx is not needed */
    struct leaves *leaves; /* NULL if the gradients of gamma and beta are not needed */
    int64_t channels, pixels, groups, sets;
    int64_t of_elements; /* whether gamma and beta are per element */
    double epsilon;
};

INLINE float *mean_of(const struct job *job, int64_t block, int64_t set) {
    return job->statistics + (2 * block * job->sets + set) * LANES;
}
INLINE float *rstd_of(const struct job *job, int64_t block, int64_t set) {
    return mean_of(job, block, set) + job->sets * LANES;
}

/* Return the elements of gamma or beta of a pixel of a channel. */
INLINE vec factor_of(const float *of, int64_t at, float otherwise) {
    return splat(of ? of[at] : otherwise);
}

/* ---- groups of channels: a tile is one channel of one block ---- */

/* Sums of a channel for each lane. */
struct sums {
    double of[LANES];
};

INLINE void add_run(double *sums, const vec *a) {
    vec sum = (a[0] + a[1]) + (a[2] + a[3]);
    UNROLL for (int i = 0; i < WIDTH; i++) sums[i] += sum[i];
}

/* Compute a statement for each pixel p of a channel, which adds to the accumulators i of 4, and
 * another one after each run of pixels. */
#define EACH_PIXEL(pixels, begin, each, end)                                                       \
    for (int64_t first = 0; first < pixels; first += RUN) {                                        \
        int64_t stop = least(pixels, first + RUN), p = first;                                      \
        begin;                                                                                     \
        for (; p + 4 <= stop; p += 4) UNROLL for (int i = 0; i < 4; i++) each(p + i, i);           \
        for (int i = 0; p < stop; p++, i++) each(p, i);                                            \
        end;                                                                                       \
    }

static void sum_channel(const value *x, int64_t pixels, struct sums *total) {
    *total = (struct sums){{0}};
    for (int part = 0; part < LANES; part += WIDTH) {
#define EACH(p, i) a[i] += load(x + (p) * LANES + part)
        EACH_PIXEL(pixels, vec a[4] = {{0}}, EACH, add_run(total->of + part, a))
#undef EACH
    }
}

/* Add up the differences from a mean, and their squares. */
static void square_channel(const value *x, int64_t pixels, const float *mean, struct sums *error,
                           struct sums *square) {
    *error = *square = (struct sums){{0}};
    for (int part = 0; part < LANES; part += WIDTH) {
        const vec m = load(mean + part);
#define EACH(p, i)                                                                                 \
    {                                                                                              \
        vec d = load(x + (p) * LANES + part) - m;                                                  \
        e[i] += d, q[i] = muladd(d, d, q[i]);                                                      \
    }
        EACH_PIXEL(pixels, vec e[4] = {{0}}; vec q[4] = {{0}}, EACH,
                   add_run(error->of + part, e); add_run(square->of + part, q))
#undef EACH
    }
}

INLINE void normalize_pixels(const struct job *job, const value *x, int64_t channel,
                             const float *mean, const float *rstd, value *y, int of_elements) {
    const int64_t pixels = job->pixels, at = of_elements ? channel * pixels : channel;
    const float *gammas = job->gamma, *betas = job->beta;
    vec gamma = factor_of(gammas, at, 1), beta = factor_of(betas, at, 0);
    for (int part = 0; part < LANES; part += WIDTH) {
        const vec m = load(mean + part), r = load(rstd + part);
        for (int64_t p = 0; p < pixels; p++) {
            if (of_elements) gamma = factor_of(gammas, at + p, 1), beta = factor_of(betas, at + p, 0);
            store(y + p * LANES + part,
                  muladd((load(x + p * LANES + part) - m) * r, gamma, beta));
        }
    }
}

/* Return the sum of a lane over `count` channels. */
INLINE double lane_total(const struct sums *sums, int64_t count, int lane) {
    double total = 0;
    for (int64_t c = 0; c < count; c++) total += sums[c].of[lane];
    return total;
}

/* Normalize a group of a block. All members of the team compute the same statistics. */
static void normalize_group(const struct team *team, const struct job *job, int64_t block,
                            int64_t group) {
    const int64_t count = job->channels / job->groups, size = job->pixels * LANES;
    const int64_t first = group * count;
    const double n = (double)(count * job->pixels);
    struct sums *sums = (struct sums *)team->shared, *errors = sums + count,
                *squares = errors + count;
    const value *x = job->x + (block * job->channels + first) * size;
    float mean[LANES], rstd[LANES];
    EACH_TILE(team, c, count) sum_channel(x + c * size, job->pixels, sums + c), tick();
    meet(team);
    for (int i = 0; i < LANES; i++) mean[i] = (float)(lane_total(sums, count, i) / n);
    EACH_TILE(team, c, count) {
        square_channel(x + c * size, job->pixels, mean, errors + c, squares + c);
        tick();
    }
    meet(team);
    for (int i = 0; i < LANES; i++) {
        double error = lane_total(errors, count, i) / n;
        double variance = lane_total(squares, count, i) / n - error * error;
        variance = variance > 0 ? variance : 0;
        mean[i] = (float)(mean[i] + error);
        rstd[i] = (float)(1 / sqrt(variance + job->epsilon));
    }
    if (team->member == 0) {
        memcpy(mean_of(job, block, group), mean, sizeof mean);
        memcpy(rstd_of(job, block, group), rstd, sizeof rstd);
    }
    value *y = job->out + (block * job->channels + first) * size;
    EACH_TILE(team, c, count) {
        if (job->of_elements)
            normalize_pixels(job, x + c * size, first + c, mean, rstd, y + c * size, 1);
        else
            normalize_pixels(job, x + c * size, first + c, mean, rstd, y + c * size, 0);
        tick();
    }
}

/* Add up dz and dz * (x - mean) * rstd, where dz is dy, or gamma * dy if `gamma` is not NULL. */
INLINE void sum_products(const value *dy, const value *x, int64_t pixels, const float *gamma,
                         const float *mean, const float *rstd, struct sums *sum,
                         struct sums *product) {
    *sum = *product = (struct sums){{0}};
    for (int part = 0; part < LANES; part += WIDTH) {
        const vec m = load(mean + part), r = load(rstd + part);
#define EACH(p, i)                                                                                 \
    {                                                                                              \
        vec dz = load(dy + (p) * LANES + part), d = (load(x + (p) * LANES + part) - m) * r;        \
        if (gamma) dz *= splat(gamma[p]);                                                          \
        s[i] += dz, q[i] = muladd(dz, d, q[i]);                                                    \
    }
        EACH_PIXEL(pixels, vec s[4] = {{0}}; vec q[4] = {{0}}, EACH,
                   add_run(sum->of + part, s); add_run(product->of + part, q))
#undef EACH
    }
}

INLINE void dx_of_pixels(const value *dy, const value *x, int64_t pixels, const float *gamma,
                         int64_t step, const float *mean, const float *rstd, const float *means,
                         value *dx) {
    vec g = factor_of(gamma, 0, 1);
    for (int part = 0; part < LANES; part += WIDTH) {
        const vec m = load(mean + part), r = load(rstd + part);
        const vec of_dz = load(means + part), of_product = load(means + LANES + part);
        for (int64_t p = 0; p < pixels; p++) {
            if (step) g = splat(gamma[p]);
            vec d = (load(x + p * LANES + part) - m) * r;
            vec dz = muladd(g, load(dy + p * LANES + part), -of_dz);
            store(dx + p * LANES + part, r * muladd(-of_product, d, dz));
        }
    }
}

/* Write the leaf's elements of a channel if gamma is per element: sums over the lanes. */
static void leaf_of_elements(const value *dy, const value *x, int64_t pixels, const float *mean,
                             const float *rstd, float *dgamma, float *dbeta) {
    for (int64_t first = 0; first < pixels; first += LANES) {
        float products[LANES * LANES] = {0}, numbers[LANES * LANES] = {0}, sums[2 * LANES];
        int64_t count = least(LANES, pixels - first);
        for (int64_t i = 0; i < count * LANES; i += WIDTH) {
            int64_t at = first * LANES + i, part = i % LANES;
            vec g = load(dy + at), d = (load(x + at) - load(mean + part)) * load(rstd + part);
            store(products + i, g * d), store(numbers + i, g);
        }
        lane_sums(products, sums), lane_sums(numbers, sums + LANES);
        memcpy(dgamma + first, sums, (size_t)count * sizeof *sums);
        memcpy(dbeta + first, sums + LANES, (size_t)count * sizeof *sums);
    }
}

INLINE float all_lanes(const struct sums *sums) {
    double total = 0;
    for (int i = 0; i < LANES; i++) total += sums->of[i];
    return (float)total;
}

/* Compute the gradients of a channel up to the sums over its group. */
static void sums_of_channel(const struct job *job, int64_t block, int64_t channel,
                            const float *mean, const float *rstd, struct sums *sum,
                            struct sums *product, float *leaf) {
    const int64_t pixels = job->pixels, at = (block * job->channels + channel) * pixels * LANES;
    const value *dy = job->dy + at, *x = job->x + at;
    if (!job->of_elements) {
        sum_products(dy, x, pixels, NULL, mean, rstd, sum, product);
        if (leaf) leaf[channel] = all_lanes(product), leaf[job->channels + channel] = all_lanes(sum);
        double gamma = job->gamma ? job->gamma[channel] : 1;
        for (int i = 0; i < LANES; i++) sum->of[i] *= gamma, product->of[i] *= gamma;
        return;
    }
    if (job->out)
        sum_products(dy, x, pixels, job->gamma + channel * pixels, mean, rstd, sum, product);
    if (!leaf) return;
    float *dgamma = leaf + channel * pixels;
    leaf_of_elements(dy, x, pixels, mean, rstd, dgamma, dgamma + job->channels * pixels);
}

static void back_of_group(const struct team *team, const struct job *job, int64_t block,
                          int64_t group, float *leaf) {
    const int64_t count = job->channels / job->groups, first = group * count;
    const int64_t pixels = job->pixels, step = job->of_elements;
    struct sums *sums = (struct sums *)team->shared, *products = sums + count;
    const float *mean = mean_of(job, block, group), *rstd = rstd_of(job, block, group);
    EACH_TILE(team, c, count) {
        sums_of_channel(job, block, first + c, mean, rstd, sums + c, products + c, leaf);
        tick();
    }
    if (!job->out) return;
    meet(team);
    float means[2 * LANES];
    for (int i = 0; i < LANES; i++) {
        means[i] = (float)(lane_total(sums, count, i) / (double)(count * pixels));
        means[LANES + i] = (float)(lane_total(products, count, i) / (double)(count * pixels));
    }
    meet(team); /* before the next group overwrites the sums */
    EACH_TILE(team, c, count) {
        const int64_t channel = first + c, at = (block * job->channels + channel) * pixels * LANES;
        const float *gamma = job->gamma ? job->gamma + channel * (step ? pixels : 1) : NULL;
        const value *dy = job->dy + at, *x = job->x + at;
        if (step)
            dx_of_pixels(dy, x, pixels, gamma, 1, mean, rstd, means, job->out + at);
        else
            dx_of_pixels(dy, x, pixels, gamma, 0, mean, rstd, means, job->out + at);
        tick();
    }
}

/* Each member computes whole groups, in its own scratch memory. If there are fewer groups than
 * members, all members compute one group after the other. */
#define EACH_GROUP(team, job, call)                                                                \
    do {                                                                                           \
        struct team alone = *team;                                                                 \
        alone.member = 0, alone.members = 1, alone.shared = team->own;                             \
        if ((job)->groups >= team->members)                                                        \
            EACH_TILE(team, group, (job)->groups) call(&alone, group);                             \
        else                                                                                       \
            for (int64_t group = 0; group < (job)->groups; group++) call(team, group);             \
    } while (0)

static void group_norm_block(const struct team *team, void *argument, int64_t block) {
    const struct job *job = argument;
#define CALL(team, group) normalize_group(team, job, block, group)
    EACH_GROUP(team, job, CALL);
#undef CALL
}

static void group_norm_back_block(const struct team *team, void *argument, int64_t block) {
    const struct job *job = argument;
    float *leaf = job->leaves ? leaf_of(team, job->leaves, block) : NULL;
#define CALL(team, group) back_of_group(team, job, block, group, leaf)
    EACH_GROUP(team, job, CALL);
#undef CALL
    if (leaf) leaf_done(team, job->leaves, block);
}

/* ---- pixels: a tile is a run of pixels of one block, with all channels ----
 *
 * A tile is processed by columns, vectors of adjacent numbers of each channel. A few columns of all
 * channels are read from memory once, and later from the caches. */

enum { TILE = 16, COLUMNS = 8 };

/* Prefetch some columns of a channel. */
#define PREFETCH(at, n, writes)                                                                    \
    for (int i = 0; i < n * WIDTH; i += 64 / (int)sizeof(value)) __builtin_prefetch(at + i, writes)

/* Lines of different channels are far apart, so the processor does not prefetch them, and reading
 * the lines that a tile overwrites would take as long as all the rest. So large results are streamed
 * to memory. Small results stay in the caches for the next layer. */
enum { LARGE = 8 << 20 }; /* bytes of a block */
INLINE int streams_to(const struct job *job) {
    int64_t bytes = job->channels * job->pixels * LANES * (int64_t)sizeof(value);
    return bytes >= LARGE && (uintptr_t)job->out % 64 == 0;
}
#define PUT(p, v)                                                                                  \
    do {                                                                                           \
        if (streams) stream(p, v);                                                                 \
        else store(p, v);                                                                          \
    } while (0)

INLINE void normalize_columns(const struct job *job, const value *x, float *means, float *rstds,
                              value *y, int n, int streams) {
    const int64_t channels = job->channels, stride = job->pixels * LANES;
    const vec count = splat((float)channels);
    vec mean[COLUMNS] = {{0}}, rstd[COLUMNS], error[COLUMNS] = {{0}}, square[COLUMNS] = {{0}};
    for (int64_t c = 0; c < channels;) {
        vec sum[COLUMNS] = {{0}};
        for (int64_t stop = least(channels, c + RUN); c < stop; c++)
            UNROLL for (int i = 0; i < n; i++) sum[i] += load(x + c * stride + i * WIDTH);
        UNROLL for (int i = 0; i < n; i++) mean[i] += sum[i];
    }
    UNROLL for (int i = 0; i < n; i++) mean[i] /= count;
    for (int64_t c = 0; c < channels;) {
        vec e[COLUMNS] = {{0}}, q[COLUMNS] = {{0}};
        for (int64_t stop = least(channels, c + RUN); c < stop; c++) {
            if (!streams) PREFETCH(y + c * stride, n, 1);
            UNROLL for (int i = 0; i < n; i++) {
                vec d = load(x + c * stride + i * WIDTH) - mean[i];
                e[i] += d, q[i] = muladd(d, d, q[i]);
            }
        }
        UNROLL for (int i = 0; i < n; i++) error[i] += e[i], square[i] += q[i];
    }
    UNROLL for (int i = 0; i < n; i++) {
        error[i] /= count;
        vec variance = larger(square[i] / count - error[i] * error[i], zero());
        mean[i] += error[i];
        rstd[i] = splat(1) / root(variance + splat((float)job->epsilon));
        store(means + i * WIDTH, mean[i]), store(rstds + i * WIDTH, rstd[i]);
    }
    for (int64_t c = 0; c < channels; c++) {
        const vec gamma = factor_of(job->gamma, c, 1), beta = factor_of(job->beta, c, 0);
        PREFETCH(x + c * stride + n * WIDTH, n, 0);
        UNROLL for (int i = 0; i < n; i++) {
            vec d = (load(x + c * stride + i * WIDTH) - mean[i]) * rstd[i];
            PUT(y + c * stride + i * WIDTH, muladd(d, gamma, beta));
        }
    }
}

/* Compute dx of some columns, and add their terms to `sums`, 16 lanes for each channel of gamma and
 * then of beta. Pixels are added in their order, so the width of a vector makes no difference. */
INLINE void back_of_columns(const struct job *job, const value *dy, const value *x,
                            const float *means, const float *rstds, float *sums, value *dx, int n,
                            int streams) {
    const int64_t channels = job->channels, stride = job->pixels * LANES;
    const vec count = splat((float)channels);
    vec mean[COLUMNS], rstd[COLUMNS], of_dz[COLUMNS] = {{0}}, of_product[COLUMNS] = {{0}};
    UNROLL for (int i = 0; i < n; i++) {
        mean[i] = load(means + i * WIDTH), rstd[i] = load(rstds + i * WIDTH);
    }
    for (int64_t c = 0; c < channels;) {
        vec s[COLUMNS] = {{0}}, q[COLUMNS] = {{0}};
        for (int64_t stop = least(channels, c + RUN); c < stop; c++) {
            const vec gamma = factor_of(job->gamma, c, 1);
            if (dx && !streams) PREFETCH(dx + c * stride, n, 1);
            UNROLL for (int i = 0; i < n; i++) {
                vec g = load(dy + c * stride + i * WIDTH);
                vec d = (load(x + c * stride + i * WIDTH) - mean[i]) * rstd[i];
                s[i] = muladd(gamma, g, s[i]), q[i] = muladd(gamma * g, d, q[i]);
            }
        }
        UNROLL for (int i = 0; i < n; i++) of_dz[i] += s[i], of_product[i] += q[i];
    }
    UNROLL for (int i = 0; i < n; i++) of_dz[i] /= count, of_product[i] /= -count;
    for (int64_t c = 0; c < channels; c++) {
        const vec gamma = factor_of(job->gamma, c, 1);
        vec g[COLUMNS], d[COLUMNS];
        UNROLL for (int i = 0; i < n; i++) {
            g[i] = load(dy + c * stride + i * WIDTH);
            d[i] = (load(x + c * stride + i * WIDTH) - mean[i]) * rstd[i];
            if (dx)
                PUT(dx + c * stride + i * WIDTH,
                    rstd[i] * muladd(of_product[i], d[i], muladd(gamma, g[i], -of_dz[i])));
        }
        if (sums) UNROLL for (int part = 0; part < PARTS; part++) {
                float *of_gamma = sums + c * LANES + part * WIDTH;
                float *of_beta = of_gamma + channels * LANES;
                vec a = load(of_gamma), b = load(of_beta);
                UNROLL for (int i = part; i < n; i += PARTS) a = muladd(g[i], d[i], a), b += g[i];
                store(of_gamma, a), store(of_beta, b);
            }
    }
}

/* The leaf of gamma and beta has `rows` elements, a multiple of 16. */
INLINE int64_t rows_of(const struct job *job) { return parts_of(2 * job->channels, LANES) * LANES; }

APART void normalize_tile(const struct job *argument, int64_t block, int64_t tile) {
    const struct job copy = *argument, *job = &copy;
    const int64_t first = tile * TILE * LANES, size = job->pixels * LANES;
    const int64_t stop = least(size, first + TILE * LANES), at = block * job->channels * size;
    float *mean = mean_of(job, block, 0), *rstd = rstd_of(job, block, 0);
    const int streams = streams_to(job);
    int64_t i = first;
#define NORMALIZE(n, streams)                                                                      \
    normalize_columns(job, job->x + at + i, mean + i, rstd + i, job->out + at + i, n, streams)
    for (; i + COLUMNS * WIDTH <= stop; i += COLUMNS * WIDTH)
        if (streams) NORMALIZE(COLUMNS, 1);
        else NORMALIZE(COLUMNS, 0);
    for (; i < stop; i += LANES) NORMALIZE(PARTS, 0);
#undef NORMALIZE
    if (streams) streamed();
}

APART void back_of_tile(const struct job *argument, int64_t block, int64_t tile, float *sums,
                        float *partial) {
    const struct job copy = *argument, *job = &copy;
    const int64_t first = tile * TILE * LANES, size = job->pixels * LANES;
    const int64_t stop = least(size, first + TILE * LANES), at = block * job->channels * size;
    const float *mean = mean_of(job, block, 0), *rstd = rstd_of(job, block, 0);
    const int streams = job->out && streams_to(job);
    if (!partial) sums = NULL;
    if (sums) memset(sums, 0, (size_t)(rows_of(job) * LANES) * sizeof *sums);
    int64_t i = first;
#define BACK(n, streams)                                                                           \
    back_of_columns(job, job->dy + at + i, job->x + at + i, mean + i, rstd + i, sums,              \
                    job->out ? job->out + at + i : NULL, n, streams)
    for (; i + COLUMNS * WIDTH <= stop; i += COLUMNS * WIDTH)
        if (streams) BACK(COLUMNS, 1);
        else BACK(COLUMNS, 0);
    for (; i < stop; i += LANES) BACK(PARTS, 0);
#undef BACK
    if (streams) streamed();
    if (sums)
        for (int64_t row = 0; row < rows_of(job); row += LANES)
            lane_sums(sums + row * LANES, partial + row);
}

static void pixel_norm_block(const struct team *team, void *argument, int64_t block) {
    const struct job *job = argument;
    EACH_TILE(team, tile, parts_of(job->pixels, TILE)) {
        normalize_tile(job, block, tile);
        tick();
    }
}

/* Each tile writes its sums, and doubles add up the tiles in their order. */
static void pixel_norm_back_block(const struct team *team, void *argument, int64_t block) {
    const struct job *job = argument;
    const int64_t tiles = parts_of(job->pixels, TILE), rows = rows_of(job);
    float *leaf = job->leaves ? leaf_of(team, job->leaves, block) : NULL;
    EACH_TILE(team, tile, tiles) {
        back_of_tile(job, block, tile, team->own, leaf ? team->shared + tile * rows : NULL);
        tick();
    }
    if (!leaf) return;
    meet(team);
    EACH_TILE(team, part, rows / LANES) {
        double sums[LANES] = {0};
        for (int64_t tile = 0; tile < tiles; tile++)
            for (int i = 0; i < LANES; i++)
                sums[i] += team->shared[tile * rows + part * LANES + i];
        for (int i = 0; i < LANES && part * LANES + i < 2 * job->channels; i++)
            leaf[part * LANES + i] = (float)sums[i];
    }
    leaf_done(team, job->leaves, block);
}

/* ---- the exported functions ---- */

static struct job job_of(const value *x, const float *gamma, const float *statistics, value *out,
                         int64_t channels, int64_t pixels, int64_t groups, int64_t of_elements) {
    return (struct job){.x = x,
                        .gamma = gamma,
                        .statistics = (float *)(uintptr_t)statistics,
                        .out = out,
                        .channels = channels,
                        .pixels = pixels,
                        .groups = groups,
                        .sets = groups ? groups : pixels,
                        .of_elements = of_elements && groups};
}

void mpidl_group_norm(const value *x, const float *gamma, const float *beta, float *statistics,
                      value *y, int64_t blocks, int64_t channels, int64_t pixels, int64_t groups,
                      int64_t of_elements, double epsilon) {
    struct job job = job_of(x, gamma, statistics, y, channels, pixels, groups, of_elements);
    job.beta = beta, job.epsilon = epsilon;
    if (groups) {
        const int64_t scratch = 3 * channels / groups * (int64_t)(sizeof(struct sums) / 4);
        each_block(blocks, group_norm_block, &job, scratch, scratch);
    } else
        each_block(blocks, pixel_norm_block, &job, 0, 0);
}

void mpidl_group_norm_backward(const value *dy, const value *x, const float *gamma,
                               const float *statistics, value *dx, float *nodes,
                               int64_t node_count, int64_t blocks, int64_t channels,
                               int64_t pixels, int64_t groups, int64_t of_elements,
                               const int64_t *tree) {
    struct job job = job_of(x, gamma, statistics, dx, channels, pixels, groups, of_elements);
    struct leaves leaves;
    job.dy = dy, job.leaves = nodes ? &leaves : NULL;
    if (nodes)
        leaves_begin(&leaves, (const struct tree *)tree,
                     2 * channels * (job.of_elements ? pixels : 1), nodes, node_count, LEAVES);
    if (groups) {
        const int64_t scratch = 2 * channels / groups * (int64_t)(sizeof(struct sums) / 4);
        each_block(blocks, group_norm_back_block, &job, scratch, scratch);
    } else {
        const int64_t rows = rows_of(&job);
        each_block(blocks, pixel_norm_back_block, &job, parts_of(pixels, TILE) * rows,
                   rows * LANES);
    }
    if (nodes && !mpidl_missing_bytes) leaves_end(&leaves);
}
