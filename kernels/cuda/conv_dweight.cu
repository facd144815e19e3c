// The gradient of a convolution with respect to its filters, as a matrix product on tensor cores:
//
//   leaf[n][m] = sum over pixels of X[pixel][m] dy[pixel][n]
//
// pixel = (image, p, q) in the `images` images of one leaf; n = a filter of the group; m = (r, s,
// c), where c is the channel within the group. X[pixel][m] is the pixel of x under tap (r, s), or 0
// outside the image. A leaf is (K, R, S, C/groups), the memory order of the filters.
//
// The sum runs over the rows of both matrices, so fragments are read by plain loads. Row pitches of
// 8 (or 24) modulo 32 floats use all banks. A lane reads 4 or NJ adjacent elements at once, which
// permutes the rows and columns of the products. Warps divide a tile along m and n. Warps also
// divide the pixels of a step into SPLIT parts, whose sums are added in order at the end. A block
// of threads computes one tile of one leaf, so a leaf depends only on its images.
//
// Definitions: as in conv_gemm.cu, and SPLIT (see above). VECTOR_X and VECTOR_Y are the numbers of
// floats of x and of dy that are copied at once.
#ifndef BM
#define BM 64
#define BN 64
#define WM 32
#define WN 32
#define SPLIT 1
#define STAGES 3
#define MIN_BLOCKS 3
#define VECTOR_X 4
#define VECTOR_Y 4
#define PRECISION 3
#endif

namespace {

constexpr int BK = 32;  // pixels per step
constexpr int WARPS_M = BM / WM, WARPS_MN = WARPS_M * (BN / WN), THREADS = WARPS_MN * SPLIT * 32;
constexpr int NJ = WN / 8;
constexpr int PITCH_M = BM + 8, PITCH_N = BN % 32 == 24 ? BN : BN + 8;
constexpr int STAGE = BK * (PITCH_M + PITCH_N);  // floats per stage
constexpr int CHUNKS = BM / VECTOR_X, STEP = THREADS / CHUNKS;
static_assert(WM == 32 && BM % 32 == 0 && BN % WN == 0 && THREADS % CHUNKS == 0, "");
static_assert(BK % STEP == 0 && BK / 8 % SPLIT == 0, "");
static_assert(PITCH_N % 32 == 8 || PITCH_N % 32 == 24, "");
static_assert((SPLIT - 1) * BM * BN <= STAGES * STAGE, "");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
conv_dweight(const float* __restrict__ dy, const float* __restrict__ x,
             float* __restrict__ leaves, int images, int height, int width, int channels,
             int out_height, int out_width, int filters, int taps_down, int taps_across,
             int stride_down, int stride_across, int top, int left, int dilation_down,
             int dilation_across, int groups) {
    DEFINE_SHAPE(shape);
    const int H = shape[0], W = shape[1], C = shape[2], P = shape[3], Q = shape[4], K = shape[5];
    const int S = shape[7], CG = C / shape[14], KG = K / shape[14];
    const int MD = shape[6] * S * CG, pixels = images * P * Q, steps = (pixels + BK - 1) / BK;
    const int tiles_m = (MD + BM - 1) / BM, tiles_n = (KG + BN - 1) / BN;

    DYN_SMEM(float, memory);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int wm = warp % WARPS_M * WM, wn = warp / WARPS_M * WN % BN, part = warp / WARPS_MN;
    int rest = blockIdx.x;
    const int m0 = rest % tiles_m * BM;
    rest /= tiles_m;
    const int n0 = rest % tiles_n * BN;
    rest /= tiles_n;
    const int group = rest % shape[14];
    const long long leaf = rest / shape[14];
    const float* xs = x + leaf * images * H * W * C + group * CG;
    const float* dys = dy + leaf * pixels * K + group * KG + n0;

    // this thread copies the same tap and channels of x in every step
    const int chunk = tid % CHUNKS, first = tid / CHUNKS, m_of_chunk = m0 + chunk * VECTOR_X;
    const int tap = m_of_chunk / CG, c_of_chunk = m_of_chunk - tap * CG;
    const int down = tap / S * shape[12] - shape[10], along = tap % S * shape[13] - shape[11];
    auto load = [&](int step, int stage) {
        float *as = memory + stage * STAGE, *bs = as + BK * PITCH_M;
#pragma unroll 2  // full unrolling would cost registers
        for (int i = 0; i < BK / STEP; ++i) {
            const int row = first + i * STEP, pixel = step * BK + row;
            const int image = pixel / (P * Q), pq = pixel - image * (P * Q), p = pq / Q;
            const int h = p * shape[8] + down, v = (pq - p * Q) * shape[9] + along;
            const bool ok = m_of_chunk < MD && pixel < pixels && (u32)h < (u32)H && (u32)v < (u32)W;
            const float* from = xs + (((image * H + h) * W + v) * C + c_of_chunk);
            cp_async<VECTOR_X>(as + row * PITCH_M + chunk * VECTOR_X, ok ? from : x, ok);
        }
        constexpr int COPIES = BK * BN / VECTOR_Y;
#pragma unroll
        for (int i = 0; i < (COPIES + THREADS - 1) / THREADS; ++i) {
            const int number = tid + i * THREADS;
            if (COPIES % THREADS && number >= COPIES) break;
            const int row = number / (BN / VECTOR_Y), n = number % (BN / VECTOR_Y) * VECTOR_Y;
            const int pixel = step * BK + row;
            const bool ok = pixel < pixels && n0 + n < KG;
            cp_async<VECTOR_Y>(bs + row * PITCH_N + n, ok ? dys + (pixel * K + n) : dy, ok);
        }
    };

    float sum[2][NJ][4] = {};
#if PRECISION == 3
    float total[2][NJ][4] = {};  // see conv_gemm.cu
#else
    float(&total)[2][NJ][4] = sum;
#endif
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) load(step, step);
        cp_commit();
    }
    for (int step = 0, stage = 0; step < steps; ++step) {
        cp_wait<STAGES - 2>();
        __syncthreads();
        const int next = step + STAGES - 1;
        if (next < steps) load(next, stage == 0 ? STAGES - 1 : stage - 1);
        cp_commit();
        const float *as = memory + stage * STAGE, *bs = as + BK * PITCH_M;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
        for (int k = 0; k < BK / 8 / SPLIT; ++k) {
            u32 a[2][4], a_low[2][4], b[NJ][2], b_low[NJ][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = (k * SPLIT + part) * 8 + half * 4 + t;
                // rows g and g + 8 of products 0 and 1 are m = 4 g + 0, 1, 2, 3
                const float4 four =
                    *reinterpret_cast<const float4*>(as + row * PITCH_M + wm + 4 * g);
                const float of_x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        tf32_parts<PRECISION>(__float_as_uint(of_x[2 * i + e]),
                                              a[i][2 * half + e], a_low[i][2 * half + e]);
                // column g of product j is n = NJ g + j
                float of_dy[NJ];
                const float* from = bs + row * PITCH_N + wn + NJ * g;
                if constexpr (NJ == 4) {
                    const float4 v = *reinterpret_cast<const float4*>(from);
                    of_dy[0] = v.x, of_dy[1] = v.y, of_dy[2] = v.z, of_dy[3] = v.w;
                } else if constexpr (NJ == 2) {
                    const float2 v = *reinterpret_cast<const float2*>(from);
                    of_dy[0] = v.x, of_dy[1] = v.y;
                } else {
#pragma unroll
                    for (int j = 0; j < NJ; ++j) of_dy[j] = from[j];
                }
#pragma unroll
                for (int j = 0; j < NJ; ++j)
                    tf32_parts<PRECISION>(__float_as_uint(of_dy[j]), b[j][half], b_low[j][half]);
            }
#if PRECISION == 3
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < NJ; ++j) mma_tf32(sum[i][j], a_low[i], b[j]);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < NJ; ++j) mma_tf32(sum[i][j], a[i], b_low[j]);
#endif
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < NJ; ++j) mma_tf32(sum[i][j], a[i], b[j]);
        }
