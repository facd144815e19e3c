// ReLU with learnable slopes, one for each channel or one for all channels.

// Computes out[i] = x[i] > 0 ? v[i] : v[i] * slope of the channel. v is dy in the backward pass,
// and x in the forward pass. Channels are adjacent in memory. `slopes` is the number of channels,
// or 1.
__device__ __forceinline__ void scaled_below_0(const value* v, const value* x, value* out,
                                               const float* slope, int slopes, long long n) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; 4 * i < n; i += step) {
        Floats<4> numbers = load<4>(v + 4 * i);
        const Floats<4> inputs = load<4>(x + 4 * i);
        int channel = (int)(4 * i % slopes);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            numbers.at[k] = inputs.at[k] > 0.f ? numbers.at[k] : numbers.at[k] * slope[channel];
            channel = channel + 1 == slopes ? 0 : channel + 1;
        }
        store<4>(out + 4 * i, numbers);
    }
}

extern "C" __global__ void __launch_bounds__(256)
prelu(const value* __restrict__ x, value* __restrict__ y, const float* __restrict__ slope,
      int slopes, long long n) {
    scaled_below_0(x, x, y, slope, slopes, n);
}

extern "C" __global__ void __launch_bounds__(256)
prelu_dx(const value* __restrict__ dy, const value* __restrict__ x, value* __restrict__ dx,
         const float* __restrict__ slope, int slopes, long long n) {
    scaled_below_0(dy, x, dx, slope, slopes, n);
}

// The terms of the slopes' gradients, which are not rounded to the type of x.
extern "C" __global__ void __launch_bounds__(256)
prelu_products(const value* __restrict__ dy, const value* __restrict__ x,
               float* __restrict__ products, long long n) {
    EACH_INDEX(i, n / 4) {
        Floats<4> g = load<4>(dy + 4 * i);
        const Floats<4> v = load<4>(x + 4 * i);
#pragma unroll
        for (int k = 0; k < 4; ++k) g.at[k] = v.at[k] > 0.f ? 0.f : g.at[k] * v.at[k];
        reinterpret_cast<Floats<4>*>(products)[i] = g;
    }
}
