// Optimizer steps: one kernel for each formula of backends/reference/optimizer.py. No operations
// are contracted, so the results have the same bytes as those of kernels/cpu/optimizer.c.
//
// parameters: for each parameter, its number of floats, and the addresses of its weight, its
// gradient, the new weight (`stepped`) and the arrays that the formula keeps. `stepped` may be the
// weight itself. places: for each block of threads, its parameter and the index of its first float;
// a block processes at most `chunk` floats. decays and factors: one number for each parameter. The
// numbers of a formula are read from memory, because they may change between replays of a recorded
// step.

// Calls step.take(weight, gradient, state) for each number of a block of threads. `take` updates
// the weight and the numbers of the state arrays. step.decay and step.rate are the parameter's
// values.
template <int ARRAYS, typename Step>
__device__ __forceinline__ void each_number(Step step, const long long* parameters,
                                            const int* places, const float* decays,
                                            const float* factors, float learning_rate, int chunk) {
    const int parameter = places[2 * blockIdx.x], first = places[2 * blockIdx.x + 1];
    const long long* own = parameters + (4 + ARRAYS) * parameter;
    const int count = min((long long)chunk, own[0] - first);
    const float* w = (const float*)own[1] + first;
    const float* g = (const float*)own[2] + first;
    float* stepped = (float*)own[3] + first;
    float* state[ARRAYS];
    long long addresses = (long long)w | (long long)g | (long long)stepped;
#pragma unroll
    for (int k = 0; k < ARRAYS; k++) {
        state[k] = (float*)own[4 + k] + first;
        addresses |= (long long)state[k];
    }
    step.decay = decays[parameter];
    step.rate = learning_rate * factors[parameter];
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
            step.take(weight.x, gradient.x, x);
            step.take(weight.y, gradient.y, y);
            step.take(weight.z, gradient.z, z);
            step.take(weight.w, gradient.w, u);
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
        step.take(weight, g[i], old);
#pragma unroll
        for (int k = 0; k < ARRAYS; k++) state[k][i] = old[k];
        stepped[i] = weight;
    }
}

struct Sgdm {
    float momentum, decay, rate;

    __device__ __forceinline__ void take(float& w, float g, float* state) const {
        if (decay != 0.0f) g = g + decay * w;
        const float v = momentum * state[0] - rate * g;
        state[0] = v;
        w = w + v;
    }
};

extern "C" __global__ void __launch_bounds__(256)
    sgdm(const long long* __restrict__ parameters, const int* __restrict__ places,
         const float* __restrict__ decays, const float* __restrict__ factors,
         const float* __restrict__ learning_rate, const float* __restrict__ momentum, int chunk) {
    const Sgdm step = {*momentum};
    each_number<1>(step, parameters, places, decays, factors, *learning_rate, chunk);
}

struct Nesterov {
    float momentum, decay, rate;

    __device__ __forceinline__ void take(float& w, float g, float* state) const {
        if (decay != 0.0f) g = g + decay * w;
        const float change = rate * g, v = momentum * state[0] - change;
        state[0] = v;
        w = w + (momentum * v - change);
    }
};

extern "C" __global__ void __launch_bounds__(256)
    nesterov(const long long* __restrict__ parameters, const int* __restrict__ places,
             const float* __restrict__ decays, const float* __restrict__ factors,
             const float* __restrict__ learning_rate, const float* __restrict__ momentum,
             int chunk) {
    const Nesterov step = {*momentum};
    each_number<1>(step, parameters, places, decays, factors, *learning_rate, chunk);
}

struct Adam {
    float mean_decay, mean_share, square_decay, square_share, epsilon, decay, rate;

    __device__ __forceinline__ void take(float& w, float g, float* state) const {
        if (decay != 0.0f) g = g + decay * w;
        state[0] = mean_decay * state[0] + mean_share * g;
        state[1] = square_decay * state[1] + square_share * (g * g);
        w = w - rate * (state[0] / (__fsqrt_rn(state[1]) + epsilon));
    }
};

extern "C" __global__ void __launch_bounds__(256)
    adam(const long long* __restrict__ parameters, const int* __restrict__ places,
         const float* __restrict__ decays, const float* __restrict__ factors,
         const float* __restrict__ learning_rate, const float* __restrict__ mean_decay,
         const float* __restrict__ mean_share, const float* __restrict__ square_decay,
         const float* __restrict__ square_share, const float* __restrict__ epsilon, int chunk) {
    const Adam step = {*mean_decay, *mean_share, *square_decay, *square_share, *epsilon};
    each_number<2>(step, parameters, places, decays, factors, *learning_rate, chunk);
}

struct AdamW {
    float mean_decay, mean_share, square_decay, square_share, epsilon, correction, decay, rate;

    __device__ __forceinline__ void take(float& w, float g, float* state) const {
        state[0] = mean_decay * state[0] + mean_share * g;
        state[1] = square_decay * state[1] + square_share * (g * g);
        float direction = correction * (state[0] / (__fsqrt_rn(state[1]) + epsilon));
        if (decay != 0.0f) direction = direction + decay * w;
        w = w - rate * direction;
    }
};

extern "C" __global__ void __launch_bounds__(256)
    adamw(const long long* __restrict__ parameters, const int* __restrict__ places,
          const float* __restrict__ decays, const float* __restrict__ factors,
          const float* __restrict__ learning_rate, const float* __restrict__ mean_decay,
          const float* __restrict__ mean_share, const float* __restrict__ square_decay,
          const float* __restrict__ square_share, const float* __restrict__ epsilon,
          const float* __restrict__ correction, int chunk) {
    const AdamW step = {*mean_decay,   *mean_share, *square_decay,
                        *square_share, *epsilon,    *correction};
    each_number<2>(step, parameters, places, decays, factors, *learning_rate, chunk);
}

struct RmsProp {
    float square_decay, square_share, epsilon, decay, rate;

    __device__ __forceinline__ void take(float& w, float g, float* state) const {
        if (decay != 0.0f) g = g + decay * w;
        state[0] = square_decay * state[0] + square_share * (g * g);
        w = w - rate * (g / (__fsqrt_rn(state[0]) + epsilon));
    }
};

extern "C" __global__ void __launch_bounds__(256)
    rmsprop(const long long* __restrict__ parameters, const int* __restrict__ places,
            const float* __restrict__ decays, const float* __restrict__ factors,
            const float* __restrict__ learning_rate, const float* __restrict__ square_decay,
            const float* __restrict__ square_share, const float* __restrict__ epsilon, int chunk) {
    const RmsProp step = {*square_decay, *square_share, *epsilon};
    each_number<1>(step, parameters, places, decays, factors, *learning_rate, chunk);
}

struct Average {
    float decay, rate;

    __device__ __forceinline__ void take(float& w, float g, float* state) const {
        state[0] = state[0] + rate * (w - state[0]);
    }
};

extern "C" __global__ void __launch_bounds__(256)
    average(const long long* __restrict__ parameters, const int* __restrict__ places,
            const float* __restrict__ decays, const float* __restrict__ factors,
            const float* __restrict__ share, int chunk) {
    const Average step = {};
    each_number<1>(step, parameters, places, decays, factors, *share, chunk);
}
