// Batch normalization and ReLU. A value is a matrix (images x pixels, C) in C order.
//
// With the second number of __launch_bounds__, no GPU spills registers to have more threads.
#include "cuda/sums.cuh"

// Computes leaf (partial sum) blockIdx.x: the sum of n rows, rounded to float32.
template <int VEC>
__device__ __forceinline__ void leaf_sums(const value* x, float* leaves, int n, int channels,
                                          int tile) {
  const Place p = place<VEC>(channels, tile);
  float sum[VEC] = {};
  if (p.inside) {
    x += (long long)blockIdx.x * n * channels + p.channel;
    for (int row = p.row; row < n; row += TOGETHER * p.rows) {
      Floats<VEC> v[TOGETHER] = {};
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i)
        if (row + i * p.rows < n) v[i] = load<VEC>(x + (long long)(row + i * p.rows) * channels);
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        float some = v[0].at[k];
#pragma unroll
        for (int i = 1; i < TOGETHER; ++i) some += v[i].at[k];
        sum[k] += some;
      }
    }
  }
  double total[VEC];
#pragma unroll
  for (int k = 0; k < VEC; ++k) total[k] = sum[k];
  add_rows(total, p, tile);
  if (p.inside && p.row == 0)
    for (int k = 0; k < VEC; ++k)
      leaves[(long long)blockIdx.x * channels + p.channel + k] = (float)total[k];
}

// leaves (leaves, C): each leaf is the sum of x over `images` images of `pixels` rows.
extern "C" __global__ void __launch_bounds__(256)
channel_sums(const value* __restrict__ x, float* __restrict__ leaves, int images, int pixels,
             int channels, int tile) {
  BY_WIDTH(leaf_sums, x, leaves, images * pixels, channels, tile);
}

// leaves (leaves, 1 + 2C): each leaf is (count, mean, M2) over the valid images of `images`.
extern "C" __global__ void __launch_bounds__(256, 3)
moments(const value* __restrict__ x, const int* __restrict__ valid, double* __restrict__ leaves,
        int images, int pixels, int channels, int tile) {
  const long long before = (long long)blockIdx.x * images;
  const int here = (int)min((long long)images, max(0ll, valid[0] - before));
  BY_WIDTH(leaf_moments, x, leaves, here * pixels, images * pixels, channels, tile);
}

// Computes leaf blockIdx.x: [sum of dz, sum of dz * (x - mean)] over n rows. If scale is null, dz
// is dy. Otherwise dz is dy if the activation is within its limits, else 0.
template <int VEC>
__device__ __forceinline__ void leaf_products(const value* dy, Source source, double* leaves, int n,
                                              int channels, int tile) {
  const Place p = place<VEC>(channels, tile);
  float sum[2 * VEC] = {};
  if (p.inside) {
    const Norm<VEC> norm = norm_of<VEC>(source, p.channel);
    const long long at = (long long)blockIdx.x * n * channels + p.channel;
    const value* x = source.x + at;
    dy += at;
    for (int row = p.row; row < n; row += FEW * p.rows) {
      Floats<VEC> g[FEW] = {}, v[FEW] = {};
#pragma unroll
      for (int i = 0; i < FEW; ++i)
        if (row + i * p.rows < n) {
          const long long from = (long long)(row + i * p.rows) * channels;
          g[i] = load<VEC>(dy + from);
          v[i] = load<VEC>(x + from);
        }
      Products<VEC> few = {};
#pragma unroll
      for (int i = 0; i < FEW; ++i) few.add(g[i], v[i], source, norm);
      few.move_to(sum);
    }
  }
  write_products<VEC>(leaves, sum, p, channels, tile);
}

// leaves (leaves, 2C): sums over `images` images each; see leaf_products. scale and beta may be
// null.
extern "C" __global__ void __launch_bounds__(256, 3)
batchnorm_sums(const value* __restrict__ dy, const value* __restrict__ x,
               const float* __restrict__ mean, const float* __restrict__ scale,
               const float* __restrict__ beta, float low, float high, double* __restrict__ leaves,
               int images, int pixels, int channels, int tile) {
  const Source source = {x, mean, scale, beta, low, high};
  BY_WIDTH(leaf_products, dy, source, leaves, images * pixels, channels, tile);
}

