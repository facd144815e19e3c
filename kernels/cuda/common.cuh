// Functions that CUDA C lacks. This file is prepended to every .cu file as text.
// tests/emulator/shim.h defines the same names for kernels that run on the CPU.
#ifndef MPIDL_EMULATED

typedef unsigned int u32;

// Declares dynamic shared memory, whose size is given at launch.
#define DYN_SMEM(T, name) extern __shared__ __align__(128) T name[]

// Returns v of the lane whose number is this lane's number XOR mask. All 32 lanes must call this
// function.
template <class T> __device__ __forceinline__ T shfl_xor(T v, int mask) {
    return __shfl_xor_sync(0xffffffffu, v, mask);
}

#if __CUDA_ARCH__ >= 800

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

// Copies 16, 8 or 4 bytes from global to shared memory asynchronously, or writes zeros if not `ok`
// (`from` must still be a valid address). After cp_wait, only this thread can rely on the data.
__device__ __forceinline__ void cp_async16(void* to, const void* from, bool ok) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                 :: "r"(shared_address(to)), "l"(from), "r"(ok ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async8(void* to, const void* from, bool ok) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n"
                 :: "r"(shared_address(to)), "l"(from), "r"(ok ? 8 : 0) : "memory");
}
__device__ __forceinline__ void cp_async4(void* to, const void* from, bool ok) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n"
                 :: "r"(shared_address(to)), "l"(from), "r"(ok ? 4 : 0) : "memory");
}
// cp_commit ends a group of copies; cp_wait<N> waits until at most N groups are pending.
__device__ __forceinline__ void cp_commit() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}
template <int N> __device__ __forceinline__ void cp_wait() {
    asm volatile("cp.async.wait_group %0;\n" :: "n"(N) : "memory");
}

// Loads four 8 x 4 matrices of 4-byte elements from shared memory. Lane l passes the address of row
// l % 8 of matrix l / 8, and receives element (l / 4, l % 4) of each matrix.
__device__ __forceinline__ void ldsm4(u32& a, u32& b, u32& c, u32& d, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(shared_address(row)) : "memory");
}

// c (16 x 8) += a (16 x 8) b (8 x 8). The tensor core reads the upper 19 bits of a and b.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c (16 x 8) += a (16 x 16) b (16 x 8) of bfloat16 numbers, two in a word.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Like ldsm4, for matrices of 8 x 8 elements of 2 bytes, which are transposed.
__device__ __forceinline__ void ldsm4_turned(u32& a, u32& b, u32& c, u32& d, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(shared_address(row)) : "memory");
}

#endif
#endif

// A stored activation or its cotangent: a float or, if BF16 is defined, a bfloat16 number.
// Arithmetic is in float: `get` widens a number, and `put` rounds it to the nearest, or of two
// equally near ones to the even one.
#ifdef BF16
typedef unsigned short value;
__device__ __forceinline__ float get(value v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ value put(float f) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    value v;
    asm("cvt.rn.bf16.f32 %0, %1;\n" : "=h"(v) : "f"(f));
    return v;
#else
    const u32 bits = __float_as_uint(f);
    return f != f ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}
#else
typedef float value;
__device__ __forceinline__ float get(value v) { return v; }
__device__ __forceinline__ value put(float f) { return f; }
#endif

// N neighbouring numbers: as floats, and in memory, where `load` and `store` move them at once.
template <int N> struct alignas(4 * N) Floats {
    float at[N];
};
template <int N> struct alignas(N * sizeof(value)) Stored {
    value at[N];
};

template <int N> __device__ __forceinline__ Floats<N> load(const value* x) {
    const Stored<N> stored = *reinterpret_cast<const Stored<N>*>(x);
    Floats<N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.at[k] = get(stored.at[k]);
    return v;
}
template <int N> __device__ __forceinline__ void store(value* x, Floats<N> v) {
    Stored<N> stored;
#pragma unroll
    for (int k = 0; k < N; ++k) stored.at[k] = put(v.at[k]);
    *reinterpret_cast<Stored<N>*>(x) = stored;
}

// Returns the number that a kernel reads after `f` has been stored.
__device__ __forceinline__ float as_stored(float f) { return get(put(f)); }

// Loads part of a vector with a number for each channel, which need not be aligned to 16 bytes.
template <int N>
__device__ __forceinline__ Floats<N> of_channels(const float* vector, int channel) {
    Floats<N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.at[k] = vector[channel + k];
    return v;
}

// An operand: x or, if `mean` is not null, the activation min(max((x - mean) * scale + beta, low),
// high), which kernels compute when they read x. It is a ReLU if the limits are 0 and infinity. If
// `scale` is null, the kernel only subtracts the mean.
struct Source {
    const value* x;
    const float *mean, *scale, *beta;
    float low, high;
};

