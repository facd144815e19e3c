// Depthwise convolution, in which each filter reads the one channel of its number, on any GPU. The
// products are float32: there are as many of them per byte as an elementwise kernel has operations,
// and tensor cores would multiply zeros.
//
// Images are NHWC, weights (C, R, S). A thread has VECTOR neighbouring channels and computes PIXELS
// neighbouring pixels of a row, in up to `tall` rows one below the other. Neighbouring threads have
// neighbouring channels, then neighbouring pixels, so that caches provide the rows that several
// taps read. The products of an element are added in the order of the taps.
//
// x may be an activation that is computed while x is read (Source in common.cuh).
//
// Definitions: VECTOR is 4 if the channels are a multiple of 4, else 1. CONV_SHAPE is optional
// (see common.cuh); with it, the weights of a thread, or its sums of their gradient, are in registers
// if they are few.
#ifndef VECTOR
#define VECTOR 4
#endif

namespace {

constexpr int THREADS = 256, PIXELS = 4;

__device__ constexpr int floor_of(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

#ifdef CONV_SHAPE
constexpr int SHAPE[] = {CONV_SHAPE};
constexpr int S = SHAPE[7], STRIDE = SHAPE[9], LEFT = SHAPE[11], SPREAD = SHAPE[13];
#else
constexpr int SHAPE[15] = {}, S = 0, STRIDE = 1, LEFT = 0, SPREAD = 0;
#endif
// Number of taps whose weights, or their sums, a thread has in registers: all or none.
constexpr int KEPT = SHAPE[6] * S <= 25 ? SHAPE[6] * S : 0, UNROLL = KEPT ? KEPT : 1;
constexpr int RESIDENT = KEPT > 9 ? 1 : 2;  // blocks of threads per multiprocessor, without spills

// The pixels of a row that a thread reads, if their number is known and small: from pixel
// FIRST + q * stride forward, and FIRST + q / stride backward, where q is the thread's first pixel.
template <bool BACKWARD> struct Window {
    static constexpr int FIRST = BACKWARD ? floor_of(LEFT - (S - 1) * SPREAD, STRIDE) : -LEFT;
    static constexpr int LAST = BACKWARD ? floor_of(PIXELS - 1 + LEFT, STRIDE)
                                         : (PIXELS - 1) * STRIDE - LEFT + (S - 1) * SPREAD;
    static constexpr bool KNOWN =
        KEPT && LAST - FIRST < 12 && (!BACKWARD || PIXELS % STRIDE == 0);
    static constexpr int SIZE = KNOWN ? LAST - FIRST + 1 : 1;

    static __device__ __forceinline__ int start(int q) {
        return FIRST + (BACKWARD ? q / STRIDE : q * STRIDE);
    }
    // Returns the place in the window of the pixel that output pixel q + i reads with tap s.
    static __device__ __forceinline__ constexpr int place(int i, int s) {
        return BACKWARD ? floor_of(i + LEFT - s * SPREAD, STRIDE) - FIRST : i * STRIDE + s * SPREAD;
    }
};

typedef Floats<VECTOR> Vector;

// One dimension: the size of the image that is read, and the filter.
struct Axis {
    int size, taps, stride, before, dilation;
};

// Returns the row or column that output m reads with a tap. Backward, it is the result / stride, or
// there is none if the result is not a multiple of the stride.
template <bool BACKWARD>
__device__ __forceinline__ int moved(const Axis& axis, int m, int tap) {
    return BACKWARD ? m + axis.before - tap * axis.dilation
                    : m * axis.stride - axis.before + tap * axis.dilation;
}

// The channels of a thread in images.
struct Operand {
    const Source& source;
    const value* x;
    Norm<VECTOR> norm;

    __device__ __forceinline__ Operand(const Source& source, int channel)
        : source(source), x(source.x + channel), norm(norm_of<VECTOR>(source, channel)) {}

    // Returns the numbers of a pixel, or zeros if it is not `inside`.
    __device__ __forceinline__ Vector at(long long offset, bool inside) const {
        Vector v = {};
        if (inside) v = load<VECTOR>(x + offset);
        if (source.mean && inside)
#pragma unroll
            for (int k = 0; k < VECTOR; ++k)
                v.at[k] = as_stored(activated(v.at[k], source, norm, k));
        return v;
    }

    // Loads the window of a row that begins at `offset` and has `size` pixels of C channels.
    template <class W>
    __device__ __forceinline__ void load_window(Vector (&line)[W::SIZE], long long offset, int q,
                                                int size, int C) const {
#pragma unroll
        for (int j = 0; j < W::SIZE; ++j) {
            const int v = W::start(q) + j;
            line[j] = at((offset + v) * C, v >= 0 && v < size);
        }
    }
};

// The part of y that thread number `n` of the grid computes.
struct Strip {
    long long image;
    int first, q0, channel;  // the first row, the first column

    __device__ __forceinline__ Strip(long long n, int tall, int C, int P, int Q) {
        const int vectors = C / VECTOR, strips = (Q + PIXELS - 1) / PIXELS;
        const int parts = (P + tall - 1) / tall;
        long long rest = n / vectors;
        channel = (int)(n - rest * vectors) * VECTOR;
        q0 = (int)(rest % strips) * PIXELS, rest /= strips;
        first = (int)(rest % parts) * tall, image = rest / parts;
    }
};

// Computes this thread's part of y, or backward of dx from dy.
template <bool BACKWARD>
__device__ __forceinline__ void convolve(const Source& source, const float* weight,
                                         const float* bias, value* y, int images, int tall,
                                         const int* sizes) {
    typedef Window<BACKWARD> Line;
    DEFINE_SHAPE(shape);
    constexpr int FROM = BACKWARD ? 3 : 0, TO = BACKWARD ? 0 : 3;  // sizes of x and y in `shape`
    const int C = shape[2], P = shape[TO], Q = shape[TO + 1];
    const Strip own((long long)blockIdx.x * THREADS + threadIdx.x, tall, C, P, Q);
    if (own.image >= images) return;
    const Axis down = {shape[FROM], shape[6], shape[8], shape[10], shape[12]};
    const Axis across = {shape[FROM + 1], shape[7], shape[9], shape[11], shape[13]};
    const int q0 = own.q0, channel = own.channel, last = min(own.first + tall, P);
    const Operand x(source, channel);
    const int taps = down.taps * across.taps;
    float kept[UNROLL][VECTOR] = {};
#pragma unroll
    for (int tap = 0; tap < KEPT; ++tap)
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) kept[tap][k] = weight[(channel + k) * taps + tap];
    Vector of_bias = {};
    if (bias) of_bias = of_channels<VECTOR>(bias, channel);
    const long long start = own.image * down.size * across.size;
#pragma unroll 1
    for (int p = own.first; p < last; ++p) {
        float sum[PIXELS][VECTOR] = {};
#pragma unroll UNROLL
        for (int r = 0; r < down.taps; ++r) {
            const int t = moved<BACKWARD>(down, p, r), h = BACKWARD ? t / down.stride : t;
            if (t < 0 || h >= down.size || (BACKWARD && h * down.stride != t)) continue;
            const long long row = start + (long long)h * across.size;
            Vector line[Line::SIZE];
            if (Line::KNOWN) x.load_window<Line>(line, row, q0, across.size, C);
#pragma unroll UNROLL
            for (int s = 0; s < across.taps; ++s) {
                float w[VECTOR];
#pragma unroll
                for (int k = 0; k < VECTOR; ++k) {
                    const int tap = r * across.taps + s;
                    w[k] = KEPT ? kept[KEPT ? tap : 0][k] : weight[(channel + k) * taps + tap];
                }
#pragma unroll
                for (int i = 0; i < PIXELS; ++i) {
                    const int u = moved<BACKWARD>(across, q0 + i, s);
                    // known at compile time if the shape is, and the stride divides PIXELS
                    if (BACKWARD && u % across.stride) continue;
                    const int v = BACKWARD ? u / across.stride : u;
                    const Vector a = Line::KNOWN
                                         ? line[Line::KNOWN ? Line::place(i, s) : 0]
                                         : x.at((row + v) * C, u >= 0 && v < across.size);
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k)
                        sum[i][k] = fmaf(a.at[k], w[k], sum[i][k]);
                }
            }
        }
        value* to = y + ((own.image * P + p) * Q + q0) * C + channel;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            if (q0 + i >= Q) break;
            Vector v;
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) v.at[k] = sum[i][k] + of_bias.at[k];
            store<VECTOR>(to + (long long)i * C, v);
        }
    }
}

}  // namespace

