// Normalization within an image: y = (x - mean) * rstd * gamma + beta, where the mean and the
// variance are those of a set of numbers of one image. A value is a matrix (images x pixels, C) in C
// order. A set consists of `width` channels of `height` rows: the pixels of an image for groups of
// channels, or one row for the channels of a pixel.
//
// `statistics` holds the means of all sets, and then rstd = 1 / sqrt(variance + epsilon). gamma and
// beta are per channel, or per element (C, pixels) if `pixels` is not 0; null stands for 1 and 0.
#include "cuda/sums.cuh"

constexpr int WARPS = 8;

struct Sets {
  const float* statistics;
  long long count;
  int height, width, per_row;  // per_row: sets of a row

  __device__ __forceinline__ long long of(long long row, int channel) const {
    return row / height * per_row + channel / width;
  }
  __device__ __forceinline__ float normalized(float x, long long set) const {
    return (x - statistics[set]) * statistics[count + set];
  }
};

__device__ __forceinline__ Sets sets_of(const float* statistics, long long rows, int height,
                                        int width, int channels) {
  const int per_row = channels / width;
  return {statistics, rows / height * per_row, height, width, per_row};
}

// Returns the element of gamma or beta of a channel of a row.
__device__ __forceinline__ float factor(const float* of, long long row, int channel, int pixels,
                                        float otherwise) {
  if (!of) return otherwise;
  return of[pixels ? (long long)channel * pixels + row % pixels : channel];
}

template <class T> __device__ __forceinline__ T sum_of_warp(T v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) v += shfl_xor(v, mask);
  return v;
}

// ---- the channels of a pixel: a warp computes a row ----

