/* Forward pass of fully connected layers; see dense.h for the order of sums. */
#include "dense.h"

#include "mpidl.h"

/* A tile has TILE outputs of `group` blocks. The panels of features are processed one after the
 * other, so that a panel's x stays in cache for all outputs. In bfloat16, tiles are larger, because
 * each of them converts x to words. */
enum { TILE = NARROW ? 128 : 64 };

struct job {
    const struct dense *dense;
    int64_t tiles;        /* number of tiles that cover the outputs */
    int64_t group, panel; /* blocks per tile; features per panel */
};

/* The weights of a step of outputs, as terms of sums over features, in rows that are `row` floats
 * apart, and the weights of the next step in memory. */
struct step {
    const float *weight, *next;
    int64_t row, next_row;
};

/* Add the sum of weight * x over `terms` terms to y, for `rows` outputs and `vectors` vectors of
 * images. Prefetch the weights of the next step, in bfloat16 to the first-level cache, because they
 * are rounded before they are multiplied. */
INLINE void multiply(const struct step *step, const float *const *x, float *const *y,
                     int64_t terms, const int rows, const int vectors) {
    const float *weight = step->weight, *next = step->next;
    const int64_t row = step->row, next_row = step->next_row;
    for (int64_t t = 0; t < terms;) {
        vec sum[ROWS][2], v[2];
        UNROLL for (int j = 0; j < rows; j++)
            UNROLL for (int i = 0; i < vectors; i++) sum[j][i] = zero();
        for (int64_t stop = least(t + terms_of(SEGMENT), terms); t < stop; t++) {
            const int64_t term = t ^ SWAP;
            if (t % (16 / PER_WORD) == 0)
                UNROLL for (int j = 0; j < rows; j++)
                    __builtin_prefetch(next + j * next_row + t * PER_WORD, 0, NARROW ? 3 : 2);
            UNROLL for (int i = 0; i < vectors; i++) v[i] = load(x[i] + term * LANES);
            UNROLL for (int j = 0; j < rows; j++) {
                vec w = splat(weight[j * row + term]);
                UNROLL for (int i = 0; i < vectors; i++) sum[j][i] = add_words(w, v[i], sum[j][i]);
            }
        }
        UNROLL for (int j = 0; j < rows; j++)
            UNROLL for (int i = 0; i < vectors; i++)
                store(y[i] + j * LANES, load(y[i] + j * LANES) + sum[j][i]);
    }
}

static void multiply_rows(const struct step *step, const float *const *x, float *const *y,
                          int64_t terms, int rows, int vectors) {
#define CASE(n)                                                                                    \
    case n:                                                                                        \
        if (vectors == 2)                                                                          \
            multiply(step, x, y, terms, n, 2);                                                     \
        else                                                                                       \
            multiply(step, x, y, terms, n, 1);                                                     \
        break;
    switch (rows) { EACH_ROWS(CASE) }
#undef CASE
}

#ifdef BF16
/* Write `count` adjacent weights as terms of a sum over features. */
static void pack_features(const float *weight, int64_t count, float *to) {
    int64_t f = 0;
#if PER_WORD == 2
    for (; f + 2 * WIDTH <= count; f += 2 * WIDTH)
        store(to + f / 2, words_of(load(weight + f), load(weight + f + WIDTH)));
    for (; f < count; f += 2) to[f / 2] = word_of(weight[f], f + 1 < count ? weight[f + 1] : 0);
#else
    for (; f + WIDTH <= count; f += WIDTH) store(to + f, rounded(load(weight + f)));
    for (; f < terms_of(count); f++) to[f] = f < count ? rounded_number(weight[f]) : 0;
#endif
}

/* Copy the features [first, first + count) of a block to `room`, as terms of a sum over features. */
static const float *feature_terms(const struct dense *d, int64_t block, int64_t first,
                                  int64_t count, float *room) {
    const int64_t terms = terms_of(count) * LANES;
    const value *x = read_features(d, block, first, count, (value *)(room + terms));
    float *to = room;
    for (int64_t f = 0; f < count; f += 2, x += 2 * LANES, to += 2 / PER_WORD * LANES)
        for (int p = 0; p < LANES; p += WIDTH)
            put_pair(to + p, load(x + p), f + 1 < count ? load(x + LANES + p) : zero());
    return room;
}
#else
#define feature_terms read_features
#endif

