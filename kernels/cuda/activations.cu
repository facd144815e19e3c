// Activations element by element, four at a time: lanes are a multiple of 16 floats. Sums and
// products alone, so that the bytes are those of the CPU's kernels with FMA (kernels/cpu/special.h,
// where the errors are stated).

struct alignas(16) Four {
    float of[4];
};

// y[i] = f(x[i]), or dx[i] = f(dy[i], y[i]), of n numbers.
template <class F>
__device__ __forceinline__ void each(const float* x, float* y, long long n, F f) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; 4 * i < n; i += step) {
        Four v = reinterpret_cast<const Four*>(x)[i];
#pragma unroll
        for (int k = 0; k < 4; ++k) v.of[k] = f(v.of[k]);
        reinterpret_cast<Four*>(y)[i] = v;
    }
}

template <class F>
__device__ __forceinline__ void each(const float* dy, const float* y, float* dx, long long n, F f) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; 4 * i < n; i += step) {
        Four g = reinterpret_cast<const Four*>(dy)[i];
        const Four v = reinterpret_cast<const Four*>(y)[i];
#pragma unroll
        for (int k = 0; k < 4; ++k) g.of[k] = f(g.of[k], v.of[k]);
        reinterpret_cast<Four*>(dx)[i] = g;
    }
}

// e to the x, for x <= 0; below -87.3 that of -87.3.
__device__ __forceinline__ float exponential_of_negative(float x) {
    const float shift = 12582912.f;  // 1.5 * 2^23: a sum with it is rounded to an integer
    x = x < -87.3f ? -87.3f : x;     // NaN stays NaN
    const float shifted = fmaf(x, 1.44269502f, shift), k = shifted - shift;
    float r = fmaf(k, -0.693359375f, x);
    r = fmaf(k, 2.12194440e-4f, r);
    float y = 1.0f / 5040;
    y = fmaf(y, r, 1.0f / 720);
    y = fmaf(y, r, 1.0f / 120);
    y = fmaf(y, r, 1.0f / 24);
    y = fmaf(y, r, 1.0f / 6);
    y = fmaf(y, r, 0.5f);
    y = fmaf(y, r, 1.f);
    y = fmaf(y, r, 1.f);
    return y * __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);  // 2^k
}

__device__ __forceinline__ float magnitude(float x) {
    return __uint_as_float(__float_as_uint(x) & 0x7fffffffu);
}

__device__ __forceinline__ float hyperbolic_tangent(float x) {
    const float a = magnitude(x), z = x * x;
    float p = fmaf(-5.70498872745e-3f, z, 2.06390887954e-2f);
    p = fmaf(p, z, -5.37397155531e-2f);
    p = fmaf(p, z, 1.33314422036e-1f);
    p = fmaf(p, z, -3.33332819422e-1f);
    const float small = fmaf(p * z, x, x), e = exponential_of_negative(-2.f * a);
    const float large = (1.f - e) / (1.f + e);
    const unsigned sign = __float_as_uint(x) & 0x80000000u;
    return a < 0.625f ? small : __uint_as_float(__float_as_uint(large) | sign);
}

__device__ __forceinline__ float logistic(float x) {
    const float e = exponential_of_negative(-magnitude(x));
    return (x >= 0.f ? 1.f : e) / (1.f + e);
}

extern "C" __global__ void __launch_bounds__(256)
activation_leaky(const float* __restrict__ x, float* __restrict__ y, float scale, long long n) {
    each(x, y, n, [=](float v) { return v > 0.f ? v : v * scale; });
}

extern "C" __global__ void __launch_bounds__(256)
activation_leaky_dx(const float* __restrict__ dy, const float* __restrict__ y,
                    float* __restrict__ dx, float scale, long long n) {
    each(dy, y, dx, n, [=](float g, float v) { return v > 0.f ? g : g * scale; });
}

extern "C" __global__ void __launch_bounds__(256)
activation_tanh(const float* __restrict__ x, float* __restrict__ y, long long n) {
    each(x, y, n, [](float v) { return hyperbolic_tangent(v); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_tanh_dx(const float* __restrict__ dy, const float* __restrict__ y,
                   float* __restrict__ dx, long long n) {
    each(dy, y, dx, n, [](float g, float v) { return g * fmaf(-v, v, 1.f); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_sigmoid(const float* __restrict__ x, float* __restrict__ y, long long n) {
    each(x, y, n, [](float v) { return logistic(v); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_sigmoid_dx(const float* __restrict__ dy, const float* __restrict__ y,
                      float* __restrict__ dx, long long n) {
    each(dy, y, dx, n, [](float g, float v) { return g * v * (1.f - v); });
}
