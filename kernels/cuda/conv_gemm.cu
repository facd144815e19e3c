// Convolution as a matrix product on tensor cores, for the forward and backward-data passes:
//
//   y[m][n] = sum over k of A[m][k] w[n][k] (+ bias[n])
//
// m = a pixel of the output; n = a filter of the group; k = (tap, c), where c is a channel of the
// group. A is never stored: A[m][k] is read from x, or is 0 outside the image.
//
//   forward        x (images, H, W, C), w (K, R, S, C/groups): tap (r, s) reads row
//                  p * stride - top + r * dilation of x
//   backward-data  x is dy, w is turned (conv_weights.cu), and H, W, C are the sizes of dy. Row h of
//                  the output adds up the taps r for which (h + top - r * dilation) / stride, a row
//                  of dy, is an integer. Rows with the same remainder modulo the stride have the
//                  same taps, and so have columns: each pair of remainders is a convolution of its
//                  own with stride 1 (a class), so no product is multiplied by zero.
//
// A block of threads computes BM x BN elements of y, and loops over k in steps of BK. The parts of
// A and w for a step are copied to shared memory while earlier steps are multiplied. The thread that
// has copied a part of A may then change it in place. The products of an element and the order of
// their sum are the same for every tile size.
//
// Definitions: BM x BN and WM x WN are the tiles of a block and of a warp. STAGES is the number of
// steps in shared memory. VECTOR is the number of elements that are copied at once, and ACROSS the
// number of columns that are stored at once. TERMS is 3 for three TF32 products of a product of
// floats (w has a second half: the remainders), and 1 for one; bfloat16 needs one. BACKWARD is 1 for
// backward-data. CONV_SHAPE is optional (see common.cuh).
// INPUT: 1 if x is normalized and clipped while it is loaded; 2 if x is the cotangent of a
// normalization, which is differentiated while it is loaded (1x1 filters only). STATISTICS: 1 if the
// moments of y are computed; 2 if y is the cotangent of an activation, and the sums of dz and of
// dz * (x - mean) for its normalization are computed (not with classes). SPLITS: the number of blocks
// that share the steps of a tile. WIDE: 1 if y is float in any case. EXTRA: x and w have this number
// of channels of zeros, which `channels` does not count.
#ifndef BM
#define BM 128
#define BN 64
#define WM 32
#define WN 32
#define STAGES 3
#define MIN_BLOCKS 2
#define VECTOR 4
#define ACROSS 4
#define TERMS 3
#define BACKWARD 0
#define INPUT 0
#define STATISTICS 0
#define SPLITS 1
#define WIDE 0
#define EXTRA 0
#endif

namespace {

#if WIDE
typedef float result;
#else
typedef value result;
#endif

template <int N> __device__ __forceinline__ void store_result(result* y, Floats<N> v) {
#if WIDE
    struct alignas(N * 4) Whole { float at[N]; };
    *reinterpret_cast<Whole*>(y) = *reinterpret_cast<const Whole*>(v.at);
#else
    store<N>(y, v);
#endif
}

constexpr int WORDS = 32;                       // words of 4 bytes of a row of a step
constexpr int IN_WORD = 4 / (int)sizeof(value);  // elements in a word
constexpr int BK = WORDS * IN_WORD;
constexpr int WARPS_N = BN / WN, THREADS = BM / WM * WARPS_N * 32;
constexpr int MI = WM / 16, NJ = WN / 8;  // tiles of 16 x 8 per warp
constexpr int CHUNKS = BK / VECTOR, STEP = THREADS / CHUNKS;  // copies per row; rows per pass
constexpr int OF_B = BM * WORDS, OF_LOW = OF_B + BN * WORDS;  // parts of a stage, in words
constexpr int OF_X = OF_LOW + (TERMS == 3 ? BN * WORDS : 0);
constexpr int STAGE = OF_X + (INPUT == 2 ? BM * WORDS : 0);
constexpr int PITCH = BN + 4;  // of the tile of y in shared memory
constexpr int GROUPS = BN / ACROSS, ROWS = THREADS / GROUPS;  // threads across and down y
static_assert(BM % WM == 0 && BN % WN == 0 && BM % STEP == 0 && WM % 16 == 0 && WN % 8 == 0, "");
static_assert(BM * PITCH + 2 * ROWS * BN <= STAGES * STAGE, "");

struct alignas(16) Row {
    long long at;  // x at tap (0, 0)
    int h, w;      // row and column of x at tap (0, 0)
};

// Returns the position of word k of a row. Chunks of 4 are permuted, so 8 rows use all banks.
__device__ __forceinline__ int place(int row, int k) {
    return row * WORDS + ((((k >> 2) ^ row) & 7) << 2) + (k & 3);
}

// The taps of one axis that a class uses: `count` taps from `first` on, every `step`-th. One tap
// further, x is read `move` pixels further.
struct Taps {
    int first, step, count, move;
};

__device__ __forceinline__ Taps taps_of(int remainder, int all, int stride, int before,
                                        int dilation) {
    if (!BACKWARD) return {0, 1, all, dilation};
    if (stride == 1) return {0, 1, all, -dilation};
    int first = 0, step = 1;
    while (first < all && (remainder + before - first * dilation) % stride) ++first;
    while (step * dilation % stride) ++step;
    return {first, step, first < all ? (all - 1 - first) / step + 1 : 0,
            -(step * dilation / stride)};
}

}  // namespace

