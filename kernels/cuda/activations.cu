// The elementwise functions of formulas.h, which is compiled once for each FUNCTION. The results
// have the same bytes as those of the CPU's kernels.
#include "formulas.h"

// y = f(x)
extern "C" __global__ void __launch_bounds__(256)
activation(const value* __restrict__ x, value* __restrict__ y, float a, float b, long long n) {
    each_four(x, y, n, [=](float v) { return PART(FUNCTION, _y)(v, a, b); });
}

// dx = dy f'(x). x_or_y is what the function's gradient requires.
extern "C" __global__ void __launch_bounds__(256)
activation_dx(const value* __restrict__ dy, const value* __restrict__ x_or_y,
              value* __restrict__ dx, float a, float b, long long n) {
    each_four(dy, x_or_y, dx, n, [=](float g, float v) { return PART(FUNCTION, _dx)(g, v, a, b); });
}
