/* Gradient of fully connected layers with respect to x; see dense.h for the order of sums. */
#include "dense.h"
#include "mpidl.h"

/* The number of groups of outputs that are added to dx at once. With enough registers, several
 * small groups are added, so that dx is read and written less often. SUMS: how many vectors of a
 * group's sums are computed together. */
#if REGISTERS == 32
enum { GROUPS = NARROW ? 1 : 4, SUMS = NARROW ? 16 : 8 };
#else
enum { GROUPS = 1, SUMS = 8 };
#endif

/* The arguments for adding the products of `groups` groups of outputs to the sums of dx: the
 * weights, and dy for the vectors of images. `sizes` and `rows` count terms. If `add` is 0, the
 * result replaces the sums. The sums of floats are in dx itself. In bfloat16, they are in scratch
 * memory, and the last groups round them to dx. */
struct visit {
    const float *weight;
    int64_t row;
    int groups, sizes[GROUPS], rows, add, is_last;
    const float *dy[2];
    float *sums[2];
    value *dx[2];
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
    vec total[SUMS][2];
    UNROLL for (int q = 0; q < features; q++)
        UNROLL for (int i = 0; i < vectors; i++) {
            total[q][i] = zero();
            if (GROUPS > 1 && v->add) total[q][i] = load(v->sums[i] + (f + q) * LANES);
        }
    int64_t at = 0;
    for (int g = 0; g < GROUPS && g < v->groups; g++) {
        vec sum[SUMS][2], dy[2];
        UNROLL for (int q = 0; q < features; q++)
            UNROLL for (int i = 0; i < vectors; i++) sum[q][i] = zero();
        if (copy.from) {
            int size = v->sizes[g], stop = size * (copy.part + 1) / copy.parts;
            for (int j = size * copy.part / copy.parts; j < stop; j++)
                copy_line(copy.to + j * LINE, copy.from + j * v->row);
            copy.from += size * v->row, copy.to += size * LINE;
        }
        for (int j = 0; j < v->sizes[g]; j++, w += row, at += LANES) {
            const int swap = SWAP ? 1 - 2 * (j & 1) : 0; /* the step to term j ^ 1 */
            const float *weights = w + swap * row;
            UNROLL for (int i = 0; i < vectors; i++) dy[i] = load(v->dy[i] + at + swap * LANES);
            UNROLL for (int q = 0; q < features; q++)
                UNROLL for (int i = 0; i < vectors; i++)
                    sum[q][i] = add_words(splat(weights[q]), dy[i], sum[q][i]);
        }
        UNROLL for (int q = 0; q < features; q++)
            UNROLL for (int i = 0; i < vectors; i++) {
                if (GROUPS == 1 && v->add) total[q][i] = load(v->sums[i] + (f + q) * LANES);
                total[q][i] += sum[q][i];
            }
    }
    UNROLL for (int q = 0; q < features; q++)
        UNROLL for (int i = 0; i < vectors; i++) {
            if (NARROW && v->is_last) store(v->dx[i] + (f + q) * LANES, total[q][i]);
            else store(v->sums[i] + (f + q) * LANES, total[q][i]);
        }
}

/* The rows of weights that a visit prefetches. */
struct rows {
    const float *first;
    int64_t row;
    int count;
};

