// Sums over the rows of a matrix (images x pixels, C) in C order.
//
// A block processes the channels of one tile (blockIdx.y) for a range of rows. Thread t has VEC
// channels, starting at VEC * (t % tile), and rows t / tile, t / tile + rows, and so on. So a
// thread's channels are constant, and neighbouring threads read neighbouring memory. VEC is 4 if C
// is a multiple of 4, else 1.

constexpr int THREADS = 256;
// The number of rows that are loaded and summed at once, for parallel loads and short sums.
constexpr int TOGETHER = 8;
constexpr int FEW = TOGETHER / 2; // the same if each row is read from several arrays

// Calls a template with 4 channels per thread if C is a multiple of 4, else with 1.
#define BY_WIDTH(function, ...)                                                                    \
  do {                                                                                             \
    if (channels % 4 == 0)                                                                         \
      function<4>(__VA_ARGS__);                                                                    \
    else                                                                                           \
      function<1>(__VA_ARGS__);                                                                    \
  } while (0)

struct Place {
    int channel, row, rows; // first channel; first row; rows that a block processes at once
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

// Adds up v over the rows of each column, in an order that depends only on `tile`. Row 0 gets the
// sum.
template <int N> __device__ __forceinline__ void add_rows(double (&v)[N], Place p, int tile) {
    __shared__ double shared[N][THREADS];
    for (int live = p.rows; live > 1;) { // each element of `shared` is written once
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

// Computes leaf blockIdx.x: (count, mean, M2) of the first n of `all` rows, in one pass. M2 is the
// sum of squared deviations from the mean.
//
// The first row of the leaf is subtracted from all rows, so that a mean far from 0 costs no
// precision. For a few rows at a time, the kernel computes first the mean and then M2. Chan's
// formula merges the results. The subtracted row belongs to the leaf, so cancellation in the final
// sums in double precision loses at most a factor of n.
template <int VEC>
__device__ __forceinline__ void leaf_moments(const value* x, double* leaves, int n, int all,
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

// The sums of dz and dz * (x - mean) over at most FEW rows. dz is dy if the activation of x is
// within its limits, else 0.
template <int VEC> struct Products {
    float dz[VEC], product[VEC];

    __device__ __forceinline__ void add(const Floats<VEC>& dy, const Floats<VEC>& x,
                                        const Source& source, const Norm<VEC>& norm) {
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const float d = gated(dy.at[k], x.at[k], source, norm, k);
            dz[k] += d;
            product[k] = fmaf(d, x.at[k] - norm.mean.at[k], product[k]);
        }
    }
    __device__ __forceinline__ void move_to(float (&sum)[2 * VEC]) {
#pragma unroll
        for (int k = 0; k < VEC; ++k) sum[k] += dz[k], sum[VEC + k] += product[k];
    }
};

// Writes leaf blockIdx.x of leaves (leaves, 2C): the sums of dz, then of dz * (x - mean).
template <int VEC>
__device__ __forceinline__ void write_leaf(double* leaves, const double* sums,
                                           const double* products, int channel, int channels) {
    leaves += blockIdx.x * 2 * (long long)channels + channel;
#pragma unroll
    for (int k = 0; k < VEC; ++k) leaves[k] = sums[k], leaves[channels + k] = products[k];
}

// Adds up the sums of a block's threads, and writes its leaf.
template <int VEC>
__device__ __forceinline__ void write_products(double* leaves, const float (&sum)[2 * VEC], Place p,
                                               int channels, int tile) {
    double total[2 * VEC];
#pragma unroll
    for (int k = 0; k < 2 * VEC; ++k) total[k] = sum[k];
    add_rows(total, p, tile);
    if (p.inside && p.row == 0)
        write_leaf<VEC>(leaves, total, total + VEC, p.channel, channels);
}
