// Batch normalization and ReLU. A value is a matrix (images x pixels, C) in C order.
//
// A block processes the channels of one tile (blockIdx.y) for a range of rows. Thread t has VEC
// channels, starting at VEC * (t % tile), and rows t / tile, t / tile + rows, and so on. So a
// thread's channels are constant, and neighbouring threads read neighbouring memory. VEC is 4 if C
// is a multiple of 4, else 1.

constexpr int THREADS = 256;
// The number of rows that are loaded and summed at once, for parallel loads and short sums.
constexpr int TOGETHER = 8;

struct Place {
  int channel, row, rows;  // first channel; first row; rows that a block processes at once
  bool inside;
};

template <int VEC> __device__ __forceinline__ Place place(int channels, int tile) {
  Place p;
  p.channel = VEC * (blockIdx.y * tile + threadIdx.x % tile);
  p.row = threadIdx.x / tile;
  p.rows = THREADS / tile;
  p.inside = p.row < p.rows && p.channel < channels;
  return p;
}

// Calls a template with 4 channels per thread if C is a multiple of 4, else with 1.
#define BY_WIDTH(function, ...)                                                                    \
  do {                                                                                             \
    if (channels % 4 == 0)                                                                         \
      function<4>(__VA_ARGS__);                                                                    \
    else                                                                                           \
      function<1>(__VA_ARGS__);                                                                    \
  } while (0)

__device__ __forceinline__ float rectified(float x) { return x <= 0 ? 0 : x; }  // NaN stays NaN
__device__ __forceinline__ float gated(float dy, float y) { return y > 0 ? dy : 0; }

// Adds up v over the rows of each column, in an order that depends only on `tile`. Row 0 gets the
// sum.
template <int N> __device__ __forceinline__ void add_rows(double (&v)[N], Place p, int tile) {
  __shared__ double shared[N][THREADS];
  for (int live = p.rows; live > 1;) {  // each element of `shared` is written once
    const int half = (live + 1) / 2;
    if (p.row >= half && p.row < live)
#pragma unroll
      for (int k = 0; k < N; ++k) shared[k][threadIdx.x] = v[k];
    __syncthreads();
    if (p.row + half < live)
#pragma unroll
      for (int k = 0; k < N; ++k) v[k] += shared[k][threadIdx.x + half * tile];
    live = half;
  }
}

// Computes leaf (partial sum) blockIdx.x: the sum of n rows, rounded to float32.
template <int VEC>
__device__ __forceinline__ void leaf_sums(const float* x, float* leaves, int n, int channels,
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
channel_sums(const float* __restrict__ x, float* __restrict__ leaves, int images, int pixels,
             int channels, int tile) {
  BY_WIDTH(leaf_sums, x, leaves, images * pixels, channels, tile);
}

// Computes leaf blockIdx.x: (count, mean, M2) of the first n of `all` rows, in one pass. M2 is the
// sum of squared deviations from the mean.
//
// The first row of the leaf is subtracted from all rows, so that a mean far from 0 costs no
// precision. For a few rows at a time, the kernel computes first the mean and then M2. Chan's
// formula merges the results. The subtracted row belongs to the leaf, so cancellation in the final
// sums in double precision loses at most a factor of n.
template <int VEC>
__device__ __forceinline__ void leaf_moments(const float* x, double* leaves, int n, int all,
                                             int channels, int tile) {
  const Place p = place<VEC>(channels, tile);
  float origin[VEC] = {}, mean[VEC] = {}, m2[VEC] = {}, count = 0;
  if (p.inside && n > 0) {
    x += (long long)blockIdx.x * all * channels + p.channel;
    const Floats<VEC> first = load<VEC>(x);
#pragma unroll
    for (int k = 0; k < VEC; ++k) origin[k] = first.at[k];
    for (int row = p.row; row < n; row += TOGETHER * p.rows) {
      const int some = min(TOGETHER, (n - row + p.rows - 1) / p.rows);
      const float one = 1.0f / some, fraction = some / (count + some), weight = count * fraction;
      Floats<VEC> v[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i)
        v[i] = i < some ? load<VEC>(x + (long long)(row + i * p.rows) * channels) : first;
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        float sum = 0, square = 0;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) sum += v[i].at[k] - origin[k];
        const float about = sum * one;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
          const float d = v[i].at[k] - origin[k] - about;
          square = i < some ? fmaf(d, d, square) : square;
        }
        const float delta = about - mean[k];
        mean[k] = fmaf(delta, fraction, mean[k]);
        m2[k] += fmaf(delta * delta, weight, square);
      }
      count += some;
    }
  }
  double total[2 * VEC];
