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
    return 2 * levels + 2; /* a run climbs at most twice through the levels, and one arrives */
}

static void add(double *left, const double *right, int64_t width) {
    for (int64_t i = 0; i < width; i++) left[i] += right[i];
}

/* Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
 * variances", 1979, equation 2.1. */
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
