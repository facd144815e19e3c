/* Resampling: weighted sums of pixels, over rows and then over columns; and copies of channels. A
 * tile of `resample` is a band of rows of one channel of one block. */
#include "activation.h"
#include "mpidl.h"
#include "team.h"

/* PIXELS: pixels of the output in a tile, at least one row. FEW: rows that are added at once. */
enum { PIXELS = 2048, FEW = 4 };

/* A pixel along one axis, and the weight with which it enters a sum. */
struct tap {
    int32_t pixel;
    float weight;
};

/* The taps of each output along one axis; those of output i are [starts[i], starts[i + 1]). */
struct axis {
    const int64_t *starts;
    const struct tap *taps;
};

static struct axis axis_of(const int64_t *table, int64_t outputs) {
    return (struct axis){table, (const struct tap *)(const void *)(table + outputs + 1)};
}

/* The geometry; Python passes it as int64_t[5]. */
struct geometry {
    int64_t C, H, W, P, Q;
};

struct job {
    const struct geometry *geometry;
    struct source source;
    value *y;
    struct axis rows, columns;
    int64_t band;
};

INLINE vec read(const value *x, int deferred, struct norm n) {
    return deferred ? activate(load(x), n) : load(x);
}

/* Add the weighted sum of `count` rows of a channel, a constant, to `sum`, or store it there if
 * `is_first`. A row has `numbers` numbers. Processors do not prefetch several short rows by
 * themselves. */
INLINE void add_rows(const struct tap *taps, const int count, const int is_first, const value *x,
                     int64_t numbers, const int deferred, struct norm n, float *restrict sum) {
    const value *rows[FEW];
    vec weights[FEW];
    UNROLL for (int t = 0; t < count; t++) {
        rows[t] = x + taps[t].pixel * numbers;
        weights[t] = splat(taps[t].weight);
    }
    for (int64_t i = 0; i < numbers; i += WIDTH) {
        UNROLL for (int t = 0; t < count; t++) __builtin_prefetch(rows[t] + i + count * numbers);
        vec s = read(rows[0] + i, deferred, n);
        if (is_first)
            s = weights[0] * s;
        else
            s = muladd(weights[0], s, load(sum + i));
        UNROLL for (int t = 1; t < count; t++)
            s = muladd(weights[t], read(rows[t] + i, deferred, n), s);
        store(sum + i, s);
    }
}

/* Compute the weighted sum of rows, a few rows at a time. */
INLINE void sum_rows(const struct tap *taps, int64_t count, const value *x, int64_t numbers,
                     const int deferred, struct norm n, float *sum) {
    if (count == 0) memset(sum, 0, (size_t)numbers * sizeof *sum);
    for (int64_t t = 0; t < count; t += FEW) {
        const int64_t few = least(FEW, count - t);
        if (few == 1 && !t) add_rows(taps + t, 1, 1, x, numbers, deferred, n, sum);
        else if (few == 2 && !t) add_rows(taps + t, 2, 1, x, numbers, deferred, n, sum);
        else if (few == 3 && !t) add_rows(taps + t, 3, 1, x, numbers, deferred, n, sum);
        else if (!t) add_rows(taps + t, 4, 1, x, numbers, deferred, n, sum);
        else if (few == 1) add_rows(taps + t, 1, 0, x, numbers, deferred, n, sum);
        else if (few == 2) add_rows(taps + t, 2, 0, x, numbers, deferred, n, sum);
        else if (few == 3) add_rows(taps + t, 3, 0, x, numbers, deferred, n, sum);
        else add_rows(taps + t, 4, 0, x, numbers, deferred, n, sum);
    }
}

/* Compute a row of the output from the weighted sum of rows. */
INLINE void sum_columns(const struct axis *axis, int64_t outputs, const float *row, value *y) {
    for (int64_t q = 0; q < outputs; q++, y += LANES) {
        const struct tap *tap = axis->taps + axis->starts[q];
        const int64_t count = axis->starts[q + 1] - axis->starts[q];
        for (int part = 0; part < LANES; part += WIDTH) {
            vec s = zero();
            if (count) s = splat(tap[0].weight) * load(row + tap[0].pixel * LANES + part);
            for (int64_t t = 1; t < count; t++)
                s = muladd(splat(tap[t].weight), load(row + tap[t].pixel * LANES + part), s);
            store(y + part, s);
        }
    }
}

static void resample_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct geometry *g = job->geometry;
    const int64_t bands = parts_of(g->P, job->band), channel = tile / bands;
    const int64_t first = tile % bands * job->band, stop = least(g->P, first + job->band);
    const int64_t numbers = g->W * LANES;
    const value *x = job->source.x + channel * g->H * numbers;
    const struct norm n = norm_of(&job->source, channel % g->C);
    value *y = job->y + (channel * g->P + first) * g->Q * LANES;
    for (int64_t p = first; p < stop; p++, y += g->Q * LANES) {
        const struct tap *taps = job->rows.taps + job->rows.starts[p];
        const int64_t count = job->rows.starts[p + 1] - job->rows.starts[p];
        const float *row = own;
        if (job->source.mean)
            sum_rows(taps, count, x, numbers, 1, n, own);
        else if (!NARROW && count == 1 && taps->weight == 1.0f)
            row = (const float *)(const void *)(x + taps->pixel * numbers); /* needs no copy */
        else
            sum_rows(taps, count, x, numbers, 0, n, own);
        sum_columns(&job->columns, g->Q, row, y);
    }
}

void mpidl_resample(const value *x, const float *mean, const float *scale, const float *beta,
                    float low, float high, value *y, int64_t blocks, const int64_t *shape,
                    const int64_t *rows, const int64_t *columns) {
    const struct geometry *g = (const struct geometry *)shape;
    struct job job = {.geometry = g,
                      .source = {x, mean, scale, beta, low, high},
                      .y = y,
                      .rows = axis_of(rows, g->P),
                      .columns = axis_of(columns, g->Q),
                      .band = most(PIXELS / g->Q, 1)};
    each_tile(blocks * g->C * parts_of(g->P, job.band), resample_tile, &job, g->W * LANES);
}

/* ---- channels ---- */

struct selection {
    const value *x;
    value *y;
    int64_t channels, pixels, outputs;
    const int64_t *indices;
};

static void take_tile(void *argument, int64_t tile, float *own) {
    const struct selection *s = argument;
    const int64_t block = tile / s->outputs, index = s->indices[tile % s->outputs];
    const int64_t numbers = s->pixels * LANES;
    const size_t bytes = (size_t)numbers * sizeof *s->y;
    (void)own;
    value *y = s->y + tile * numbers;
    if (index < 0)
        memset(y, 0, bytes);
    else
        memcpy(y, s->x + (block * s->channels + index) * numbers, bytes);
}

void mpidl_take_channels(const value *x, value *y, int64_t blocks, int64_t channels, int64_t pixels,
                         int64_t outputs, const int64_t *indices) {
    struct selection selection = {x, y, channels, pixels, outputs, indices};
    each_tile(blocks * outputs, take_tile, &selection, 0);
}
