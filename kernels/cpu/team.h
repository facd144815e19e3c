/* Distribute blocks and tiles over threads.
 *
 * A pass over a rank's blocks is divided among teams of threads. A team owns a run of consecutive
 * blocks and computes one block after the other. If there are fewer blocks than threads, teams have
 * several members, which share the tiles of each block. Like MPI ranks, all members run the same
 * function on a block. Each member computes its own tiles, and `meet` is their barrier:
 *
 *     static void work(const struct team *team, void *job, int64_t block) {
 *         EACH_TILE(team, c, channels) fill(job, block, c, team->shared);
 *         meet(team);
 *         EACH_TILE(team, row, rows) convolve(job, block, row, team->shared, team->own);
 *     }
 *
 * A tile is a range of channels, rows or weights that depends only on the layer's shape. No sum is
 * divided between tiles. Therefore results do not depend on the number of threads.
 */
#ifndef MPIDL_TEAM_H
#define MPIDL_TEAM_H

#include <stdint.h>

enum { MOST_THREADS = 256 };

struct barrier;

struct team {
    int thread;                 /* number of the thread; 0 is the caller */
    int index, teams;           /* index of the team; number of teams */
    int member, members;        /* index of the member; number of members */
    int64_t first, stop;        /* the team's blocks */
    float *shared;              /* scratch of the team */
    float *own;                 /* scratch of this member */
    struct barrier *barrier;
};

/* A member's tiles are consecutive, because adjacent tiles read the same data. */
#define TILES_BEGIN(team, tiles) ((int64_t)(tiles) * (team)->member / (team)->members)
#define TILES_END(team, tiles) ((int64_t)(tiles) * ((team)->member + 1) / (team)->members)
#define EACH_TILE(team, t, tiles)                                                                  \
    for (int64_t t = TILES_BEGIN(team, tiles); t < TILES_END(team, tiles); t++)

typedef void block_work(const struct team *team, void *job, int64_t block);
typedef void tile_work(void *job, int64_t tile, float *own);

/* Run `work` on each of `blocks` blocks and wait until all are done. `shared` and `own` are the
 * numbers of floats of scratch memory per team and per member. The memory is 64-byte aligned and
 * uninitialized. If the system has refused scratch memory in this call of the library (see
 * mpidl_missing_bytes), do nothing. The same rules apply to each_tile. */
void each_block(int64_t blocks, block_work *work, void *job, int64_t shared, int64_t own);

/* Return the number of teams into which each_block(blocks) divides the threads. */
int teams_for(int64_t blocks);

/* Return the number of threads of team `index` of `teams` teams. */
int members_of(int index, int teams);

/* Run `work` on each of `tiles` independent tiles. */
void each_tile(int64_t tiles, tile_work *work, void *job, int64_t own);

/* Wait for all members of the team. */
void meet(const struct team *team);

/* Run the hook if it is due and this thread has set it. Kernels call this function often enough for
 * one run of the hook per millisecond. */
void tick(void);

/* Select IEEE 754 arithmetic on the calling thread and return its previous mode, for
 * `former_rounding`. A library compiled with -ffast-math may have disabled subnormal numbers on the
 * thread that loaded it. */
unsigned standard_rounding(void);
void former_rounding(unsigned before);

/* Pause in a waiting loop. After thousands of calls, yield the core to another thread. */
void relax(int *spins);

/* sums.c: advance the sums over ranks that this thread has started; stop advancing them. */
void advance_sums(void);
void stop_sums(void);

/* Return 64-byte aligned memory for `floats` floats, on huge pages if the system supports them.
 * `slot` identifies the buffer, which is valid until the next request for the same slot that needs
 * more memory. Return NULL if the system refuses the memory. Only the main thread may call this
 * function. */
float *scratch(int slot, int64_t floats);

#endif