// y, bias, mean, scale, beta, low, high: see above; vectors have an element per channel of x, or of
// the normalization if `channels` is a multiple of their length `period` (flattened images). If
// INPUT is 2, `inputs` is the input of the normalization, with the shape of x, dx = a * dz + b *
// (input - mean) + c with dz = x where the clipped value lies between its limits (everywhere if scale
// is null), 0 in unused images, and is stored in `dz`. before: see Source; the activation of which y
// is the cotangent, if STATISTICS is 2. leaves: the moments (count, mean, M2) or sums of y, in `parts`
// rows per block of 16 images, one for each tile that contains rows of the block; rows that are not
// needed have count 0, or zeros. The rows of the tiles of all ranks begin `skipped` rows before this
// rank's rows, so tiles do not depend on the number of ranks. partial, tickets: memory for SPLITS > 1.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
conv_gemm(const value* __restrict__ x, const value* __restrict__ w,
          const float* __restrict__ bias, result* __restrict__ y, const float* __restrict__ mean,
          const float* __restrict__ scale, const float* __restrict__ beta, float low, float high,
          int period, const value* __restrict__ inputs, const float* __restrict__ a,
          const float* __restrict__ b, const float* __restrict__ c, value* __restrict__ dz,
          const int* __restrict__ valid, const value* __restrict__ before_x,
          const float* __restrict__ before_mean, const float* __restrict__ before_scale,
          const float* __restrict__ before_beta, float before_low, float before_high,
          double* __restrict__ leaves, int parts, int skipped,
          float* partial, int* tickets, int images, const int* __restrict__ sizes) {
    DEFINE_SHAPE(shape);
    const int H = shape[0], W = shape[1], C = shape[2] + EXTRA, P = shape[3], Q = shape[4];
    const int K = shape[5], S = shape[7], CG = C / shape[14], KG = K / shape[14];  // per group
    const int KD = shape[6] * S * CG;                                // elements of a filter
    const int tiles_n = (KG + BN - 1) / BN;

    DYN_SMEM(u32, memory);
    __shared__ Row row_table[BM];
    __shared__ long long row_of_y[BM];  // the position of a row in y, or -1
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int wm = warp / WARPS_N * WM, wn = warp % WARPS_N * WN;
    int rest = blockIdx.x;  // blocks that share A are neighbours
    const int split = rest % SPLITS;
    rest /= SPLITS;
    const int tile_of_all = rest, across = rest % (tiles_n * shape[14]);
    rest /= tiles_n * shape[14];
    const int group = across / tiles_n, n0 = across % tiles_n * BN;
    const value* filters_of_group = w + (long long)group * KG * KD;

    // the class, its rows and columns (down x along), and its taps
    int down = P, along = Q, from_row = 0, from_column = 0, apart_h = 1, apart_w = 1;
    if (BACKWARD && shape[8] * shape[9] > 1) {
        apart_h = shape[8], apart_w = shape[9];
        for (int number = 0;; ++number) {
            from_row = number / apart_w, from_column = number % apart_w;
            down = (P - from_row + apart_h - 1) / apart_h;
            along = (Q - from_column + apart_w - 1) / apart_w;
            const int tiles = (int)(((long long)images * down * along + BM - 1) / BM);
            if (rest < tiles) break;
            rest -= tiles;
        }
    }
    const Taps vertical = taps_of(from_row, shape[6], shape[8], shape[10], shape[12]);
    const Taps level = taps_of(from_column, S, shape[9], shape[11], shape[13]);
    const bool is_class = BACKWARD && shape[8] * shape[9] > 1;
    const int taps_along = is_class ? level.count : S;
    const int depth = is_class ? vertical.count * level.count * CG : KD;
    const int steps = (depth + BK - 1) / BK;
    const bool is_ragged = depth % BK != 0;  // the last step has less than BK elements
    const long long m0 = (long long)rest * BM - skipped, rows = (long long)images * down * along;

    for (int i = tid; i < BM; i += THREADS) {
        const long long m = m0 + i, image = m / (down * along);
        const int pixel = (int)(m - image * (down * along)), i_h = pixel / along;
        const int p = i_h * apart_h + from_row, q = (pixel - i_h * along) * apart_w + from_column;
        Row row;
        if (BACKWARD) {
            row.h = (p + shape[10] - vertical.first * shape[12]) / shape[8];
            row.w = (q + shape[11] - level.first * shape[13]) / shape[9];
        } else {
            row.h = p * shape[8] - shape[10], row.w = q * shape[9] - shape[11];
        }
        row.at = ((image * H + row.h) * W + row.w) * C + group * CG;
        const bool exists = m >= 0 && m < rows;
        if (!exists) row.h = -(1 << 29);  // outside of every image
        row_table[i] = row;
        row_of_y[i] = exists ? ((image * P + p) * Q + q) * K + group * KG + n0 : -1;
    }
    __syncthreads();

    const int chunk = tid % CHUNKS, first = tid / CHUNKS;
    const int of_chunk = place(first, chunk * VECTOR / IN_WORD);
    // Returns the position of this thread's part of row `first + i * STEP`, in values.
    auto part_of = [&](int i) {
        const int word = STEP % 8 ? place(first + i * STEP, chunk * VECTOR / IN_WORD)
                                  : of_chunk + i * STEP * WORDS;
        return word * IN_WORD + chunk * VECTOR % IN_WORD;
    };
    auto load = [&](int step, int stage) {
        const int k = step * BK + chunk * VECTOR;
        const int tap = k / CG, channel = k - tap * CG, i_h = tap / taps_along;
        const int i_w = tap - i_h * taps_along, h_by = i_h * vertical.move, w_by = i_w * level.move;
        const bool is_inside = k < depth;
        value *as = (value*)(memory + stage * STAGE), *bs = as + OF_B * IN_WORD;
#pragma unroll 2  // full unrolling would cost registers
        for (int i = 0; i < BM / STEP; ++i) {
            const Row row = row_table[first + i * STEP];
            const bool ok = is_inside && (u32)(row.h + h_by) < (u32)H &&
                            (u32)(row.w + w_by) < (u32)W;
            const long long at = ok ? row.at + ((h_by * W + w_by) * C + channel) : 0;
            copy_async<VECTOR>(as + part_of(i), x + at, ok);
            if (INPUT == 2) copy_async<VECTOR>(as + part_of(i) + OF_X * IN_WORD, inputs + at, ok);
        }
        const int of_tap = is_class ? (vertical.first + i_h * vertical.step) * S + level.first +
                                          i_w * level.step
                                    : tap;
#pragma unroll 2
        for (int i = 0; i < (BN + STEP - 1) / STEP; ++i) {
            const int n = first + i * STEP;
            if (BN % STEP && n >= BN) break;
            const bool ok = is_inside && n0 + n < KG;
            const long long at = ok ? (long long)(n0 + n) * KD + of_tap * CG + channel : 0;
            copy_async<VECTOR>(bs + part_of(i), filters_of_group + at, ok);
            if (TERMS == 3)
                copy_async<VECTOR>(bs + part_of(i) + BN * BK,
                                   filters_of_group + (long long)K * KD + at, ok);
        }
    };

    const Source source = {INPUT == 2 ? inputs : x, INPUT ? mean : 0, INPUT ? scale : 0, beta, low,
                           high};
    // Changes the parts of A that this thread has copied.
    auto change = [&](int step, int stage) {
        if (INPUT == 0 && !(TERMS == 1 && IN_WORD == 1)) return;
        const int k = step * BK + chunk * VECTOR;
        const int tap = k / CG, channel = k - tap * CG, i_h = tap / taps_along;
        const int h_by = i_h * vertical.move, w_by = (tap - i_h * taps_along) * level.move;
        const int of_vectors = (group * CG + channel) % period;
        const Norm<VECTOR> norm = norm_of<VECTOR>(source, of_vectors);
        Floats<VECTOR> fa, fb, fc;
        if (INPUT == 2) {
            fa = of_channels<VECTOR>(a, of_vectors), fb = of_channels<VECTOR>(b, of_vectors);
            fc = of_channels<VECTOR>(c, of_vectors);
        }
        value* as = (value*)(memory + stage * STAGE);
#pragma unroll 2
        for (int i = 0; i < BM / STEP; ++i) {
            const Row row = row_table[first + i * STEP];
            value* part = as + part_of(i);
            Floats<VECTOR> v = ::load<VECTOR>(part);
            const bool ok = k < depth && (u32)(row.h + h_by) < (u32)H &&
                            (u32)(row.w + w_by) < (u32)W;
            if (INPUT == 1) {
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
                    v.at[e] = ok ? activated(v.at[e], source, norm, e) : 0.f;
            }
            if (INPUT == 2) {
                const Floats<VECTOR> input = ::load<VECTOR>(part + OF_X * IN_WORD);
                const bool is_used = ok && m0 + first + i * STEP < (long long)valid[0] * (P * Q);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) {
                    const float of_z = gated(v.at[e], input.at[e], source, norm, e);
                    v.at[e] = is_used ? gradient(of_z, input.at[e], norm.mean.at[e], fa.at[e],
                                                 fb.at[e], fc.at[e])
                                      : 0.f;
                }
                if (ok && across == 0) store<VECTOR>(dz + row.at + channel, v);
            }
            if (TERMS == 1 && IN_WORD == 1) {
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) v.at[e] = rounded_to_tf32(v.at[e]);
            }
            store<VECTOR>(part, v);
        }
    };

    // offset of the matrix row that this lane loads at k = 0; for another k, XOR it with k
    const int of_a = place(wm + (lane & 15), (lane >> 4) * 4);
    const int of_b = place(wn + (lane >> 4) * 8 + (lane & 7), (lane >> 3 & 1) * 4);
    float sum[MI][NJ][4] = {};
