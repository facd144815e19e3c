// The gradient of a convolution with respect to its filters, as a matrix product on tensor cores:
//
//   leaf[n][m] = sum over pixels of X[pixel][m] dy[pixel][n]
//
// pixel = (image, p, q) in the `images` images of one leaf; n = a filter of the group; m = (r, s,
// c), where c is the channel within the group. X[pixel][m] is the pixel of x under tap (r, s), or 0
// outside the image. A leaf is (K, R, S, C/groups), the memory order of the filters. The gradient of
// the bias, the sum of dy[pixel][n], is a leaf (K).
//
// The sum runs over the rows of both matrices. Fragments of floats are read by plain loads: row
// pitches of 8 (or 24) modulo 32 floats use all banks. A lane reads 4 or NJ adjacent elements at
// once, which permutes the rows and columns of the products. Warps divide a tile along m and n.
// Warps also divide the pixels of a step into SPLIT parts, whose sums are added in order.
//
// A block of threads computes one tile of a range of leaves, and folds them like a binary counter: if
// bit l of i is set, level l holds the node of 2^l leaves that leaf i must be combined with. Leaf i
// is added to the nodes of the levels below its first 0 bit, and the sum is stored at that level.
// The last leaf is added to all levels that hold a node. So a node depends only on its images.
//
// Definitions: as in conv_gemm.cu, and SPLIT (see above). LEVELS: ranges have up to 2^LEVELS leaves.
// VECTOR_X and VECTOR_Y are the numbers of values of x and of dy that are copied at once. The EXTRA
// channels of x, which are zeros, have no gradient.
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
#define TERMS 3
#define INPUT 0
#define LEVELS 0
#define EXTRA 0
#endif

namespace {

constexpr int BK = 32;  // pixels per step
constexpr int IS_FLOAT = sizeof(value) == 4, DEEP = IS_FLOAT ? 8 : 16;  // pixels of a product
constexpr int WARPS_M = BM / WM, WARPS_MN = WARPS_M * (BN / WN), THREADS = WARPS_MN * SPLIT * 32;
constexpr int NJ = WN / 8, AT_ONCE = NJ % 2 ? 1 : NJ, OWN = 2 * NJ * 4;  // elements of a thread
constexpr int PITCH_M = BM + 8, PITCH_N = BN % 32 == 24 ? BN : BN + 8;
constexpr int STAGE = BK * (PITCH_M + PITCH_N);  // values per stage
constexpr int CHUNKS = BM / VECTOR_X, STEP = THREADS / CHUNKS;
constexpr int COPIES = BK * BN / VECTOR_Y;
static_assert(WM == 32 && BM % 32 == 0 && BN % WN == 0 && THREADS % CHUNKS == 0, "");
static_assert(BK % STEP == 0 && BK / DEEP % SPLIT == 0 && BN <= THREADS, "");
static_assert(PITCH_N % 32 == 8 || PITCH_N % 32 == 24, "");

}  // namespace