// y (images, P, Q, C) = cross-correlation of x (images, H, W, C) with the weights, plus bias unless
// it is null.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
conv_depthwise(const value* __restrict__ x, const float* __restrict__ mean,
               const float* __restrict__ scale, const float* __restrict__ beta, float low,
               float high, const float* __restrict__ weight, const float* __restrict__ bias,
               value* __restrict__ y, int images, int tall, const int* __restrict__ sizes) {
    convolve<false>({x, mean, scale, beta, low, high}, weight, bias, y, images, tall, sizes);
}

// dx (images, H, W, C) from dy (images, P, Q, C). A pixel of dx has products only with the pixels
// of dy that read it.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
conv_depthwise_dx(const value* __restrict__ dy, const float* __restrict__ weight,
                  const float* __restrict__ bias, value* __restrict__ dx, int images, int tall,
                  const int* __restrict__ sizes) {
    convolve<true>({dy}, weight, bias, dx, images, tall, sizes);
}

// The gradient with respect to the weights, with one leaf for images_per_leaf consecutive images:
// leaves (leaves, C, R, S). dy is zero in unused images.
//
// A block of threads computes the weights of `tile` vectors of channels of a leaf. Thread t has
// vector t % tile, and every THREADS / tile-th strip of PIXELS pixels of dy. The sums of the
// threads are added in order, so a leaf depends only on its images. Grid: x enumerates (leaf, tile
// of channels), with the last index fastest.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
conv_depthwise_dweight(const value* __restrict__ dy, const value* __restrict__ x,
                       const float* __restrict__ mean, const float* __restrict__ scale,
                       const float* __restrict__ beta, float low, float high,
                       float* __restrict__ leaves, int images_per_leaf, int tile,
                       const int* __restrict__ sizes) {
    typedef Window<false> Line;
    DEFINE_SHAPE(shape);
    __shared__ float sums[VECTOR][THREADS];
    const int H = shape[0], W = shape[1], C = shape[2], P = shape[3], Q = shape[4];
    const Axis down = {H, shape[6], shape[8], shape[10], shape[12]};
    const Axis across = {W, shape[7], shape[9], shape[11], shape[13]};
    const int taps = down.taps * across.taps, vectors = C / VECTOR;
    const int tiles = (vectors + tile - 1) / tile, lines = THREADS / tile;
    const long long leaf = blockIdx.x / tiles;
    const int vector = blockIdx.x % tiles * tile + threadIdx.x % tile, line = threadIdx.x / tile;
    const int channel = vector * VECTOR, strips = (Q + PIXELS - 1) / PIXELS;
    const bool works = vector < vectors && line < lines;
    const Source source = {x, mean, scale, beta, low, high};
    const Operand of_x(source, works ? channel : 0);
    dy += works ? channel : 0;

#pragma unroll 1
    for (int from = 0; from < taps; from += UNROLL) {  // once if KEPT
        float sum[UNROLL][VECTOR] = {};
        for (int n = works ? line : images_per_leaf * P * strips; n < images_per_leaf * P * strips;
             n += lines) {
            const int q0 = n % strips * PIXELS, row = n / strips, p = row % P;
            const long long image = leaf * images_per_leaf + row / P;
            Vector g[PIXELS] = {};
#pragma unroll
            for (int i = 0; i < PIXELS; ++i)
                if (q0 + i < Q) g[i] = load<VECTOR>(dy + ((image * P + p) * Q + q0 + i) * C);
            Vector line[Line::SIZE];
#pragma unroll
            for (int j = 0; j < UNROLL; ++j) {
                const int tap = from + j, r = tap / across.taps, s = tap - r * across.taps;
                const int h = moved<false>(down, p, r);
                if (h < 0 || h >= H) continue;
                const long long row = (image * H + h) * W;
                if (Line::KNOWN && s == 0) of_x.load_window<Line>(line, row, q0, W, C);
#pragma unroll
                for (int i = 0; i < PIXELS; ++i) {
                    if (q0 + i >= Q) break;
                    const int v = moved<false>(across, q0 + i, s);
                    const Vector a = Line::KNOWN ? line[Line::KNOWN ? Line::place(i, s) : 0]
                                                 : of_x.at((row + v) * C, v >= 0 && v < W);
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k)
                        sum[j][k] = fmaf(a.at[k], g[i].at[k], sum[j][k]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < UNROLL; ++j) {
            __syncthreads();  // the sums of the previous tap have been read
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) sums[k][threadIdx.x] = sum[j][k];
            __syncthreads();
            if (line >= VECTOR || !works) continue;
            float total = 0.f;  // thread `line` adds up channel `line` of the vector
            for (int other = 0; other < lines; ++other)
                total += sums[line][other * tile + threadIdx.x % tile];
            leaves[(leaf * C + channel + line) * taps + from + j] = total;
        }
    }
}
