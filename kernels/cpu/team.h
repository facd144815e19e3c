/* Threads, and the blocks and tiles that each of them computes.
 *
 * Teams share a pass over a rank's blocks. A team owns a run of consecutive blocks and computes one
 * after the other. If there are fewer blocks than threads, a team has several members, which share
 * each block's tiles. All members run the same function on the block, as MPI ranks run the same
 * program: each computes its own tiles, and `meet` is their barrier:
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
    int thread;                 /* number of the thread; 0 is the caller */
    int index, teams;           /* number of the team, and of teams */
    int member, members;        /* number of the member, and of members */
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

/* Run `work` on each of `blocks` blocks and wait for all. shared and own: floats of scratch,
 * 64-byte aligned, uninitialized. */
void each_block(int64_t blocks, block_work *work, void *job, int64_t shared, int64_t own);

/* The number of teams into which each_block(blocks) divides the threads. */
int teams_for(int64_t blocks);

/* The number of threads of team `index` of `teams`; team 0 has the first ones, and so on. */
int members_of(int index, int teams);

/* Run `work` on each of `tiles` independent tiles. */
void each_tile(int64_t tiles, tile_work *work, void *job, int64_t own);

/* Wait for all members of the team. */
void meet(const struct team *team);

/* Run the hook if it is due; kernels call this about every millisecond. On threads other than the
 * one that set the hook it does nothing. */
void tick(void);

/* 64-byte aligned memory of the process for `floats` floats, on huge pages if the system offers
 * them. `slot` identifies the buffer, which is valid until a call asks the slot for more. Main
 * thread only. */
float *scratch(int slot, int64_t floats);

#endif
