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

// Copies one array. Row blockIdx.y of `table` describes the copy: source, destination, number of
// rows, words per row, and the pitches of source and destination in words of 4 bytes.
extern "C" __global__ void __launch_bounds__(256)
copy_pieces(const long long* __restrict__ table) {
  const long long* piece = table + 6 * blockIdx.y;
  const int* __restrict__ from = reinterpret_cast<const int*>(piece[0]);
  int* __restrict__ to = reinterpret_cast<int*>(piece[1]);
  for (long long row = 0; row < piece[2]; ++row) {
    const int* source = from + row * piece[4];
    int* destination = to + row * piece[5];
#pragma unroll 4
    EACH_INDEX(i, piece[3]) destination[i] = source[i];
  }
}
