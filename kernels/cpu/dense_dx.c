/* Gradient of fully connected layers with respect to x; see dense.h for the order of sums. */
#include "dense.h"
#include "mpidl.h"

/* The number of groups of outputs that are added to dx at once. With enough registers, several
 * groups are added, so that dx is read and written less often. */
#if REGISTERS == 32
enum { GROUPS = 4 };
#else
enum { GROUPS = 1 };
#endif

/* The arguments for adding the products of `groups` groups of outputs to dx: the weights, and dy
 * for the vectors of images. If `add` is 0, the result replaces dx. */
struct visit {
    const float *weight;
    int64_t row;
    int groups, sizes[GROUPS], add;
    const float *dy[2];
    float *dx[2];
};

/* Add a visit's products to `features` features, starting at f, for `vectors` vectors of images. */
INLINE void back(const struct visit *v, int64_t f, const int features, const int vectors) {
    vec total[8][2];
    UNROLL for (int q = 0; q < features; q++)
        UNROLL for (int i = 0; i < vectors; i++) {
            total[q][i] = zero();
            if (GROUPS > 1 && v->add) total[q][i] = load(v->dx[i] + (f + q) * LANES);
        }
    const float *w = v->weight + f;
    int64_t at = 0;
    for (int g = 0; g < GROUPS && g < v->groups; g++) {
        vec sum[8][2], dy[2];
        UNROLL for (int q = 0; q < features; q++)
            UNROLL for (int i = 0; i < vectors; i++) sum[q][i] = zero();
        for (int j = 0; j < v->sizes[g]; j++, w += v->row, at += LANES) {
            UNROLL for (int i = 0; i < vectors; i++) dy[i] = load(v->dy[i] + at);
            UNROLL for (int q = 0; q < features; q++)
                UNROLL for (int i = 0; i < vectors; i++)
                    sum[q][i] = muladd(splat(w[q]), dy[i], sum[q][i]);
        }
        UNROLL for (int q = 0; q < features; q++)
            UNROLL for (int i = 0; i < vectors; i++) {
                if (GROUPS == 1 && v->add) total[q][i] = load(v->dx[i] + (f + q) * LANES);
                total[q][i] += sum[q][i];
            }
    }
    UNROLL for (int q = 0; q < features; q++)
        UNROLL for (int i = 0; i < vectors; i++) store(v->dx[i] + (f + q) * LANES, total[q][i]);
}

/* Add a visit's products to `count` features. Prefetch the weights of `fetch` rows, starting at
 * `next`. */
INLINE void back_features(const struct visit *v, int64_t count, const float *next, int fetch,
                          const int vectors) {
    int64_t f = 0;
    for (; f + 16 <= count; f += 16) {
        for (int j = 0; j < fetch; j++) __builtin_prefetch(next + j * v->row + f, 0, 2);
        for (int q = 0; q < 16; q += 8 / vectors) back(v, f + q, 8 / vectors, vectors);
    }
    for (; f < count; f++) back(v, f, 1, vectors);
}

/* Compute dx for `count` features, starting at feature f, in `blocks` blocks. */
void dense_dx_panel(const struct dense *d, int64_t f, int64_t count, int64_t first,
                    int64_t blocks) {
    int64_t groups = parts_of(d->outputs, GROUP);
    for (int64_t g = 0; g < groups; g += GROUPS) {
        int64_t k = part(d->outputs, g, groups);
        int64_t next = part(d->outputs, least(g + GROUPS, groups), groups);
        int64_t after = part(d->outputs, least(g + 2 * GROUPS, groups), groups);
        struct visit v = {.weight = d->weight + k * d->features + f,
                          .row = d->features,
                          .groups = (int)least(GROUPS, groups - g),
                          .add = g > 0};
        for (int i = 0; i < v.groups; i++)
            v.sizes[i] =
                (int)(part(d->outputs, g + i + 1, groups) - part(d->outputs, g + i, groups));
        for (int64_t i = 0; i < blocks * PARTS; i += 2) {
            int vectors = (int)least(2, blocks * PARTS - i);
            int fetch = i ? 0 : (int)(after - next);
            for (int j = 0; j < vectors; j++) {
                int64_t block = first + (i + j) / PARTS, lane = (i + j) % PARTS * WIDTH;
                v.dy[j] = d->dy + (block * d->outputs + k) * LANES + lane;
                v.dx[j] = d->dx + (block * d->features + f) * LANES + lane;
            }
            if (vectors == 2)
                back_features(&v, count, d->weight + next * d->features + f, fetch, 2);
            else
                back_features(&v, count, d->weight + next * d->features + f, fetch, 1);
        }
        tick();
    }
}

/* Compute the batch-norm sums of the channels whose features are in [first, stop), in one block. */
void dense_sums(const struct dense *d, int64_t block, int64_t first, int64_t stop) {
    int64_t pixels = d->features / d->channels;
    double *row = d->sums + block * 2 * d->channels;
    for (int64_t c = first / pixels; c < stop / pixels; c++) {
        int64_t at = (block * d->features + c * pixels) * LANES;
        channel_norm_sums(d->dx + at, d->x.x + at, pixels, &d->x, c, row + c,
                          row + d->channels + c);
    }
}

int64_t dense_tile(const struct dense *d) {
    int64_t pixels = d->sums ? d->features / d->channels : 1;
    return PANEL > pixels ? PANEL / pixels * pixels : pixels;
}

/* A tile has dense_tile features of `group` blocks. */
struct job {
    const struct dense *dense;
    int64_t tile, group, groups;
};

static void dx_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct dense *d = job->dense;
    int64_t first = tile % job->groups * job->group, blocks = least(job->group, d->blocks - first);
    int64_t f0 = tile / job->groups * job->tile, stop = least(f0 + job->tile, d->features);
    for (int64_t f = f0; f < stop; f += PANEL)
        dense_dx_panel(d, f, least(PANEL, stop - f), first, blocks);
    if (d->sums)
        for (int64_t b = 0; b < blocks; b++) dense_sums(d, first + b, f0, stop);
}

void mpidl_dense_dx(const float *dy, const float *x, const float *mean, const float *scale,
                    const float *beta, const float *weight, float *dx, double *sums,
                    const int64_t *tree, int64_t features, int64_t channels, int64_t outputs) {
    struct dense d = backward_of((struct source){x, mean, scale, beta}, dy, tree, features,
                                 channels, outputs);
    d.weight = weight, d.dx = dx, d.sums = sums;
    struct job job = {&d, dense_tile(&d), MANY_BLOCKS, parts_of(d.blocks, MANY_BLOCKS)};
    each_tile(parts_of(features, job.tile) * job.groups, dx_tile, &job, 0);
    if (sums) fold_sums(sums, 2 * channels, d.tree);
}
