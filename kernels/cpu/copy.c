/* Copies of arrays, and conversions between float and bfloat16. */
#include "mpidl.h"
#include "team.h"
#include "value.h"

enum { PART = 1 << 14 }; /* numbers per tile */

struct job {
    const void *from;
    void *to;
    int64_t count; /* a multiple of 16 */
};

void mpidl_copy(const float *from, float *to, int64_t floats) {
    int64_t i = 0;
    for (; i + 4 * WIDTH <= floats; i += 4 * WIDTH)
        UNROLL for (int j = 0; j < 4; j++) store(to + i + j * WIDTH, load(from + i + j * WIDTH));
    for (; i < floats; i++) to[i] = from[i];
}

void mpidl_zero(float *to, int64_t floats) { memset(to, 0, (size_t)floats * sizeof(float)); }

#define CONVERSION(name, source, result)                                                           \
    static void name##_tile(void *argument, int64_t tile, float *own) {                            \
        const struct job *job = argument;                                                          \
        const source *from = job->from;                                                            \
        result *to = job->to;                                                                      \
        int64_t stop = least(job->count, (tile + 1) * PART);                                       \
        for (int64_t i = tile * PART; i < stop; i += WIDTH) store(to + i, load(from + i));         \
    }
CONVERSION(widen, uint16_t, float)
CONVERSION(narrow, float, uint16_t)

void mpidl_widen(const uint16_t *from, float *to, int64_t count) {
    struct job job = {from, to, count};
    each_tile(parts_of(count, PART), widen_tile, &job, 0);
}

void mpidl_narrow(const float *from, uint16_t *to, int64_t count) {
    struct job job = {from, to, count};
    each_tile(parts_of(count, PART), narrow_tile, &job, 0);
}