// ranges: the first leaf and the number of leaves of each range, or null for ranges of one leaf.
// nodes (ranges, K, R, S, C/groups), bias_nodes (ranges, K) or null. If `plain`, the leaves of a range
// are added up from left to right. mean, scale, beta, low, high, period: see conv_gemm.cu; x is
// normalized if INPUT is 1.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
conv_dweight(const value* __restrict__ dy, const value* __restrict__ x,
             const int* __restrict__ ranges, float* __restrict__ nodes,
             float* __restrict__ bias_nodes, const float* __restrict__ mean,
             const float* __restrict__ scale, const float* __restrict__ beta, float low, float high,
             int period, int plain, int images, const int* __restrict__ sizes) {
    DEFINE_SHAPE(shape);
    const int H = shape[0], W = shape[1], C = shape[2] + EXTRA, P = shape[3], Q = shape[4];
    const int K = shape[5], S = shape[7], CG = C / shape[14], KG = K / shape[14];
    const int MD = shape[6] * S * CG, pixels = images * P * Q, steps = (pixels + BK - 1) / BK;
    const int tiles_m = (MD + BM - 1) / BM, tiles_n = (KG + BN - 1) / BN;

    DYN_SMEM(value, memory);
    float* kept = reinterpret_cast<float*>(memory + STAGES * STAGE);  // the levels
    float* kept_bias = kept + LEVELS * BM * BN;
    float* of_parts = kept_bias + LEVELS * BN;  // sums of the parts of SPLIT
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int wm = warp % WARPS_M * WM, wn = warp / WARPS_M * WN % BN, part = warp / WARPS_MN;
    const int own = (warp % WARPS_MN) * 32 + lane;  // number of the thread within its part
    int rest = blockIdx.x;
    const int m0 = rest % tiles_m * BM;
    rest /= tiles_m;
    const int n0 = rest % tiles_n * BN;
    rest /= tiles_n;
    const int group = rest % shape[14];
    const long long range = rest / shape[14];
    const long long first_leaf = ranges ? ranges[2 * range] : range;
    const int leaves = ranges ? ranges[2 * range + 1] : 1;
    const bool has_bias = bias_nodes && m0 == 0 && tid < BN;

    // this thread copies the same tap and channels of x in every step
    const int chunk = tid % CHUNKS, first = tid / CHUNKS, m_of_chunk = m0 + chunk * VECTOR_X;
    const int tap = m_of_chunk / CG, c_of_chunk = m_of_chunk - tap * CG;
    const int down = tap / S * shape[12] - shape[10], along = tap % S * shape[13] - shape[11];
    // Returns the offset of x for a row of a step of a leaf, or -1 outside the image.
    auto place = [&](int step, int row) {
        const int pixel = step * BK + row;
        const int image = pixel / (P * Q), pq = pixel - image * (P * Q), p = pq / Q;
        const int h = p * shape[8] + down, v = (pq - p * Q) * shape[9] + along;
        const bool ok = m_of_chunk < MD && pixel < pixels && (u32)h < (u32)H && (u32)v < (u32)W;
        return ok ? ((image * H + h) * W + v) * C + group * CG + c_of_chunk : -1;
    };
    auto load = [&](long long leaf, int step, int stage) {
        value *as = memory + stage * STAGE, *bs = as + BK * PITCH_M;
        const value* xs = x + leaf * images * H * W * C;
        const value* dys = dy + leaf * pixels * K + group * KG + n0;
#pragma unroll 2  // full unrolling would cost registers
        for (int i = 0; i < BK / STEP; ++i) {
            const int row = first + i * STEP, at = place(step, row);
            copy_async<VECTOR_X>(as + row * PITCH_M + chunk * VECTOR_X, at >= 0 ? xs + at : x,
                                 at >= 0);
        }
#pragma unroll 2
        for (int i = 0; i < (COPIES + THREADS - 1) / THREADS; ++i) {
            const int number = tid + i * THREADS;
            if (COPIES % THREADS && number >= COPIES) break;
            const int row = number / (BN / VECTOR_Y), n = number % (BN / VECTOR_Y) * VECTOR_Y;
            const int pixel = step * BK + row;
            const bool ok = pixel < pixels && n0 + n < KG;
            copy_async<VECTOR_Y>(bs + row * PITCH_N + n, ok ? dys + (pixel * K + n) : dy, ok);
        }
    };

    const Source source = {x, INPUT ? mean : 0, INPUT ? scale : 0, beta, low, high};
    __shared__ float norm_of_tile[3][INPUT ? BM : 1];  // registers would spill
    for (int i = tid; INPUT && i < BM; i += THREADS) {
        const Norm<1> norm = norm_of<1>(source, (group * CG + (m0 + i) % CG) % period);
        norm_of_tile[0][i] = norm.mean.at[0], norm_of_tile[1][i] = norm.scale.at[0];
        norm_of_tile[2][i] = norm.beta.at[0];
    }
    if (INPUT) __syncthreads();
    constexpr bool ROUNDS = TERMS == 1 && IS_FLOAT;
    // Changes what this thread has copied: normalizes x, and rounds both.
    auto change = [&](int step, int stage) {
        value *as = memory + stage * STAGE, *bs = as + BK * PITCH_M;
        Norm<VECTOR_X> norm;
        if (INPUT) {
            norm.mean = of_channels<VECTOR_X>(norm_of_tile[0], chunk * VECTOR_X);
            norm.scale = of_channels<VECTOR_X>(norm_of_tile[1], chunk * VECTOR_X);
            norm.beta = of_channels<VECTOR_X>(norm_of_tile[2], chunk * VECTOR_X);
        }
        if (INPUT || ROUNDS)
#pragma unroll 1  // more would cost registers
            for (int i = 0; i < BK / STEP; ++i) {
                const int row = first + i * STEP;
                value* to = as + row * PITCH_M + chunk * VECTOR_X;
                Floats<VECTOR_X> v = ::load<VECTOR_X>(to);
                const bool ok = !INPUT || place(step, row) >= 0;
#pragma unroll
                for (int e = 0; e < VECTOR_X; ++e) {
                    if (INPUT) v.at[e] = ok ? activated(v.at[e], source, norm, e) : 0.f;
                    if (ROUNDS) v.at[e] = rounded_to_tf32(v.at[e]);
                }
                store<VECTOR_X>(to, v);
            }
        if (ROUNDS)
#pragma unroll 2
            for (int i = 0; i < (COPIES + THREADS - 1) / THREADS; ++i) {
                const int number = tid + i * THREADS;
                if (COPIES % THREADS && number >= COPIES) break;
                value* to = bs + number / (BN / VECTOR_Y) * PITCH_N +
                            number % (BN / VECTOR_Y) * VECTOR_Y;
                Floats<VECTOR_Y> v = ::load<VECTOR_Y>(to);
#pragma unroll
                for (int e = 0; e < VECTOR_Y; ++e) v.at[e] = rounded_to_tf32(v.at[e]);
                store<VECTOR_Y>(to, v);
            }
    };

    float sum[2][NJ][4] = {}, of_bias = 0.f;
#if TERMS == 3
    float total[2][NJ][4] = {};  // see conv_gemm.cu
#else
    float(&total)[2][NJ][4] = sum;
#endif
    const int all = leaves * steps;
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < all) load(first_leaf + step / steps, step % steps, step);
        cp_commit();
    }
    int step = 0, leaf = 0, next_step = (STAGES - 1) % steps, next_leaf = (STAGES - 1) / steps;
    for (int n = 0, stage = 0; n < all; ++n) {
        cp_wait<STAGES - 2>();
        change(step, stage);
        __syncthreads();
        if (next_leaf < leaves)
            load(first_leaf + next_leaf, next_step, stage == 0 ? STAGES - 1 : stage - 1);
        cp_commit();
        if (++next_step == steps) next_step = 0, ++next_leaf;
        const value *as = memory + stage * STAGE, *bs = as + BK * PITCH_M;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        const int live = pixels - step * BK;  // pixels of this step
#pragma unroll
        for (int k = 0; k < BK / DEEP / SPLIT; ++k) {
            const int row0 = (k * SPLIT + part) * DEEP;
            if (row0 >= live) break;
#ifdef BF16
            u32 of_m[2][4], of_n[NJ][2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                ldsm4_turned(of_m[i][0], of_m[i][1], of_m[i][2], of_m[i][3],
                             as + (row0 + (lane >> 4) * 8 + (lane & 7)) * PITCH_M + wm + i * 16 +
                                 (lane >> 3 & 1) * 8);
#pragma unroll
            for (int j = 0; j < NJ; j += 2) {
                u32 two[2][2];  // an odd last column is loaded twice
                ldsm4_turned(two[0][0], two[0][1], two[1][0], two[1][1],
                             bs + (row0 + (lane >> 3 & 1) * 8 + (lane & 7)) * PITCH_N + wn +
                                 (j + (j + 1 < NJ ? lane >> 4 : 0)) * 8);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (j + e / 2 < NJ) of_n[j + e / 2][e % 2] = two[e / 2][e % 2];
            }
#else
            u32 of_m[2][4], low_of_m[2][4], of_n[NJ][2], low_of_n[NJ][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = row0 + half * 4 + t;
                // rows g and g + 8 of products 0 and 1 are m = 4 g + 0, 1, 2, 3
                const Floats<4> of_x = ::load<4>(as + row * PITCH_M + wm + 4 * g);
                // column g of product j is n = NJ g + j
                float of_dy[NJ];
                const float* from = bs + row * PITCH_N + wn + NJ * g;
#pragma unroll
                for (int j = 0; j < NJ; j += AT_ONCE) {
                    const Floats<AT_ONCE> v = ::load<AT_ONCE>(from + j);
#pragma unroll
                    for (int k = 0; k < AT_ONCE; ++k) of_dy[j + k] = v.at[k];
                }
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        u32& high = of_m[i][2 * half + e];
                        high = __float_as_uint(of_x.at[2 * i + e]);
                        if (TERMS == 3) tf32_parts(high, high, low_of_m[i][2 * half + e]);
                    }
#pragma unroll
                for (int j = 0; j < NJ; ++j) {
                    of_n[j][half] = __float_as_uint(of_dy[j]);
                    if (TERMS == 3) tf32_parts(of_n[j][half], of_n[j][half], low_of_n[j][half]);
                }
            }
#if TERMS == 3
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < NJ; ++j) mma_tf32(sum[i][j], low_of_m[i], of_n[j]);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < NJ; ++j) mma_tf32(sum[i][j], of_m[i], low_of_n[j]);
#endif
#endif
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < NJ; ++j) mma(sum[i][j], of_m[i], of_n[j]);
        }
        if (has_bias && n0 + tid < KG) {  // from memory, because shared memory may hold rounded dy
            const value* from = dy + ((first_leaf + leaf) * pixels + step * BK) * K + group * KG +
                                n0 + tid;
            float of_step = 0.f;
#pragma unroll 8
            for (int row = 0; row < min(BK, live); ++row) of_step += get(from[(long long)row * K]);
            of_bias += of_step;
        }
