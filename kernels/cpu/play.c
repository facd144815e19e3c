/* Call a recorded sequence of functions. build.py defines CALLS from mpidl.h: one case for each
 * function, which casts the arguments. */
#include "mpidl.h"

#include <math.h>
#include <string.h>

#ifndef CALLS
#define CALLS
#endif

#define POINTER(i) ((void *)(intptr_t)arguments[i])

static inline float as_float(int64_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline double as_double(int64_t bits) {
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static int is_refused; /* whether mpidl_need_finite has read a number that is not finite */

void mpidl_need_finite(const double *number) { is_refused = !isfinite(*number); }

int64_t mpidl_play(const int64_t *calls, int64_t count) {
    mpidl_sums_waiting = is_refused = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t function = calls[0], *arguments = calls + 2;
        switch (function) {
            CALLS
            default: return i; /* this function cannot be recorded */
        }
        if (mpidl_missing_bytes || mpidl_sums_waiting || is_refused) return i;
        calls = arguments + calls[1];
    }
    return count;
}
