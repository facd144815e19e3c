/* Concatenate values along the channels, and split them again. */
#include "activation.h"
#include "mpidl.h"
#include "team.h"

enum { ROWS = 1024 }; /* rows of a tile; a row has the 16 lanes of a pixel */

struct job {
    struct source part; /* (blocks, channels, pixels, 16) */
    value *whole;       /* (blocks, all, pixels, 16), starting at the part's first channel */
    int64_t channels, pixels, rows, pitch; /* rows, pitch: rows per block of part and whole */
    int split;
};

static void copy_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const struct source *s = &job->part;
    int64_t tiles = parts_of(job->rows, ROWS), block = tile / tiles;
    int64_t row = tile % tiles * ROWS, stop = least(job->rows, row + ROWS);
    value *part = (value *)(uintptr_t)s->x + block * job->rows * LANES;
    value *whole = job->whole + block * job->pitch * LANES;
    if (!s->mean) {
        const value *from = job->split ? whole : part;
        memcpy((job->split ? part : whole) + row * LANES, from + row * LANES,
               (size_t)((stop - row) * LANES) * sizeof *from);
        return;
    }
    while (row < stop) { /* copy channel by channel */
        int64_t channel = row / job->pixels;
        int64_t end = least(stop, (channel + 1) * job->pixels) * LANES;
        struct norm n = norm_of(s, channel);
        for (int64_t i = row * LANES; i < end; i += WIDTH)
            store(whole + i, activate(load(part + i), n));
        row = end / LANES;
    }
}

static void copy(struct job job, int64_t blocks, int64_t all, int64_t first) {
    job.rows = job.channels * job.pixels;
    job.pitch = all * job.pixels;
    job.whole += first * job.pixels * LANES;
    each_tile(blocks * parts_of(job.rows, ROWS), copy_tile, &job, 0);
}

void mpidl_concat(const value *x, const float *mean, const float *scale, const float *beta,
                  float low, float high, value *y, int64_t blocks, int64_t channels, int64_t pixels,
                  int64_t all, int64_t first) {
    struct job job = {.part = {x, mean, scale, beta, low, high},
                      .whole = y,
                      .channels = channels,
                      .pixels = pixels};
    copy(job, blocks, all, first);
}

void mpidl_split(const value *y, value *x, int64_t blocks, int64_t channels, int64_t pixels,
                 int64_t all, int64_t first) {
    struct job job = {.part = {.x = x},
                      .whole = (value *)(uintptr_t)y,
                      .channels = channels,
                      .pixels = pixels,
                      .split = 1};
    copy(job, blocks, all, first);
}
