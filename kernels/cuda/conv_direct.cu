// Convolution in plain float32, for any GPU. GPUs without TF32 tensor cores use these kernels; on
// other GPUs, tests use these kernels as a reference.
//
// Each of the three passes is a product out[m][n] = sum over t of a[m][t] * b[t][n]:
//
//                      m                  n                     t
//   forward            a pixel of y       a filter              r, s, and a channel
//   backward-data      a pixel of x       a channel             r, s, and a filter
//   backward-weights   a filter           r, s, and a channel   a pixel of y, of one leaf
//
// A CTA (block of threads) computes a tile of 64 x 32 elements of the product within one group. The
// CTA loops over t in chunks of 32, and loads both operands of a chunk into shared memory.
// Consecutive threads read consecutive channels or filters of a pixel, so reads coalesce. Padding
// is read as zeros. A chunk is added up by fused multiply-add in the order of t, and then the sums
// of the chunks are added in order. So the order depends only on the shape, and the short sums keep
// the error small.
//
// Images are NHWC; weights are KRSC, i.e. (K, R, S, C/groups). Offsets within an image and within
// the weights are int; the caller checks the sizes.

constexpr int ROWS = 64, COLUMNS = 32, DEPTH = 32;
constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int OWN = ROWS / WARPS; // consecutive rows of the tile that a thread computes

// The operands of one chunk. The rows of `a` are aligned to 16 bytes, for vector reads. The rows of
// `b` are one float longer than the 32 banks of shared memory, so that writes along rows or columns
// use different banks.
struct alignas(16) Operands {
    float a[DEPTH][ROWS + 4];
    float b[DEPTH][COLUMNS + 1];
};

// A pixel of y or x: its row and column in its image (the padding begins at -top, -left), and the
// offset of the image, which is -1 if the pixel does not exist.
struct Pixel {
    long long image;
    int row, column;
};

// A tap of the filters, combined with a channel or a filter: the distance by which the tap moves a
// pixel, the offset of the channel or filter in a pixel, and the offset of the weights. `channel`
// is -1 if the tap does not exist.
struct Tap {
    int down, across, channel, weights;
};

// Adds the products of a chunk to the sums of this thread. The thread's elements are in the column
// of its lane, in OWN rows starting with row OWN * warp.
__device__ __forceinline__ void add_product(const Operands& from, float (&sums)[OWN]) {
    int row = threadIdx.x / 32 * OWN, column = threadIdx.x % 32;
    float part[OWN] = {};
#pragma unroll 8
    for (int t = 0; t < DEPTH; t++) {
        float b = from.b[t][column];
#pragma unroll
        for (int i = 0; i < OWN; i++) part[i] = fmaf(from.a[t][row + i], b, part[i]);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) sums[i] += part[i];
}

// Returns pixel number n of images with rows x columns pixels. The offset of the image is its index
// times `values`, the number of elements per image.
__device__ __forceinline__ Pixel pixel_of(long long n, long long pixels, int rows, int columns,
                                          long long values) {
    if (n >= pixels) return {-1, 0, 0};
    long long image = n / (rows * columns);
    int place = (int)(n - image * (rows * columns));
    return {image * values, place / columns, place % columns};
}

// Returns the row or column of y to which a tap contributes from a row or column of x. `moved` is
// that row or column of x, moved by the tap. Returns -1 if there is no such row or column.
__device__ __forceinline__ int output_of(int moved, int stride, int outputs) {
    if (moved < 0) return -1;
    int place = stride == 1 ? moved : moved / stride;
    return place * stride == moved && place < outputs ? place : -1;
}

// Computes y = the cross-correlation of x with the weights, plus bias unless it is null. BACKWARD, x
// is dy, and y is dx: each of its pixels adds up products with the pixels of dy that read it. H, W
// and C are sizes of x; P, Q and K are those of y. Grid: tiles of pixels of y, tiles of the channels
// of a group of y, groups.
template <bool BACKWARD>
__device__ __forceinline__ void convolve(const value* x, const float* weight, const float* bias,
                                         value* y, int images, const int* sizes) {
    __shared__ Operands chunk;
    __shared__ Pixel pixels[ROWS];
    __shared__ Tap taps[DEPTH];
    DEFINE_SHAPE(shape);
    constexpr int FROM = BACKWARD ? 3 : 0, TO = BACKWARD ? 0 : 3;
    const int H = shape[FROM], W = shape[FROM + 1], C = shape[FROM + 2];
    const int P = shape[TO], Q = shape[TO + 1], K = shape[TO + 2], groups = shape[14];
    const int R = shape[6], S = shape[7], stride_h = shape[8], stride_w = shape[9];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int channels = C / groups, filters = K / groups, depth = R * S * channels;
    const int first_filter = blockIdx.y * COLUMNS, group = blockIdx.z;
    const long long first_pixel = (long long)blockIdx.x * ROWS, all = (long long)images * P * Q;

    if (threadIdx.x < ROWS) {
        Pixel at = pixel_of(first_pixel + threadIdx.x, all, P, Q, (long long)H * W * C);
        if (BACKWARD)
            pixels[threadIdx.x] = {at.image, at.row + shape[10], at.column + shape[11]};
        else
            pixels[threadIdx.x] = {at.image, at.row * stride_h - shape[10],
                                   at.column * stride_w - shape[11]};
    }
    float sums[OWN] = {};
    for (int first = 0; first < depth; first += DEPTH) {
        if (threadIdx.x < DEPTH) {
            const int t = first + threadIdx.x, tap = t / channels;
            const int channel = group * channels + t % channels;
            taps[threadIdx.x] = {tap / S * shape[12], tap % S * shape[13], t < depth ? channel : -1,
                                 BACKWARD ? (channel * R * S + tap) * filters : t};
        }
        __syncthreads();
        Tap tap = taps[lane];
        for (int m = warp; m < ROWS; m += WARPS) {
            Pixel at = pixels[m];
            int h = at.row + tap.down, w = at.column + tap.across;
            if (BACKWARD) {
                h = output_of(at.row - tap.down, stride_h, H);
                w = output_of(at.column - tap.across, stride_w, W);
            }
            bool inside = at.image >= 0 && tap.channel >= 0 && h >= 0 && h < H && w >= 0 && w < W;
            chunk.a[lane][m] = inside ? get(x[at.image + (h * W + w) * C + tap.channel]) : 0.0f;
        }
        for (int i = warp; i < 32; i += WARPS) {  // lanes read neighbouring weights
            const int t = BACKWARD ? i : lane, n = BACKWARD ? lane : i, filter = first_filter + n;
            const int of_filter = BACKWARD ? filter : (group * filters + filter) * depth;
            bool there = filter < filters && taps[t].channel >= 0;
            chunk.b[t][n] = there ? weight[taps[t].weights + of_filter] : 0.0f;
        }
        __syncthreads();
        add_product(chunk, sums);
    }
    if (first_filter + lane >= filters) return;
    int filter = group * filters + first_filter + lane;
    const float of_filter = bias ? bias[filter] : 0.0f;
    for (int i = 0; i < OWN; i++) {
        long long pixel = first_pixel + warp * OWN + i;
        if (pixel < all) y[pixel * K + filter] = put(sums[i] + of_filter);
    }
}