// The normalization of N neighbouring channels; zeros if there is none.
template <int N> struct Norm {
    Floats<N> mean, scale, beta;
};

template <int N> __device__ __forceinline__ Norm<N> norm_of(const Source& source, int channel) {
    Norm<N> norm = {};
    if (source.mean) norm.mean = of_channels<N>(source.mean, channel);
    if (source.scale) norm.scale = of_channels<N>(source.scale, channel);
    if (source.scale) norm.beta = of_channels<N>(source.beta, channel);
    return norm;
}

// Fused and separate kernels use these functions, so both kinds give the same bytes. NaN stays NaN,
// and -0 becomes 0 if that is a limit.
template <int N> __device__ __forceinline__ float normalized(float x, const Norm<N>& norm, int k) {
    return fmaf(x - norm.mean.at[k], norm.scale.at[k], norm.beta.at[k]);
}
template <int N>
__device__ __forceinline__ float activated(float x, const Source& source, const Norm<N>& norm,
                                           int k) {
    if (!source.mean) return x;
    const float y = normalized(x, norm, k);
    return y <= source.low ? source.low : y >= source.high ? source.high : y;
}
// Returns the gradient of the normalized number; dy if there is no normalization.
template <int N>
__device__ __forceinline__ float gated(float dy, float x, const Source& source,
                                       const Norm<N>& norm, int k) {
    if (!source.scale) return dy;
    const float y = normalized(x, norm, k);
    return y > source.low && y < source.high ? dy : 0.f;
}
__device__ __forceinline__ float gradient(float dz, float x, float mean, float a, float b,
                                          float c) {
    return fmaf(a, dz, fmaf(x - mean, b, c));
}

// Loops over the indices below `count`; neighbouring threads of the grid get neighbouring indices.
#define EACH_INDEX(i, count)                                                                       \
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, count_of_##i = (count),   \
                   step_of_##i = (long long)gridDim.x * blockDim.x;                                \
         i < count_of_##i; i += step_of_##i)

// Computes dx[i] = f(dy[i], y[i]) for n numbers, a multiple of 4. A thread processes four numbers at
// a time.
template <class F>
__device__ __forceinline__ void each_four(const value* dy, const value* y, value* dx,
                                          long long n, F f) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; 4 * i < n; i += step) {
        Floats<4> g = load<4>(dy + 4 * i);
        const Floats<4> v = load<4>(y + 4 * i);
#pragma unroll
        for (int k = 0; k < 4; ++k) g.at[k] = f(g.at[k], v.at[k]);
        store<4>(dx + 4 * i, g);
    }
}

#if defined(MPIDL_EMULATED) || __CUDA_ARCH__ >= 800
// Copies N values to shared memory as cp_async16 does. Two bytes are copied at once, and arrive.
template <int N>
__device__ __forceinline__ void copy_async(value* to, const value* from, bool ok) {
    constexpr int BYTES = N * (int)sizeof(value);
    if (BYTES == 16)
        cp_async16(to, from, ok);
    else if (BYTES == 8)
        cp_async8(to, from, ok);
    else if (BYTES == 4)
        cp_async4(to, from, ok);
    else
        *to = ok ? *from : (value)0;
}

// c += a b for two fragments of 8 words per row.
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef BF16
    mma_bf16(c, a, b);
#else
    mma_tf32(c, a, b);
#endif
}
#endif

// The shape of a convolution (`Shape` in mpidl/backends/gpu/conv.py): the constants CONV_SHAPE if
// they are defined, else the array `sizes`, an argument of the kernel.
#ifdef CONV_SHAPE
#define DEFINE_SHAPE(shape) constexpr int shape[] = {CONV_SHAPE}
#else
#define DEFINE_SHAPE(shape) const int* const shape = sizes
#endif

// Adds the sums of a warp's products to `total`, and sets the sums to 0.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void move_sums(float (&total)[ROWS][COLUMNS][4],
                                          float (&sum)[ROWS][COLUMNS][4]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) total[i][j][e] += sum[i][j][e], sum[i][j][e] = 0.f;
}

// Splits a float into two numbers for tensor cores, which read only the upper 19 bits. `high` is the
// nearest number of 19 bits, and `low` is exactly the remainder (12 bits; tensor cores read 11 of
// them).
__device__ __forceinline__ void tf32_parts(u32 number, u32& high, u32& low) {
    high = (number + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(__uint_as_float(number) - __uint_as_float(high));
}

// Adds half a unit of the last bit that tensor cores read, so that dropping the lower bits rounds to
// the nearest number. Infinity and NaN are not changed, because the addition could turn them into
// numbers.
__device__ __forceinline__ float rounded_to_tf32(float number) {
    const bool is_finite = fabsf(number) < __int_as_float(0x7f800000);
    return is_finite ? __uint_as_float(__float_as_uint(number) + 0x1000u) : number;
}
