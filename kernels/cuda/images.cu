// Gathers images of a data set, stored as (n, C, H, W), into the values of a mini-batch, stored as
// (image, P, Q, C), i.e. in NHWC layout.

enum { THREADS = 256, EACH = 4 };  // threads per block; elements per thread

__device__ __forceinline__ float usual(unsigned char) { return 255.0f; }  // the default divisor
__device__ __forceinline__ float usual(float) { return 1.0f; }

enum { LEFT_TO_RIGHT = 1, TOP_TO_BOTTOM = 2 };  // the bits of `mirrored`

// Returns the option of an image, or 0 if `option` is null.
__device__ __forceinline__ int said(const int* option, int image) {
    return option ? option[image] : 0;
}

// Mirrors each image as `mirrored` says, and cuts out the window (P, Q) that begins at pixel (top,
// left). Pixels outside the image have the value of `fill` (C), or 0. The result is (pixel -
// centre) / divisor, where centre and divisor are given for each channel or, if of_pixels, for each
// (c, p, q). Image i is number indices[i] of `pixels`, or number i if indices is null. Unused
// images (from image *valid on) become zero. `parts` blocks of threads share an image.
template <class T>
__device__ __forceinline__ void window(const T* pixels, const int* indices, const int* valid,
                                       const int* mirrored, const int* top, const int* left,
                                       const T* fill, const float* centre, const float* divisor,
                                       value* lanes, int C, int H, int W, int P, int Q,
                                       int of_pixels, int count, int parts) {
    const int image = blockIdx.x / parts;
    const int size = P * Q * C, first = blockIdx.x % parts * (THREADS * EACH);
    lanes += (long long)image * size;
    if (image >= (valid ? *valid : count)) {
        for (int e = first + threadIdx.x; e < min(first + THREADS * EACH, size); e += THREADS)
            lanes[e] = put(0.0f);
        return;
    }
    const long long number = indices ? indices[image] : image;
    const T* own = pixels + number * ((long long)C * H * W);
    const int down = said(top, image), across = said(left, image);
    const int turned = said(mirrored, image);
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int e = first + threadIdx.x + n * THREADS;
        if (e >= size) break;
        const int c = e % C, q = e / C % Q, p = e / C / Q;
        int h = p + down, w = q + across;
        const bool inside = h >= 0 && h < H && w >= 0 && w < W;
        if (turned & LEFT_TO_RIGHT) w = W - 1 - w;
        if (turned & TOP_TO_BOTTOM) h = H - 1 - h;
        T pixel = fill ? fill[c] : (T)0;
        if (inside) pixel = own[((long long)c * H + h) * W + w];
        const int at = of_pixels ? (c * P + p) * Q + q : c;
        lanes[e] = put(((float)pixel - (centre ? centre[at] : 0.0f)) /
                       (centre ? divisor[at] : usual(pixel)));
    }
}

// Windows of images of bytes. If centre is null, bytes are divided by 255.
extern "C" __global__ void __launch_bounds__(256) images_of_bytes(
    const unsigned char* __restrict__ pixels, const int* __restrict__ indices,
    const int* __restrict__ valid, const int* __restrict__ mirrored, const int* __restrict__ top,
    const int* __restrict__ left, const unsigned char* __restrict__ fill,
    const float* __restrict__ centre, const float* __restrict__ divisor,
    value* __restrict__ lanes, int C, int H, int W, int P, int Q, int of_pixels, int count,
    int parts) {
    window(pixels, indices, valid, mirrored, top, left, fill, centre, divisor, lanes, C, H, W, P, Q,
           of_pixels, count, parts);
}

// Windows of images of floats. If centre is null, floats are not normalized.
extern "C" __global__ void __launch_bounds__(256) images_of_floats(
    const float* __restrict__ pixels, const int* __restrict__ indices,
    const int* __restrict__ valid, const int* __restrict__ mirrored, const int* __restrict__ top,
    const int* __restrict__ left, const float* __restrict__ fill,
    const float* __restrict__ centre, const float* __restrict__ divisor,
    value* __restrict__ lanes, int C, int H, int W, int P, int Q, int of_pixels, int count,
    int parts) {
    window(pixels, indices, valid, mirrored, top, left, fill, centre, divisor, lanes, C, H, W, P, Q,
           of_pixels, count, parts);
}

// y = factor * (x + total) for images (image, height, width, channels), where x is mirrored left to
// right (turn 1), top to bottom (2), both ways (3) or not at all. total may be null.
extern "C" __global__ void __launch_bounds__(256)
    images_mirror(const value* __restrict__ x, const value* __restrict__ total,
                  value* __restrict__ y, float factor, int turn, int channels, int height,
                  int width, long long n) {
    EACH_INDEX(i, n) {
        const long long pixel = i / channels, row = pixel / width;
        int w = (int)(pixel % width), h = (int)(row % height);
        if (turn & LEFT_TO_RIGHT) w = width - 1 - w;
        if (turn & TOP_TO_BOTTOM) h = height - 1 - h;
        const long long from = ((row / height * height + h) * width + w) * channels + i % channels;
        y[i] = put((get(x[from]) + (total ? get(total[i]) : 0.0f)) * factor);
    }
}

// Gathers the targets of images, as words of four bytes, from table (n, channels, places) to
// (image, places, channels), where places are pixels. Unused images (from image *valid on) become
// zero; see `window`.
extern "C" __global__ void __launch_bounds__(256)
    images_targets(const int* __restrict__ table, const int* __restrict__ indices,
                   const int* __restrict__ valid, int* __restrict__ lanes, int channels, int places,
                   int count, int parts) {
    const int image = blockIdx.x / parts;
    const int size = channels * places, first = blockIdx.x % parts * (THREADS * EACH);
    const bool there = image < (valid ? *valid : count);
    lanes += (long long)image * size;
    if (there) table += (long long)(indices ? indices[image] : image) * size;
    for (int e = first + threadIdx.x; e < min(first + THREADS * EACH, size); e += THREADS)
        lanes[e] = there ? table[e % channels * places + e / channels] : 0;
}
