// Products of two values with broadcasting, and a learnable factor for each channel. WIDTH is the
// number of neighbours in memory that a thread computes at once, 4 or 1.
#include "cuda/sums.cuh"

// Loads WIDTH neighbours, or one number WIDTH times if the operand lacks their axis.
__device__ __forceinline__ Floats<WIDTH> operand(const value* x, int step) {
    if (step) return load<WIDTH>(x);
    Floats<WIDTH> v;
    const float number = get(*x);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) v.at[k] = number;
    return v;
}

// Returns the distance of an element of an image with the given steps along the axes.
__device__ __forceinline__ long long distance(int i, int j, int k, int s0, int s1, int s2) {
    return (long long)i * s0 + (long long)j * s1 + (long long)k * s2;
}

// y (images, n0, n1, n2) = a * b. a and b have the given steps along the axes, which are 0 along
// axes that they lack.
extern "C" __global__ void __launch_bounds__(256)
multiply(const value* __restrict__ a, const value* __restrict__ b, value* __restrict__ y,
         int images, int n0, int n1, int n2, int a0, int a1, int a2, int b0, int b1, int b2) {
    const long long of_a = (long long)(a0 ? n0 : 1) * (a1 ? n1 : 1) * (a2 ? n2 : 1);
    const long long of_b = (long long)(b0 ? n0 : 1) * (b1 ? n1 : 1) * (b2 ? n2 : 1);
    const int across = n2 / WIDTH;
    EACH_INDEX(t, (long long)images * n0 * n1 * across) {
        const long long row = t / across, image = row / ((long long)n0 * n1);
        const int k = (int)(t - row * across) * WIDTH, j = (int)(row % n1);
        const int i = (int)(row / n1 % n0);
        Floats<WIDTH> v = operand(a + image * of_a + distance(i, j, k, a0, a1, a2), a2);
        const Floats<WIDTH> w = operand(b + image * of_b + distance(i, j, k, b0, b1, b2), b2);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) v.at[e] *= w.at[e];
        store<WIDTH>(y + t * WIDTH, v);
    }
}

// dx = the products of dy (images, n0, n1, n2) and x, summed over the axes along which the step of
// dx is 0. A block of threads computes up to `tile` neighbours of an image. Thread t adds the terms
// t / tile, t / tile + rows, and so on, and the sums of the threads are added in order.
extern "C" __global__ void __launch_bounds__(256)
multiply_dx(const value* __restrict__ dy, const value* __restrict__ x, value* __restrict__ dx,
            int tile, int n0, int n1, int n2, int x0, int x1, int x2, int d0, int d1, int d2) {
    const int kept0 = d0 ? n0 : 1, kept1 = d1 ? n1 : 1, kept2 = d2 ? n2 : 1;
    const long long of_x = (long long)(x0 ? n0 : 1) * (x1 ? n1 : 1) * (x2 ? n2 : 1);
    const int tiles = (kept2 + tile - 1) / tile;
    long long block = blockIdx.x;
    const int k = (int)(block % tiles) * tile + threadIdx.x % tile;
    block /= tiles;
    const int j = (int)(block % kept1);
    block /= kept1;
    const int i = (int)(block % kept0);
    const long long image = block / kept0;
    Place p;
    p.channel = k, p.row = threadIdx.x / tile, p.rows = THREADS / tile;
    p.inside = p.row < p.rows && k < kept2;
    double total[1] = {};
    if (p.inside) {
        const int many1 = n1 / kept1, many2 = n2 / kept2;
        const long long terms = (long long)(n0 / kept0) * many1 * many2;
        const value* g = dy + ((image * n0 + i) * n1 + j) * n2 + k;
        const value* v = x + image * of_x + distance(i, j, k, x0, x1, x2);
        for (long long first = p.row; first < terms; first += TOGETHER * p.rows) {
            float some = 0.f;
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const long long term = first + (long long)n * p.rows;
                if (term >= terms) break;
                const long long row = term / many2;
                const int c = (int)(term - row * many2), b = (int)(row % many1);
                const int a = (int)(row / many1);
                some = fmaf(get(g[distance(a, b, c, n1 * n2, n2, 1)]),
                            get(v[distance(a, b, c, x0, x1, x2)]), some);
            }
            total[0] += some;
        }
    }
    add_rows(total, p, tile);
    if (p.inside && p.row == 0) {
        dx += image * kept0 * kept1 * kept2 + distance(i, j, k, d0, d1, 1);
        *dx = put((float)total[0]);
    }
}

// y = x * the factor of the channel. Channels are neighbours in memory. n counts runs of WIDTH.
extern "C" __global__ void __launch_bounds__(256)
scale_channels(const value* __restrict__ x, const float* __restrict__ factor,
               value* __restrict__ y, long long n, int channels) {
    EACH_INDEX(i, n) {
        Floats<WIDTH> v = load<WIDTH>(x + i * WIDTH);
        const Floats<WIDTH> f = of_channels<WIDTH>(factor, (int)(i * WIDTH % channels));
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) v.at[k] *= f.at[k];
        store<WIDTH>(y + i * WIDTH, v);
    }
}

// leaves (leaves, C): each leaf is the sum of dy * x over `images` images of `pixels` rows.
extern "C" __global__ void __launch_bounds__(256)
scale_dfactor(const value* __restrict__ dy, const value* __restrict__ x,
              float* __restrict__ leaves, int images, int pixels, int channels, int tile) {
    const Place p = place<WIDTH>(channels, tile);
    const int n = images * pixels;
    float sum[WIDTH] = {};
    if (p.inside) {
        const long long at = (long long)blockIdx.x * n * channels + p.channel;
        for (int row = p.row; row < n; row += FEW * p.rows) {
            Floats<WIDTH> g[FEW] = {}, v[FEW] = {};
#pragma unroll
            for (int i = 0; i < FEW; ++i) {
                const long long from = at + (long long)(row + i * p.rows) * channels;
                if (row + i * p.rows >= n) break;
                g[i] = load<WIDTH>(dy + from), v[i] = load<WIDTH>(x + from);
            }
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                float some = 0.f;
#pragma unroll
                for (int i = 0; i < FEW; ++i) some = fmaf(g[i].at[k], v[i].at[k], some);
                sum[k] += some;
            }
        }
    }
    double total[WIDTH];
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) total[k] = sum[k];
    add_rows(total, p, tile);
    if (p.inside && p.row == 0)
        for (int k = 0; k < WIDTH; ++k)
            leaves[(long long)blockIdx.x * channels + p.channel + k] = (float)total[k];
}
