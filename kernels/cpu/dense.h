/* What the files of fully connected layers share: y = weight x + bias, where x (blocks, features,
 * 16), weight (outputs, features), bias (outputs), y (blocks, outputs, 16).
 *
 * No sum is one long chain, which would round more. A sum over features (forward) is made of
 * SEGMENTs of consecutive features, each added up from its first to its last, and added to the
 * bias in order. A sum over outputs (backward) is made in the same way of groups of at most GROUP
 * outputs, all of about the same size. A sum over images is a leaf of the tree: from image 0 to
 * image 15. How much is computed at once, and for how many blocks, decides only when something is
 * added, never in which order: no result depends on it. */
#ifndef MPIDL_DENSE_H
#define MPIDL_DENSE_H

#include "activation.h"
#include "fold.h"
#include "team.h"

enum { SEGMENT = 256, GROUP = 8 };

/* Features, and blocks, that are worked on together. */
enum { PANEL = 512, MANY_BLOCKS = 8 };

/* So many rows of weights and two vectors of images fill the registers with their sums. */
#if REGISTERS == 32
enum { ROWS = 8 };
#else
enum { ROWS = 6 };
#endif

struct dense {
    struct source x;
    const float *weight, *bias, *dy;
    float *y, *dx;
    double *sums; /* (blocks, 2 * channels): of dx, see mpidl_batchnorm_sums; or NULL */
    float *nodes; /* (nodes, outputs, features): of the gradient with respect to weight */
    const struct tree *tree;
    int64_t blocks, features, outputs, channels; /* of features / channels pixels */
};

/* `count` in `parts` parts of about the same size: where part i begins, and part i - 1 ends. */
INLINE int64_t part(int64_t count, int64_t i, int64_t parts) { return count * i / parts; }

/* A block's features [first, first + count), activated: where they lie, which is in `room` (count,
 * 16) if they had to be computed. */
static inline const float *read_features(const struct dense *d, int64_t block, int64_t first,
                                         int64_t count, float *room) {
    const float *x = d->x.x + (block * d->features + first) * LANES;
    if (!d->x.mean) return x;
    int64_t pixels = d->features / d->channels;
    for (int64_t f = 0; f < count;) {
        int64_t c = (first + f) / pixels, stop = least(count, (c + 1) * pixels - first);
        struct norm n = norm_of(&d->x, c);
        for (; f < stop; f++)
            UNROLL for (int p = 0; p < LANES; p += WIDTH)
                store(room + f * LANES + p, activate(load(x + f * LANES + p), n));
    }
    return room;
}

/* dense_dx.c: dx of `count` features from f on, of `blocks` blocks from `first` on. */
void dense_dx_panel(const struct dense *d, int64_t f, int64_t count, int64_t first, int64_t blocks);
/* The sums of the channels that are the features [first, stop) of a block, once dx is there. */
void dense_sums(const struct dense *d, int64_t block, int64_t first, int64_t stop);
/* About PANEL features: whole channels, where they are summed. */
int64_t dense_tile(const struct dense *d);

#endif
