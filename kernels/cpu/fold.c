#include "fold.h"

#include <string.h>

int joins(const struct tree *tree, int64_t start, int64_t stop) {
    if (tree->plain) return 1;
    int64_t size = 1;
    while (size < stop - start) size *= 2;
    return start % size == 0 && (stop - start == size || stop == tree->leaves);
}

void counter_begin(struct counter *counter, const struct tree *tree, int64_t first) {
    counter->tree = tree, counter->next = first, counter->count = 0;
}

void counter_push(struct counter *counter, int64_t stop) {
    counter->start[counter->count++] = counter->next;
    counter->next = stop;
}

int counter_joins(const struct counter *c) {
    return c->count > 1 && joins(c->tree, c->start[c->count - 2], c->next);
}

void counter_pop(struct counter *counter) { counter->count--; }

int counter_slots(int64_t blocks) {
    int levels = 0;
    while (((int64_t)1 << levels) < blocks) levels++;
    return 2 * levels + 2; /* at most two values per level, and the new value */
}

static float *slot_of(const struct leaves *leaves, int team, int slot) {
    if (team == 0 && slot < leaves->node_count) return leaves->nodes + slot * leaves->size;
    return leaves->room + ((int64_t)team * leaves->slots + slot) * leaves->size;
}

void leaves_begin(struct leaves *leaves, const struct tree *tree, int64_t size, float *nodes,
                  int64_t node_count, int slot) {
    int64_t blocks = tree->stop - tree->first;
    int teams = blocks ? teams_for(blocks) : 1;
    leaves->tree = tree, leaves->size = size;
    leaves->nodes = nodes, leaves->node_count = node_count;
    leaves->slots = counter_slots((blocks + teams - 1) / teams);
    leaves->room = scratch(slot, teams * leaves->slots * size);
    counter_begin(&leaves->counters[0], tree, tree->first);
}

float *leaf_of(const struct team *team, struct leaves *leaves, int64_t block) {
    struct counter *counter = &leaves->counters[team->thread];
    if (block == team->first) counter_begin(counter, leaves->tree, leaves->tree->first + block);
    return slot_of(leaves, team->index, counter->count);
}

static void add_floats(float *left, const float *right, int64_t first, int64_t stop) {
    for (int64_t i = first; i < stop; i++) left[i] += right[i];
}

void leaf_done(const struct team *team, struct leaves *leaves, int64_t block) {
    struct counter *counter = &leaves->counters[team->thread];
    counter_push(counter, leaves->tree->first + block + 1);
    meet(team);
    for (; counter_joins(counter); counter_pop(counter)) {
        float *left = slot_of(leaves, team->index, counter->count - 2);
        /* each member adds its part of the values */
        add_floats(left, slot_of(leaves, team->index, counter->count - 1),
                   TILES_BEGIN(team, leaves->size), TILES_END(team, leaves->size));
    }
    meet(team);
}

void leaves_end(struct leaves *leaves) {
    int64_t blocks = leaves->tree->stop - leaves->tree->first, size = leaves->size;
    int teams = blocks ? teams_for(blocks) : 1, thread = 0;
    struct counter whole = leaves->counters[0];
    float *slots[SLOTS + MOST_THREADS];
    for (int i = 0; i < whole.count; i++) slots[i] = slot_of(leaves, 0, i);
    for (int t = 1; t < teams; t++) {
        thread += members_of(t - 1, teams);
        const struct counter *part = &leaves->counters[thread];
        for (int i = 0; i < part->count; i++) {
            slots[whole.count] = slot_of(leaves, t, i);
            counter_push(&whole, i + 1 < part->count ? part->start[i + 1] : part->next);
            for (; counter_joins(&whole); counter_pop(&whole))
                add_floats(slots[whole.count - 2], slots[whole.count - 1], 0, size);
        }
    }
    for (int i = 0; i < whole.count; i++)
        if (slots[i] != leaves->nodes + i * size)
            memcpy(leaves->nodes + i * size, slots[i], (size_t)size * sizeof(float));
}

static void add(double *left, const double *right, int64_t width) {
    for (int64_t i = 0; i < width; i++) left[i] += right[i];
}

/* Combine (count, mean, M2) of two sets: Chan, Golub and LeVeque, "Updating formulae and a pairwise
 * algorithm for computing sample variances", 1979, equation 2.1. */
static void merge(double *left, const double *right, int64_t width) {
    int64_t channels = width / 2;
    double n = left[0], m = right[0];
    for (int64_t c = 1; c <= channels; c++) {
        double delta = right[c] - left[c];
        left[c] += delta * (m / (n + m));
        left[channels + c] += right[channels + c] + delta * delta * (n * m / (n + m));
    }
    left[0] = n + m;
}

static int64_t fold(double *rows, int64_t width, const struct tree *tree,
                    void (*combine)(double *, const double *, int64_t)) {
    struct counter counter;
    counter_begin(&counter, tree, tree->first);
    for (int64_t b = tree->first; b < tree->stop; b++) {
        double *row = rows + (b - tree->first) * width, *slot = rows + counter.count * width;
        if (slot != row) memcpy(slot, row, (size_t)width * sizeof *row);
        counter_push(&counter, b + 1);
        while (counter_joins(&counter)) {
            double *right = rows + (counter.count - 1) * width;
            combine(right - width, right, width);
            counter_pop(&counter);
        }
    }
    return counter.count;
}

int64_t fold_sums(double *rows, int64_t width, const struct tree *tree) {
    return fold(rows, width, tree, add);
}

int64_t fold_moments(double *rows, int64_t channels, const struct tree *tree) {
    return fold(rows, 1 + 2 * channels, tree, merge);
}