template <int VEC>
__device__ __forceinline__ void normalize_rows(const value* x, const float* gamma,
                                               const float* beta, float epsilon, value* y,
                                               float* statistics, long long rows, int channels) {
  const int lane = threadIdx.x % 32;
  for (long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32; row < rows;
       row += (long long)gridDim.x * WARPS) {
    const value* in = x + row * channels;
    float sum = 0, error = 0, square = 0;
    for (int c = VEC * lane; c < channels; c += VEC * 32) {
      const Floats<VEC> v = load<VEC>(in + c);
#pragma unroll
      for (int k = 0; k < VEC; ++k) sum += v.at[k];
    }
    const float about = sum_of_warp(sum) / channels;
    for (int c = VEC * lane; c < channels; c += VEC * 32) {
      const Floats<VEC> v = load<VEC>(in + c);
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        const float d = v.at[k] - about;
        error += d, square = fmaf(d, d, square);
      }
    }
    error = sum_of_warp(error) / channels;
    const float variance = fmaxf(sum_of_warp(square) / channels - error * error, 0.f);
    const float mean = about + error, rstd = 1.f / __fsqrt_rn(variance + epsilon);
    if (lane == 0) statistics[row] = mean, statistics[rows + row] = rstd;
    for (int c = VEC * lane; c < channels; c += VEC * 32) {
      Floats<VEC> v = load<VEC>(in + c);
#pragma unroll
      for (int k = 0; k < VEC; ++k)
        v.at[k] = fmaf((v.at[k] - mean) * rstd, gamma ? gamma[c + k] : 1.f,
                       beta ? beta[c + k] : 0.f);
      store<VEC>(y + row * channels + c, v);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
pixel_norm(const value* __restrict__ x, const float* __restrict__ gamma,
           const float* __restrict__ beta, float epsilon, value* __restrict__ y,
           float* __restrict__ statistics, long long rows, int channels) {
  BY_WIDTH(normalize_rows, x, gamma, beta, epsilon, y, statistics, rows, channels);
}

template <int VEC>
__device__ __forceinline__ void back_of_rows(const value* dy, const value* x, const float* gamma,
                                             const float* statistics, value* dx, long long rows,
                                             int channels) {
  const int lane = threadIdx.x % 32;
  for (long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32; row < rows;
       row += (long long)gridDim.x * WARPS) {
    const long long at = row * channels;
    const float mean = statistics[row], rstd = statistics[rows + row];
    float sum = 0, product = 0;
    for (int c = VEC * lane; c < channels; c += VEC * 32) {
      const Floats<VEC> g = load<VEC>(dy + at + c), v = load<VEC>(x + at + c);
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        const float dz = gamma ? gamma[c + k] * g.at[k] : g.at[k];
        sum += dz, product = fmaf(dz, (v.at[k] - mean) * rstd, product);
      }
    }
    sum = sum_of_warp(sum) / channels, product = sum_of_warp(product) / channels;
    for (int c = VEC * lane; c < channels; c += VEC * 32) {
      Floats<VEC> g = load<VEC>(dy + at + c);
      const Floats<VEC> v = load<VEC>(x + at + c);
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        const float dz = gamma ? gamma[c + k] * g.at[k] : g.at[k];
        g.at[k] = rstd * fmaf(-product, (v.at[k] - mean) * rstd, dz - sum);
      }
      store<VEC>(dx + at + c, g);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
pixel_norm_dx(const value* __restrict__ dy, const value* __restrict__ x,
              const float* __restrict__ gamma, const float* __restrict__ statistics,
              value* __restrict__ dx, long long rows, int channels) {
  BY_WIDTH(back_of_rows, dy, x, gamma, statistics, dx, rows, channels);
}

// ---- groups of channels ----

// moments (images, 1 + 2C): (count, means, M2) of the channels of each image.
extern "C" __global__ void __launch_bounds__(256, 3)
image_moments(const value* __restrict__ x, double* __restrict__ moments, int pixels, int channels,
              int tile) {
  BY_WIDTH(leaf_moments, x, moments, pixels, pixels, channels, tile);
}

// Statistics of each set from the moments of its channels; a warp computes a set.
extern "C" __global__ void __launch_bounds__(256)
group_statistics(const double* __restrict__ moments, double epsilon, float* __restrict__ statistics,
                 long long sets, int groups, int channels) {
  const int lane = threadIdx.x % 32, width = channels / groups;
  const long long set = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
  if (set >= sets) return;
  const double* of_image = moments + set / groups * (1 + 2 * (long long)channels);
  const double *means = of_image + 1 + set % groups * width, *m2 = means + channels;
  double sum = 0, square = 0;
  for (int c = lane; c < width; c += 32) sum += means[c];
  const double mean = sum_of_warp(sum) / width;
  for (int c = lane; c < width; c += 32) {
    const double d = means[c] - mean;
    square += m2[c] + of_image[0] * d * d;
  }
  const double variance = sum_of_warp(square) / (of_image[0] * width);
  if (lane != 0) return;
  statistics[set] = (float)mean;
  statistics[sets + set] = (float)(1 / __dsqrt_rn(variance + epsilon));
}

template <int VEC>
__device__ __forceinline__ void normalize_groups(const value* x, const float* gamma,
                                                 const float* beta, Sets sets, value* y,
                                                 int pixels, long long rows, int channels) {
  const int columns = channels / VEC;
  EACH_INDEX(i, rows * columns) {
    const long long row = i / columns;
    const int c = (int)(i % columns) * VEC;
    Floats<VEC> v = load<VEC>(x + VEC * i);
#pragma unroll
    for (int k = 0; k < VEC; ++k)
      v.at[k] = fmaf(sets.normalized(v.at[k], sets.of(row, c + k)),
                     factor(gamma, row, c + k, pixels, 1.f), factor(beta, row, c + k, pixels, 0.f));
    store<VEC>(y + VEC * i, v);
  }
}

extern "C" __global__ void __launch_bounds__(256)
group_norm(const value* __restrict__ x, const float* __restrict__ gamma,
           const float* __restrict__ beta, const float* __restrict__ statistics,
           value* __restrict__ y, int pixels, long long rows, int height, int width, int channels) {
  const Sets sets = sets_of(statistics, rows, height, width, channels);
  BY_WIDTH(normalize_groups, x, gamma, beta, sets, y, pixels, rows, channels);
}

// Leaves of n rows: the sums of dz * (x - mean) * rstd and of dz, where dz is dy, or gamma * dy if
// gamma is not null (per element).
template <int VEC>
__device__ __forceinline__ void sums_of_rows(const value* dy, const value* x, const float* gamma,
                                             Sets sets, float* products, float* sums, int n,
                                             int pixels, int channels, int tile) {
  const Place p = place<VEC>(channels, tile);
  float sum[2 * VEC] = {};
  if (p.inside) {
    const long long first = (long long)blockIdx.x * n;
    for (int start = p.row; start < n; start += FEW * p.rows) {
      Floats<VEC> g[FEW] = {}, v[FEW] = {};
#pragma unroll
      for (int i = 0; i < FEW; ++i)
        if (start + i * p.rows < n) {
          const long long at = (first + start + i * p.rows) * channels + p.channel;
          g[i] = load<VEC>(dy + at), v[i] = load<VEC>(x + at);
        }
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        float some = 0, product = 0;
#pragma unroll
        for (int i = 0; i < FEW; ++i) {
          if (start + i * p.rows >= n) continue;
          const long long row = first + start + i * p.rows;
          const int c = p.channel + k;
          const float dz = gamma ? factor(gamma, row, c, pixels, 1.f) * g[i].at[k] : g[i].at[k];
          some += dz;
          product = fmaf(dz, sets.normalized(v[i].at[k], sets.of(row, c)), product);
        }
        sum[k] += product, sum[VEC + k] += some;
      }
    }
  }
  double total[2 * VEC];
#pragma unroll
  for (int k = 0; k < 2 * VEC; ++k) total[k] = sum[k];
  add_rows(total, p, tile);
  if (!p.inside || p.row != 0) return;
  const long long to = (long long)blockIdx.x * channels + p.channel;
  for (int k = 0; k < VEC; ++k)
    products[to + k] = (float)total[k], sums[to + k] = (float)total[VEC + k];
}

// products and sums (leaves, C): see sums_of_rows; a leaf has `images` images of `of_image` rows.
extern "C" __global__ void __launch_bounds__(256, 2)
group_norm_sums(const value* __restrict__ dy, const value* __restrict__ x,
                const float* __restrict__ gamma, const float* __restrict__ statistics,
                float* __restrict__ products, float* __restrict__ sums, int height, int width,
                long long rows, int pixels, int images, int of_image, int channels, int tile) {
  const Sets sets = sets_of(statistics, rows, height, width, channels);
  BY_WIDTH(sums_of_rows, dy, x, gamma, sets, products, sums, images * of_image, pixels, channels,
           tile);
}

// means (2, sets): the means of dz and of dz * (x - mean) * rstd over each set, from the sums of each
// image. The sums are multiplied by gamma, per channel, if it is not null. A warp computes a set.
extern "C" __global__ void __launch_bounds__(256)
group_means(const float* __restrict__ products, const float* __restrict__ sums,
            const float* __restrict__ gamma, float* __restrict__ means, long long sets, int groups,
            int height, int channels) {
  const int lane = threadIdx.x % 32, width = channels / groups;
  const long long set = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
  if (set >= sets) return;
  const int first = (int)(set % groups) * width;
  const long long at = set / groups * channels;
  double sum = 0, product = 0;
  for (int c = first + lane; c < first + width; c += 32) {
    const double weight = gamma ? gamma[c] : 1;
    sum += weight * sums[at + c], product += weight * products[at + c];
  }
  sum = sum_of_warp(sum), product = sum_of_warp(product);
  if (lane != 0) return;
  const double count = (double)height * width;
  means[set] = (float)(sum / count), means[sets + set] = (float)(product / count);
}

template <int VEC>
__device__ __forceinline__ void back_of_groups(const value* dy, const value* x, const float* gamma,
                                               Sets sets, const float* means, value* dx, int pixels,
                                               long long rows, int channels) {
  const int columns = channels / VEC;
  EACH_INDEX(i, rows * columns) {
    const long long row = i / columns;
    const int c = (int)(i % columns) * VEC;
    Floats<VEC> g = load<VEC>(dy + VEC * i);
    const Floats<VEC> v = load<VEC>(x + VEC * i);
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
      const long long set = sets.of(row, c + k);
      const float dz = factor(gamma, row, c + k, pixels, 1.f) * g.at[k];
      g.at[k] = sets.statistics[sets.count + set] *
                fmaf(-means[sets.count + set], sets.normalized(v.at[k], set), dz - means[set]);
    }
    store<VEC>(dx + VEC * i, g);
  }
}

extern "C" __global__ void __launch_bounds__(256)
group_norm_dx(const value* __restrict__ dy, const value* __restrict__ x,
              const float* __restrict__ gamma, const float* __restrict__ statistics,
              const float* __restrict__ means, value* __restrict__ dx, int pixels, long long rows,
              int height, int width, int channels) {
  const Sets sets = sets_of(statistics, rows, height, width, channels);
  BY_WIDTH(back_of_groups, dy, x, gamma, sets, means, dx, pixels, rows, channels);
}

// products and sums (blocks, C, pixels): the sums of dy * (x - mean) * rstd and of dy over the 16
// images of a block, for each element of an image.
extern "C" __global__ void __launch_bounds__(256)
element_sums(const value* __restrict__ dy, const value* __restrict__ x,
             const float* __restrict__ statistics, float* __restrict__ products,
             float* __restrict__ sums, long long elements, int pixels, int width, int channels) {
  const Sets sets = sets_of(statistics, elements / channels * 16, pixels, width, channels);
  EACH_INDEX(i, elements) {  // elements of all blocks, channels last
    const int c = (int)(i % channels);
    const long long pixel = i / channels, block = pixel / pixels;
    long long at = (block * 16 * pixels + pixel % pixels) * channels + c;
    long long set = block * 16 * sets.per_row + c / width;
    float sum = 0, product = 0;
#pragma unroll 4
    for (int image = 0; image < 16; ++image) {
      const float g = get(dy[at]);
      sum += g, product = fmaf(g, sets.normalized(get(x[at]), set), product);
      at += (long long)pixels * channels, set += sets.per_row;
    }
    const long long to = (block * channels + c) * pixels + pixel % pixels;
    products[to] = product, sums[to] = sum;
  }
}
