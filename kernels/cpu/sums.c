/* Sums over the ranks of a host in shared memory. mpidl/comm/host_memory.py explains the layout of
 * the memory, and sum_plans.py creates a plan for each sum.
 *
 * A sum is divided into chunks, and all ranks number the chunks of all sums in the same way. A
 * chunk goes through three stages on each rank. `place` copies this rank's nodes into its slot.
 * `fold` combines the nodes of all ranks, and `take` copies the results out of the slots. In shared
 * memory, each rank counts the chunks that have passed each stage. A rank waits only for these
 * counts, so no rank sends a message. A slot is reused when all ranks have taken its results. Each
 * rank also records which sum each slot belongs to. Otherwise, ranks that start different sums
 * would read each other's values at the wrong places. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "mpidl.h"
#include "team.h"

enum { FLOATS, DOUBLES, MOMENTS }; /* kinds of values in a sum */

/* A rank's counts of chunks, in shared memory. */
enum stage { PLACED, FOLDED, TAKEN, STAGES };
enum { MOST_SLOTS = 8 };
struct counts {
    _Atomic int64_t of[STAGES];
    char pad[128 - STAGES * 8];   /* processors fetch lines of 64 bytes in pairs */
    int64_t identity[MOST_SLOTS]; /* `identity` of the plan of each slot's chunk */
    int64_t width[MOST_SLOTS];    /* 4 times the width of the chunk's sum, plus its kind */
};

/* The description of a sum. `table` holds the rank and the row of each node, the left and the right
 * node of each join, and the node that contains each result. */
struct plan {
    int64_t kind, width; /* `width`: number of values in a node */
    int64_t chunk;       /* number of values in a chunk; for moments, of channels */
    int64_t chunks;
    int64_t stride;      /* bytes between adjacent nodes of a chunk */
    int64_t direct;      /* 1: each rank folds all values; 0: each rank folds a segment */
    int64_t own;         /* number of this rank's nodes */
    int64_t nodes, joins, results;
    int64_t identity;    /* a hash of the description, to detect ranks with different sums */
    int64_t table[];
};

/* A sum of one or more arrays, the pieces. The caller keeps the struct and its memory until all
 * chunks have been taken. */
struct sum {
    const struct plan *plan;
    const int64_t *pieces; /* their number; for each: number of values, addresses of own nodes */
    char *out;             /* (results, width); NULL if this rank needs no results */
    struct sum *next;
    int64_t chunks[STAGES]; /* chunks that have passed each stage */
};

/* A rank's view of the incomplete sums, in the order in which they were started. */
struct queue {
    char *memory; /* the counts of all ranks, then the slots of each rank */
    int64_t rank, ranks, slots, slot_bytes;
    int64_t patience;             /* time limit of mpidl_sums_wait, in ns */
    int64_t waited;               /* total time spent waiting in mpidl_sums_wait, in ns */
    int64_t chunks[STAGES];       /* chunks that have passed each stage */
    int64_t least[STAGES];        /* a lower bound of `chunks` over all ranks */
    struct sum *current[STAGES];  /* the sum that the next chunk belongs to */
    struct sum *last;
    int64_t differs; /* 1 + the number of a rank whose chunk belongs to another sum, or 0 */
    char *scratch;   /* for the joined nodes of a chunk if `direct` is 1 */
};

int64_t mpidl_sums_waiting;
static _Atomic(struct queue *) ticking; /* the queue that `advance_sums` advances */
static pthread_t owner;                 /* the thread that started a sum in the queue */

_Static_assert(sizeof(void *) == sizeof(int64_t), "Python stores addresses in int64_t");

void mpidl_sums_leave(const int64_t *queue) {
    if (ticking == (const struct queue *)queue) ticking = NULL;
}

void stop_sums(void) { ticking = NULL; }

static struct counts *counts_of(const struct queue *q, int64_t rank) {
    return (struct counts *)q->memory + rank;
}

static void publish(struct queue *q, int stage) {
    q->chunks[stage]++;
    q->current[stage]->chunks[stage]++;
    atomic_store_explicit(&counts_of(q, q->rank)->of[stage], q->chunks[stage],
                          memory_order_release);
    if (q->current[stage]->chunks[stage] == q->current[stage]->plan->chunks)
        q->current[stage] = q->current[stage]->next;
}

/* Return whether `count` chunks have passed a stage on all ranks. */
static int have_passed(struct queue *q, int stage, int64_t count) {
    if (q->least[stage] >= count) return 1;
    int64_t least = INT64_MAX;
    for (int64_t r = 0; r < q->ranks; r++) {
        int64_t passed =
            atomic_load_explicit(&counts_of(q, r)->of[stage], memory_order_acquire);
        if (passed < count) return 0;
        if (passed < least) least = passed;
    }
    q->least[stage] = least;
    return 1;
}

static char *node_of(const struct queue *q, const struct plan *plan, int64_t node, int64_t chunk) {
    int64_t slots = plan->table[2 * node] * q->slots + chunk % q->slots;
    return q->memory + q->ranks * (int64_t)sizeof(struct counts) + slots * q->slot_bytes +
           plan->table[2 * node + 1] * plan->stride;
}

