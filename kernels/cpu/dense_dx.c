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
    int groups, sizes[GROUPS], rows, add;
    const float *dy[2];
    float *dx[2];
};

/* The number of features whose weights, in one row, fill a line of the caches. */
enum { LINE = 16 };

/* Rows that start a multiple of 4 KiB apart use the same set of the first-level cache, which holds
 * about 8 lines. If a visit has more of these rows, each tile of features reads the same lines from
 * the second-level cache again. Therefore, a visit of more than FEW_ROWS rows copies the weights of
 * LINE features to adjacent lines. It copies them while it computes the preceding features, which
 * hides the latency. */
enum { SET_BYTES = 4096, FEW_ROWS = 16 };

/* The copy that a tile of features makes: a part of the rows of each group. */
struct copy {
    const float *from; /* the first row, or NULL if the tile copies nothing */
    float *to;
    int part, parts;
};

INLINE void copy_line(float *to, const float *from) {
    UNROLL for (int i = 0; i < LINE; i += WIDTH) store(to + i, load(from + i));
}

/* Add a visit's products to `features` features, starting at f, for `vectors` vectors of images.
 * The weights of these features are at w, in rows that are `row` floats apart. */
INLINE void back(const struct visit *v, const float *w, int64_t row, int64_t f, const int features,
                 const int vectors, struct copy copy) {
    vec total[8][2];
    UNROLL for (int q = 0; q < features; q++)
        UNROLL for (int i = 0; i < vectors; i++) {
            total[q][i] = zero();
            if (GROUPS > 1 && v->add) total[q][i] = load(v->dx[i] + (f + q) * LANES);
        }
    int64_t at = 0;
    for (int g = 0; g < GROUPS && g < v->groups; g++) {
        vec sum[8][2], dy[2];
        UNROLL for (int q = 0; q < features; q++)
            UNROLL for (int i = 0; i < vectors; i++) sum[q][i] = zero();
        if (copy.from) {
            int size = v->sizes[g], stop = size * (copy.part + 1) / copy.parts;
            for (int j = size * copy.part / copy.parts; j < stop; j++)
                copy_line(copy.to + j * LINE, copy.from + j * v->row);
            copy.from += size * v->row, copy.to += size * LINE;
        }
        for (int j = 0; j < v->sizes[g]; j++, w += row, at += LANES) {
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
 * `next`. If `packs` is 1, copy the weights. */
INLINE void back_features(const struct visit *v, int64_t count, const float *next, int fetch,
                          const int vectors, const int packs) {
    const int features = 8 / vectors, tiles = LINE / features;
    float packed[2][GROUPS * GROUP * LINE] __attribute__((aligned(64)));
    float *now = packed[0], *later = packed[1];
    int64_t f = 0;
    if (packs)
        for (int j = 0; j < v->rows; j++) copy_line(now + j * LINE, v->weight + j * v->row);
    for (; f + LINE <= count; f += LINE) {
        for (int j = 0; j < fetch; j++) __builtin_prefetch(next + j * v->row + f, 0, 2);
        struct copy copy = {.to = later, .parts = tiles};
        if (packs && f + 2 * LINE <= count) copy.from = v->weight + f + LINE;
        for (; copy.part < tiles; copy.part++) {
            int q = copy.part * features;
            if (packs)
                back(v, now + q, LINE, f + q, features, vectors, copy);
            else
                back(v, v->weight + f + q, v->row, f + q, features, vectors, (struct copy){0});
        }
        float *used = now;
        now = later, later = used;
    }
    for (; f < count; f++) back(v, v->weight + f, v->row, f, 1, vectors, (struct copy){0});
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
                          .rows = (int)(next - k),
                          .add = g > 0};
        for (int i = 0; i < v.groups; i++)
            v.sizes[i] =
                (int)(part(d->outputs, g + i + 1, groups) - part(d->outputs, g + i, groups));
        int packs = GROUPS > 1 && v.rows > FEW_ROWS && count >= LINE &&
                    d->features * (int64_t)sizeof(float) % SET_BYTES == 0;
        for (int64_t i = 0; i < blocks * PARTS; i += 2) {
            int vectors = (int)least(2, blocks * PARTS - i);
            int fetch = i ? 0 : (int)(after - next);
            for (int j = 0; j < vectors; j++) {
                int64_t block = first + (i + j) / PARTS, lane = (i + j) % PARTS * WIDTH;
                v.dy[j] = d->dy + (block * d->outputs + k) * LANES + lane;
                v.dx[j] = d->dx + (block * d->features + f) * LANES + lane;
            }
            const float *ahead = d->weight + next * d->features + f;
            if (vectors == 2 && packs)
                back_features(&v, count, ahead, fetch, 2, 1);
            else if (vectors == 2)
                back_features(&v, count, ahead, fetch, 2, 0);
            else if (packs)
                back_features(&v, count, ahead, fetch, 1, 1);
            else
                back_features(&v, count, ahead, fetch, 1, 0);
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
                    const float *beta, float low, float high, const float *weight, float *dx,
                    double *sums, const int64_t *tree, int64_t features, int64_t channels,
                    int64_t outputs) {
    const struct source source = {x, mean, scale, beta, low, high};
    struct dense d = backward_of(source, dy, tree, features, channels, outputs);
    d.weight = weight, d.dx = dx, d.sums = sums;
    struct job job = {&d, dense_tile(&d), MANY_BLOCKS, parts_of(d.blocks, MANY_BLOCKS)};
    each_tile(parts_of(features, job.tile) * job.groups, dx_tile, &job, 0);
    if (sums) fold_sums(sums, 2 * channels, d.tree);
}