#if TERMS == 3
    float total[MI][NJ][4] = {};  // tensor cores may truncate, so `sum` covers only one step
#else
    float(&total)[MI][NJ][4] = sum;
#endif
    const int of_split = (steps + SPLITS - 1) / SPLITS, begin = split * of_split;
    const int end = min(steps, begin + of_split);
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (begin + step < end) load(begin + step, step);
        cp_commit();
    }
    for (int step = begin, stage = 0; step < end; ++step) {
        cp_wait<STAGES - 2>();
        change(step, stage);
        __syncthreads();  // the step has arrived, and all warps have finished the previous step
        const int next = step + STAGES - 1;
        if (next < end) load(next, stage == 0 ? STAGES - 1 : stage - 1);
        cp_commit();
        const u32 *as = memory + stage * STAGE, *bs = as + OF_B;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        const int live = depth - step * BK;  // elements of this step
#pragma unroll
        for (int k = 0; k < WORDS; k += 8) {
            if (is_ragged && k * IN_WORD >= live) break;
            u32 of_n[NJ][2], low_of_n[NJ][2];
#pragma unroll
            for (int j = 0; j < NJ; j += 2) {
                u32 two[2][2];  // columns j, j + 1; an odd last column is loaded twice
                const int again = j + 1 < NJ ? 0 : (lane >> 4) * 8 * WORDS;
                const u32* from = bs + j * 8 * WORDS - again + (of_b ^ k);
                ldsm4(two[0][0], two[0][1], two[1][0], two[1][1], from);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (j + e / 2 < NJ) of_n[j + e / 2][e % 2] = two[e / 2][e % 2];
                if (TERMS == 3) {
                    ldsm4(two[0][0], two[0][1], two[1][0], two[1][1], from + BN * WORDS);
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (j + e / 2 < NJ) low_of_n[j + e / 2][e % 2] = two[e / 2][e % 2];
                }
            }
#pragma unroll
            for (int i = 0; i < MI; ++i) {
                u32 of_m[4], low_of_m[4];
                ldsm4(of_m[0], of_m[1], of_m[2], of_m[3], as + i * 16 * WORDS + (of_a ^ k));
#if TERMS == 3
#pragma unroll
                for (int e = 0; e < 4; ++e) tf32_parts(of_m[e], of_m[e], low_of_m[e]);
#pragma unroll
                for (int j = 0; j < NJ; ++j) mma_tf32(sum[i][j], low_of_m, of_n[j]);
#pragma unroll
                for (int j = 0; j < NJ; ++j) mma_tf32(sum[i][j], of_m, low_of_n[j]);
#endif
#pragma unroll
                for (int j = 0; j < NJ; ++j) mma(sum[i][j], of_m, of_n[j]);
            }
        }
#if TERMS == 3
        move_sums(total, sum);
#endif
    }

    // the tile goes to shared memory, so that neighbouring threads store neighbouring numbers
    cp_wait<0>();
    __syncthreads();
    float* tile = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int j = 0; j < NJ; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2*>(tile + (wm + i * 16 + half * 8 + (lane >> 2)) * PITCH +
                                           wn + j * 8 + 2 * (lane & 3)) =
                    make_float2(total[i][j][2 * half], total[i][j][2 * half + 1]);
    __syncthreads();