#pragma unroll
  for (int k = 0; k < VEC; ++k) {
    total[k] = (double)count * mean[k];
    total[VEC + k] = m2[k] + total[k] * mean[k];
  }
  add_rows(total, p, tile);
  if (!p.inside || p.row != 0) return;
  leaves += blockIdx.x * (1 + 2 * (long long)channels);
  if (p.channel == 0) leaves[0] = n;
  for (int k = 0; k < VEC; ++k) {
    const double shift = n > 0 ? total[k] / n : 0;
    leaves[1 + p.channel + k] = origin[k] + shift;
    leaves[1 + channels + p.channel + k] = fmax(total[VEC + k] - total[k] * shift, 0.0);
  }
}

// leaves (leaves, 1 + 2C): each leaf is (count, mean, M2) over the valid images of `images`.
extern "C" __global__ void __launch_bounds__(256)
moments(const float* __restrict__ x, const int* __restrict__ valid, double* __restrict__ leaves,
        int images, int pixels, int channels, int tile) {
  const long long before = (long long)blockIdx.x * images;
  const int here = (int)min((long long)images, max(0ll, valid[0] - before));
  BY_WIDTH(leaf_moments, x, leaves, here * pixels, images * pixels, channels, tile);
}

// Computes leaf blockIdx.x: [sum of dz, sum of dz * (x - mean)] over n rows. If scale is null, dz
// is dy. Otherwise dz is dy if the activation is > 0, else 0.
template <int VEC>
__device__ __forceinline__ void leaf_products(const float* dy, const float* x, const float* mean,
                                              const float* scale, const float* beta,
                                              double* leaves, int n, int channels, int tile) {
  const Place p = place<VEC>(channels, tile);
  float sum[2 * VEC] = {};
  if (p.inside) {
    const Floats<VEC> m = each<VEC>(mean, p.channel);
    Floats<VEC> s = {}, t = {};
    if (scale) s = each<VEC>(scale, p.channel), t = each<VEC>(beta, p.channel);
    const long long at = (long long)blockIdx.x * n * channels + p.channel;
    dy += at, x += at;
    constexpr int FEW = TOGETHER / 2;  // half as many rows, because rows of two arrays are loaded
    for (int row = p.row; row < n; row += FEW * p.rows) {
      Floats<VEC> g[FEW] = {}, v[FEW] = {};
#pragma unroll
      for (int i = 0; i < FEW; ++i)
        if (row + i * p.rows < n) {
          const long long from = (long long)(row + i * p.rows) * channels;
          g[i] = load<VEC>(dy + from);
          v[i] = load<VEC>(x + from);
        }
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        float some = 0, product = 0;
#pragma unroll
        for (int i = 0; i < FEW; ++i) {
          const float y = normalized(v[i].at[k], m.at[k], s.at[k], t.at[k]);
          const float dz = scale ? gated(g[i].at[k], y) : g[i].at[k];
          some += dz;
          product = fmaf(dz, v[i].at[k] - m.at[k], product);
        }
        sum[k] += some;
        sum[VEC + k] += product;
      }
    }
  }
  double total[2 * VEC];
