#define _GNU_SOURCE
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "mpidl.h"

enum { SPIN = 4000 };
#define HUGE_PAGE ((size_t)2 << 20)
static const long TICK = 1000000; /* ns between two runs of the hook */

struct barrier {
    atomic_int waiting, round;
    char pad[56];
};

/* The scratch memory of a thread or a team, which is kept between passes. */
struct room {
    float *data;
    int64_t floats;
};

/* The current pass over blocks or tiles. */
static struct pass {
    block_work *block;
    tile_work *tile;
    void *job;
    int64_t count; /* number of blocks or tiles */
    int teams;
    atomic_llong next; /* next tile to compute */
} pass;

static int threads = 1; /* number of running threads, including the caller */
static pthread_t workers[MOST_THREADS];
static struct barrier barriers[MOST_THREADS];
static struct room own[MOST_THREADS], shared[MOST_THREADS], slots[16];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begin = PTHREAD_COND_INITIALIZER;
static atomic_int generation, busy; /* number of the pass; number of workers still in the pass */
static int sleeping, leaving;
static void (*hook)(void);
static pthread_t watcher; /* the thread that set the hook and runs it */
static long last_tick;

int64_t mpidl_missing_bytes;

/* Memory for scratch comes directly from the system: malloc would keep the smaller buffers that
 * larger buffers have replaced. With ASan, malloc detects accesses past the end. */
#if defined(__SANITIZE_ADDRESS__)
static size_t whole_pages(size_t bytes) { return bytes; }
static void *reserve(size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, HUGE_PAGE, bytes) ? NULL : memory;
}
static void release(void *memory, size_t bytes) {
    (void)bytes;
    free(memory);
}
#else
static size_t whole_pages(size_t bytes) { return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }
static void release(void *memory, size_t bytes) {
    if (bytes) munmap(memory, bytes);
}
static void *reserve(size_t bytes) {
    char *start = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return NULL;
    size_t before = -(uintptr_t)start % HUGE_PAGE; /* bytes before the first huge page */
    release(start, before);
    release(start + before + bytes, HUGE_PAGE - before);
#ifdef MADV_HUGEPAGE
    madvise(start + before, bytes, MADV_HUGEPAGE);
#endif
    return start + before;
}
#endif

/* If the system refuses the memory, set mpidl_missing_bytes to its size and return NULL. */
static float *room(struct room *room, int64_t floats) {
    if (room->floats < floats) {
        size_t bytes = whole_pages((size_t)floats * sizeof(float));
        release(room->data, whole_pages((size_t)room->floats * sizeof(float)));
        room->data = reserve(bytes);
        room->floats = room->data ? floats : 0;
        if (!room->data) mpidl_missing_bytes = (int64_t)bytes;
    }
    return room->data;
}

float *scratch(int slot, int64_t floats) { return room(&slots[slot], floats); }

void relax(int *spins) {
    if (++*spins < SPIN) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    } else {
        sched_yield(); /* another thread may need this core */
    }
}

void tick(void) {
    advance_sums();
    if (!hook || !pthread_equal(pthread_self(), watcher)) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    long ns = now.tv_sec * 1000000000L + now.tv_nsec;
    if (ns - last_tick < TICK) return;
    hook();
    clock_gettime(CLOCK_MONOTONIC, &now);
    last_tick = now.tv_sec * 1000000000L + now.tv_nsec;
}

void meet(const struct team *team) {
    if (team->members == 1) return;
    struct barrier *b = team->barrier;
    int round = atomic_load(&b->round), spins = 0;
    if (atomic_fetch_add(&b->waiting, 1) + 1 == team->members) {
        atomic_store(&b->waiting, 0);
        atomic_fetch_add(&b->round, 1);
        return;
    }
    while (atomic_load(&b->round) == round) relax(&spins);
}

/* If the threads do not divide evenly, the first teams have one more member. */
int members_of(int index, int teams) { return threads / teams + (index < threads % teams); }

unsigned standard_rounding(void) {
#if defined(__x86_64__)
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(0x1f80);
    return before;
#else
    return 0;
#endif
}

void former_rounding(unsigned before) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(before);
#else
    (void)before;
#endif
}

