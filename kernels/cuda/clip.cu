// Clips gradients to a threshold, or scales them by trust ratios. Squares for norms are summed in
// double precision, in a fixed order: a tree over each block of threads, a tree over the blocks of
// a parameter, then a sum over the parameters in order. The arrays of a parameter (see parameters.cuh)
// are weight, gradient and result.
#include "cuda/parameters.cuh"

// Returns the sum of `own` over the block's 256 threads to each thread.
__device__ __forceinline__ double sum_of_block(double own, double* sums) {
    __syncthreads();
    sums[threadIdx.x] = own;
    for (int half = 128; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}

// clipped = gradient + decay * weight, limited to [-limit, limit]; an infinite limit has no effect.
// squares: for each block of threads, the sum of the squares of its floats (at most `chunk`) before
// they are limited.
extern "C" __global__ void __launch_bounds__(256)
    clip_numbers(const long long* __restrict__ parameters, const int* __restrict__ places,
                 const float* __restrict__ decays, float limit, int chunk,
                 double* __restrict__ squares) {
    __shared__ double sums[256];
    const Part part(parameters, places, 4, chunk);
    const float *weight = part.array(1), *gradient = part.array(2);
    float* clipped = part.array(3);
    const float decay = decays[part.parameter];
    double square = 0.0;
    for (int i = threadIdx.x; i < part.count; i += 256) {
        float g = gradient[i];
        if (decay != 0.0f) g = g + decay * weight[i];
        square += (double)g * g;
        clipped[i] = g > limit ? limit : g < -limit ? -limit : g;
    }
    square = sum_of_block(square, sums);
    if (threadIdx.x == 0) squares[blockIdx.x] = square;
}

// Returns the factor that limits a gradient's norm, given the square of the norm. NaN stays NaN.
__device__ __forceinline__ float scale_of(double square, double threshold) {
    const double norm = sqrt(square);
    return norm <= threshold ? 1.0f : (float)(threshold / norm);
}

// scales: for each parameter, the factor that limits the gradient's norm to the threshold. If
// `together`, the norm of all gradients together is limited instead. firsts: for each parameter,
// the index of its first square; the last entry is the number of squares. Runs as one block of
// threads.
extern "C" __global__ void __launch_bounds__(256)
    clip_scales(const double* __restrict__ squares, const int* __restrict__ firsts, int count,
                int together, double threshold, float* __restrict__ scales) {
    __shared__ double sums[256];
    double all = 0.0;
    for (int p = 0; p < count; p++) {
        double own = 0.0;
        for (int i = firsts[p] + threadIdx.x; i < firsts[p + 1]; i += 256) own += squares[i];
        const double square = sum_of_block(own, sums);
        all += square;
        if (threadIdx.x == 0 && !together) scales[p] = scale_of(square, threshold);
    }
    if (together)
        for (int p = threadIdx.x; p < count; p += 256) scales[p] = scale_of(all, threshold);
}

// Multiplies the results by the scale of their parameter.
extern "C" __global__ void __launch_bounds__(256)
    clip_scale(const long long* __restrict__ parameters, const int* __restrict__ places,
               const float* __restrict__ scales, int chunk) {
    const Part part(parameters, places, 4, chunk);
    const float scale = scales[part.parameter];
    float* result = part.array(3);
    if (scale == 1.0f) return;
    for (int i = threadIdx.x; i < part.count; i += 256) result[i] *= scale;
}

// scaled = update + decay * weight. squares: for each block of threads, the sums of the squares of
// its weights and of its updates. If `regularized`, the updates include the decay.
extern "C" __global__ void __launch_bounds__(256)
    trust_squares(const long long* __restrict__ parameters, const int* __restrict__ places,
                  const float* __restrict__ decays, int regularized, int chunk,
                  double* __restrict__ squares) {
    __shared__ double sums[256];
    const Part part(parameters, places, 4, chunk);
    const float *weight = part.array(1), *update = part.array(2);
    float* scaled = part.array(3);
    const float decay = decays[part.parameter];
    double of_weights = 0.0, of_updates = 0.0;
    for (int i = threadIdx.x; i < part.count; i += 256) {
        const float w = weight[i], u = update[i];
        const float direction = decay != 0.0f ? u + decay * w : u;
        const float measured = regularized ? direction : u;
        of_weights += (double)w * w;
        of_updates += (double)measured * measured;
        scaled[i] = direction;
    }
    of_weights = sum_of_block(of_weights, sums);
    of_updates = sum_of_block(of_updates, sums);
    if (threadIdx.x == 0) {
        squares[2 * blockIdx.x] = of_weights;
        squares[2 * blockIdx.x + 1] = of_updates;
    }
}

// scales: for each parameter, coefficient * |weight| / |update|, or 1 if one of these three numbers
// is 0. If `separate`, the divisor is |update| + decay * |weight|. firsts: for each parameter, the
// index of its first block of threads; the last entry is the number of blocks. Runs as one block of
// threads.
extern "C" __global__ void __launch_bounds__(256)
    trust_scales(const double* __restrict__ squares, const int* __restrict__ firsts,
                 const float* __restrict__ decays, const float* __restrict__ coefficients,
                 int count, int separate, float* __restrict__ scales) {
    __shared__ double sums[256];
    for (int p = 0; p < count; p++) {
        double weight = 0.0, update = 0.0;
        for (int i = firsts[p] + threadIdx.x; i < firsts[p + 1]; i += 256) {
            weight += squares[2 * i];
            update += squares[2 * i + 1];
        }
        const double norm = sqrt(sum_of_block(weight, sums));
        double divisor = sqrt(sum_of_block(update, sums));
        if (separate) divisor += (double)decays[p] * norm;
        const bool scaled = coefficients[p] != 0.0f && norm > 0.0 && divisor > 0.0;
        if (threadIdx.x == 0)
            scales[p] = scaled ? (float)((double)coefficients[p] * norm / divisor) : 1.0f;
    }
}