#pragma unroll
  for (int k = 0; k < 2 * VEC; ++k) total[k] = sum[k];
  add_rows(total, p, tile);
  if (!p.inside || p.row != 0) return;
  leaves += blockIdx.x * 2 * (long long)channels;
  for (int k = 0; k < VEC; ++k) {
    leaves[p.channel + k] = total[k];
    leaves[channels + p.channel + k] = total[VEC + k];
  }
}

// leaves (leaves, 2C): sums over `images` images each; see leaf_products. scale and beta may be
// null.
extern "C" __global__ void __launch_bounds__(256)
batchnorm_sums(const float* __restrict__ dy, const float* __restrict__ x,
               const float* __restrict__ mean, const float* __restrict__ scale,
               const float* __restrict__ beta, double* __restrict__ leaves, int images, int pixels,
               int channels, int tile) {
  BY_WIDTH(leaf_products, dy, x, mean, scale, beta, leaves, images * pixels, channels, tile);
}

template <int VEC>
__device__ __forceinline__ void normalize(const float* x, const float* mean, const float* scale,
                                          const float* beta, float* y, int relu, long long n,
                                          int channels, int tile) {
  const Place p = place<VEC>(channels, tile);
  if (!p.inside) return;
  const Floats<VEC> m = each<VEC>(mean, p.channel), s = each<VEC>(scale, p.channel),
                    t = each<VEC>(beta, p.channel);
  x += p.channel, y += p.channel;
  const long long step = (long long)gridDim.x * p.rows;
  for (long long row = (long long)blockIdx.x * p.rows + p.row; row < n; row += 4 * step) {
    Floats<VEC> v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (row + i * step < n) v[i] = load<VEC>(x + (row + i * step) * channels);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (row + i * step < n) {
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
          const float z = normalized(v[i].at[k], m.at[k], s.at[k], t.at[k]);
          v[i].at[k] = relu ? rectified(z) : z;
        }
        store<VEC>(y + (row + i * step) * channels, v[i]);
      }
  }
}

// y = (x - mean) * scale + beta for n rows, or its ReLU if `relu`.
extern "C" __global__ void __launch_bounds__(256)
batchnorm(const float* __restrict__ x, const float* __restrict__ mean,
          const float* __restrict__ scale, const float* __restrict__ beta, float* __restrict__ y,
          int relu, long long n, int channels, int tile) {
  BY_WIDTH(normalize, x, mean, scale, beta, y, relu, n, channels, tile);
}

template <int VEC>
__device__ __forceinline__ void normalize_back(const float* dy, const float* x, const float* mean,
                                               const float* scale, const float* beta,
                                               const float* a, const float* b, const float* c,
                                               float* dx, long long used, long long n,
                                               int channels, int tile) {
  const Place p = place<VEC>(channels, tile);
  if (!p.inside) return;
  const Floats<VEC> m = each<VEC>(mean, p.channel), fa = each<VEC>(a, p.channel),
                    fb = each<VEC>(b, p.channel), fc = each<VEC>(c, p.channel);
  Floats<VEC> s = {}, t = {};
  if (scale) s = each<VEC>(scale, p.channel), t = each<VEC>(beta, p.channel);
  dy += p.channel, x += p.channel, dx += p.channel;
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
          const float y = normalized(v[i].at[k], m.at[k], s.at[k], t.at[k]);
          const float dz = scale ? gated(g[i].at[k], y) : g[i].at[k];
          out.at[k] = gradient(dz, v[i].at[k], m.at[k], fa.at[k], fb.at[k], fc.at[k]);
        }
      }
      store<VEC>(dx + (row + i * step) * channels, out);
    }
  }
}