/* Do this thread's part of the pass. */
static void take_part(int thread) {
    if (pass.tile) {
        for (;;) {
            int64_t tile = atomic_fetch_add(&pass.next, 1);
            if (tile >= pass.count) return;
            pass.tile(pass.job, tile, own[thread].data);
            tick();
        }
    }
    int teams = pass.teams, t = 0, first = 0;
    while (thread >= first + members_of(t, teams)) first += members_of(t++, teams);
    struct team team = {
        .thread = thread,
        .index = t,
        .teams = teams,
        .member = thread - first,
        .members = members_of(t, teams),
        .first = pass.count * t / teams,
        .stop = pass.count * (t + 1) / teams,
        .shared = shared[t].data,
        .own = own[thread].data,
        .barrier = &barriers[t],
    };
    for (int64_t b = team.first; b < team.stop; b++) {
        pass.block(&team, pass.job, b);
        meet(&team);
        tick();
    }
}

static void *run_worker(void *argument) {
    int seen = 0, self = (int)(intptr_t)argument;
    standard_rounding();
    for (;;) {
        int spins = 0;
        while (atomic_load(&generation) == seen && spins < 2 * SPIN) relax(&spins);
        if (atomic_load(&generation) == seen) {
            pthread_mutex_lock(&lock);
            sleeping++;
            while (atomic_load(&generation) == seen) pthread_cond_wait(&begin, &lock);
            sleeping--;
            pthread_mutex_unlock(&lock);
        }
        seen = atomic_load(&generation);
        if (leaving) return NULL;
        take_part(self);
        atomic_fetch_sub(&busy, 1);
    }
}

static void announce(void) {
    pthread_mutex_lock(&lock);
    atomic_fetch_add(&generation, 1);
    if (sleeping) pthread_cond_broadcast(&begin);
    pthread_mutex_unlock(&lock);
}

static void start_workers(int wanted) {
    atomic_store(&generation, 0); /* the value that new workers expect */
    for (; threads < wanted; threads++)
        if (pthread_create(&workers[threads], NULL, run_worker, (void *)(intptr_t)threads)) break;
}

static void stop_workers(void) {
    leaving = 1;
    announce();
    for (; threads > 1; threads--) pthread_join(workers[threads - 1], NULL);
    leaving = 0;
}

/* A forked child inherits the memory but not the threads, so it continues with one thread. */
static void in_child(void) {
    threads = 1, sleeping = 0, leaving = 0;
    hook = NULL; /* the hook sends the parent's messages */
    stop_sums();
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&begin, NULL);
}

static void run_pass(void) {
    unsigned before = standard_rounding();
    if (threads > 1) {
        atomic_store(&busy, threads - 1);
        announce();
    }
    take_part(0);
    int spins = 0;
    while (threads > 1 && atomic_load(&busy)) {
        relax(&spins);
        tick();
    }
    former_rounding(before);
}

int teams_for(int64_t blocks) {
    /* choose the number of teams that finishes first; ties go to the largest number */
    int best = 1;
    double least = 0;
    for (int teams = 1; teams <= threads && teams <= blocks; teams++) {
        double turns = (double)((blocks + teams - 1) / teams) / (threads / teams);
        if (teams == 1 || turns <= least) best = teams, least = turns;
    }
    return best;
}

void each_block(int64_t blocks, block_work *work, void *job, int64_t shared_floats,
                int64_t own_floats) {
    if (blocks == 0) return;
    pass = (struct pass){.block = work, .job = job, .count = blocks, .teams = teams_for(blocks)};
    for (int t = 0; t < pass.teams; t++) room(&shared[t], shared_floats);
    for (int t = 0; t < threads; t++) room(&own[t], own_floats);
    if (!mpidl_missing_bytes) run_pass();
}

void each_tile(int64_t tiles, tile_work *work, void *job, int64_t own_floats) {
    if (tiles == 0) return;
    pass = (struct pass){.tile = work, .job = job, .count = tiles};
    for (int t = 0; t < threads; t++) room(&own[t], own_floats);
    if (!mpidl_missing_bytes) run_pass();
}

int64_t mpidl_set_threads(int64_t count) {
    static int watched;
    if (!watched) watched = !pthread_atfork(NULL, NULL, in_child);
    if (count > MOST_THREADS) count = MOST_THREADS;
    if (count == threads) return threads;
    if (threads > 1) stop_workers();
    start_workers((int)count);
    return threads; /* may be fewer than requested; results do not depend on the number */
}

void mpidl_set_hook(void (*function)(void)) { hook = function, watcher = pthread_self(); }