#if SPLITS > 1
    // the last block of a tile to arrive adds up the sums of all, in order
    volatile float* sums = partial + (long long)tile_of_all * SPLITS * (BM * BN);
    for (int i = tid; i < BM * BN; i += THREADS)
        sums[split * (BM * BN) + i] = tile[i / BN * PITCH + i % BN];
    __threadfence();
    __syncthreads();
    __shared__ bool is_last;
    if (tid == 0) is_last = atomicAdd(tickets + tile_of_all, 1) == SPLITS - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = tid; i < BM * BN; i += THREADS) {
        float of_all = sums[i];
#pragma unroll 4
        for (int n = 1; n < SPLITS; ++n) of_all += sums[n * (BM * BN) + i];
        tile[i / BN * PITCH + i % BN] = of_all;
    }
    if (tid == 0) tickets[tile_of_all] = 0;
    __syncthreads();
#endif

    const int column = tid % GROUPS * ACROSS, line = tid / GROUPS;
    const bool is_mine = line < ROWS && n0 + column < KG;
    Floats<ACROSS> of_bias = {};
    if (bias && is_mine) of_bias = of_channels<ACROSS>(bias, group * KG + n0 + column);
    for (int i = line; is_mine && i < BM; i += ROWS) {
        Floats<ACROSS> v;
#pragma unroll
        for (int e = 0; e < ACROSS; ++e) {
            v.at[e] = tile[i * PITCH + column + e] + of_bias.at[e];
            if (STATISTICS) tile[i * PITCH + column + e] = as_stored(v.at[e]);
        }
        if (row_of_y[i] >= 0) store_result<ACROSS>(y + row_of_y[i] + column, v);
    }
