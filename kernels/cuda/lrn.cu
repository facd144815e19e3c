// Cross-channel (local response) normalization of NHWC images: y = x d^-beta with
// d = k + a (sum of x^2 over a window of channels) and a = alpha / window. See mpidl/ops/lrn.py.
#include "formulas.h"

// Returns d^-beta, and stores d^-beta / d in `ratio`.
__device__ __forceinline__ float power(float d, double beta, float& ratio) {
    if (beta == 0.75) {
        const float root = inverse_fourth_root(d), square = root * root, cube = square * root;
        ratio = cube * (square * square);
        return cube;
    }
    const float result = (float)exp(-beta * log((double)d));
    ratio = result / d;
    return result;
}

// Returns the denominator d of channel c of a pixel whose channels begin at x.
__device__ __forceinline__ float denominator(const value* x, int c, int C, int before, int behind,
                                             float a, float k) {
    const int first = max(0, c - before), stop = min(C, c + behind + 1);
    float sum = 0.f;
    for (int j = first; j < stop; ++j) sum = fmaf(get(x[j]), get(x[j]), sum);
    return fmaf(sum, a, k);
}

// y and x are (rows, C), where a row is a pixel.
extern "C" __global__ void __launch_bounds__(256)
lrn(const value* __restrict__ x, value* __restrict__ y, long long rows, int C, int before,
    int behind, float a, float k, double beta) {
    EACH_INDEX(i, rows * C) {
        const int c = (int)(i % C);
        float ratio;
        const float d = denominator(x + i - c, c, C, before, behind, a, k);
        y[i] = put(get(x[i]) * power(d, beta, ratio));
    }
}

// dx = dy d^-beta - factor x S, where S is the sum of dy x d^(-beta - 1) over the channels whose
// windows contain this channel. A block of threads processes `height` rows, and `width` channels of
// each row (blockIdx.y). The block first computes the products for these channels and their
// neighbours, then the sums.
extern "C" __global__ void __launch_bounds__(256)
lrn_dx(const value* __restrict__ dy, const value* __restrict__ x, value* __restrict__ dx,
       long long rows, int C, int before, int behind, float a, float k, double beta, float factor,
       int height, int width) {
    DYN_SMEM(float, products);  // for each row, starting at channel from - behind
    const int from = blockIdx.y * width, here = min(width, C - from);
    const int all = here + behind + before;
    const long long first = (long long)blockIdx.x * height;
    const int those = (int)min((long long)height, rows - first);
    for (int i = threadIdx.x; i < those * all; i += blockDim.x) {
        const int c = from - behind + i % all;
        float product = 0.f;
        if (c >= 0 && c < C) {
            const long long row = (first + i / all) * C;
            float ratio;
            power(denominator(x + row, c, C, before, behind, a, k), beta, ratio);
            product = get(dy[row + c]) * get(x[row + c]) * ratio;
        }
        products[i] = product;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < those * here; i += blockDim.x) {
        const int c = i % here;
        const float* own = products + i / here * all + c;
        const long long row = (first + i / here) * C, at = row + from + c;
        float sum = 0.f, ratio;
        for (int j = 0; j <= behind + before; ++j) sum += own[j];
        const float scale =
            power(denominator(x + row, from + c, C, before, behind, a, k), beta, ratio);
        dx[at] = put(fmaf(get(x[at]) * -factor, sum, get(dy[at]) * scale));
    }
}