/* Return the scratch floats for the features of a panel of one block. */
static int64_t panel_floats(const struct job *job) {
    if (NARROW) return (terms_of(job->panel) + job->panel / 2) * LANES;
    return job->dense->x.mean ? job->panel * LANES : 0;
}

/* In bfloat16, the rounded weights of a step follow the features in a thread's scratch memory. Rows
 * use different sets of a cache. */
enum { STEP_ROW = NARROW ? PANEL / PER_WORD + LANES : 0 };

static void forward_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct dense *d = job->dense;
    int64_t first = tile / job->tiles * job->group, blocks = least(job->group, d->blocks - first);
    int64_t k0 = tile % job->tiles * TILE, outputs = least(TILE, d->outputs - k0);
    int64_t steps = parts_of(outputs, ROWS); /* all steps have about the same number of rows */
    float *y = d->y + (first * d->outputs + k0) * LANES;
    const int64_t own_panel = panel_floats(job);

    for (int64_t b = 0; b < blocks; b++)
        for (int64_t k = 0; k < outputs; k++)
            for (int p = 0; p < LANES; p += WIDTH)
                store(y + (b * d->outputs + k) * LANES + p, splat(d->bias ? d->bias[k0 + k] : 0));
    for (int64_t f = 0; f < d->features; f += job->panel) {
        int64_t count = least(job->panel, d->features - f);
        const float *x[MANY_BLOCKS];
        for (int64_t b = 0; b < blocks; b++)
            x[b] = feature_terms(d, first + b, f, count, own + b * own_panel);
        for (int64_t s = 0; s < steps; s++) {
            int64_t k = part(outputs, s, steps), rows = part(outputs, s + 1, steps) - k;
            const float *weight = d->weight + (k0 + k) * d->features + f;
            struct step step = {weight, weight + ROWS * d->features, d->features, d->features};
#ifdef BF16
            float *packed = own + blocks * own_panel;
            for (int64_t j = 0; j < rows; j++)
                pack_features(weight + j * d->features, count, packed + j * STEP_ROW);
            step.weight = packed, step.row = STEP_ROW;
#endif
            for (int64_t i = 0; i < blocks * PARTS; i += 2) {
                int vectors = (int)least(2, blocks * PARTS - i);
                const float *from[2];
                float *to[2];
                for (int v = 0; v < vectors; v++) {
                    int64_t b = (i + v) / PARTS, lane = (i + v) % PARTS * WIDTH;
                    from[v] = x[b] + lane;
                    to[v] = y + (b * d->outputs + k) * LANES + lane;
                }
                multiply_rows(&step, from, to, terms_of(count), (int)rows, vectors);
            }
            tick();
        }
    }
}

void mpidl_dense(const value *x, const float *mean, const float *scale, const float *beta,
                 float low, float high, const float *weight, const float *bias, float *y,
                 int64_t blocks, int64_t features, int64_t channels, int64_t outputs) {
    struct dense d = {.x = {x, mean, scale, beta, low, high},
                      .weight = weight,
                      .bias = bias,
                      .y = y,
                      .blocks = blocks,
                      .features = features,
                      .outputs = outputs,
                      .channels = channels};
    struct job job = {.dense = &d, .tiles = parts_of(outputs, TILE)};
    /* With few outputs, distribute blocks over the threads, in pairs if there are enough blocks.
     * With many outputs, distribute outputs, so that each weight is read once per MANY_BLOCKS
     * blocks. */
    job.group = job.tiles > 1 ? MANY_BLOCKS : blocks >= 2 * teams_for(blocks) ? 2 : 1;
    job.panel = job.tiles > 1 ? PANEL : SEGMENT;
    each_tile(job.tiles * parts_of(blocks, job.group), forward_tile, &job,
              job.group * panel_floats(&job) + ROWS * STEP_ROW);
}
