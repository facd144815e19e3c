/* Fully connected layers: the gradients with respect to weight and bias, and a backward pass that
 * computes all gradients at once for layers with few outputs. See dense.h for the order of sums.
 *
 * A leaf of the gradient is as large as the weights, so leaves are never written to memory.
 * Instead, a small tile of the weights is processed at a time: the leaves of all blocks are
 * computed one after another and folded in registers and caches. Only this rank's nodes are
 * written to memory. */
#include "dense.h"
#include "mpidl.h"

/* The step of the binary counter (see fold.h) for a block: how often the new value is combined with
 * the value below it, and whether the result is one of this rank's nodes. */
struct plan {
    uint8_t joins, stays;
};

/* Compute the steps for all blocks. `room` is scratch memory of one float per block. */
static struct plan *make_plan(const struct tree *tree, float *room) {
    struct plan *plan = (struct plan *)room;
    int64_t last[SLOTS]; /* the last block whose value was stored at each height */
    struct counter counter;
    counter_begin(&counter, tree, tree->first);
    for (int64_t b = 0; b < tree->stop - tree->first; b++) {
        plan[b] = (struct plan){0, 0};
        counter_push(&counter, tree->first + b + 1);
        for (; counter_joins(&counter); counter_pop(&counter)) plan[b].joins++;
        last[counter.count - 1] = b;
    }
    for (int i = 0; i < counter.count; i++) plan[last[i]].stays = 1;
    return plan;
}

/* A tile of the weights is at most ROWS outputs x ACROSS features. */
enum { ACROSS = 2 * WIDTH };

struct tile {
    const float *dy;    /* dy_images of a block, starting at the tile's first output */
    const float *x;     /* x of the block, starting at the tile's first feature, term by term */
    int64_t image;      /* stride of the terms of x: images, or words of two images */
    float *slots;       /* the tile's values in the lowest slot */
    int64_t slot, slot_row;
    float *nodes;       /* the tile's values in the lowest node */
    int64_t node, node_row;
    int64_t count;      /* features in the tile */
    int stream;         /* whether the nodes are too large for the caches */
};

/* Compute one block's leaf and fold it with the values below it in the counter. */
INLINE void fold_leaf(const struct tile *t, struct plan plan, int height, const int rows) {
    vec sum[ROWS][2], x[2];
    UNROLL for (int j = 0; j < rows; j++)
        UNROLL for (int i = 0; i < 2; i++) sum[j][i] = zero();
    for (int n = 0; n < TERMS_PER_PIXEL; n++) {
        const int term = n ^ SWAP;
        UNROLL for (int i = 0; i < 2; i++) x[i] = load(t->x + term * t->image + i * WIDTH);
        UNROLL for (int j = 0; j < rows; j++) {
            vec dy = splat(t->dy[j * TERMS_PER_PIXEL + term]);
            UNROLL for (int i = 0; i < 2; i++) sum[j][i] = add_words(dy, x[i], sum[j][i]);
        }
    }
    for (int n = 0; n < plan.joins; n++) {
        const float *left = t->slots + --height * t->slot;
        UNROLL for (int j = 0; j < rows; j++)
            UNROLL for (int i = 0; i < 2; i++)
                sum[j][i] = load(left + j * t->slot_row + i * WIDTH) + sum[j][i];
    }
    float *to = t->slots + height * t->slot, *node = t->nodes + height * t->node;
    int64_t row = t->slot_row;
    if (plan.stays && t->count == ACROSS) to = node, row = t->node_row;
    if (plan.stays && t->stream)
        UNROLL for (int j = 0; j < rows; j++)
            UNROLL for (int i = 0; i < 2; i++) stream(to + j * row + i * WIDTH, sum[j][i]);
    else
        UNROLL for (int j = 0; j < rows; j++)
            UNROLL for (int i = 0; i < 2; i++) store(to + j * row + i * WIDTH, sum[j][i]);
    if (plan.stays && t->count < ACROSS)
        for (int j = 0; j < rows; j++)
            memcpy(node + j * t->node_row, to + j * row, (size_t)t->count * sizeof *to);
}

