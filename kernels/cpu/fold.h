/* The tree that sums over a mini-batch in a fixed order, for any number of ranks and threads.
 * mpidl/core/fold.py explains the tree. */
#ifndef MPIDL_FOLD_H
#define MPIDL_FOLD_H

#include "team.h"

/* Python passes a tree as int64_t[4]. */
struct tree {
    int64_t first, stop; /* this rank's blocks */
    int64_t leaves;      /* leaves of the whole mini-batch */
    int64_t plain;       /* 1: sum each run from left to right; see Tree in mpidl/core/fold.py */
};

/* Return whether two adjacent values that together cover blocks [start, stop) may be combined. */
int joins(const struct tree *tree, int64_t start, int64_t stop);

/* A binary counter over values that arrive in the order of their blocks. The counter owns no
 * memory: the values on its stack are in the caller's slots, starting with the bottom of the stack.
 * To merge the counters of several teams, push the nodes of one counter onto the other. */
enum { SLOTS = 64 };
struct counter {
    const struct tree *tree;
    int64_t next;           /* the first block that has not been folded yet */
    int64_t start[SLOTS];   /* first block of each value on the stack */
    int count;
};

void counter_begin(struct counter *counter, const struct tree *tree, int64_t first);

/* Record that the caller has stored a value in slot `count`. The value ends before block `stop`. */
void counter_push(struct counter *counter, int64_t stop);

/* Return whether the caller must combine the two topmost values now, in the lower of the two slots.
 * If so, the caller combines them, calls counter_pop, and calls this function again. */
int counter_joins(const struct counter *counter);
void counter_pop(struct counter *counter);

/* Return the largest number of slots that a run of `blocks` blocks needs. */
int counter_slots(int64_t blocks);

/* Folds leaves of `size` floats, one per block, while a pass of each_block computes the leaves.
 * Each team folds its own run of blocks. Finally, the nodes of the teams are combined like the
 * nodes of ranks. */
struct leaves {
    const struct tree *tree;
    int64_t size;
    float *nodes; /* the result: the nodes of this rank, one after another */
    int64_t node_count;
    float *room; /* for values that do not fit into `nodes` */
    int slots;
    struct counter counters[MOST_THREADS]; /* each member of a team keeps a copy */
};

/* Prepare the fold before the pass. `nodes` has memory for `node_count` nodes. Other values are
 * kept in the scratch slot `slot`. */
void leaves_begin(struct leaves *leaves, const struct tree *tree, int64_t size, float *nodes,
                  int64_t node_count, int slot);
/* Return the memory for the leaf of `block`, counted from 0. All members of the team write to this
 * memory. */
float *leaf_of(const struct team *team, struct leaves *leaves, int64_t block);
/* Fold a complete leaf. All members of the team must call this function, which synchronizes them.
 */
void leaf_done(const struct team *team, struct leaves *leaves, int64_t block);
/* Complete the fold after the pass. */
void leaves_end(struct leaves *leaves);

/* Fold rows of doubles, one for each block of [tree->first, tree->stop), into this rank's nodes.
 * Store the nodes in the first rows and return their number. */
int64_t fold_sums(double *rows, int64_t width, const struct tree *tree);
/* Fold moments like fold_sums. A row has 1 + 2 * channels numbers: count, means and M2. */
int64_t fold_moments(double *rows, int64_t channels, const struct tree *tree);

#endif