template <int VEC>
__device__ __forceinline__ void normalize_back(const value* dy, Source source, const float* a,
                                               const float* b, const float* c, value* dx,
                                               long long used, long long n, int channels,
                                               int tile) {
  const Place p = place<VEC>(channels, tile);
  if (!p.inside) return;
  const Floats<VEC> fa = of_channels<VEC>(a, p.channel), fb = of_channels<VEC>(b, p.channel),
                    fc = of_channels<VEC>(c, p.channel);
  const Norm<VEC> norm = norm_of<VEC>(source, p.channel);
  const value* x = source.x + p.channel;
  dy += p.channel, dx += p.channel;
  const long long step = (long long)gridDim.x * p.rows;
  for (long long row = (long long)blockIdx.x * p.rows + p.row; row < n; row += 4 * step) {
    Floats<VEC> g[4], v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (row + i * step < used) {
        g[i] = load<VEC>(dy + (row + i * step) * channels);
        v[i] = load<VEC>(x + (row + i * step) * channels);
      }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i * step >= n) continue;
      Floats<VEC> out = {};
      if (row + i * step < used) {
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
          const float dz = gated(g[i].at[k], v[i].at[k], source, norm, k);
          out.at[k] = gradient(dz, v[i].at[k], norm.mean.at[k], fa.at[k], fb.at[k], fc.at[k]);
        }
      }
      store<VEC>(dx + (row + i * step) * channels, out);
    }
  }
}

// dx = a * dz + b * (x - mean) + c for n rows, with dz as in leaf_products. dx is 0 for unused
// images (from image *valid on). dx may be dy.
extern "C" __global__ void __launch_bounds__(256, 2)
batchnorm_dx(const value* dy, const value* __restrict__ x, const float* __restrict__ mean,
             const float* __restrict__ scale, const float* __restrict__ beta, float low, float high,
             const float* __restrict__ a, const float* __restrict__ b, const float* __restrict__ c,
             const int* __restrict__ valid, value* dx, int pixels, long long n, int channels,
             int tile) {
  const long long used = min(n, (long long)valid[0] * pixels);
  const Source source = {x, mean, scale, beta, low, high};
  BY_WIDTH(normalize_back, dy, source, a, b, c, dx, used, n, channels, tile);
}

template <int VEC>
__device__ __forceinline__ void add_rows_of(Source a, Source b, value* y, unsigned char* positive,
                                            int relu, long long n, int channels, int tile) {
  const Place p = place<VEC>(channels, tile);
  if (!p.inside) return;
  const Norm<VEC> of_a = norm_of<VEC>(a, p.channel), of_b = norm_of<VEC>(b, p.channel);
  const long long step = (long long)gridDim.x * p.rows;
  for (long long row = (long long)blockIdx.x * p.rows + p.row; row < n; row += 4 * step) {
    Floats<VEC> v[4], w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (row + i * step < n) {
        const long long at = (row + i * step) * channels + p.channel;
        v[i] = load<VEC>(a.x + at);
        if (b.x) w[i] = load<VEC>(b.x + at);
      }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i * step >= n) continue;
      const long long at = (row + i * step) * channels + p.channel;
      int bits = 0;
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        float sum = activated(v[i].at[k], a, of_a, k);
        if (b.x) sum += activated(w[i].at[k], b, of_b, k);
        v[i].at[k] = relu && sum <= 0 ? 0 : sum;  // NaN stays NaN
        bits |= (as_stored(v[i].at[k]) > 0) << k;
      }
      store<VEC>(y + at, v[i]);
      if (positive) positive[at / 4] = (unsigned char)bits;
    }
  }
}

// y = a + b for n rows, or a if b is null, or the ReLU of this if `relu`. Each operand is normalized
// if its mean is not null. `positive` (a byte for each four channels of a pixel, or null) gets a bit
// for each element: whether ReLU keeps it. The gradient reads these bits instead of y.
extern "C" __global__ void __launch_bounds__(256, 2)
add_operands(const value* __restrict__ a, const float* __restrict__ a_mean,
           const float* __restrict__ a_scale, const float* __restrict__ a_beta, float a_low,
           float a_high, const value* __restrict__ b, const float* __restrict__ b_mean,
           const float* __restrict__ b_scale, const float* __restrict__ b_beta, float b_low,
           float b_high, value* __restrict__ y, unsigned char* __restrict__ positive, int relu,
           long long n, int channels, int tile) {
  const Source of_a = {a, a_mean, a_scale, a_beta, a_low, a_high};
  const Source of_b = {b, b_mean, b_scale, b_beta, b_low, b_high};
  BY_WIDTH(add_rows_of, of_a, of_b, y, positive, relu, n, channels, tile);
}

