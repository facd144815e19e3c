/* The tree that adds up a mini-batch in one order, on any number of ranks and threads. It is the
 * tree of mpidl/fold.py, which explains it. */
#ifndef MPIDL_FOLD_H
#define MPIDL_FOLD_H

#include "team.h"

/* int64_t[4] in Python. */
struct tree {
    int64_t first, stop; /* this rank's blocks */
    int64_t leaves;      /* of the whole mini-batch */
    int64_t plain;       /* 1: each run from left to right, see fold.Tree */
};

/* Whether two neighbours that form [start, stop) may be combined. */
int joins(const struct tree *tree, int64_t start, int64_t stop);

/* A binary counter over values that arrive in the order of their blocks. It owns no memory: the
 * values of its stack lie in the caller's slots, the first at the bottom. The counters of several
 * teams are merged by pushing the nodes of one to the other. */
enum { SLOTS = 64 };
struct counter {
    const struct tree *tree;
    int64_t next;           /* the first block that is not folded yet */
    int64_t start[SLOTS];   /* of each value on the stack */
    int count;
};

void counter_begin(struct counter *counter, const struct tree *tree, int64_t first);

/* The value in slot `count` has arrived and ends at block `stop`. */
void counter_push(struct counter *counter, int64_t stop);

/* Whether the caller must combine the two topmost values now, into the lower slot. It then calls
 * counter_pop and asks again. */
int counter_joins(const struct counter *counter);
void counter_pop(struct counter *counter);

/* The most slots that a run of `blocks` blocks takes. */
int counter_slots(int64_t blocks);

/* Folds leaves of `size` floats, one a block, while a pass of each_block makes them. Each team
 * folds its run, and at the end the teams' nodes are combined, as the ranks' are. */
struct leaves {
    const struct tree *tree;
    int64_t size;
    float *nodes; /* the result: this rank's nodes, one after the other */
    int64_t node_count;
    float *room; /* for values that do not fit into `nodes` */
    int slots;
    struct counter counters[MOST_THREADS]; /* each member of a team keeps a copy */
};

/* Before the pass. `nodes` has room for `node_count` values; scratch slot `slot` is used. */
void leaves_begin(struct leaves *leaves, const struct tree *tree, int64_t size, float *nodes,
                  int64_t node_count, int slot);
/* The memory into which all members of the team write the leaf of `block` (counted from 0). */
float *leaf_of(const struct team *team, struct leaves *leaves, int64_t block);
/* Called by all members of the team when the leaf is complete; they meet in it. */
void leaf_done(const struct team *team, struct leaves *leaves, int64_t block);
/* After the pass. */
void leaves_end(struct leaves *leaves);

/* Fold rows of doubles, one for each block of [tree->first, tree->stop), into this rank's nodes.
 * The first rows hold the nodes afterwards; return their number. */
int64_t fold_sums(double *rows, int64_t width, const struct tree *tree);
/* The same for (count, mean, M2) of `channels` channels: rows of 1 + 2 * channels. */
int64_t fold_moments(double *rows, int64_t channels, const struct tree *tree);

#endif