#if PRECISION == 3
        move_sums(total, sum);
#endif
    }

    if (SPLIT > 1) {
        __syncthreads();  // all warps have finished the last step
        const int at = (warp % WARPS_MN) * 32 + lane;
#pragma unroll
        for (int i = 0; i < 2 * NJ * 4; ++i)
            if (part > 0)
                memory[((part - 1) * 2 * NJ * 4 + i) * (WARPS_MN * 32) + at] =
                    total[i / (NJ * 4)][i / 4 % NJ][i % 4];
        __syncthreads();
        if (part > 0) return;
#pragma unroll
        for (int other = 0; other < SPLIT - 1; ++other)
#pragma unroll
            for (int i = 0; i < 2 * NJ * 4; ++i)
                total[i / (NJ * 4)][i / 4 % NJ][i % 4] +=
                    memory[(other * 2 * NJ * 4 + i) * (WARPS_MN * 32) + at];
    }

    const int m = m0 + wm + 4 * g;
    float* out = leaves + (leaf * K + group * KG) * MD + m;
#pragma unroll
    for (int j = 0; j < NJ; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int n = n0 + wn + NJ * (2 * t + e) + j;
            if (n >= KG) continue;
            const float four[4] = {total[0][j][e], total[0][j][2 + e], total[1][j][e],
                                   total[1][j][2 + e]};
            float* to = out + (long long)n * MD;
            if (MD % 4 == 0) {
                if (m < MD)
                    *reinterpret_cast<float4*>(to) =
                        make_float4(four[0], four[1], four[2], four[3]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (m + i < MD) to[i] = four[i];
            }
        }
}
