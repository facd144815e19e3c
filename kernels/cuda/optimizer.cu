// SGD with momentum. Nothing is contracted, so that the bytes are those of kernels/cpu/optimizer.c.

struct Step {
    float rate, momentum, decay;

    __device__ __forceinline__ void take(float& w, float& v, float g) const {
        if (decay != 0.0f) g = g + decay * w;
        v = momentum * v - rate * g;
        w = w + v;
    }
};

// Of all parameters at once: v <- momentum * v - rate * factor * (g + decay * w); stepped = w + v,
// which may lie where w does. decays and factors: of each parameter.
//
// parameters: of each the addresses of weight, gradient, velocity and stepped, and how many floats.
// places: of each block of threads the parameter and the first of the `chunk` floats that it steps.
extern "C" __global__ void __launch_bounds__(256)
    sgdm(const long long* __restrict__ parameters, const int* __restrict__ places,
         const float* __restrict__ decays, const float* __restrict__ factors,
         const float* __restrict__ learning_rate, const float* __restrict__ momentum, int chunk) {
    const int parameter = places[2 * blockIdx.x], first = places[2 * blockIdx.x + 1];
    const long long* own = parameters + 5 * parameter;
    const int count = min((long long)chunk, own[4] - first);
    const float* w = (const float*)own[0] + first;
    const float* g = (const float*)own[1] + first;
    float* v = (float*)own[2] + first;
    float* stepped = (float*)own[3] + first;
    const Step step = {*learning_rate * factors[parameter], *momentum, decays[parameter]};
    int rest = 0;
    if (((long long)w & 15) == 0 && ((long long)g & 15) == 0 && ((long long)v & 15) == 0 &&
        ((long long)stepped & 15) == 0) {
        rest = count / 4 * 4;
        for (int i = 4 * threadIdx.x; i < rest; i += 4 * 256) {
            float4 weight = *(const float4*)(w + i), velocity = *(const float4*)(v + i);
            const float4 gradient = *(const float4*)(g + i);
            step.take(weight.x, velocity.x, gradient.x);
            step.take(weight.y, velocity.y, gradient.y);
            step.take(weight.z, velocity.z, gradient.z);
            step.take(weight.w, velocity.w, gradient.w);
            *(float4*)(v + i) = velocity;
            *(float4*)(stepped + i) = weight;
        }
    }
    for (int i = rest + threadIdx.x; i < count; i += 256) {
        float weight = w[i], velocity = v[i];
        step.take(weight, velocity, g[i]);
        v[i] = velocity;
        stepped[i] = weight;
    }
}
