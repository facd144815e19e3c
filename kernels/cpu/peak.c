/* Measure the peak rate of multiply-adds of a core. Only benchmarks call this function. */
#include "lanes.h"
#include "mpidl.h"

/* The number of independent sums that fit into registers next to the factors. Independent sums hide
 * the latency of multiply-adds. */
#if REGISTERS == 32
#define SUMS 24
#else
#define SUMS 12
#endif

int64_t mpidl_fma_peak(int64_t iterations, float *result) {
    vec sum[SUMS], factor = load(result), term = load(result + LANES);
    UNROLL for (int i = 0; i < SUMS; i++) sum[i] = splat((float)i); /* all sums differ */
    for (int64_t n = 0; n < iterations; n++)
        UNROLL for (int i = 0; i < SUMS; i++) sum[i] = muladd(sum[i], factor, term);
    UNROLL for (int i = 1; i < SUMS; i++) sum[0] = sum[0] + sum[i];
    store(result, sum[0]);
    return iterations * SUMS * WIDTH * 2;
}
