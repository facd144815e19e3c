// Elementwise activations. A thread processes four elements at a time, because sizes are multiples
// of 16 floats. The kernels perform the same IEEE and FMA operations as the CPU's kernels, in the
// same order, so the results have the same bytes. kernels/cpu/special.h states the error bounds.

struct alignas(16) Four {
    float of[4];
};

// Computes y[i] = f(x[i]) or dx[i] = f(dy[i], y[i]) for n numbers. For the gradient of GELU, y is
// the input instead of the output.
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

// Returns (e^r - 1 - r) / r^2 for |r| <= log(2) / 2: the terms of e^r from r^2 / 2! to r^7 / 7!.
__device__ __forceinline__ float exponential_terms(float r) {
    float y = 1.0f / 5040;
    y = fmaf(y, r, 1.0f / 720);
    y = fmaf(y, r, 1.0f / 120);
    y = fmaf(y, r, 1.0f / 24);
    y = fmaf(y, r, 1.0f / 6);
    return fmaf(y, r, 0.5f);
}

// Returns e^x for x <= 0. Below -87.3, returns e^-87.3.
__device__ __forceinline__ float exponential_of_negative(float x) {
    const float shift = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
    x = x < -87.3f ? -87.3f : x;     // NaN stays NaN
    const float shifted = fmaf(x, 1.44269502f, shift), k = shifted - shift;
    float r = fmaf(k, -0.693359375f, x);
    r = fmaf(k, 2.12194440e-4f, r);
    float y = fmaf(exponential_terms(r), r, 1.f);
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

// GELU, computed as in kernels/cpu/elementwise.c, which states the error bounds.

struct Two {
    float high, low;
};

__device__ __forceinline__ Two exact_product(float a, float b) {
    const float high = a * b;
    return {high, fmaf(a, b, -high)};
}

struct Exponential {
    float rest, power;  // the value is (1 + rest) * power
};

// Returns 2^32 e^(high + low) for high + low from -92 to 0.
__device__ __forceinline__ Exponential large_exponential(float high, float low) {
    const float shift = 12582912.f;
    const float shifted = fmaf(high, 1.44269502f, shift), k = shifted - shift;
    float r = fmaf(k, -0.693359375f, high);
    r = r + fmaf(k, 2.12194440e-4f, low);
    const float power = __uint_as_float((__float_as_uint(shifted) << 23) + 0x4f800000u);
    return {fmaf(r * r, exponential_terms(r), r), power};
}

__device__ __forceinline__ float clipped_magnitude(float x, float most) {
    const float a = magnitude(x);
    return a > most ? most : a;  // NaN stays NaN
}

__device__ __forceinline__ Exponential large_gauss(float t) {
    const Two square = exact_product(t, t);
    return large_exponential(square.high * -0.5f, square.low * -0.5f);
}

__device__ __forceinline__ float tail_ratio(float t) {
    float p = fmaf(-0x1.3c896cp-9f, t, -0x1.a6f19cp-7f);
    p = fmaf(p, t, -0x1.5bf8dp-6f);
    p = fmaf(p, t, 0x1.76bd76p-5f);
    p = fmaf(p, t, 0x1.9deec4p-3f);
    float q = fmaf(0x1.878abp-7f, t, 0x1.c6b3f6p-4f);
    q = fmaf(q, t, 0x1.fc83bcp-2f);
    q = fmaf(q, t, 0x1.3e1ff2p0f);
    q = fmaf(q, t, 0x1.b33ea6p0f);
    q = fmaf(q, t, 1.f);
    return p * t / q;
}

__device__ __forceinline__ float gelu(float x) {
    const float t = clipped_magnitude(x, 13.2f), sum = t + 1.f, quotient = t / sum;
    const float lost = (1.f - sum) + t;
    const Exponential gauss = large_gauss(t);
    float ratio = fmaf(lost, quotient - 1.f, tail_ratio(t));
    ratio = fmaf(ratio, gauss.rest, ratio + gauss.rest);
    const float tail = fmaf(quotient, ratio, quotient) * gauss.power * 0x1p-33f;
    return x >= 0.f ? x - tail : x < -13.2f ? -0.f : -tail;
}

__device__ __forceinline__ float gelu_slope(float x) {
    const float t = clipped_magnitude(x, 13.2f), half = 0.5f / (t + 1.f);
    const Exponential gauss = large_gauss(t);
    const float mills = fmaf(half, tail_ratio(t), half);
    float slope = fmaf(t, -0.398942280f, mills);
    slope = slope * fmaf(gauss.power, gauss.rest, gauss.power) * 0x1p-32f;
    slope = x < -13.2f ? 0.f : slope;
    return x >= 0.f ? 1.f - slope : slope;
}

__device__ __forceinline__ Exponential large_cubic_exponential(float t) {
    const float b = 0x1.988454p0f, b_low = -0x1.857936p-25f;
    const float c = 0x1.2444f2p-4f, c_low = 0x1.49b16ap-29f;
    const Two square = exact_product(t, t), cubic = exact_product(c, square.high);
    const float sum = b + cubic.high, part = sum - b;
    float low = (b - (sum - part)) + (cubic.high - part);
    low = low + (b_low + fmaf(c_low, square.high, fmaf(c, square.low, cubic.low)));
    const Two product = exact_product(t, sum);
    return large_exponential(-product.high, -fmaf(t, low, product.low));
}

__device__ __forceinline__ float gelu_tanh(float x) {
    const Exponential e = large_cubic_exponential(clipped_magnitude(x, 10.2f));
    const float power = fmaf(e.power, e.rest, e.power);
    const float y = (x >= 0.f ? x : x * power) / fmaf(power, 0x1p-32f, 1.f);
    return x < -10.2f ? -0.f : x >= 0.f ? y : y * 0x1p-32f;
}

__device__ __forceinline__ float gelu_tanh_slope(float x) {
    const float t = clipped_magnitude(x, 10.2f);
    const Exponential e = large_cubic_exponential(t);
    const float power = fmaf(e.power, e.rest, e.power) * 0x1p-32f, share = 1.f / (1.f + power);
    const float argument_slope = fmaf(t * t, 0.214064474f, 0x1.988454p0f);
    float slope = power * share * fmaf(-t * share, argument_slope, 1.f);
    slope = x < -10.2f ? 0.f : slope;
    return x >= 0.f ? 1.f - slope : slope;
}

__device__ __forceinline__ float clipped(float x, float low, float high) {
    x = x < low ? low : x; // NaN stays NaN
    return x > high ? high : x;
}

__device__ __forceinline__ float hard_sigmoid(float x, float alpha, float beta) {
    return clipped(fmaf(x, alpha, beta), 0.f, 1.f);
}

__device__ __forceinline__ float hard_swish_slope(float x) {
    return x > -3.f ? (x < 3.f ? fmaf(x, 1.0f / 3, 0.5f) : 1.f) : 0.f;
}

__device__ __forceinline__ float swish(float x) { return x < -87.3f ? 0.f : x * logistic(x); }

__device__ __forceinline__ float swish_slope(float x) {
    const float s = logistic(x), slope = s * fmaf(x, 1.f - s, 1.f);
    return x < -87.3f ? 0.f : x > 87.3f ? 1.f : slope;
}

// Computes out[i] = x[i] > 0 ? v[i] : v[i] * slope of the channel. v is dy in the backward pass,
// and x in the forward pass. Channels are adjacent in memory. `slopes` is the number of channels,
// or 1.
__device__ __forceinline__ void prelu(const float* v, const float* x, float* out,
                                      const float* slope, int slopes, long long n) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; 4 * i < n; i += step) {
        Four values = reinterpret_cast<const Four*>(v)[i];
        const Four inputs = reinterpret_cast<const Four*>(x)[i];
        int channel = (int)(4 * i % slopes);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            values.of[k] = inputs.of[k] > 0.f ? values.of[k] : values.of[k] * slope[channel];
            channel = channel + 1 == slopes ? 0 : channel + 1;
        }
        reinterpret_cast<Four*>(out)[i] = values;
    }
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

