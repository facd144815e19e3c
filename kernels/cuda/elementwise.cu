// Elementwise arithmetic on whole arrays, and a kernel that copies many arrays at once.

// Returns whether a thread may read and write four neighbouring numbers at once.
__device__ __forceinline__ bool by_fours(const value* a, const value* b, const value* y,
                                         long long n) {
  return ((size_t)a | (size_t)b | (size_t)y) % sizeof(Stored<4>) == 0 && n % 4 == 0;
}

extern "C" __global__ void __launch_bounds__(256)
add_value(const value* __restrict__ a, const value* __restrict__ b, value* __restrict__ y,
          long long n) {
  if (by_fours(a, b, y, n))
    each_four(a, b, y, n, [](float first, float second) { return first + second; });
  else
    EACH_INDEX(i, n) y[i] = put(get(a[i]) + get(b[i]));
}

extern "C" __global__ void __launch_bounds__(256)
add_double(const double* __restrict__ a, const double* __restrict__ b, double* __restrict__ y,
           long long n) {
  EACH_INDEX(i, n) y[i] = a[i] + b[i];
}

// y = x * (factor * late). The factor is first rounded to float32, or to float64 if x has this
// type. late (1,) may be null.
extern "C" __global__ void __launch_bounds__(256)
scaled_value(const value* __restrict__ x, double factor, const double* __restrict__ late,
             value* __restrict__ y, long long n) {
  const float number = (float)(late ? late[0] * factor : factor);
  EACH_INDEX(i, n) y[i] = put(get(x[i]) * number);
}

extern "C" __global__ void __launch_bounds__(256)
scaled_double(const double* __restrict__ x, double factor, const double* __restrict__ late,
              double* __restrict__ y, long long n) {
  const double number = late ? late[0] * factor : factor;
  EACH_INDEX(i, n) y[i] = x[i] * number;
}

extern "C" __global__ void __launch_bounds__(256)
cast_double_float(const double* __restrict__ x, float* __restrict__ y, long long n) {
  EACH_INDEX(i, n) y[i] = (float)x[i];
}

extern "C" __global__ void __launch_bounds__(256)
cast_float_double(const float* __restrict__ x, double* __restrict__ y, long long n) {
  EACH_INDEX(i, n) y[i] = x[i];
}

extern "C" __global__ void __launch_bounds__(256)
cast_float_value(const float* __restrict__ x, value* __restrict__ y, long long n) {
  EACH_INDEX(i, n) y[i] = put(x[i]);
}

extern "C" __global__ void __launch_bounds__(256)
cast_value_float(const value* __restrict__ x, float* __restrict__ y, long long n) {
  EACH_INDEX(i, n) y[i] = get(x[i]);
}

// Sets n words of 4 bytes to 0.
extern "C" __global__ void __launch_bounds__(256)
zero_words(int* __restrict__ x, long long n) {
  EACH_INDEX(i, n) x[i] = 0;
}

template <class T> __device__ __forceinline__ void copy_rows(const long long* piece) {
  const T* __restrict__ from = reinterpret_cast<const T*>(piece[0]);
  T* __restrict__ to = reinterpret_cast<T*>(piece[1]);
  const long long width = piece[4];
#pragma unroll 4
  EACH_INDEX(i, piece[2] * width) {
    const long long row = i / width, column = i - row * width;
    to[row * piece[6] + column] = from[row * piece[5] + column];
  }
}

// Copies parts of arrays. Row blockIdx.y of `table` describes a copy: source, destination, number of
// rows, and the bytes that are moved at once; as multiples of these: the width of the rows, and
// their distances in the source and in the destination.
extern "C" __global__ void __launch_bounds__(256)
copy_pieces(const long long* __restrict__ table) {
  const long long* piece = table + 7 * blockIdx.y;
  if (piece[3] == 16) copy_rows<float4>(piece);
  if (piece[3] == 4) copy_rows<int>(piece);
  if (piece[3] == 2) copy_rows<short>(piece);
}
