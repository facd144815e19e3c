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

// Copies 16 or 4 bytes from global to shared memory asynchronously, or writes zeros if not `ok`
// (`from` must still be a valid address). After cp_wait, only this thread can rely on the data.
__device__ __forceinline__ void cp_async16(void* to, const void* from, bool ok) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                 :: "r"(shared_address(to)), "l"(from), "r"(ok ? 16 : 0) : "memory");
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

#endif
#endif

// Loops over the indices below `count`; neighbouring threads of the grid get neighbouring indices.
#define EACH_INDEX(i, count)                                                                       \
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, count_of_##i = (count),   \
                   step_of_##i = (long long)gridDim.x * blockDim.x;                                \
         i < count_of_##i; i += step_of_##i)

// Computes y[i] = f(x[i]) or dx[i] = f(dy[i], y[i]) for n numbers, a multiple of 4. A thread
// processes four numbers at a time.
struct alignas(16) Four {
    float of[4];
};

template <class F>
__device__ __forceinline__ void each_four(const float* x, float* y, long long n, F f) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; 4 * i < n; i += step) {
        Four v = reinterpret_cast<const Four*>(x)[i];
#pragma unroll
        for (int k = 0; k < 4; ++k) v.of[k] = f(v.of[k]);
        reinterpret_cast<Four*>(y)[i] = v;
    }
}

template <class F>
__device__ __forceinline__ void each_four(const float* dy, const float* y, float* dx,
                                          long long n, F f) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; 4 * i < n; i += step) {
        Four g = reinterpret_cast<const Four*>(dy)[i];
        const Four v = reinterpret_cast<const Four*>(y)[i];
#pragma unroll
        for (int k = 0; k < 4; ++k) g.of[k] = f(g.of[k], v.of[k]);
        reinterpret_cast<Four*>(dx)[i] = g;
    }
}

#if defined(MPIDL_EMULATED) || __CUDA_ARCH__ >= 800
template <int FLOATS>
__device__ __forceinline__ void cp_async(float* to, const float* from, bool ok) {
    if (FLOATS == 4)
        cp_async16(to, from, ok);
    else
        cp_async4(to, from, ok);
}
#endif

// The shape of a convolution: the constants CONV_SHAPE if defined, else the kernel's arguments,
// starting with `height`.
#ifdef CONV_SHAPE
#define DEFINE_SHAPE(shape) constexpr int shape[] = {CONV_SHAPE}
#else
#define DEFINE_SHAPE(shape)                                                                        \
    const int shape[] = {height,      width,         channels, out_height, out_width,              \
                         filters,     taps_down,     taps_across,                                  \
                         stride_down, stride_across, top,      left,                               \
                         dilation_down, dilation_across, groups}
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

// Splits a float into numbers for tensor cores, which read only the upper 19 bits. If TERMS is 3,
// `high` is the nearest number of 19 bits, and `low` is exactly the remainder (12 bits; tensor
// cores read 11 of them). If TERMS is 1, half a unit of the last kept bit is added, so that
// dropping the lower bits rounds to the nearest number. Infinity and NaN are not changed, because
// the addition could turn them into numbers.
template <int TERMS> __device__ __forceinline__ void tf32_parts(u32 value, u32& high, u32& low) {
    if (TERMS == 3) {
        high = (value + 0x1000u) & 0xffffe000u;
        low = __float_as_uint(__uint_as_float(value) - __uint_as_float(high));
    } else {
        high = (~value & 0x7f800000u) ? value + 0x1000u : value;
        low = 0;
    }
}
