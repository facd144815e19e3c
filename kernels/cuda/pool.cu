// Max and average pooling of NHWC images.
//
// In forward passes, a CTA (block of threads) writes one row of the output, which is Q * C
// consecutive numbers. A thread processes POOL_WIDTH consecutive channels, so reads and writes
// coalesce. In backward passes, a CTA writes `count` pixels as described in sums.cuh, and can also
// compute a leaf of the sums for the normalization and activation of x.
// Gradients are gathered, not scattered: each pixel of x adds up dy of the windows that contain the
// pixel, in the order of its positions in the windows, row by row. Windows may overlap and extend
// into the padding, but each window contains at least one pixel. Offsets within a row are int.
#include "cuda/sums.cuh"

#ifndef POOL_WIDTH
#define POOL_WIDTH 1 // channels per thread: 4 if C is a multiple of 4, else 1
#define MAX 1        // 1 for max pooling, 0 for average pooling
#endif

typedef Floats<POOL_WIDTH> Values; // the channels that a thread reads or writes at once
struct alignas(POOL_WIDTH) Places {
    unsigned char at[POOL_WIDTH];
};

// A window along one axis. Its positions [first, stop) are not padding. `start` is the pixel at
// position 0, which may be padding.
struct Span {
    int start, first, stop;
};

__device__ __forceinline__ Span span_of(int window, int stride, int before, int size, int pixels) {
    int start = window * stride - before;
    return {start, start < 0 ? -start : 0, pixels - start < size ? pixels - start : size};
}

// Returns the number by which the sum of a window is divided.
__device__ __forceinline__ float divisor(Span rows, Span columns, int size, int count_padding) {
    if (count_padding) return (float)size;
    return (float)((rows.stop - rows.first) * (columns.stop - columns.first));
}

// The windows that contain a pixel, along one axis. The pixel is at position `place` of window
// number `window`, and at position place + stride of the previous window. The position increases by
// the stride with each earlier window, as long as such positions and windows exist.
struct Containing {
    int place, window;
};

__device__ __forceinline__ Containing containing(int pixel, int stride, int before, int windows) {
    int window = (pixel + before) / stride, place = (pixel + before) % stride;
    if (window >= windows) {
        place += (window - (windows - 1)) * stride;
        window = windows - 1;
    }
    return {place, window};
}

// If MAX, y is the largest pixel of each window, or NaN if a pixel is NaN, and argmax is the position
// of the first such pixel in the window, counted row by row. Otherwise y is the mean of the window,
// which counts padding as zeros if `count_padding`, and argmax is null. x is (images, H, W, C), and
// normalized if mean is not null; y and argmax are (images, P, Q, C). Grid: images * P.
extern "C" __global__ void __launch_bounds__(256, 4)
pool2d(const value* __restrict__ x, const float* __restrict__ mean,
       const float* __restrict__ scale, const float* __restrict__ beta, float low, float high,
       value* __restrict__ y, unsigned char* __restrict__ argmax, int C, int H, int W, int P, int Q,
       int R, int S, int stride_h, int stride_w, int top, int left, int count_padding) {
    const Source source = {x, mean, scale, beta, low, high};
    const Span rows = span_of(blockIdx.x % P, stride_h, top, R, H);
    const value* image = source.x + (long long)(blockIdx.x / P) * H * W * C;
    const long long row = (long long)blockIdx.x * Q * C;
    for (int at = threadIdx.x * POOL_WIDTH; at < Q * C; at += blockDim.x * POOL_WIDTH) {
        Span columns = span_of(at / C, stride_w, left, S, W);
        const Norm<POOL_WIDTH> norm = norm_of<POOL_WIDTH>(source, at % C);
        Values result = {};
        int place[POOL_WIDTH];
        for (int v = 0; MAX && v < POOL_WIDTH; v++) {
            result.at[v] = -__int_as_float(0x7f800000); // -infinity
            place[v] = rows.first * S + columns.first;
        }
        for (int i = rows.first; i < rows.stop; i++) {
            const value* line = image + (long long)(rows.start + i) * W * C + at % C;
            Values of_row = {}; // one sum over a large window would lose accuracy
#pragma unroll 2 // 4, the default, needs so many registers that some GPUs spill
            for (int j = columns.first; j < columns.stop; j++) {
                Values pixel = load<POOL_WIDTH>(line + (columns.start + j) * C);
                for (int v = 0; v < POOL_WIDTH; v++) {
                    const float number = activated(pixel.at[v], source, norm, v);
                    if (!MAX)
                        of_row.at[v] += number;
                    else if (number > result.at[v] || number != number)
                        result.at[v] = number, place[v] = i * S + j;
                }
            }
            for (int v = 0; !MAX && v < POOL_WIDTH; v++) result.at[v] += of_row.at[v];
        }
        const float count = divisor(rows, columns, R * S, count_padding);
        for (int v = 0; !MAX && v < POOL_WIDTH; v++) result.at[v] /= count;
        store<POOL_WIDTH>(y + row + at, result);
        Places places = {};
        for (int v = 0; MAX && v < POOL_WIDTH; v++) places.at[v] = (unsigned char)place[v];
        if (MAX) *reinterpret_cast<Places*>(argmax + row + at) = places;
    }
}

