// Convolution as a matrix product on tensor cores, for the forward and backward-data passes. The
// passes differ in how a row of the left matrix is gathered:
//
//   y[m][n] = sum over k of A[m][k] w[n][k] (+ bias[n])
//
// m = (image, row, column) of the output; n = a filter of the group; k = (r, s, c), where c is the
// channel within the group. A is never stored: A[m][k] is read from x, or is 0 outside the image.
//
//   forward        x (images, H, W, C), w (K, R, S, C/groups): row of x = p * stride - top + r * d
//   backward-data  x is dy, w is transposed (conv_weights.cu): with t = p + top - r * d the row
//                  of dy is t / stride, if this is an integer; H, W, C are the sizes of dy
//
// A block of threads computes BM x BN elements of y, and loops over k in steps of BK. The parts of
// A and w for a step are copied to shared memory while earlier steps are multiplied. PRECISION 3 is
// 3xTF32: each operand is split into two TF32 numbers, and the three largest of the four products
// are added. The products of an element and the order of their sum are the same for every tile
// size.
//
// Definitions: BM x BN and WM x WN are the tiles of a block and of a warp. STAGES is the number of
// steps in shared memory. VECTOR is the number of floats copied at once: 4 if the channels of a
// group are a multiple of 4, else 1. BACKWARD is 1 for backward-data. CONV_SHAPE (optional) gives
// the kernel's arguments from `height` on as constants.
#ifndef BM
#define BM 128
#define BN 64
#define WM 32
#define WN 32
#define STAGES 3
#define MIN_BLOCKS 2
#define VECTOR 4
#define PRECISION 3
#define BACKWARD 0
#endif

