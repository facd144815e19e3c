// Images of a data set to the lanes of a mini-batch: (n, C, H, W) as files have them to (image, P,
// Q, C), which is NHWC.

enum { THREADS = 256, EACH = 4 };  // elements of a thread

__device__ __forceinline__ float value_of(unsigned char pixel) { return pixel / 255.0f; }
__device__ __forceinline__ float value_of(float pixel) { return pixel; }

// What is said of each image, or 0 of all.
__device__ __forceinline__ int said(const int* option, int image) {
    return option ? option[image] : 0;
}

// Window (P, Q) of an image from its pixel (top, left) on, of the image mirrored left to right if
// that is said; zeros outside of the image, and in images from *valid on. Image i is number
// indices[i] of `pixels`, or i where indices is null. `parts` blocks of threads have an image.
template <class T>
__device__ __forceinline__ void window(const T* pixels, const int* indices, const int* valid,
                                       const int* mirrored, const int* top, const int* left,
                                       float* lanes, int C, int H, int W, int P, int Q, int count,
                                       int parts) {
    const int image = blockIdx.x / parts;
    const int size = P * Q * C, first = blockIdx.x % parts * (THREADS * EACH);
    lanes += (long long)image * size;
    if (image >= (valid ? *valid : count)) {
        for (int e = first + threadIdx.x; e < min(first + THREADS * EACH, size); e += THREADS)
            lanes[e] = 0.0f;
        return;
    }
    const long long number = indices ? indices[image] : image;
    const T* own = pixels + number * ((long long)C * H * W);
    const int down = said(top, image), across = said(left, image);
    const bool turned = said(mirrored, image) != 0;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int e = first + threadIdx.x + n * THREADS;
        if (e >= size) break;
        const int c = e % C, q = e / C % Q, p = e / C / Q;
        const int h = p + down, w = q + across;
        float value = 0.0f;
        if (h >= 0 && h < H && w >= 0 && w < W)
            value = value_of(own[((long long)c * H + h) * W + (turned ? W - 1 - w : w)]);
        lanes[e] = value;
    }
}

// Of bytes, which are divided by 255.
extern "C" __global__ void __launch_bounds__(256) images_of_bytes(
    const unsigned char* __restrict__ pixels, const int* __restrict__ indices,
    const int* __restrict__ valid, const int* __restrict__ mirrored, const int* __restrict__ top,
    const int* __restrict__ left, float* __restrict__ lanes, int C, int H, int W, int P, int Q,
    int count, int parts) {
    window(pixels, indices, valid, mirrored, top, left, lanes, C, H, W, P, Q, count, parts);
}

// Of numbers, which are left as they are.
extern "C" __global__ void __launch_bounds__(256) images_of_floats(
    const float* __restrict__ pixels, const int* __restrict__ indices,
    const int* __restrict__ valid, const int* __restrict__ mirrored, const int* __restrict__ top,
    const int* __restrict__ left, float* __restrict__ lanes, int C, int H, int W, int P, int Q,
    int count, int parts) {
    window(pixels, indices, valid, mirrored, top, left, lanes, C, H, W, P, Q, count, parts);
}

// lanes[i] = table[indices[i]] of the first *valid images, 0 of the others.
extern "C" __global__ void __launch_bounds__(256)
    images_labels(const int* __restrict__ table, const int* __restrict__ indices,
                  const int* __restrict__ valid, int* __restrict__ lanes, int images) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < images) lanes[i] = i < *valid ? table[indices[i]] : 0;
}