// Returns dx of a pixel. If MAX, it adds up dy of the windows in which the pixel is the largest.
// Otherwise it adds up the pixel's part of dy of all windows that contain it.
__device__ __forceinline__ Values gather(const value* dy, const unsigned char* argmax, int pixel,
                                         int channel, int C, int H, int W, int P, int Q, int R,
                                         int S, int stride_h, int stride_w, int top, int left,
                                         int count_padding) {
    const int row = pixel / W;
    const long long image = (long long)(row / H) * P * Q * C;
    const Containing rows = containing(row % H, stride_h, top, P);
    const Containing columns = containing(pixel % W, stride_w, left, Q);
    Values sum = {};
    for (int i = rows.place, p = rows.window; i < R && p >= 0; i += stride_h, p--) {
        const long long line = image + (long long)p * Q * C + channel;
#pragma unroll 2
        for (int j = columns.place, q = columns.window; j < S && q >= 0; j += stride_w, q--) {
            Values part = load<POOL_WIDTH>(dy + line + q * C);
            Places place;
            if (MAX) place = *reinterpret_cast<const Places*>(argmax + line + q * C);
            const float count = divisor(span_of(p, stride_h, top, R, H),
                                        span_of(q, stride_w, left, S, W), R * S, count_padding);
            for (int v = 0; v < POOL_WIDTH; v++)
                if (!MAX)
                    sum.at[v] += part.at[v] / count;
                else if (place.at[v] == i * S + j)
                    sum.at[v] += part.at[v];
        }
    }
    return sum;
}

// Computes dx of `count` pixels, of all `pixels`, and if `leaves` (leaves, 2C) is not null, their leaf
// of the sums of batchnorm_sums, with the same bytes. dy and argmax are (images, P, Q, C), x and dx
// (images, H, W, C). Grid: pixels / count, rounded up; tiles.
extern "C" __global__ void __launch_bounds__(256, 3)
pool2d_dx(const value* __restrict__ dy, const unsigned char* __restrict__ argmax,
          const value* __restrict__ x, const float* __restrict__ mean,
          const float* __restrict__ scale, const float* __restrict__ beta, float low, float high,
          value* __restrict__ dx, double* __restrict__ leaves, int count, int pixels, int tile,
          int C, int H, int W, int P, int Q, int R, int S, int stride_h, int stride_w, int top,
          int left, int count_padding) {
    const Source source = {x, mean, scale, beta, low, high};
    const Place spot = place<POOL_WIDTH>(C, tile);
    float sum[2 * POOL_WIDTH] = {};
    if (spot.inside) {
        const Norm<POOL_WIDTH> norm = norm_of<POOL_WIDTH>(source, spot.channel);
        const int first = blockIdx.x * count, here = min(count, pixels - first);
        for (int row = spot.row; row < here; row += FEW * spot.rows) {
            Products<POOL_WIDTH> few = {};
#pragma unroll 1 // so that more threads fit on a multiprocessor
            for (int i = 0; i < FEW && row + i * spot.rows < here; ++i) {
                const int pixel = first + row + i * spot.rows;
                const long long at = (long long)pixel * C + spot.channel;
                Values x = {};
                if (leaves) x = load<POOL_WIDTH>(source.x + at);
                Values g = gather(dy, argmax, pixel, spot.channel, C, H, W, P, Q, R, S,
                                       stride_h, stride_w, top, left, count_padding);
                store<POOL_WIDTH>(dx + at, g);
                for (int k = 0; k < POOL_WIDTH; ++k) g.at[k] = as_stored(g.at[k]);
                few.add(g, x, source, norm);
            }
            few.move_to(sum);
        }
    }
    if (leaves) write_products<POOL_WIDTH>(leaves, sum, spot, C, tile);
}
