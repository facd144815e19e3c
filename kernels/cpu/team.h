/* Threads: who works on which block, and on which part of it.
 *
 * A pass over a rank's blocks is shared by teams. A team owns a run of consecutive blocks and does
 * one after the other; where there are fewer blocks than threads a team has several members, who
 * share each block's tiles. All members run the same function on the block (as MPI ranks run the
 * same program): each takes the tiles that are its own, and `meet` is their barrier:
 *
 *     static void work(const struct team *team, void *job, int64_t block) {
 *         EACH_TILE(team, c, channels) fill(job, block, c, team->shared);
 *         meet(team);
 *         EACH_TILE(team, row, rows) convolve(job, block, row, team->shared, team->own);
 *     }
 *
 * A tile is a range of channels, rows or weights fixed by the layer's shape alone, and no sum is
 * split between tiles, so the bytes do not depend on the number of threads.
 */
#ifndef MPIDL_TEAM_H
#define MPIDL_TEAM_H

#include <stdint.h>

enum { MOST_THREADS = 256 };

struct barrier;

struct team {
    int thread;                 /* which of all threads, 0 the caller's */
    int index, teams;           /* which team, of how many */
    int member, members;        /* which of this team's threads, of how many */
    int64_t first, stop;        /* the team's blocks */
    float *shared;              /* scratch of the team */
    float *own;                 /* scratch of this member */
    struct barrier *barrier;
};

/* A member's tiles are consecutive: neighbours share what they read. */
#define TILES_BEGIN(team, tiles) ((int64_t)(tiles) * (team)->member / (team)->members)
#define TILES_END(team, tiles) ((int64_t)(tiles) * ((team)->member + 1) / (team)->members)
#define EACH_TILE(team, t, tiles)                                                                  \
    for (int64_t t = TILES_BEGIN(team, tiles); t < TILES_END(team, tiles); t++)

typedef void block_work(const struct team *team, void *job, int64_t block);
typedef void tile_work(void *job, int64_t tile, float *own);

/* Run `work` on each of `blocks` blocks; shared and own: floats of scratch, 64-byte aligned, with
 * unknown contents. Returns when all is done. */
void each_block(int64_t blocks, block_work *work, void *job, int64_t shared, int64_t own);

/* Into how many teams each_block(blocks) will divide the threads. */
int teams_for(int64_t blocks);

/* How many threads team `index` of `teams` has; team 0 has the first ones, and so on. */
int members_of(int index, int teams);

/* Run `work` on each of `tiles` independent tiles. */
void each_tile(int64_t tiles, tile_work *work, void *job, int64_t own);

/* All members of the team have come here. */
void meet(const struct team *team);

/* Let the hook run if it is time: to be called every millisecond or so of work. Only the thread that
 * set it runs it, whoever calls this. */
void tick(void);

/* 64-byte aligned memory of the process for `floats` floats, on huge pages where they are offered;
 * `slot` tells buffers apart. It stays valid until the slot is asked for more. Main thread only. */
float *scratch(int slot, int64_t floats);

#endif