#if TERMS == 3
        move_sums(total, sum);
#endif
        if (++step < steps) continue;
        step = 0;

        // the leaf is complete
        if (SPLIT > 1) {
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                if (part > 0)
                    of_parts[((part - 1) * OWN + i) * (WARPS_MN * 32) + own] =
                        total[i / (NJ * 4)][i / 4 % NJ][i % 4];
            __syncthreads();
#pragma unroll
            for (int other = 0; other < SPLIT - 1; ++other)
#pragma unroll
                for (int i = 0; i < OWN; ++i)
                    if (part == 0)
                        total[i / (NJ * 4)][i / 4 % NJ][i % 4] +=
                            of_parts[(other * OWN + i) * (WARPS_MN * 32) + own];
        }
        const bool is_last = leaf + 1 == leaves;
        if (LEVELS > 0) {
            bool is_open = true;
#pragma unroll 1
            for (int l = 0; l < (plain ? 1 : LEVELS) && is_open; ++l) {
                float* level = kept + l * BM * BN + own;
                const bool adds = plain ? leaf > 0 : leaf >> l & 1;
                const bool keeps = !is_last && (plain || !adds);
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    float& of_leaf = total[i / (NJ * 4)][i / 4 % NJ][i % 4];
                    if (part > 0) break;
                    if (adds) of_leaf = level[i * (WARPS_MN * 32)] + of_leaf;
                    if (keeps) level[i * (WARPS_MN * 32)] = of_leaf;
                }
                if (has_bias && adds) of_bias = kept_bias[l * BN + tid] + of_bias;
                if (has_bias && keeps) kept_bias[l * BN + tid] = of_bias;
                is_open = !keeps;
            }
        }
        ++leaf;
        if (is_last) break;
        of_bias = 0.f;
