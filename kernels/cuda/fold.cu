// Folds the rows of a matrix by the tree that adds up a mini-batch (mpidl/core/fold.py).
//
// A node of n rows splits at the largest power of two below n. Folding from left to right works
// like a binary counter: row i is combined with levels 0, 1, ... as long as the bits of i are set,
// and is kept at the first level whose bit is not set. The last row is combined with all levels
// whose bits are set. A run of 2^l rows that begins at a multiple of 2^l is a node of the same
// tree. So threads may divide a node into such runs and combine the results by the same tree,
// without changing the bytes. Kernels that fold a sum and compute with its root stand here too.

struct Moments {
  double count, mean, m2;
};

__device__ __forceinline__ float combined(float left, float right) { return left + right; }
__device__ __forceinline__ double combined(double left, double right) { return left + right; }

// Merges moments with the same operations as `fold.merge_moments`, in the same order.
__device__ __forceinline__ Moments combined(Moments left, Moments right) {
  if (right.count == 0) return left;
  if (left.count == 0) return right;
  const double n = left.count, m = right.count, both = __dadd_rn(n, m);
  const double delta = __dadd_rn(right.mean, -left.mean);
  double part = 0.5, weight = 0.5 * n;  // exactly the quotients below, without slow divisions
  if (n != m || n > 1 << 26) part = __ddiv_rn(m, both), weight = __ddiv_rn(__dmul_rn(n, m), both);
  const double square = __dmul_rn(__dmul_rn(delta, delta), weight);
  return {both, __dadd_rn(left.mean, __dmul_rn(delta, part)),
          __dadd_rn(left.m2, __dadd_rn(right.m2, square))};
}

// [sum of dz, sum of dz * (x - mean)] of a channel.
struct Pair {
  double sum, product;
};

__device__ __forceinline__ Pair combined(Pair left, Pair right) {
  return {left.sum + right.sum, left.product + right.product};
}

// Access to column `column` of the rows of matrices in C order. Sums are (rows, width). Moments are
// (rows, 1 + 2 width), and a row is [count, mean, M2]. Pairs are (rows, 2 width), first all sums.
template <class T>
__device__ __forceinline__ void read(const T* x, long long row, int column, int width, T& v) {
  v = x[row * width + column];
}
__device__ __forceinline__ void read(const double* x, long long row, int column, int width,
                                     Moments& v) {
  x += row * (1 + 2 * (long long)width);
  v = {x[0], x[1 + column], x[1 + width + column]};
}
__device__ __forceinline__ void read(const double* x, long long row, int column, int width,
                                     Pair& v) {
  x += row * 2 * width;
  v = {x[column], x[width + column]};
}

template <class T> __device__ __forceinline__ void store(T* root, int column, int width, T v) {
  root[column] = v;
}
__device__ __forceinline__ void store(double* root, int column, int width, Moments v) {
  if (column == 0) root[0] = v.count;
  root[1 + column] = v.mean;
  root[1 + width + column] = v.m2;
}
__device__ __forceinline__ void store(double* root, int column, int width, Pair v) {
  root[column] = v.sum;
  root[width + column] = v.product;
}

// Adds a node of 2^lowest rows that begins at row `start`; the last node may have fewer rows.
// Returns the value of the largest node that this node completes. The recursion keeps each level in
// a register.
template <int L = 0, int LEVELS, class T>
__device__ __forceinline__ T push(T (&level)[LEVELS], T value, int start, int lowest, bool last) {
  if constexpr (L < LEVELS) {
    if (L >= lowest) {
      if (start >> L & 1) {
        value = combined(level[L], value);
      } else if (!last) {
        level[L] = value;
        return value;
      }
    }
    return push<L + 1>(level, value, start, lowest, last);
  }
  return value;
}

// Returns the fold of rows first .. first + n - 1, n >= 1.
template <int LEVELS, class T>
__device__ __forceinline__ T folded(const T* x, long long first, int n, int column, int width) {
  T level[LEVELS], value;
  int i = 0;
  for (; i + 4 < n; i += 4) {  // four loads at a time, never the last row
    T a, b, c, d;
    read(x, first + i, column, width, a);
    read(x, first + i + 1, column, width, b);
    read(x, first + i + 2, column, width, c);
    read(x, first + i + 3, column, width, d);
    push<2>(level, combined(combined(a, b), combined(c, d)), i, 2, false);
  }
  for (; i < n; ++i) {
    read(x, first + i, column, width, value);
    value = push(level, value, i, 0, i + 1 == n);
  }
  return value;
}