/* Add a visit's products to `count` features. If `packs` is 1, copy the weights. */
INLINE void back_features(const struct visit *v, int64_t count, struct rows next,
                          const int vectors, const int packs) {
    const int features = SUMS / vectors, tiles = LINE / features;
    float packed[2][GROUPS * GROUP * LINE] __attribute__((aligned(64)));
    float *now = packed[0], *later = packed[1];
    int64_t f = 0;
    if (packs)
        for (int j = 0; j < v->rows; j++) copy_line(now + j * LINE, v->weight + j * v->row);
    for (; f + LINE <= count; f += LINE) {
        for (int j = 0; j < next.count; j++)
            __builtin_prefetch(next.first + j * next.row + f, 0, 2);
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

enum { DY, DY_IMAGES }; /* scratch slots for the operands of round_dy */

#ifdef BF16
void pack_outputs(const struct dense *d, int64_t k, int64_t stop, int64_t f, int64_t count,
                  float *to, int64_t row) {
    for (; k < stop; k += 2, to += 2 / PER_WORD * row) {
        const float *even = d->weight + k * d->features + f;
        const float *odd = k + 1 < stop ? even + d->features : NULL;
        int64_t i = 0;
        for (; i + WIDTH <= count; i += WIDTH) {
            const vec low = load(even + i), high = odd ? load(odd + i) : zero();
#if PER_WORD == 2
            store(to + i, paired(low, high));
#else
            store(to + i, rounded(low)), store(to + row + i, rounded(high));
#endif
        }
        for (; i < count; i++) {
            const float high = odd ? odd[i] : 0;
            if (PER_WORD == 2) to[i] = word_of(even[i], high);
            else to[i] = rounded_number(even[i]), to[row + i] = rounded_number(high);
        }
    }
}

static void round_dy_tile(void *argument, int64_t block, float *own) {
    const struct dense **copies = argument, *from = copies[0], *d = copies[1];
    const int64_t terms = terms_of(from->outputs);
    const float *dy = from->dy + block * from->outputs * LANES;
    if (d->dy)
        for (int64_t k = 0; k < from->outputs; k += 2)
            for (int p = 0; p < LANES; p += WIDTH) {
                const vec even = load(dy + k * LANES + p);
                const vec odd = k + 1 < from->outputs ? load(dy + (k + 1) * LANES + p) : zero();
                put_pair((float *)d->dy + (block * terms + terms_of(k)) * LANES + p, rounded(even),
                         rounded(odd));
            }
    if (d->dy_images)
        for (int64_t k = 0; k < from->outputs; k++)
            for (int p = 0; p < LANES; p += WIDTH) {
                float *to = (float *)d->dy_images + (block * from->outputs + k) * TERMS_PER_PIXEL;
                if (PER_WORD == 2) store((uint16_t *)to + p, load(dy + k * LANES + p));
                else store(to + p, rounded(load(dy + k * LANES + p)));
            }
}
#endif

void round_dy(struct dense *d, int for_dx, int for_dweight) {
#ifdef BF16
    const struct dense from = *d, *copies[] = {&from, d};
    const int64_t rows = d->blocks * d->outputs;
    d->dy = for_dx ? scratch(DY, d->blocks * terms_of(d->outputs) * LANES) : NULL;
    d->dy_images = for_dweight ? scratch(DY_IMAGES, rows * TERMS_PER_PIXEL) : NULL;
    each_tile(d->blocks, round_dy_tile, copies, 0);
#endif
}

/* The scratch memory of bfloat16: the rounded weights of a group, whose rows use different sets of a
 * cache, and the sums. */
enum { PACKED_ROW = PANEL + LANES };

static int64_t groups_of(const struct dense *d) { return parts_of(d->outputs, GROUP); }

int64_t dense_dx_floats(const struct dense *d, int64_t blocks) {
    if (!NARROW) return 0;
    return terms_of(GROUP) * PACKED_ROW + (groups_of(d) > 1 ? blocks * PANEL * LANES : 0);
}

/* Set the terms, the weights and the prefetched rows of a visit of the groups from g. */
static struct rows begin_visit(struct visit *v, const struct dense *d, int64_t g, int64_t f,
                               int64_t count, const float *packed, int64_t row, float *own) {
    const int64_t groups = groups_of(d), k = group_start(d->outputs, g, groups);
    const int64_t next = group_start(d->outputs, least(g + GROUPS, groups), groups);
    const int64_t after = group_start(d->outputs, least(g + 2 * GROUPS, groups), groups);
    *v = (struct visit){.weight = d->weight + k * d->features + f,
                        .row = d->features,
                        .groups = (int)least(GROUPS, groups - g),
                        .rows = (int)terms_of(next - k),
                        .add = g > 0,
                        .is_last = g + GROUPS >= groups};
    for (int i = 0; i < v->groups; i++)
        v->sizes[i] = (int)terms_of(group_start(d->outputs, g + i + 1, groups) -
                                    group_start(d->outputs, g + i, groups));
#ifdef BF16
    v->weight = packed, v->row = row;
    if (!packed) {
        pack_outputs(d, k, next, f, count, own, PACKED_ROW);
        v->weight = own, v->row = PACKED_ROW;
    }
#endif
    return (struct rows){d->weight + next * d->features + f, d->features, (int)(after - next)};
}

void dense_dx_panel(const struct dense *d, int64_t f, int64_t count, int64_t first, int64_t blocks,
                    const float *packed, int64_t row, float *own) {
    const int64_t groups = groups_of(d), dy_rows = terms_of(d->outputs);
    for (int64_t g = 0; g < groups; g += GROUPS) {
        const int64_t at = terms_of(group_start(d->outputs, g, groups));
        struct visit v;
        const struct rows next = begin_visit(&v, d, g, f, count, packed, row, own);
        int packs = !NARROW && GROUPS > 1 && v.rows > FEW_ROWS && count >= LINE &&
                    d->features * (int64_t)sizeof(float) % SET_BYTES == 0;
        for (int64_t i = 0; i < blocks * PARTS; i += 2) {
            int vectors = (int)least(2, blocks * PARTS - i);
            struct rows fetch = next;
            if (i) fetch.count = 0;
            for (int j = 0; j < vectors; j++) {
                int64_t block = first + (i + j) / PARTS, lane = (i + j) % PARTS * WIDTH;
                v.dy[j] = d->dy + (block * dy_rows + at) * LANES + lane;
                v.dx[j] = d->dx + (block * d->features + f) * LANES + lane;
                v.sums[j] = (float *)v.dx[j];
                if (NARROW)
                    v.sums[j] = own + terms_of(GROUP) * PACKED_ROW +
                                (block - first) * count * LANES + lane;
            }
            if (vectors == 2 && packs)
                back_features(&v, count, fetch, 2, 1);
            else if (vectors == 2)
                back_features(&v, count, fetch, 2, 0);
            else if (packs)
                back_features(&v, count, fetch, 1, 1);
            else
                back_features(&v, count, fetch, 1, 0);
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
        dense_dx_panel(d, f, least(PANEL, stop - f), first, blocks, NULL, 0, own);
    if (d->sums)
        for (int64_t b = 0; b < blocks; b++) dense_sums(d, first + b, f0, stop);
}

void mpidl_dense_dx(const float *dy, const value *x, const float *mean, const float *scale,
                    const float *beta, float low, float high, const float *weight, value *dx,
                    double *sums, const int64_t *tree, int64_t features, int64_t channels,
                    int64_t outputs) {
    const struct source source = {x, mean, scale, beta, low, high};
    struct dense d = backward_of(source, dy, tree, features, channels, outputs);
    d.weight = weight, d.dx = dx, d.sums = sums;
    round_dy(&d, 1, 0);
    struct job job = {&d, dense_tile(&d), MANY_BLOCKS, parts_of(d.blocks, MANY_BLOCKS)};
    each_tile(parts_of(features, job.tile) * job.groups, dx_tile, &job,
              dense_dx_floats(&d, least(d.blocks, MANY_BLOCKS)));
    if (sums) fold_sums(sums, 2 * channels, d.tree);
}