static void fold_rows(const struct tile *t, struct plan plan, int height, int rows) {
#define CASE(n)                                                                                    \
    case n:                                                                                        \
        fold_leaf(t, plan, height, n);                                                             \
        break;
    switch (rows) { EACH_ROWS(CASE) }
#undef CASE
}

/* Transpose the features [first, first + count) of a block to (terms, stride), term by term, with
 * zeros up to a multiple of ACROSS. `room` is scratch memory for an activation. */
static void turn(const struct dense *d, int64_t block, int64_t first, int64_t count, float *room,
                 float *to, int64_t stride) {
    const value *x = read_features(d, block, first, count, (value *)room);
#if PER_WORD == 2 /* a row holds the eight words of a feature and those of the feature f + 16 */
    for (int64_t f = 0; f < count; f += ACROSS) {
        vec v[WIDTH];
        UNROLL for (int i = 0; i < WIDTH; i++) {
            const value *low = x + (f + i) * LANES, *high = low + WIDTH * LANES;
            __m256i halves[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            if (f + i < count) halves[0] = _mm256_loadu_si256((const __m256i *)low);
            if (f + i + WIDTH < count) halves[1] = _mm256_loadu_si256((const __m256i *)high);
            v[i] = (vec)_mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1);
        }
        transpose(v);
        UNROLL for (int i = 0; i < WIDTH; i++)
            store(to + i % TERMS_PER_PIXEL * stride + f + i / TERMS_PER_PIXEL * WIDTH, v[i]);
    }
#else
    for (int64_t f = 0; f < parts_of(count, ACROSS) * ACROSS; f += WIDTH)
        for (int p = 0; p < LANES; p += WIDTH) {
            const value *from = x + f * LANES + p;
            vec v[WIDTH];
            UNROLL for (int i = 0; i < WIDTH; i++) v[i] = zero();
            if (f + WIDTH <= count)
                UNROLL for (int i = 0; i < WIDTH; i++) v[i] = load(from + i * LANES);
            else
                UNROLL for (int i = 0; i < WIDTH; i++)
                    if (f + i < count) v[i] = load(from + i * LANES);
            transpose(v);
            UNROLL for (int i = 0; i < WIDTH; i++) store(to + (p + i) * stride + f, v[i]);
        }
#endif
}

struct job {
    const struct dense *dense;
    int64_t panel, stride; /* features per tile; stride of the tile's images */
    int64_t groups;        /* number of groups of outputs */
    int stream;
};

/* A tile has at most MANY_OUTPUTS outputs and one panel of features. */
enum { MANY_OUTPUTS = 512 };

static void dweight_tile(void *argument, int64_t number, float *own) {
    const struct job *job = argument;
    const struct dense *d = job->dense;
    int64_t f0 = number / job->groups * job->panel, count = least(job->panel, d->features - f0);
    int64_t k0 = number % job->groups * MANY_OUTPUTS;
    int64_t outputs = least(MANY_OUTPUTS, d->outputs - k0);
    int64_t steps = parts_of(outputs, ROWS), block = TERMS_PER_PIXEL * job->stride;
    float *x = own, *slots = x + d->blocks * block;
    float *room = slots + counter_slots(d->blocks) * ROWS * ACROSS;
    const struct plan *plan = make_plan(d->tree, room + job->panel * LANES);

    for (int64_t b = 0; b < d->blocks; b++)
        turn(d, b, f0, count, room, x + b * block, job->stride);
    for (int64_t s = 0; s < steps; s++) {
        int64_t k = k0 + part(outputs, s, steps), rows = k0 + part(outputs, s + 1, steps) - k;
        for (int64_t f = 0; f < count; f += ACROSS) {
            struct tile t = {.image = job->stride,
                             .slots = slots,
                             .slot = ROWS * ACROSS,
                             .slot_row = ACROSS,
                             .nodes = d->nodes + k * d->features + f0 + f,
                             .node = d->outputs * d->features,
                             .node_row = d->features,
                             .count = least(ACROSS, count - f)};
            t.stream = job->stream && t.count == ACROSS;
            int height = 0;
            for (int64_t b = 0; b < d->blocks; b++) {
                t.dy = d->dy_images + (b * d->outputs + k) * TERMS_PER_PIXEL;
                t.x = x + b * block + f;
                fold_rows(&t, plan[b], height, (int)rows);
                height += 1 - plan[b].joins;
            }
        }
        tick();
    }
    if (job->stream) streamed();
}