// x is (images, H, W, C), y is (images, P, Q, K).
extern "C" __global__ void __launch_bounds__(THREADS)
conv_direct_forward(const value* __restrict__ x, const float* __restrict__ weight,
                    const float* __restrict__ bias, value* __restrict__ y, int images,
                    const int* __restrict__ sizes) {
    convolve<false>(x, weight, bias, y, images, sizes);
}

extern "C" __global__ void __launch_bounds__(THREADS)
conv_direct_dx(const value* __restrict__ dy, const float* __restrict__ weight,
               const float* __restrict__ bias, value* __restrict__ dx, int images,
               const int* __restrict__ sizes) {
    convolve<true>(dy, weight, bias, dx, images, sizes);
}

// The gradient with respect to the weights, with one leaf for images_per_leaf consecutive images:
// leaves (leaves, K, R, S, C/groups). dy is zero in unused images, so unused images add nothing.
// Grid: x enumerates (leaf, tile of a group's filters, tile of a filter's weights), with the last
// index fastest; y is 1; z is the group.
extern "C" __global__ void __launch_bounds__(THREADS)
conv_direct_dweight(const value* __restrict__ dy, const value* __restrict__ x,
                    float* __restrict__ leaves, int images_per_leaf,
                    const int* __restrict__ sizes) {
    __shared__ Operands chunk;
    __shared__ Pixel pixels[DEPTH];
    DEFINE_SHAPE(shape);
    const int H = shape[0], W = shape[1], C = shape[2], P = shape[3], Q = shape[4], K = shape[5];
    const int R = shape[6], S = shape[7], groups = shape[14];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int channels = C / groups, filters = K / groups, width = R * S * channels;
    const int tiles_across = (width + COLUMNS - 1) / COLUMNS;
    const int tiles = tiles_across * ((filters + ROWS - 1) / ROWS);
    const int leaf = blockIdx.x / tiles, tile = blockIdx.x % tiles, group = blockIdx.z;
    const int first_filter = tile / tiles_across * ROWS;
    const int n = tile % tiles_across * COLUMNS + lane; // number of the weight within its filter
    const int tap = n / channels, channel = group * channels + n % channels;
    const int down = tap / S * shape[12], across = tap % S * shape[13];
    const long long depth = (long long)images_per_leaf * P * Q, first_pixel = leaf * depth;

    float sums[OWN] = {};
    for (long long first = 0; first < depth; first += DEPTH) {
        if (threadIdx.x < DEPTH) {
            long long number = first_pixel + first + threadIdx.x;
            Pixel at = pixel_of(number, first_pixel + depth, P, Q, (long long)H * W * C);
            pixels[threadIdx.x] = {at.image, at.row * shape[8] - shape[10],
                                   at.column * shape[9] - shape[11]};
        }
        __syncthreads();
#pragma unroll
        for (int t = warp; t < DEPTH; t += WARPS) {
            Pixel at = pixels[t];
            const value* values = dy + (first_pixel + first + t) * K + group * filters;
            for (int m = lane; m < ROWS; m += 32) {
                bool there = at.image >= 0 && first_filter + m < filters;
                chunk.a[t][m] = there ? get(values[first_filter + m]) : 0.0f;
            }
            int h = at.row + down, w = at.column + across;
            bool inside = at.image >= 0 && n < width && h >= 0 && h < H && w >= 0 && w < W;
            chunk.b[t][lane] = inside ? get(x[at.image + (h * W + w) * C + channel]) : 0.0f;
        }
        __syncthreads();
        add_product(chunk, sums);
    }
    if (n >= width) return;
    for (int i = 0; i < OWN; i++) {
        int filter = first_filter + warp * OWN + i;
        if (filter >= filters) return;
        long long offset = ((long long)leaf * K + group * filters + filter) * width + n;
        leaves[offset] = sums[i];
    }
}