#pragma unroll
        for (int i = 0; i < OWN; ++i) total[i / (NJ * 4)][i / 4 % NJ][i % 4] = 0.f;
    }
    if (has_bias && n0 + tid < KG) bias_nodes[range * K + group * KG + n0 + tid] = of_bias;
    if (part > 0) return;

    // the rows and columns of the products of floats are permuted (see above)
    const int of_filter = MD - MD / CG * EXTRA;
    float* out = nodes + (range * K + group * KG) * of_filter;
#pragma unroll
    for (int j = 0; j < NJ; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int n = n0 + wn + (IS_FLOAT ? NJ * (2 * t + e) + j : 8 * j + 2 * t + e);
            if (n >= KG) continue;
            const float four[4] = {total[0][j][e], total[0][j][2 + e], total[1][j][e],
                                   total[1][j][2 + e]};
            float* to = out + (long long)n * of_filter;
            const int m_first = m0 + wm + 4 * g;
            if (IS_FLOAT && EXTRA == 0 && MD % 4 == 0) {
                if (m_first < MD)
                    *reinterpret_cast<float4*>(to + m_first) =
                        make_float4(four[0], four[1], four[2], four[3]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = IS_FLOAT ? m_first + i : m0 + wm + 8 * i + g;
                    const bool is_extra = EXTRA && at % CG >= CG - EXTRA;
                    if (at < MD && !is_extra) to[at - at / CG * EXTRA] = four[i];
                }
            }
        }
}
