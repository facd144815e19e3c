// Elementwise arithmetic on whole arrays, and a kernel that copies many arrays at once.

extern "C" __global__ void __launch_bounds__(256)
add_float(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ y,
          long long n) {
  EACH_INDEX(i, n) y[i] = a[i] + b[i];
}

extern "C" __global__ void __launch_bounds__(256)
add_double(const double* __restrict__ a, const double* __restrict__ b, double* __restrict__ y,
           long long n) {
  EACH_INDEX(i, n) y[i] = a[i] + b[i];
}

// y = x * (factor * late). The factor is first rounded to the type of x. late (1,) may be null.
extern "C" __global__ void __launch_bounds__(256)
scaled_float(const float* __restrict__ x, double factor, const double* __restrict__ late,
             float* __restrict__ y, long long n) {
  const float number = (float)(late ? late[0] * factor : factor);
  EACH_INDEX(i, n) y[i] = x[i] * number;
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