// Combines the values of a column's `lines` threads, which are `columns` threads apart, in the
// thread of line 0. `shared` has an element per thread.
template <class T>
__device__ __forceinline__ void combine_lines(T& value, T* shared, int columns, int lines) {
  const int line = threadIdx.x / columns;
#pragma unroll 1
  for (int half = 1; half < lines; half *= 2) {  // each element of `shared` is written once
    if (line % (2 * half) == half) shared[threadIdx.x] = value;
    __syncthreads();
    if (line % (2 * half) == 0 && line + half < lines)
      value = combined(value, shared[threadIdx.x + half * columns]);
  }
}

// A row of the table of a launch that folds: the leaves (n, width), their root, and the numbers
// below (see `fold.spread`). blockIdx.y is the number of the row.
struct Fold {
  const long long* row;
  int n, width, columns, chunk;

  __device__ __forceinline__ explicit Fold(const long long* table) {
    row = table + 6 * blockIdx.y;
    n = row[2], width = row[3], columns = row[4], chunk = row[5];
  }
};

// Folds all columns of a sum, `columns` at a time. The thread of line i folds `chunk` rows, a power
// of two, from i * chunk on.
template <class T>
__device__ __forceinline__ void fold_sums(const long long* table, T* shared) {
  const Fold of(table);
  const T* leaves = reinterpret_cast<const T*>(of.row[0]);
  T* root = reinterpret_cast<T*>(of.row[1]);
  const int here = threadIdx.x % of.columns, line = threadIdx.x / of.columns;
  const int lines = (of.n - 1) / of.chunk + 1;
  for (int from = blockIdx.x * of.columns; from < of.width; from += gridDim.x * of.columns) {
    const bool inside = from + here < of.width && line < lines;
    T value{};
    if (inside)
      value = folded<20>(leaves, line * of.chunk, min(of.chunk, of.n - line * of.chunk),
                         from + here, of.width);
    combine_lines(value, shared, of.columns, lines);
    if (inside && line == 0) store(root, from + here, of.width, value);
    __syncthreads();  // before the next columns overwrite `shared`
  }
}

extern "C" __global__ void __launch_bounds__(512)
fold_float(const long long* __restrict__ table) {
  __shared__ float shared[512];
  fold_sums(table, shared);
}

extern "C" __global__ void __launch_bounds__(512)
fold_double(const long long* __restrict__ table) {
  __shared__ double shared[512];
  fold_sums(table, shared);
}

// Returns the fold of at most 4 rows. Unlike `folded`, this function inlines `combined` only three
// times, because the code that merges moments is large.
template <class T>
__device__ __forceinline__ T folded_few(const double* x, long long first, int n, int column,
                                        int width) {
  T v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) read(x, first + min(i, n - 1), column, width, v[i]);
  if (n > 1) v[0] = combined(v[0], v[1]);
  if (n > 3) v[2] = combined(v[2], v[3]);
  return n > 2 ? combined(v[0], v[2]) : v[0];
}

enum { MOST_COLUMNS = 4, PASSES = 24 };  // columns of a block; levels of the tree over its passes

// Returns the fold of n rows, in the threads of line 0. All threads of the block fold 4 rows each
// in a pass, so only the nodes above a pass need memory for their levels, in `levels`.
template <class T>
__device__ __forceinline__ T fold_by_passes(const double* leaves, int n, int column, int width,
                                            int columns, T* shared, T (*levels)[MOST_COLUMNS]) {
  const int here = threadIdx.x % columns, line = threadIdx.x / columns;
  const int run = 4 * (blockDim.x / columns);
  T value{};
#pragma unroll 1
  for (int start = 0, pass = 0; start < n; start += run, ++pass) {
    const int rest = min(n - start, run), lines = (rest + 3) / 4;
    if (column < width && line < lines)
      value = folded_few<T>(leaves, start + 4 * line, min(4, rest - 4 * line), column, width);
    combine_lines(value, shared, columns, lines);
    if (line == 0) {  // as `push`
      const bool last = start + run >= n;
      int level = 0;
#pragma unroll 1
      for (; pass >> level; ++level) {
        if (pass >> level & 1)
          value = combined(levels[level][here], value);
        else if (!last)
          break;
      }
      if (!last) levels[level][here] = value;
    }
    __syncthreads();  // before the next pass overwrites `shared`
  }
  return value;
}

extern "C" __global__ void __launch_bounds__(512)
fold_moments(const long long* __restrict__ table) {
  __shared__ Moments shared[512], levels[PASSES][MOST_COLUMNS];
  const Fold of(table);
  const int here = threadIdx.x % of.columns;
  for (int from = blockIdx.x * of.columns; from < of.width; from += gridDim.x * of.columns) {
    const Moments value = fold_by_passes(reinterpret_cast<const double*>(of.row[0]), of.n,
                                         from + here, of.width, of.columns, shared, levels);
    if (threadIdx.x < of.columns && from + here < of.width)
      store(reinterpret_cast<double*>(of.row[1]), from + here, of.width, value);
  }
}