/* Return whether stores of the gradient bypass the caches. This requires rows that start at cache
 * lines. */
static int streams(const struct dense *d) {
    const int64_t large = 4 << 20; /* in floats */
    return d->outputs * d->features >= large && d->features % LANES == 0 &&
           (uintptr_t)d->nodes % (LANES * sizeof(float)) == 0;
}

void mpidl_dense_dweight(const float *dy, const value *x, const float *mean, const float *scale,
                         const float *beta, float low, float high, float *nodes,
                         const int64_t *tree, int64_t features, int64_t channels, int64_t outputs) {
    const struct source source = {x, mean, scale, beta, low, high};
    struct dense d = backward_of(source, dy, tree, features, channels, outputs);
    d.nodes = nodes;
    if (d.blocks == 0) return;
    round_dy(&d, 0, 1);
    int64_t room = (1 << 17) / (d.blocks * TERMS_PER_PIXEL); /* x of all blocks must stay in cache */
    struct job job = {.dense = &d, .groups = parts_of(outputs, MANY_OUTPUTS)};
    job.stream = streams(&d);
    job.panel = least(PANEL, room > 2 * ACROSS ? room / ACROSS * ACROSS : 2 * ACROSS);
    job.stride = job.panel + LANES; /* so that the images use different cache sets */
    each_tile(parts_of(features, job.panel) * job.groups, dweight_tile, &job,
              d.blocks * TERMS_PER_PIXEL * job.stride + counter_slots(d.blocks) * ROWS * ACROSS +
                  job.panel * LANES + d.blocks);
}

/* dbias *************************************************************************************** */

#ifndef BF16 /* dy has floats in both compilations */
/* Compute dbias of one tile (LANES outputs). The 16 images of a row are added as in channel_sum. */
static void dbias_tile(void *argument, int64_t tile, float *own) {
    const struct dense *d = argument;
    int64_t k = tile * LANES, count = least(LANES, d->outputs - k);
    const struct plan *plan = make_plan(d->tree, own);
    float *slots = own + d->blocks, rows[LANES * LANES] = {0};
    int height = 0;
    for (int64_t b = 0; b < d->blocks; b++, height++) {
        const float *dy = d->dy + (b * d->outputs + k) * LANES;
        float *leaf = slots + height * LANES;
        for (int64_t i = 0; i < count * LANES; i++) rows[i] = 0 + dy[i];
        lane_sums(rows, leaf);
        for (int n = 0; n < plan[b].joins; n++, height--, leaf -= LANES)
            for (int i = 0; i < LANES; i++) leaf[i - LANES] += leaf[i];
        if (plan[b].stays)
            memcpy(d->nodes + height * d->outputs + k, leaf, (size_t)count * sizeof *leaf);
    }
}

void mpidl_dense_dbias(const float *dy, float *nodes, const int64_t *tree, int64_t outputs) {
    struct dense d = backward_of((struct source){0}, dy, tree, 0, 0, outputs);
    d.nodes = nodes;
    if (d.blocks == 0) return;
    each_tile(parts_of(outputs, LANES), dbias_tile, &d,
              d.blocks + counter_slots(d.blocks) * LANES);
}
#endif

