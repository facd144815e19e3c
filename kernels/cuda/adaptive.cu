// Adam and RMSProp. Nothing is contracted, so that the bytes are those of kernels/cpu/optimizer.c.

// Of all parameters at once, with g = gradient + decay * w:
//   mean <- gradient_decay * mean + gradient_share * g; square <- square_decay * square +
//   square_share * g * g; stepped = w - rate * factor * mean / (sqrt(square) + epsilon),
// with g for the mean where a parameter has none. stepped may lie where w does.
//
// parameters: of each the addresses of weight, gradient, mean (0: none), square and stepped, and how
// many floats. places: of each block of threads the parameter and the first of its `chunk` floats.
extern "C" __global__ void __launch_bounds__(256)
    adaptive(const long long* __restrict__ parameters, const int* __restrict__ places,
             const float* __restrict__ decays, const float* __restrict__ factors,
             const float* __restrict__ learning_rate, float gradient_decay, float gradient_share,
             float square_decay, float square_share, float epsilon, int chunk) {
    const int parameter = places[2 * blockIdx.x], first = places[2 * blockIdx.x + 1];
    const long long* own = parameters + 6 * parameter;
    const int count = min((long long)chunk, own[5] - first);
    const float* weight = (const float*)own[0] + first;
    const float* gradient = (const float*)own[1] + first;
    float* mean = own[2] ? (float*)own[2] + first : 0;
    float* square = (float*)own[3] + first;
    float* stepped = (float*)own[4] + first;
    const float decay = decays[parameter], rate = *learning_rate * factors[parameter];
    for (int i = threadIdx.x; i < count; i += 256) {
        const float w = weight[i];
        float g = gradient[i];
        if (decay != 0.0f) g = g + decay * w;
        float direction = g;
        if (mean) mean[i] = direction = gradient_decay * mean[i] + gradient_share * g;
        const float s = square_decay * square[i] + square_share * (g * g);
        square[i] = s;
        stepped[i] = w - rate * (direction / (__fsqrt_rn(s) + epsilon));
    }
}
