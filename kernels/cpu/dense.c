/* Forward pass of fully connected layers; see dense.h for the order of sums. */
#include "dense.h"

#include "mpidl.h"

/* A tile has TILE outputs of `group` blocks. The panels of features are processed one after the
 * other, so that a panel's x stays in cache for all outputs. */
enum { TILE = 64 };

struct job {
    const struct dense *dense;
    int64_t tiles;        /* number of tiles that cover the outputs */
    int64_t group, panel; /* blocks per tile; features per panel */
};

/* Add the sum of weight * x over `count` features to y, for `rows` outputs and `vectors` vectors of
 * images. Prefetch the weights of the next ROWS outputs. */
INLINE void multiply(const float *weight, int64_t row, const float *const *x, float *const *y,
                     int64_t count, const int rows, const int vectors) {
    for (int64_t f = 0; f < count;) {
        vec sum[ROWS][2], v[2];
        UNROLL for (int j = 0; j < rows; j++)
            UNROLL for (int i = 0; i < vectors; i++) sum[j][i] = zero();
        for (int64_t stop = least(f + SEGMENT, count); f < stop; f++) {
            if (f % 16 == 0)
                UNROLL for (int j = 0; j < rows; j++)
                    __builtin_prefetch(weight + (ROWS + j) * row + f, 0, 2);
            UNROLL for (int i = 0; i < vectors; i++) v[i] = load(x[i] + f * LANES);
            UNROLL for (int j = 0; j < rows; j++) {
                vec w = splat(weight[j * row + f]);
                UNROLL for (int i = 0; i < vectors; i++) sum[j][i] = muladd(w, v[i], sum[j][i]);
            }
        }
        UNROLL for (int j = 0; j < rows; j++)
            UNROLL for (int i = 0; i < vectors; i++)
                store(y[i] + j * LANES, load(y[i] + j * LANES) + sum[j][i]);
    }
}

static void multiply_rows(const float *weight, int64_t row, const float *const *x,
                          float *const *y, int64_t count, int rows, int vectors) {
#define CASE(n)                                                                                    \
    case n:                                                                                        \
        if (vectors == 2)                                                                          \
            multiply(weight, row, x, y, count, n, 2);                                              \
        else                                                                                       \
            multiply(weight, row, x, y, count, n, 1);                                              \
        break;
    switch (rows) { EACH_ROWS(CASE) }
#undef CASE
}

static void forward_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct dense *d = job->dense;
    int64_t first = tile / job->tiles * job->group, blocks = least(job->group, d->blocks - first);
    int64_t k0 = tile % job->tiles * TILE, outputs = least(TILE, d->outputs - k0);
    int64_t steps = parts_of(outputs, ROWS); /* all steps have about the same number of rows */
    float *y = d->y + (first * d->outputs + k0) * LANES;

    for (int64_t b = 0; b < blocks; b++)
        for (int64_t k = 0; k < outputs; k++)
            for (int p = 0; p < LANES; p += WIDTH)
                store(y + (b * d->outputs + k) * LANES + p, splat(d->bias ? d->bias[k0 + k] : 0));
    for (int64_t f = 0; f < d->features; f += job->panel) {
        int64_t count = least(job->panel, d->features - f);
        const float *x[MANY_BLOCKS];
        for (int64_t b = 0; b < blocks; b++)
            x[b] = read_features(d, first + b, f, count, own + b * job->panel * LANES);
        for (int64_t s = 0; s < steps; s++) {
            int64_t k = part(outputs, s, steps), rows = part(outputs, s + 1, steps) - k;
            const float *weight = d->weight + (k0 + k) * d->features + f;
            for (int64_t i = 0; i < blocks * PARTS; i += 2) {
                int vectors = (int)least(2, blocks * PARTS - i);
                const float *from[2];
                float *to[2];
                for (int v = 0; v < vectors; v++) {
                    int64_t b = (i + v) / PARTS, lane = (i + v) % PARTS * WIDTH;
                    from[v] = x[b] + lane;
                    to[v] = y + (b * d->outputs + k) * LANES + lane;
                }
                multiply_rows(weight, d->features, from, to, count, (int)rows, vectors);
            }
            tick();
        }
    }
}

void mpidl_dense(const float *x, const float *mean, const float *scale, const float *beta,
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
              mean ? job.group * job.panel * LANES : 0);
}
