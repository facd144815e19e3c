/* Functions for all losses: run work on the tiles of blocks, and sum the tiles' results. */
#ifndef MPIDL_LOSS_H
#define MPIDL_LOSS_H

#include "fold.h"
#include "mpidl.h"
#include "special.h"
#include "team.h"

#define EACH_LANE_OF_ALL for (int lane = 0; lane < LANES; lane++)
enum { FEW = 2048 }; /* up to this amount of work, one thread is fastest */

/* Run `work` on each tile. `amount` counts the logits or elements of 16 floats. */
INLINE void each(int64_t tiles, tile_work *work, void *job, int64_t own, int64_t amount) {
    if (amount > FEW || own) {
        each_tile(tiles, work, job, own);
    } else {
        for (int64_t tile = 0; tile < tiles; tile++) work(job, tile, NULL);
        tick();
    }
}

/* Sum the tiles of each block into rows, and fold the rows into this rank's nodes. */
INLINE void fold_tiles(const double *sums, int64_t blocks, int64_t tiles, double *rows,
                       const int64_t *tree) {
    for (int64_t block = 0; block < blocks; block++) {
        double total = 0;
        for (int64_t tile = 0; tile < tiles; tile++) total += sums[block * tiles + tile];
        rows[block] = total;
    }
    fold_sums(rows, 1, (const struct tree *)tree);
}

INLINE double *room_for_sums(int64_t count) {
    return (double *)scratch(0, count * (int64_t)(sizeof(double) / sizeof(float)));
}

/* Return rest^gamma for rest >= 0, without the C library's pow. */
INLINE double power_of(double rest, double gamma) {
    return rest < 0x1p-1022 ? 0 : exponential(gamma * logarithm(rest));
}

#endif