// Folds the moments [count, mean, M2] of n leaves and computes the statistics from them, with a
// column per channel. root, where the fold is stored, may be null. All results are finite even if
// there are no images.
extern "C" __global__ void __launch_bounds__(1024)
statistics(const double* __restrict__ leaves, double* __restrict__ root,
           const float* __restrict__ gamma, double epsilon, double* __restrict__ count,
           double* __restrict__ mean, double* __restrict__ rstd, double* __restrict__ variance,
           float* __restrict__ shift, float* __restrict__ scale, int n, int channels,
           int columns) {
  __shared__ Moments shared[1024], levels[PASSES][MOST_COLUMNS];
  const int c = blockIdx.x * columns + threadIdx.x % columns;
  const Moments all = fold_by_passes(leaves, n, c, channels, columns, shared, levels);
  if (threadIdx.x >= columns || c >= channels) return;
  if (root) store(root, c, channels, all);
  const double images = fmax(all.count, 1.0), spread = all.m2 / images;
  const double r = 1.0 / sqrt(spread + epsilon);
  if (c == 0) count[0] = images;
  mean[c] = all.mean;
  rstd[c] = r;
  variance[c] = spread;
  shift[c] = (float)all.mean;
  scale[c] = (float)(gamma[c] * r);
}

// Folds [sum of dz, sum of dz * (x - mean)] of n leaves, like `statistics`, and computes the
// factors of dx, dgamma and dbeta.
extern "C" __global__ void __launch_bounds__(1024)
batchnorm_factors(const double* __restrict__ leaves, double* __restrict__ root,
                  const float* __restrict__ gamma, const double* __restrict__ count,
                  const double* __restrict__ rstd, float* __restrict__ a, float* __restrict__ b,
                  float* __restrict__ c, float* __restrict__ dgamma, float* __restrict__ dbeta,
                  int n, int channels, int columns) {
  __shared__ Pair shared[1024], levels[PASSES][MOST_COLUMNS];
  const int i = blockIdx.x * columns + threadIdx.x % columns;
  const Pair all = fold_by_passes(leaves, n, i, channels, columns, shared, levels);
  if (threadIdx.x >= columns || i >= channels) return;
  if (root) store(root, i, channels, all);
  const double r = rstd[i], factor = gamma[i] * r;
  a[i] = (float)factor;
  b[i] = (float)(-factor * r * r * all.product / count[0]);
  c[i] = (float)(-factor * all.sum / count[0]);
  dgamma[i] = (float)(all.product * r);
  dbeta[i] = (float)all.sum;
}

// The last kernel of a recorded step, which stores the results: results[row][i], in pinned memory,
// for the same row as program_begin, is the fold of the sum that row i of the table describes. A row
// has the leaves, their number, and the root, which may be null.
extern "C" __global__ void __launch_bounds__(256)
program_end(const long long* __restrict__ table, const int* __restrict__ counter,
            double* __restrict__ results) {
  __shared__ double shared[256], levels[PASSES][MOST_COLUMNS];
  const long long* row = table + 3 * blockIdx.x;
  const double* leaves = reinterpret_cast<const double*>(row[0]);
  double* root = reinterpret_cast<double*>(row[2]);
  const double sum = fold_by_passes(leaves, row[1], 0, 1, 1, shared, levels);
  if (threadIdx.x > 0) return;
  results[(long long)counter[1] * gridDim.x + blockIdx.x] = sum;
  if (root) *root = sum;
}

// Computes the root of a tree from nodes that together contain each leaf once. The rows of `values`
// are the values of these nodes, from left to right. For the node of row i, order[2 * i] is the
// first leaf, and order[2 * i + 1] is the level l. The node has 2^l leaves, or fewer if it is the
// last node. Each thread processes one column.
template <class T, class E>
__device__ __forceinline__ void combine_nodes(const E* values, const int* order, E* root, int rows,
                                              int width) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= width) return;
  T level[16], value;
  for (int i = 0; i < rows; ++i) {
    read(values, i, column, width, value);
    value = push(level, value, order[2 * i], order[2 * i + 1], i + 1 == rows);
  }
  store(root, column, width, value);
}

extern "C" __global__ void __launch_bounds__(128)
combine_float(const float* __restrict__ values, const int* __restrict__ order,
              float* __restrict__ root, int rows, int width) {
  combine_nodes<float>(values, order, root, rows, width);
}

extern "C" __global__ void __launch_bounds__(128)
combine_double(const double* __restrict__ values, const int* __restrict__ order,
               double* __restrict__ root, int rows, int width) {
  combine_nodes<double>(values, order, root, rows, width);
}

extern "C" __global__ void __launch_bounds__(128)
combine_moments(const double* __restrict__ values, const int* __restrict__ order,
                double* __restrict__ root, int rows, int width) {
  combine_nodes<Moments>(values, order, root, rows, width);
}
