// Softmax and cross-entropy, in double: what a training step reports, where its gradient begins.
//
// logits (images, classes), as memory orders them. A block of threads has the 16 images of a block,
// which are one leaf of the sum over images, and a warp has one image: its lanes add up every 32nd
// class, and each other by one tree.

enum { IMAGES = 16, LANES_OF_WARP = 32 };

// Of an image: the largest of its logits, and the sum over the classes of e^(logit - top).
struct Normalizer {
    double top, sum;
};

__device__ __forceinline__ Normalizer normalizer(const float* logits, int classes) {
    const int lane = threadIdx.x % LANES_OF_WARP;
    float top = logits[0];
    for (int c = lane; c < classes; c += LANES_OF_WARP) top = logits[c] > top ? logits[c] : top;
    for (int mask = 16; mask; mask /= 2) {
        const float other = shfl_xor(top, mask);
        top = other > top ? other : top;
    }
    Normalizer found = {top, 0.0};
#pragma unroll 1
    for (int c = lane; c < classes; c += LANES_OF_WARP) found.sum += exp(logits[c] - found.top);
#pragma unroll
    for (int mask = 16; mask; mask /= 2) found.sum += shfl_xor(found.sum, mask);
    return found;
}

// Of this thread's warp: which image of the block it has, which of all.
__device__ __forceinline__ int image_of_block() { return threadIdx.x / LANES_OF_WARP; }
__device__ __forceinline__ int image_of_all() { return blockIdx.x * IMAGES + image_of_block(); }

// p (images, classes) = e^logit / the sum of them.
extern "C" __global__ void __launch_bounds__(512)
    loss_softmax(const float* __restrict__ logits, double* __restrict__ p, int classes) {
    const long long first = (long long)image_of_all() * classes;
    const Normalizer of = normalizer(logits + first, classes);
    for (int c = threadIdx.x % LANES_OF_WARP; c < classes; c += LANES_OF_WARP)
        p[first + c] = exp(logits[first + c] - of.top) / of.sum;
}

// dx (images, classes) = p (dy - the sum of p dy over the classes): the gradient behind a softmax.
extern "C" __global__ void __launch_bounds__(512)
    loss_softmax_dx(const float* __restrict__ dy, const double* __restrict__ p,
                    float* __restrict__ dx, int classes) {
    const long long first = (long long)image_of_all() * classes;
    const int lane = threadIdx.x % LANES_OF_WARP;
    double inner = 0.0;
    for (int c = lane; c < classes; c += LANES_OF_WARP) inner += p[first + c] * dy[first + c];
#pragma unroll
    for (int mask = 16; mask; mask /= 2) inner += shfl_xor(inner, mask);
    for (int c = lane; c < classes; c += LANES_OF_WARP)
        dx[first + c] = (float)(p[first + c] * (dy[first + c] - inner));
}

// rows[block]: the sum over the block's images, in their order, of `value`, one a warp.
__device__ __forceinline__ void add_images(double* of_image, double value, double* rows) {
    if (threadIdx.x % LANES_OF_WARP == 0) of_image[image_of_block()] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0.0;
        for (int i = 0; i < IMAGES; i++) sum += of_image[i];
        rows[blockIdx.x] = sum;
    }
}

// rows (blocks): of -log softmax(logits)[label]. valid: how many images of this share there are.
extern "C" __global__ void __launch_bounds__(512)
    loss_cross_entropy(const float* __restrict__ logits, const int* __restrict__ labels,
                       const int* __restrict__ valid, double* __restrict__ rows, int classes) {
    __shared__ double of_image[IMAGES];
    const int image = image_of_all();
    const float* own = logits + (long long)image * classes;
    double value = 0.0;
    if (image < *valid) {
        const Normalizer of = normalizer(own, classes);
        value = log(of.sum) - (own[labels[image]] - of.top);
    }
    add_images(of_image, value, rows);
}

// d (images, classes) = (softmax(logits) - one at the label) * factor * late; zero in unused
// images. late: a number that is known when the kernel runs, or null.
extern "C" __global__ void __launch_bounds__(512)
    loss_dlogits(const float* __restrict__ logits, const int* __restrict__ labels,
                 const int* __restrict__ valid, double factor, const double* __restrict__ late,
                 float* __restrict__ d, int classes) {
    const int image = image_of_all(), lane = threadIdx.x % LANES_OF_WARP;
    const float* own = logits + (long long)image * classes;
    d += (long long)image * classes;
    if (image >= *valid) {
        for (int c = lane; c < classes; c += LANES_OF_WARP) d[c] = 0.0f;
        return;
    }
    const double scale = late ? *late * factor : factor;
    const int label = labels[image];
    const Normalizer of = normalizer(own, classes);
    for (int c = lane; c < classes; c += LANES_OF_WARP) {
        const double p = exp(own[c] - of.top) / of.sum;
        d[c] = (float)((p - (label == c ? 1.0 : 0.0)) * scale);
    }
}

// Whether (value, place) comes before (best, at) where the largest is looked for: of equal ones the
// first, and what is not a number before all.
__device__ __forceinline__ bool before(float value, int place, float best, int at) {
    const bool strange = value != value, best_strange = best != best;
    if (strange != best_strange) return strange;
    if (value > best) return true;
    return (strange || value == best) && place < at;
}

// rows (blocks): how many valid images' largest logit is their label's.
extern "C" __global__ void __launch_bounds__(512)
    loss_correct(const float* __restrict__ logits, const int* __restrict__ labels,
                 const int* __restrict__ valid, double* __restrict__ rows, int classes) {
    __shared__ double of_image[IMAGES];
    const int image = image_of_all();
    const float* own = logits + (long long)image * classes;
    double value = 0.0;
    if (image < *valid) {
        float best = own[0];
        int at = 0;
        for (int c = threadIdx.x % LANES_OF_WARP; c < classes; c += LANES_OF_WARP)
            if (before(own[c], c, best, at)) best = own[c], at = c;
        for (int mask = 16; mask; mask /= 2) {
            const float other = shfl_xor(best, mask);
            const int place = shfl_xor(at, mask);
            if (before(other, place, best, at)) best = other, at = place;
        }
        value = at == labels[image];
    }
    add_images(of_image, value, rows);
}