/* All of backward ***************************************************************************** */

/* A tile has dense_tile features. CHUNK features of a pair of blocks fit into the first-level
 * cache. All gradients of a chunk are computed before the features of the next chunk are read. */
enum { CHUNK = 128 };

static void backward_tile(void *argument, int64_t number, float *own) {
    const struct job *job = argument;
    const struct dense *d = job->dense;
    int64_t f0 = number * job->panel, stop = least(f0 + job->panel, d->features);
    int64_t steps = parts_of(d->outputs, ROWS), slot = d->outputs * job->stride;
    float *room = own, *x = room + CHUNK * LANES, *slots = x + LANES * (CHUNK + LANES);
    float *for_plan = slots + counter_slots(d->blocks) * slot;
    const struct plan *plan = make_plan(d->tree, for_plan);
    float *packed = for_plan + odd_lines(parts_of(d->blocks, LANES)); /* only in bfloat16 */
    float *for_dx = packed + (NARROW ? terms_of(d->outputs) * job->stride : 0);
    int height = 0;

#ifdef BF16
    pack_outputs(d, 0, d->outputs, f0, stop - f0, packed, job->stride);
#endif
    for (int64_t first = 0; first < d->blocks; first += 2) {
        int64_t last = least(first + 2, d->blocks);
        int at = height;
        for (int64_t f = f0; f < stop; f += CHUNK) {
            int64_t count = least(CHUNK, stop - f);
            dense_dx_panel(d, f, count, first, last - first, packed + f - f0, job->stride, for_dx);
            at = height;
            for (int64_t b = first; b < last; at += 1 - plan[b++].joins) {
                turn(d, b, f, count, room, x, CHUNK + LANES);
                for (int64_t s = 0; s < steps; s++) {
                    int64_t k = part(d->outputs, s, steps);
                    int rows = (int)(part(d->outputs, s + 1, steps) - k);
                    for (int64_t i = 0; i < count; i += ACROSS) {
                        struct tile t = {.dy = d->dy_images +
                                               (b * d->outputs + k) * TERMS_PER_PIXEL,
                                         .x = x + i,
                                         .image = CHUNK + LANES,
                                         .slots = slots + k * job->stride + f - f0 + i,
                                         .slot = slot,
                                         .slot_row = job->stride,
                                         .nodes = d->nodes + k * d->features + f + i,
                                         .node = d->outputs * d->features,
                                         .node_row = d->features,
                                         .count = least(ACROSS, count - i)};
                        fold_rows(&t, plan[b], at, rows);
                    }
                }
            }
        }
        height = at;
        if (d->sums)
            for (int64_t b = first; b < last; b++) dense_sums(d, b, f0, stop);
        tick();
    }
}

void mpidl_dense_backward(const float *dy, const value *x, const float *mean, const float *scale,
                          const float *beta, float low, float high, const float *weight, value *dx,
                          double *sums, float *nodes, const int64_t *tree, int64_t features,
                          int64_t channels, int64_t outputs) {
    const struct source source = {x, mean, scale, beta, low, high};
    struct dense d = backward_of(source, dy, tree, features, channels, outputs);
    d.weight = weight, d.dx = dx, d.sums = sums, d.nodes = nodes;
    if (d.blocks == 0) return;
    round_dy(&d, 1, 1);
    struct job job = {.dense = &d, .panel = dense_tile(&d)};
    job.stride = parts_of(job.panel, ACROSS) * ACROSS + LANES;
    each_tile(parts_of(features, job.panel), backward_tile, &job,
              LANES * (2 * CHUNK + LANES) + counter_slots(d.blocks) * outputs * job.stride +
                  odd_lines(parts_of(d.blocks, LANES)) +
                  (NARROW ? terms_of(outputs) * job.stride : 0) + dense_dx_floats(&d, 2));
    if (sums) fold_sums(sums, 2 * channels, d.tree);
}
