// Folds the rows of a matrix by the tree that adds up a mini-batch (mpidl/core/fold.py).
//
// A node of n rows splits at the largest power of two below n. Folding from left to right works
// like a binary counter: row i is combined with levels 0, 1, ... as long as the bits of i are set,
// and is kept at the first level whose bit is not set. The last row is combined with all levels
// whose bits are set. A run of 2^l rows that begins at a multiple of 2^l is a node of the same
// tree. So threads may divide a node into such runs and combine the results by the same tree,
// without changing the bytes.

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
  const double square = __dmul_rn(__dmul_rn(delta, delta), __ddiv_rn(__dmul_rn(n, m), both));
  return {both, __dadd_rn(left.mean, __dmul_rn(delta, __ddiv_rn(m, both))),
          __dadd_rn(left.m2, __dadd_rn(right.m2, square))};
}

// Access to matrices in C order. Sums are (rows, width). Moments are (rows, 1 + 2 width), and a row
// is [count, mean, M2].
template <class T> struct Matrix {
  typedef T Value;
  static __device__ __forceinline__ T load(const T* x, long long row, int column, int width) {
    return x[row * width + column];
  }
  static __device__ __forceinline__ void store(T* x, long long row, int column, int width, T v) {
    x[row * width + column] = v;
  }
};

struct MomentsMatrix {
  typedef Moments Value;
  static __device__ __forceinline__ Moments load(const double* x, long long row, int column,
                                                 int width) {
    x += row * (1 + 2 * (long long)width);
    return {x[0], x[1 + column], x[1 + width + column]};
  }
  static __device__ __forceinline__ void store(double* x, long long row, int column, int width,
                                               Moments v) {
    x += row * (1 + 2 * (long long)width);
    if (column == 0) x[0] = v.count;
    x[1 + column] = v.mean;
    x[1 + width + column] = v.m2;
  }
};

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
template <int LEVELS, class M, class E>
__device__ __forceinline__ typename M::Value folded(const E* x, long long first, int n, int column,
                                                    int width) {
  typename M::Value level[LEVELS], value;
  int i = 0;
  for (; i + 4 < n; i += 4) {  // four loads at a time, never the last row
    const auto a = M::load(x, first + i, column, width);
    const auto b = M::load(x, first + i + 1, column, width);
    const auto c = M::load(x, first + i + 2, column, width);
    const auto d = M::load(x, first + i + 3, column, width);
    push<2>(level, combined(combined(a, b), combined(c, d)), i, 2, false);
  }
  for (; i < n; ++i)
    value = push(level, M::load(x, first + i, column, width), i, 0, i + 1 == n);
  return value;
}

// Returns the fold of at most 4 rows. Unlike `folded`, this function inlines `combined` only three
// times, because the code that merges moments is large.
template <class M, class E>
__device__ __forceinline__ typename M::Value folded_few(const E* x, long long first, int n,
                                                        int column, int width) {
  typename M::Value v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = M::load(x, first + min(i, n - 1), column, width);
  if (n > 1) v[0] = combined(v[0], v[1]);
  if (n > 3) v[2] = combined(v[2], v[3]);
  return n > 2 ? combined(v[0], v[2]) : v[0];
}

// Folds `columns` columns of one node per block. Thread (row, column) folds up to `chunk` rows of
// the node, starting at row * chunk, where chunk is a power of two. The results of the threads of a
// column are combined through `shared`.
template <int LEVELS, class M, class E>
__device__ __forceinline__ void fold_node(const E* values, const int* nodes, E* roots, int width,
                                          int columns, int chunk, typename M::Value* shared) {
  const long long first = nodes[2 * blockIdx.y];
  const int n = nodes[2 * blockIdx.y + 1];
  const int here = threadIdx.x % columns, row = threadIdx.x / columns;
  const int column = blockIdx.x * columns + here;
  const int rows = (n + chunk - 1) / chunk;
  typename M::Value value{};
  const bool inside = column < width && row < rows;
  if (inside) {
    const long long start = first + (long long)row * chunk;
    const int own = min(chunk, n - row * chunk);
    if constexpr (LEVELS > 2)
      value = folded<LEVELS, M>(values, start, own, column, width);
    else
      value = folded_few<M>(values, start, own, column, width);
  }
#pragma unroll 1
  for (int half = 1; half < rows; half *= 2) {  // each element of `shared` is written once
    if (row % (2 * half) == half) shared[threadIdx.x] = value;
    __syncthreads();
    if (inside && row % (2 * half) == 0 && row + half < rows)
      value = combined(value, shared[threadIdx.x + half * columns]);
  }
  if (inside && row == 0) M::store(roots, blockIdx.y, column, width, value);
}

// roots[node] is the fold of the rows of `values` that nodes[node] = (first, count) selects, where
// node is blockIdx.y.
extern "C" __global__ void __launch_bounds__(512)
fold_float(const float* __restrict__ values, const int* __restrict__ nodes,
           float* __restrict__ roots, int width, int columns, int chunk) {
  __shared__ float shared[512];
  fold_node<16, Matrix<float>>(values, nodes, roots, width, columns, chunk, shared);
}

extern "C" __global__ void __launch_bounds__(512)
fold_double(const double* __restrict__ values, const int* __restrict__ nodes,
            double* __restrict__ roots, int width, int columns, int chunk) {
  __shared__ double shared[512];
  fold_node<16, Matrix<double>>(values, nodes, roots, width, columns, chunk, shared);
}

// Like fold_float, for moments. chunk must be at most 4.
extern "C" __global__ void __launch_bounds__(1024)
fold_moments(const double* __restrict__ values, const int* __restrict__ nodes,
             double* __restrict__ roots, int width, int columns, int chunk) {
  __shared__ Moments shared[1024];
  fold_node<2, MomentsMatrix>(values, nodes, roots, width, columns, chunk, shared);
}

// Computes the root of a tree from nodes that together contain each leaf once. The rows of `values`
// are the values of these nodes, from left to right. For the node of row i, order[2 * i] is the
// first leaf, and order[2 * i + 1] is the level l. The node has 2^l leaves, or fewer if it is the
// last node. Each thread processes one column.
template <class M, class E>
__device__ __forceinline__ void combine_nodes(const E* values, const int* order, E* root, int rows,
                                              int width) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= width) return;
  typename M::Value level[16], value;
  for (int i = 0; i < rows; ++i)
    value = push(level, M::load(values, i, column, width), order[2 * i], order[2 * i + 1],
                 i + 1 == rows);
  M::store(root, 0, column, width, value);
}

extern "C" __global__ void __launch_bounds__(128)
combine_float(const float* __restrict__ values, const int* __restrict__ order,
              float* __restrict__ root, int rows, int width) {
  combine_nodes<Matrix<float>>(values, order, root, rows, width);
}

extern "C" __global__ void __launch_bounds__(128)
combine_double(const double* __restrict__ values, const int* __restrict__ order,
               double* __restrict__ root, int rows, int width) {
  combine_nodes<Matrix<double>>(values, order, root, rows, width);
}

extern "C" __global__ void __launch_bounds__(128)
combine_moments(const double* __restrict__ values, const int* __restrict__ order,
                double* __restrict__ root, int rows, int width) {
  combine_nodes<MomentsMatrix>(values, order, root, rows, width);
}