// dx = a * dz + b * (x - mean) + c for n rows, with dz as in leaf_products. dx is 0 for unused
// images (from image *valid on). dx may be dy.
extern "C" __global__ void __launch_bounds__(256)
batchnorm_dx(const float* dy, const float* __restrict__ x, const float* __restrict__ mean,
             const float* __restrict__ scale, const float* __restrict__ beta,
             const float* __restrict__ a, const float* __restrict__ b, const float* __restrict__ c,
             const int* __restrict__ valid, float* dx, int pixels, long long n, int channels,
             int tile) {
  const long long used = min(n, (long long)valid[0] * pixels);
  BY_WIDTH(normalize_back, dy, x, mean, scale, beta, a, b, c, dx, used, n, channels, tile);
}

// ReLU and its gradient, four elements at a time, because sizes are multiples of 16 floats.
extern "C" __global__ void __launch_bounds__(256)
relu(const float* __restrict__ x, float* __restrict__ y, long long n) {
  const long long step = (long long)gridDim.x * THREADS;
  for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; 4 * i < n; i += step) {
    Floats<4> v = load<4>(x + 4 * i);
#pragma unroll
    for (int k = 0; k < 4; ++k) v.at[k] = rectified(v.at[k]);
    store<4>(y + 4 * i, v);
  }
}

extern "C" __global__ void __launch_bounds__(256)
relu_dx(const float* __restrict__ dy, const float* __restrict__ y, float* __restrict__ dx,
        long long n) {
  const long long step = (long long)gridDim.x * THREADS;
  for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; 4 * i < n; i += step) {
    Floats<4> g = load<4>(dy + 4 * i);
    const Floats<4> v = load<4>(y + 4 * i);
#pragma unroll
    for (int k = 0; k < 4; ++k) g.at[k] = gated(g.at[k], v.at[k]);
    store<4>(dx + 4 * i, g);
  }
}

// Computes the statistics from the folded moments [count, mean, M2], with one thread per channel.
// All results are finite even if there are no images.
extern "C" __global__ void __launch_bounds__(128)
statistics(const double* __restrict__ folded, const float* __restrict__ gamma, double epsilon,
           double* __restrict__ count, double* __restrict__ mean, double* __restrict__ rstd,
           double* __restrict__ variance, float* __restrict__ shift, float* __restrict__ scale,
           int channels) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= channels) return;
  const double images = fmax(folded[0], 1.0), about = folded[1 + c];
  const double spread = folded[1 + channels + c] / images, r = 1.0 / sqrt(spread + epsilon);
  if (c == 0) count[0] = images;
  mean[c] = about;
  rstd[c] = r;
  variance[c] = spread;
  shift[c] = (float)about;
  scale[c] = (float)(gamma[c] * r);
}

// Computes the factors of dx, dgamma and dbeta from the folded [sum of dy, sum of dy * (x - mean)].
extern "C" __global__ void __launch_bounds__(128)
batchnorm_factors(const double* __restrict__ sums, const float* __restrict__ gamma,
                  const double* __restrict__ count, const double* __restrict__ rstd,
                  float* __restrict__ a, float* __restrict__ b, float* __restrict__ c,
                  float* __restrict__ dgamma, float* __restrict__ dbeta, int channels) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= channels) return;
  const double sum = sums[i], product = sums[channels + i], r = rstd[i], factor = gamma[i] * r;
  a[i] = (float)factor;
  b[i] = (float)(-factor * r * r * product / count[0]);
  c[i] = (float)(-factor * sum / count[0]);
  dgamma[i] = (float)(product * r);
  dbeta[i] = (float)sum;
}

// new = old + decay * (value - old). Row blockIdx.y of `table` has the addresses of old (float32),
// value (float64) and new (float32), and their length.
extern "C" __global__ void __launch_bounds__(128)
running(const long long* __restrict__ table, double decay) {
  const long long* row = table + 4 * blockIdx.y;
  const float* olds = reinterpret_cast<const float*>(row[0]);
  const double* values = reinterpret_cast<const double*>(row[1]);
  float* news = reinterpret_cast<float*>(row[2]);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < row[3]; i += gridDim.x * blockDim.x) {
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
