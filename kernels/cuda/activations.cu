// The elementwise functions of formulas.h, which is compiled once for each FUNCTION. The results
// have the same bytes as those of the CPU's kernels.
#include "formulas.h"

// y = f(x)
extern "C" __global__ void __launch_bounds__(256)
activation(const float* __restrict__ x, float* __restrict__ y, float a, float b, long long n) {
    each_four(x, y, n, [=](float v) { return PART(FUNCTION, _y)(v, a, b); });
}

// dx = dy f'(x). `value` is x or y, as the function's gradient requires.
extern "C" __global__ void __launch_bounds__(256)
activation_dx(const float* __restrict__ dy, const float* __restrict__ value,
              float* __restrict__ dx, float a, float b, long long n) {
    each_four(dy, value, dx, n, [=](float g, float v) { return PART(FUNCTION, _dx)(g, v, a, b); });
}
