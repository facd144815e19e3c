// Resampling of NHWC images: weighted sums of pixels; and copies of channels.
//
// A table (`rows` or `columns`) has the positions at which the taps of each output along an axis
// begin, one more than there are outputs, followed by the taps: the source pixel in the lower and
// the bits of a float, the weight, in the upper half of an integer.

#ifndef RESAMPLE_WIDTH
#define RESAMPLE_WIDTH 1 // channels per thread: 4 if C is a multiple of 4, else 1
#endif

typedef Floats<RESAMPLE_WIDTH> Values; // the channels that a thread reads or writes at once

__device__ __forceinline__ float weight_of(long long tap) {
    return __int_as_float((int)(tap >> 32));
}

// y (images, P, Q, C) are sums over rows and then over columns of x (images, H, W, C), which is
// normalized if mean is not null. A CTA (block of threads) writes one row of y. Grid: images * P.
extern "C" __global__ void __launch_bounds__(256)
resample(const value* __restrict__ x, const float* __restrict__ mean,
         const float* __restrict__ scale, const float* __restrict__ beta, float low, float high,
         value* __restrict__ y, int C, int H, int W, int P, int Q,
         const long long* __restrict__ rows, const long long* __restrict__ columns) {
    const Source source = {x, mean, scale, beta, low, high};
    const int p = blockIdx.x % P;
    const value* image = source.x + (long long)(blockIdx.x / P) * H * W * C;
    const long long* row_taps = rows + P + 1;
    const long long* column_taps = columns + Q + 1;
    const int first_row = (int)rows[p], last_row = (int)rows[p + 1];
    for (int at = threadIdx.x * RESAMPLE_WIDTH; at < Q * C; at += blockDim.x * RESAMPLE_WIDTH) {
        const int channel = at % C;
        const int first = (int)columns[at / C], last = (int)columns[at / C + 1];
        const Norm<RESAMPLE_WIDTH> norm = norm_of<RESAMPLE_WIDTH>(source, channel);
        Values result = {};
        for (int j = first; j < last; ++j) {
            const long long column = column_taps[j];
            const value* pixels = image + (long long)(int)column * C + channel;
            Values sum = {};
            for (int i = first_row; i < last_row; ++i) {
                const long long row = row_taps[i];
                const float weight = weight_of(row);
                const Values pixel = load<RESAMPLE_WIDTH>(pixels + (long long)(int)row * W * C);
                for (int k = 0; k < RESAMPLE_WIDTH; ++k) {
                    const float number = activated(pixel.at[k], source, norm, k);
                    sum.at[k] = i == first_row ? weight * number
                                               : fmaf(weight, number, sum.at[k]);
                }
            }
            const float weight = weight_of(column);
            for (int k = 0; k < RESAMPLE_WIDTH; ++k)
                result.at[k] = j == first ? weight * sum.at[k]
                                          : fmaf(weight, sum.at[k], result.at[k]);
        }
        store<RESAMPLE_WIDTH>(y + (long long)blockIdx.x * Q * C + at, result);
    }
}

// Channel c of y (pixels, outputs) is channel indices[c] of x (pixels, C), or 0 if this index is
// negative.
extern "C" __global__ void __launch_bounds__(256)
take_channels(const value* __restrict__ x, value* __restrict__ y,
              const long long* __restrict__ indices, long long pixels, int C, int outputs) {
    EACH_INDEX(i, pixels * outputs) {
        const long long pixel = i / outputs;
        const long long index = indices[i - pixel * outputs];
        y[i] = index < 0 ? put(0.0f) : x[pixel * C + index];
    }
}