#if STATISTICS
    // for each block of images in the tile: a thread's rows, then all rows of a column
    __syncthreads();  // the tile holds what is stored
    float* of_line = tile + BM * PITCH;
    constexpr int HEAD = STATISTICS == 1;  // numbers of a leaf in front of those of the channels
    const Source before = {before_x,   before_mean, before_scale, before_beta,
                           before_low, before_high};
    Norm<ACROSS> norm = {};
    if (STATISTICS == 2 && is_mine) norm = norm_of<ACROSS>(before, group * KG + n0 + column);
    const long long of_block = 16LL * P * Q, used = min(rows, (long long)valid[0] * (P * Q));
    const long long stop = min(m0 + BM, rows);
    for (long long n = max(m0, 0LL) / of_block; n * of_block < stop; ++n) {
        const int i0 = (int)(max(max(m0, 0LL), n * of_block) - m0);
        const int i1 = (int)(min(stop, (n + 1) * of_block) - m0);
        const int count = max(0, min(i1, (int)min((long long)BM, used - m0)) - i0);
        const int own = is_mine ? max(0, (count - line + ROWS - 1) / ROWS) : 0;
        Floats<ACROSS> first = {}, second = {};  // mean and M2, or the sums of dz and dz (x - mean)
        for (int i = i0 + line, j = 0; j < own; i += ROWS, ++j) {
            Floats<ACROSS> x_before;
            if (STATISTICS == 2) x_before = ::load<ACROSS>(before_x + row_of_y[i] + column);
#pragma unroll
            for (int e = 0; e < ACROSS; ++e) {
                const float v = tile[i * PITCH + column + e];
                if (STATISTICS == 1) {
                    first.at[e] += v - tile[i0 * PITCH + column + e];
                } else {
                    const float of_z = gated(v, x_before.at[e], before, norm, e);
                    first.at[e] += of_z;
                    second.at[e] = fmaf(of_z, x_before.at[e] - norm.mean.at[e], second.at[e]);
                }
            }
        }
#pragma unroll
        for (int e = 0; e < ACROSS; ++e) {
            if (STATISTICS == 1 && own) {
                first.at[e] /= own;
                for (int i = i0 + line, j = 0; j < own; i += ROWS, ++j) {
                    const float d = tile[i * PITCH + column + e] - tile[i0 * PITCH + column + e] -
                                    first.at[e];
                    second.at[e] = fmaf(d, d, second.at[e]);
                }
            }
            if (is_mine) of_line[2 * (line * BN + column + e)] = first.at[e];
            if (is_mine) of_line[2 * (line * BN + column + e) + 1] = second.at[e];
        }
        __syncthreads();
        const int part = (int)(rest - (n * of_block + skipped) / BM);
        const long long width = HEAD + 2LL * K;
        const int left_over = (n + 1) * of_block <= m0 + BM ? parts - part : 1;
        double* leaf = leaves + (n * parts + part) * width;
        if (tid < BN && n0 + tid < KG) {
            double total = 0, other = 0;
            for (int i = 0; i < min(ROWS, count); ++i) {
                const double of_first = of_line[2 * (i * BN + tid)];
                const double rows_of_line = HEAD ? (count - i + ROWS - 1) / ROWS : 1;
                total += rows_of_line * of_first;
                other += of_line[2 * (i * BN + tid) + 1];
                if (STATISTICS == 1) other += rows_of_line * of_first * of_first;
            }
            if (STATISTICS == 1) {
                const double shift = count ? total / count : 0;
                other = fmax(other - total * shift, 0.0), total = tile[i0 * PITCH + tid] + shift;
            }
            const int channel = HEAD + group * KG + n0 + tid;
            leaf[channel] = total, leaf[K + channel] = other;
            for (int i = 1; STATISTICS == 2 && i < left_over; ++i)
                leaf[i * width + channel] = leaf[i * width + K + channel] = 0;
        }
        if (STATISTICS == 1 && tid == 0 && across == 0) {
            leaf[0] = count;
            for (int i = 1; i < left_over; ++i) leaf[i * width] = 0;
        }
        __syncthreads();
    }
#endif
}