namespace {

constexpr int BK = 32;
constexpr int WARPS_N = BN / WN, THREADS = BM / WM * WARPS_N * 32;
constexpr int MI = WM / 16, NJ = WN / 8;  // tiles of 16 x 8 per warp
constexpr int CHUNKS = BK / VECTOR, STEP = THREADS / CHUNKS;  // copies per row; rows per pass
constexpr int STAGE = (BM + BN) * BK;                         // floats per stage
static_assert(BM % WM == 0 && BN % WN == 0 && BM % STEP == 0 && WM % 16 == 0 && WN % 8 == 0, "");

struct alignas(16) Row {
    long long at;  // forward: x at tap (0, 0); backward: the image
    int h, w;      // forward: row and column of x at tap (0, 0); backward: t at tap (0, 0)
};

// Returns the position of element k of a row. Chunks of 4 are permuted, so 8 rows use all banks.
__device__ __forceinline__ int place(int row, int k) {
    return row * BK + ((((k >> 2) ^ row) & 7) << 2) + (k & 3);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
conv_gemm(const float* __restrict__ x, const float* __restrict__ w,
          const float* __restrict__ bias, float* __restrict__ y, long long rows, int height,
          int width, int channels, int out_height, int out_width, int filters, int taps_down,
          int taps_across, int stride_down, int stride_across, int top, int left,
          int dilation_down, int dilation_across, int groups) {
    DEFINE_SHAPE(shape);
    const int H = shape[0], W = shape[1], C = shape[2], P = shape[3], Q = shape[4], K = shape[5];
    const int S = shape[7], stride_h = shape[8], stride_w = shape[9];
    const int dilation_h = shape[12], dilation_w = shape[13];
    const int CG = C / shape[14], KG = K / shape[14];  // channels and filters per group
    const int KD = shape[6] * S * CG, steps = (KD + BK - 1) / BK;
    const int tiles_n = (KG + BN - 1) / BN;

    DYN_SMEM(float, memory);
    __shared__ Row row_table[BM];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int wm = warp / WARPS_N * WM, wn = warp % WARPS_N * WN;
    const int across = blockIdx.x % (tiles_n * shape[14]);  // blocks that share A are neighbours
    const long long m0 = (long long)(blockIdx.x / (tiles_n * shape[14])) * BM;
    const int group = across / tiles_n, n0 = across % tiles_n * BN;
    const float* filters_of_group = w + (long long)group * KG * KD;

    for (int i = tid; i < BM; i += THREADS) {
        const long long m = m0 + i, image = m / (P * Q);
        const int pixel = (int)(m - image * (P * Q)), p = pixel / Q, q = pixel - p * Q;
        Row row;
#if BACKWARD
        row.h = p + shape[10], row.w = q + shape[11];
        row.at = image * H * W * C + group * CG;
#else
        row.h = p * stride_h - shape[10], row.w = q * stride_w - shape[11];
        row.at = ((image * H + row.h) * W + row.w) * C + group * CG;
#endif
        if (m >= rows) row.h = -(1 << 29);  // past the last row: outside of every image
        row_table[i] = row;
    }
    __syncthreads();

    const int chunk = tid % CHUNKS, first = tid / CHUNKS;
    auto load = [&](int step, int stage) {
        const int k = step * BK + chunk * VECTOR;
        const int tap = k / CG, c = k - tap * CG, r = tap / S, s = tap - r * S;
        const bool inside = k < KD;
        const int down = r * dilation_h, along = s * dilation_w;
        float *as = memory + stage * STAGE, *bs = as + BM * BK;
#pragma unroll 2  // full unrolling would cost registers
        for (int i = 0; i < BM / STEP; ++i) {
            const Row row = row_table[first + i * STEP];
#if BACKWARD
            const int t = row.h - down, u = row.w - along;
            const int h = t / stride_h, v = u / stride_w;
            const bool ok = inside && t >= 0 && u >= 0 && h < H && v < W && t == h * stride_h &&
                            u == v * stride_w;
            const float* from = x + row.at + (h * W + v) * C + c;
#else
            const int h = row.h + down, v = row.w + along;
            const bool ok = inside && (u32)h < (u32)H && (u32)v < (u32)W;
            const float* from = x + row.at + (down * W + along) * C + c;
#endif
            cp_async<VECTOR>(as + place(first + i * STEP, chunk * VECTOR), ok ? from : x, ok);
        }
#pragma unroll 2
        for (int i = 0; i < (BN + STEP - 1) / STEP; ++i) {
            const int n = first + i * STEP;
            if (BN % STEP && n >= BN) break;
            const bool ok = inside && n0 + n < KG;
            const float* from = filters_of_group + (long long)(n0 + n) * KD + k;
            cp_async<VECTOR>(bs + place(n, chunk * VECTOR), ok ? from : w, ok);
        }
    };

    // offset of the matrix row that this lane loads at k = 0; for another k, XOR it with k
    const int of_a = place(wm + (lane & 15), (lane >> 4) * 4);
    const int of_b = place(wn + (lane >> 4) * 8 + (lane & 7), (lane >> 3 & 1) * 4);
    float sum[MI][NJ][4] = {};
#if PRECISION == 3
    float total[MI][NJ][4] = {};  // tensor cores may truncate, so `sum` covers only one step
#endif
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) load(step, step);
        cp_commit();
    }
    for (int step = 0, stage = 0; step < steps; ++step) {
        cp_wait<STAGES - 2>();
        __syncthreads();  // the step has arrived, and all warps have finished the previous step
        const int next = step + STAGES - 1;
        if (next < steps) load(next, stage == 0 ? STAGES - 1 : stage - 1);
        cp_commit();
        const float *as = memory + stage * STAGE, *bs = as + BM * BK;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
        for (int k = 0; k < BK; k += 8) {
            u32 b[NJ][2], b_low[NJ][2];
#pragma unroll
            for (int j = 0; j < NJ; j += 2) {
                u32 two[2][2];  // columns j, j + 1; an odd last column is loaded twice
                const int again = j + 1 < NJ ? 0 : (lane >> 4) * 8 * BK;
                ldsm4(two[0][0], two[0][1], two[1][0], two[1][1],
                      bs + j * 8 * BK - again + (of_b ^ k));
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (j + e / 2 < NJ)
                        tf32_parts<PRECISION>(two[e / 2][e % 2], b[j + e / 2][e % 2],
                                              b_low[j + e / 2][e % 2]);
            }
#pragma unroll
            for (int i = 0; i < MI; ++i) {
                u32 a[4], a_low[4];
                ldsm4(a[0], a[1], a[2], a[3], as + i * 16 * BK + (of_a ^ k));
#pragma unroll
                for (int e = 0; e < 4; ++e) tf32_parts<PRECISION>(a[e], a[e], a_low[e]);
#if PRECISION == 3
#pragma unroll
                for (int j = 0; j < NJ; ++j) mma_tf32(sum[i][j], a_low, b[j]);
#pragma unroll
                for (int j = 0; j < NJ; ++j) mma_tf32(sum[i][j], a, b_low[j]);
#endif
#pragma unroll
                for (int j = 0; j < NJ; ++j) mma_tf32(sum[i][j], a, b[j]);
            }
        }
#if PRECISION == 3
        move_sums(total, sum);
#endif
    }

    const int g = lane >> 2, t = lane & 3;
    const bool pairs = KG % 2 == 0;  // two adjacent filters are then aligned to 8 bytes
#pragma unroll
    for (int j = 0; j < NJ; ++j) {
        const int n = n0 + wn + j * 8 + 2 * t;
        if (n >= KG) continue;
        const float* of_filter = bias + group * KG + n;
        const float bias0 = bias ? of_filter[0] : 0.f;
        const float bias1 = bias && n + 1 < KG ? of_filter[1] : 0.f;
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const long long m = m0 + wm + i * 16 + half * 8 + g;
                if (m >= rows) continue;
#if PRECISION == 3
                const float* found = total[i][j] + 2 * half;
#else
                const float* found = sum[i][j] + 2 * half;
#endif
                float* to = y + m * K + group * KG + n;
                if (pairs) {
                    *reinterpret_cast<float2*>(to) =
                        make_float2(found[0] + bias0, found[1] + bias1);
                } else {
                    to[0] = found[0] + bias0;
                    if (n + 1 < KG) to[1] = found[1] + bias1;
                }
            }
    }
}