// The gradient of the sum, dz, for the n rows of leaf blockIdx.x, and this leaf of the sums of dz
// and of dz * (x - mean) for the normalization of each operand, unless its leaves are null. dz is
// dy + more_dy (which may be null) where y > 0 or, if y is null, where the bit of `positive` is 1.
// The sums have the bytes of `batchnorm_sums`.
template <int VEC>
__device__ __forceinline__ void add_relu_back(const value* dy, const value* more_dy, const value* y,
                                              const unsigned char* positive, value* dz, Source a,
                                              double* a_leaves, Source b, double* b_leaves, int n,
                                              int channels, int tile) {
  const Place p = place<VEC>(channels, tile);
  float sum[3 * VEC] = {};  // of dz, of dz * (a - mean of a), of dz * (b - mean of b)
  if (p.inside) {
    const Norm<VEC> of_a = norm_of<VEC>(a, p.channel), of_b = norm_of<VEC>(b, p.channel);
    const long long first = (long long)blockIdx.x * n * channels + p.channel;
    for (int row = p.row; row < n; row += FEW * p.rows) {
      Floats<VEC> g[FEW] = {}, v[FEW] = {}, w[FEW] = {};
#pragma unroll
      for (int i = 0; i < FEW; ++i) {
        if (row + i * p.rows >= n) continue;
        const long long at = first + (long long)(row + i * p.rows) * channels;
        Floats<VEC> more = {}, of_y = {};
        g[i] = load<VEC>(dy + at);
        if (more_dy) more = load<VEC>(more_dy + at);
        if (y) of_y = load<VEC>(y + at);
        if (a.x) v[i] = load<VEC>(a.x + at);
        if (b.x) w[i] = load<VEC>(b.x + at);
        const int bits = y ? 0 : positive[at / 4];
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
          const float both = more_dy ? g[i].at[k] + more.at[k] : g[i].at[k];
          g[i].at[k] = (y ? of_y.at[k] > 0 : bits >> k & 1) ? as_stored(both) : 0.f;
        }
        store<VEC>(dz + at, g[i]);
      }
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        float some = 0, with_a = 0, with_b = 0;
#pragma unroll
        for (int i = 0; i < FEW; ++i) {
          some += g[i].at[k];
          with_a = fmaf(g[i].at[k], v[i].at[k] - of_a.mean.at[k], with_a);
          with_b = fmaf(g[i].at[k], w[i].at[k] - of_b.mean.at[k], with_b);
        }
        sum[k] += some, sum[VEC + k] += with_a, sum[2 * VEC + k] += with_b;
      }
    }
  }
  if (!a_leaves && !b_leaves) return;
  double total[3 * VEC];
#pragma unroll
  for (int k = 0; k < 3 * VEC; ++k) total[k] = sum[k];
  add_rows(total, p, tile);
  if (!p.inside || p.row != 0) return;
  if (a_leaves) write_leaf<VEC>(a_leaves, total, total + VEC, p.channel, channels);
  if (b_leaves) write_leaf<VEC>(b_leaves, total, total + 2 * VEC, p.channel, channels);
}

extern "C" __global__ void __launch_bounds__(256, 2)
add_relu_dx(const value* __restrict__ dy, const value* __restrict__ more_dy,
            const value* __restrict__ y, const unsigned char* __restrict__ positive,
            value* __restrict__ dz, const value* __restrict__ a, const float* __restrict__ a_mean,
            double* __restrict__ a_leaves, const value* __restrict__ b,
            const float* __restrict__ b_mean, double* __restrict__ b_leaves, int images, int pixels,
            int channels, int tile) {
  const Source of_a = {a, a_mean}, of_b = {b, b_mean};
  BY_WIDTH(add_relu_back, dy, more_dy, y, positive, dz, of_a, a_leaves, of_b, b_leaves,
           images * pixels, channels, tile);
}

// new = old + decay * (value - old). Row blockIdx.y of `table` has the addresses of old (float32),
// value (float64) and new (float32), their length, and the bits of decay.
extern "C" __global__ void __launch_bounds__(128)
running(const long long* __restrict__ table) {
  const long long* row = table + 5 * blockIdx.y;
  const float* olds = reinterpret_cast<const float*>(row[0]);
  const double* values = reinterpret_cast<const double*>(row[1]);
  float* news = reinterpret_cast<float*>(row[2]);
  const double decay = __longlong_as_double(row[4]);
  EACH_INDEX(i, row[3]) {
    const double old = olds[i];
    news[i] = (float)(old + decay * (values[i] - old));
  }
}

extern "C" __global__ void __launch_bounds__(128)
predict_scale(const float* __restrict__ gamma, const float* __restrict__ variance, double epsilon,
              float* __restrict__ scale, int channels) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < channels) scale[c] = (float)(gamma[c] / sqrt(variance[c] + epsilon));
}