static int64_t item_of(const struct plan *plan) {
    return plan->kind == FLOATS ? (int64_t)sizeof(float) : (int64_t)sizeof(double);
}

static int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* A chunk of a sum: its first value and its number of values (for moments, of channels). */
struct part {
    int64_t first, count;
};

static struct part part_of(const struct plan *plan, int64_t chunk) {
    int64_t whole = plan->kind == MOMENTS ? plan->width / 2 : plan->width;
    int64_t first = chunk * plan->chunk;
    return (struct part){first, least_of(plan->chunk, whole - first)};
}

/* Copy the moments of `count` channels between a node of all channels and a node of a chunk. */
static void copy_moments(double *to, int64_t to_channels, int64_t to_first, const double *from,
                         int64_t channels, int64_t first, int64_t count) {
    to[0] = from[0];
    memcpy(to + 1 + to_first, from + 1 + first, (size_t)count * sizeof(double));
    memcpy(to + 1 + to_channels + to_first, from + 1 + channels + first,
           (size_t)count * sizeof(double));
}

/* Copy the pieces of a node of this rank to the node's memory in the slot. */
static void copy_pieces(const struct sum *sum, int64_t row, struct part part, char *to) {
    const int64_t *piece = sum->pieces + 1, item = item_of(sum->plan), own = sum->plan->own;
    for (int64_t p = 0, start = 0; p < sum->pieces[0]; p++, piece += 1 + own) {
        int64_t stop = start + piece[0];
        int64_t low = start > part.first ? start : part.first;
        int64_t high = least_of(stop, part.first + part.count);
        if (low < high)
            memcpy(to + (low - part.first) * item,
                   (const char *)(intptr_t)piece[1 + row] + (low - start) * item,
                   (size_t)((high - low) * item));
        start = stop;
    }
}

static int place(struct queue *q) {
    struct sum *sum = q->current[PLACED];
    if (!sum || !have_passed(q, TAKEN, q->chunks[PLACED] - q->slots + 1)) return 0;
    const struct plan *plan = sum->plan;
    struct part part = part_of(plan, sum->chunks[PLACED]);
    int64_t row = 0;
    for (int64_t i = 0; row < plan->own; i++) {
        if (plan->table[2 * i] != q->rank) continue;
        char *to = node_of(q, plan, i, q->chunks[PLACED]);
        if (plan->kind == MOMENTS)
            copy_moments((double *)to, part.count, 0,
                         (const double *)(intptr_t)sum->pieces[2 + row], plan->width / 2,
                         part.first, part.count);
        else
            copy_pieces(sum, row, part, to);
        row++;
    }
    struct counts *counts = counts_of(q, q->rank);
    counts->identity[q->chunks[PLACED] % q->slots] = plan->identity;
    counts->width[q->chunks[PLACED] % q->slots] = 4 * plan->width + plan->kind;
    publish(q, PLACED);
    return 1;
}

static void add_floats(float *out, const float *left, const float *right, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = left[i] + right[i];
}

static void add_doubles(double *out, const double *left, const double *right, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = left[i] + right[i];
}

/* Merge moments like fold.merge_moments. Sets without images are ignored. */
static void merge(double *out, const double *left, const double *right, int64_t channels) {
    double n = left[0], m = right[0];
    if (n == 0 || m == 0) {
        memmove(out, m == 0 ? left : right, (size_t)(1 + 2 * channels) * sizeof(double));
        return;
    }
    for (int64_t c = 1; c <= channels; c++) {
        double delta = right[c] - left[c];
        double squares = right[channels + c] + delta * delta * (n * m / (n + m));
        out[channels + c] = left[channels + c] + squares;
        out[c] = left[c] + delta * (m / (n + m));
    }
    out[0] = n + m;
}

static void combine(const struct plan *plan, char *out, const char *left, const char *right,
                    int64_t count) {
    if (plan->kind == FLOATS)
        add_floats((float *)out, (const float *)left, (const float *)right, count);
    else if (plan->kind == DOUBLES)
        add_doubles((double *)out, (const double *)left, (const double *)right, count);
    else
        merge((double *)out, (const double *)left, (const double *)right, count);
}

static void write_result(const struct sum *sum, int64_t row, struct part part, const char *from) {
    const struct plan *plan = sum->plan;
    int64_t item = item_of(plan);
    char *out = sum->out + row * plan->width * item;
    if (plan->kind == MOMENTS)
        copy_moments((double *)out, plan->width / 2, part.first, (const double *)from, part.count,
                     0, part.count);
    else
        memcpy(out + part.first * item, from, (size_t)(part.count * item));
}

