// The elementwise functions of formulas.h, which is compiled once for each FUNCTION. The results
// have the same bytes as those of the CPU's kernels.
#include "formulas.h"

// Calls f(i, v) for four neighbouring numbers v of x, starting at number i, or for their
// normalization per channel if `mean` is not null.
template <class F>
__device__ __forceinline__ void each_normalized(const Source& source, int channels, long long n,
                                                F f) {
    EACH_INDEX(i, n / 4) {
        Floats<4> v = load<4>(source.x + 4 * i);
        int channel = source.mean ? (int)(4 * i % channels) : 0;
#pragma unroll
        for (int k = 0; source.mean && k < 4; ++k) {
            v.at[k] = normalized(v.at[k], norm_of<1>(source, channel), 0);
            channel = channel + 1 == channels ? 0 : channel + 1;
        }
        f(4 * i, v);
    }
}

// y = f(x)
extern "C" __global__ void __launch_bounds__(256)
activation(const value* __restrict__ x, const float* __restrict__ mean,
           const float* __restrict__ scale, const float* __restrict__ beta, value* __restrict__ y,
           float a, float b, int channels, long long n) {
    each_normalized({x, mean, scale, beta, 0.f, 0.f}, channels, n, [=](long long i, Floats<4> v) {
#pragma unroll
        for (int k = 0; k < 4; ++k) v.at[k] = PART(FUNCTION, _y)(v.at[k], a, b);
        store<4>(y + i, v);
    });
}

// dx = dy f'(x). x_or_y is what the function's gradient requires.
extern "C" __global__ void __launch_bounds__(256)
activation_dx(const value* __restrict__ dy, const value* __restrict__ x_or_y,
              const float* __restrict__ mean, const float* __restrict__ scale,
              const float* __restrict__ beta, value* __restrict__ dx, float a, float b,
              int channels, long long n) {
    const Source source = {x_or_y, mean, scale, beta, 0.f, 0.f};
    each_normalized(source, channels, n, [=](long long i, Floats<4> v) {
        Floats<4> g = load<4>(dy + i);
#pragma unroll
        for (int k = 0; k < 4; ++k) g.at[k] = PART(FUNCTION, _dx)(g.at[k], v.at[k], a, b);
        store<4>(dx + i, g);
    });
}
