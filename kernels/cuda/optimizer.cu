// An optimizer step: a formula of formulas.h, which is compiled once for each FORMULA. No operations
// are contracted, so the results have the same bytes as those of the CPU's kernels.
#include "cuda/parameters.cuh"
#include "formulas.h"

#define SIZES(name, numbers, kept) enum { name##_numbers = numbers, name##_kept = kept };
EACH_STEP(SIZES)

// The arrays of a parameter (see parameters.cuh) are its weight, its gradient, the new weight
// (`stepped`, which may be the weight itself) and the arrays that the formula keeps. decays and
// factors: one number for each parameter. The numbers of a formula, starting with the learning rate,
// are read from memory, because they may change between replays of a recorded step. Numbers that the
// formula lacks are null.
extern "C" __global__ void __launch_bounds__(256)
optimizer_step(const long long* __restrict__ parameters, const int* __restrict__ places,
               const float* __restrict__ decays, const float* __restrict__ factors,
               const float* __restrict__ learning_rate, const float* __restrict__ number1,
               const float* __restrict__ number2, const float* __restrict__ number3,
               const float* __restrict__ number4, const float* __restrict__ number5,
               const float* __restrict__ number6, int chunk) {
    constexpr int ARRAYS = PART(FORMULA, _kept), NUMBERS = PART(FORMULA, _numbers) - 1;
    const float* from[MOST_NUMBERS - 1] = {number1, number2, number3, number4, number5, number6};
    float numbers[MOST_NUMBERS - 1];
#pragma unroll
    for (int k = 0; k < NUMBERS; k++) numbers[k] = *from[k];
    const Part part(parameters, places, 4 + ARRAYS, chunk);
    const int count = part.count;
    const float *w = part.array(1), *g = part.array(2);
    float *stepped = part.array(3), *state[ARRAYS];
    long long addresses = (long long)w | (long long)g | (long long)stepped;
#pragma unroll
    for (int k = 0; k < ARRAYS; k++) {
        state[k] = part.array(4 + k);
        addresses |= (long long)state[k];
    }
    const float decay = decays[part.parameter];
    const float rate = *learning_rate * factors[part.parameter];
    auto step = [=](float& w, float g, float* kept) {
        w = FORMULA(w, g, decay, rate, numbers, kept);
    };
    int rest = 0;
    if ((addresses & 15) == 0) {
        rest = count / 4 * 4;
        for (int i = 4 * threadIdx.x; i < rest; i += 4 * 256) {
            float4 weight = *(const float4*)(w + i);
            const float4 gradient = *(const float4*)(g + i);
            float4 old[ARRAYS];
#pragma unroll
            for (int k = 0; k < ARRAYS; k++) old[k] = *(const float4*)(state[k] + i);
            float x[ARRAYS], y[ARRAYS], z[ARRAYS], u[ARRAYS];
#pragma unroll
            for (int k = 0; k < ARRAYS; k++)
                x[k] = old[k].x, y[k] = old[k].y, z[k] = old[k].z, u[k] = old[k].w;
            step(weight.x, gradient.x, x);
            step(weight.y, gradient.y, y);
            step(weight.z, gradient.z, z);
            step(weight.w, gradient.w, u);
#pragma unroll
            for (int k = 0; k < ARRAYS; k++)
                *(float4*)(state[k] + i) = make_float4(x[k], y[k], z[k], u[k]);
            *(float4*)(stepped + i) = weight;
        }
    }
    for (int i = rest + threadIdx.x; i < count; i += 256) {
        float weight = w[i], old[ARRAYS];
#pragma unroll
        for (int k = 0; k < ARRAYS; k++) old[k] = state[k][i];
        step(weight, g[i], old);
#pragma unroll
        for (int k = 0; k < ARRAYS; k++) state[k][i] = old[k];
        stepped[i] = weight;
    }
}
