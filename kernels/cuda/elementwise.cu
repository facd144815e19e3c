// Arithmetic on whole arrays, and copies of many at once. All in memory order.

template <class T>
__device__ __forceinline__ void sum(const T* a, const T* b, T* y, long long n) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
    y[i] = a[i] + b[i];
}

extern "C" __global__ void __launch_bounds__(256)
add_float(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ y,
          long long n) {
  sum(a, b, y, n);
}

extern "C" __global__ void __launch_bounds__(256)
add_double(const double* __restrict__ a, const double* __restrict__ b, double* __restrict__ y,
           long long n) {
  sum(a, b, y, n);
}

template <class T>
__device__ __forceinline__ void product(const T* x, T factor, T* y, long long n) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
    y[i] = x[i] * factor;
}

// y = x * (factor * late), rounded to x's type first; late (1,) may be null.
extern "C" __global__ void __launch_bounds__(256)
scaled_float(const float* __restrict__ x, double factor, const double* __restrict__ late,
             float* __restrict__ y, long long n) {
  product(x, (float)(late ? late[0] * factor : factor), y, n);
}

extern "C" __global__ void __launch_bounds__(256)
scaled_double(const double* __restrict__ x, double factor, const double* __restrict__ late,
              double* __restrict__ y, long long n) {
  product(x, late ? late[0] * factor : factor, y, n);
}

extern "C" __global__ void __launch_bounds__(256)
cast_double_float(const double* __restrict__ x, float* __restrict__ y, long long n) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
    y[i] = (float)x[i];
}

// n words of 4 bytes become 0.
extern "C" __global__ void __launch_bounds__(256)
zero_words(int* __restrict__ x, long long n) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
    x[i] = 0;
}

// Rows of `table`: source, destination, rows, words a row, words from row to row of the source and
// of the destination; a word is 4 bytes, blockIdx.y the row of the table.
extern "C" __global__ void __launch_bounds__(256)
copy_pieces(const long long* __restrict__ table) {
  const long long* piece = table + 6 * blockIdx.y;
  const int* __restrict__ from = reinterpret_cast<const int*>(piece[0]);
  int* __restrict__ to = reinterpret_cast<int*>(piece[1]);
  const long long words = piece[3], step = (long long)gridDim.x * blockDim.x;
  for (long long row = 0; row < piece[2]; ++row) {
    const int* source = from + row * piece[4];
    int* destination = to + row * piece[5];
#pragma unroll 4
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step)
      destination[i] = source[i];
  }
}