extern "C" __global__ void __launch_bounds__(256)
activation_gelu(const float* __restrict__ x, float* __restrict__ y, long long n) {
    each(x, y, n, [](float v) { return gelu(v); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_gelu_dx(const float* __restrict__ dy, const float* __restrict__ x,
                   float* __restrict__ dx, long long n) {
    each(dy, x, dx, n, [](float g, float v) { return g * gelu_slope(v); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_gelu_tanh(const float* __restrict__ x, float* __restrict__ y, long long n) {
    each(x, y, n, [](float v) { return gelu_tanh(v); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_gelu_tanh_dx(const float* __restrict__ dy, const float* __restrict__ x,
                        float* __restrict__ dx, long long n) {
    each(dy, x, dx, n, [](float g, float v) { return g * gelu_tanh_slope(v); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_swish(const float* __restrict__ x, float* __restrict__ y, long long n) {
    each(x, y, n, [](float v) { return swish(v); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_swish_dx(const float* __restrict__ dy, const float* __restrict__ x,
                    float* __restrict__ dx, long long n) {
    each(dy, x, dx, n, [](float g, float v) { return g * swish_slope(v); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_clip(const float* __restrict__ x, float* __restrict__ y, float low, float high,
                long long n) {
    each(x, y, n, [=](float v) { return clipped(v, low, high); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_clip_dx(const float* __restrict__ dy, const float* __restrict__ y,
                   float* __restrict__ dx, float low, float high, long long n) {
    each(dy, y, dx, n, [=](float g, float v) { return v > low && v < high ? g : 0.f; });
}

extern "C" __global__ void __launch_bounds__(256)
activation_hard_sigmoid(const float* __restrict__ x, float* __restrict__ y, float alpha,
                        float beta, long long n) {
    each(x, y, n, [=](float v) { return hard_sigmoid(v, alpha, beta); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_hard_sigmoid_dx(const float* __restrict__ dy, const float* __restrict__ y,
                           float* __restrict__ dx, float alpha, long long n) {
    each(dy, y, dx, n, [=](float g, float v) { return v > 0.f && v < 1.f ? g * alpha : 0.f; });
}

extern "C" __global__ void __launch_bounds__(256)
activation_hard_swish(const float* __restrict__ x, float* __restrict__ y, long long n) {
    each(x, y, n, [](float v) { return v * hard_sigmoid(v, 1.0f / 6, 0.5f); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_hard_swish_dx(const float* __restrict__ dy, const float* __restrict__ x,
                         float* __restrict__ dx, long long n) {
    each(dy, x, dx, n, [](float g, float v) { return g * hard_swish_slope(v); });
}

extern "C" __global__ void __launch_bounds__(256)
activation_prelu(const float* __restrict__ x, float* __restrict__ y,
                 const float* __restrict__ slope, int slopes, long long n) {
    prelu(x, x, y, slope, slopes, n);
}

extern "C" __global__ void __launch_bounds__(256)
activation_prelu_dx(const float* __restrict__ dy, const float* __restrict__ x,
                    float* __restrict__ dx, const float* __restrict__ slope, int slopes,
                    long long n) {
    prelu(dy, x, dx, slope, slopes, n);
}

extern "C" __global__ void __launch_bounds__(256)
activation_prelu_products(const float* __restrict__ dy, const float* __restrict__ x,
                          float* __restrict__ products, long long n) {
    each(dy, x, products, n, [](float g, float v) { return v > 0.f ? 0.f : g * v; });
}