/* Fold all nodes of a chunk without changing the nodes in shared memory, which all ranks read. */
static void fold_alone(const struct queue *q, const struct sum *sum, struct part part) {
    const struct plan *plan = sum->plan;
    const int64_t *joins = plan->table + 2 * plan->nodes, *results = joins + 2 * plan->joins;
    const char *values[plan->nodes + 1];
    int64_t item = item_of(plan);
    for (int64_t i = 0; i < plan->nodes; i++) values[i] = node_of(q, plan, i, q->chunks[FOLDED]);
    for (int64_t j = 0; j < plan->joins; j++) {
        int64_t left = joins[2 * j], right = joins[2 * j + 1];
        char *out = q->scratch + left * plan->stride;
        if (plan->results == 1 && plan->kind != MOMENTS && left == results[0])
            out = sum->out + part.first * item;
        combine(plan, out, values[left], values[right], part.count);
        values[left] = out;
    }
    for (int64_t row = 0; row < plan->results; row++)
        if (values[results[row]] != sum->out + part.first * item)
            write_result(sum, row, part, values[results[row]]);
}

/* Fold this rank's segment of a chunk, in place. */
static void fold_segment(const struct queue *q, const struct sum *sum, struct part part) {
    const struct plan *plan = sum->plan;
    const int64_t *joins = plan->table + 2 * plan->nodes, lines = (part.count + 15) / 16;
    int64_t first = 16 * (lines * q->rank / q->ranks);
    int64_t stop = least_of(16 * (lines * (q->rank + 1) / q->ranks), part.count);
    if (first >= stop) return;
    for (int64_t j = 0; j < plan->joins; j++) {
        char *left = node_of(q, plan, joins[2 * j], q->chunks[FOLDED]) + first * item_of(plan);
        char *right = node_of(q, plan, joins[2 * j + 1], q->chunks[FOLDED]) + first * item_of(plan);
        combine(plan, left, left, right, stop - first);
    }
}

/* Return whether all ranks have placed a chunk of this sum. If a rank has placed a chunk of another
 * sum, stop the queue. */
static int is_same(struct queue *q, const struct sum *sum) {
    int64_t slot = q->chunks[FOLDED] % q->slots;
    for (int64_t r = 0; r < q->ranks && !q->differs; r++)
        if (counts_of(q, r)->identity[slot] != sum->plan->identity) q->differs = 1 + r;
    return !q->differs;
}

static int fold(struct queue *q) {
    struct sum *sum = q->current[FOLDED];
    if (!sum || !have_passed(q, PLACED, q->chunks[FOLDED] + 1) || !is_same(q, sum)) return 0;
    struct part part = part_of(sum->plan, sum->chunks[FOLDED]);
    unsigned before = standard_rounding();
    if (!sum->plan->direct)
        fold_segment(q, sum, part);
    else if (sum->out)
        fold_alone(q, sum, part);
    former_rounding(before);
    publish(q, FOLDED);
    return 1;
}

static int take(struct queue *q) {
    struct sum *sum = q->current[TAKEN];
    const struct plan *plan = sum ? sum->plan : NULL;
    if (!sum || q->chunks[TAKEN] == q->chunks[FOLDED]) return 0;
    if (!plan->direct) {
        if (!have_passed(q, FOLDED, q->chunks[TAKEN] + 1)) return 0;
        const int64_t *results = plan->table + 2 * (plan->nodes + plan->joins);
        struct part part = part_of(plan, sum->chunks[TAKEN]);
        for (int64_t row = 0; sum->out && row < plan->results; row++)
            write_result(sum, row, part, node_of(q, plan, results[row], q->chunks[TAKEN]));
    }
    publish(q, TAKEN);
    if (!q->current[TAKEN]) {
        q->last = NULL; /* the caller may free the sums now */
        mpidl_sums_leave((int64_t *)q);
    }
    return 1;
}

static void advance(struct queue *q) {
    while (q->last && place(q) + fold(q) + take(q)) continue;
}

void advance_sums(void) {
    struct queue *q = atomic_load_explicit(&ticking, memory_order_relaxed);
    if (q && pthread_equal(pthread_self(), owner)) advance(q);
}

void mpidl_sums_start(int64_t *queue, int64_t *sum) {
    struct queue *q = (struct queue *)queue;
    struct sum *s = (struct sum *)sum;
    s->next = NULL;
    for (int stage = 0; stage < STAGES; stage++) {
        s->chunks[stage] = 0;
        if (!q->current[stage]) q->current[stage] = s;
    }
    if (q->last) q->last->next = s;
    q->last = s;
    owner = pthread_self();
    ticking = q;
    advance(q);
}

void mpidl_sums_advance(int64_t *queue) { advance((struct queue *)queue); }

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

void mpidl_sums_wait(int64_t *queue, const int64_t *sum) {
    struct queue *q = (struct queue *)queue;
    const struct sum *s = (const struct sum *)sum;
    advance(q);
    mpidl_sums_waiting = s->chunks[TAKEN] < s->plan->chunks;
    if (!mpidl_sums_waiting) return;
    int64_t start = now(), time = start;
    for (int spins = 0; mpidl_sums_waiting && time - start < q->patience; time = now()) {
        for (int i = 0; i < 16 && mpidl_sums_waiting; i++) {
            relax(&spins);
            advance(q);
            mpidl_sums_waiting = s->chunks[TAKEN] < s->plan->chunks;
        }
    }
    q->waited += time - start;
}

