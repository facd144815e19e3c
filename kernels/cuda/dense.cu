// Fully connected layers in float32: three matrix products, computed from tiles in shared memory.
//
// The matrices in memory are x (images, features), weight (outputs, features), y and dy (images,
// outputs). A thread adds up the products of an element by fmaf in order, in runs of RUN products.
// The thread then adds the runs in order. So the sum of an element does not depend on the tile.

enum {
    THREADS = 128,
    DEPTH = 16,  // products per stage; for dweight, the images of one block (a leaf)
    RUN = 256,   // products that are added up separately, to keep rounding errors small
};

// Element k of column i of a tile is stored at [k][turned(k, i)], so that quads stored along k use
// different banks. Groups of 8 columns stay together.
template <int WIDTH> __device__ __forceinline__ int turned(int k, int i) {
    return i ^ ((k / 4 * 8) & (WIDTH - 1));
}

// Returns `count` floats, at most 4, starting at p, and zeros in the rest of the quad. `aligned`
// tells whether whole quads are aligned to 16 bytes.
__device__ __forceinline__ float4 quad(const float* p, int count, int aligned) {
    if (aligned && count >= 4) return *(const float4*)p;
    float4 found;
    found.x = count > 0 ? p[0] : 0.0f;
    found.y = count > 1 ? p[1] : 0.0f;
    found.z = count > 2 ? p[2] : 0.0f;
    found.w = count > 3 ? p[3] : 0.0f;
    return found;
}

// One stage of an operand with WIDTH columns, held in registers on its way to shared memory.
// Element (k, i) is matrix[i * pitch + k] if ALONG, else matrix[k * pitch + i].
template <int WIDTH, bool ALONG> struct Stage {
    static constexpr int QUADS = WIDTH * DEPTH / 4;
    static constexpr int HELD = (QUADS + THREADS - 1) / THREADS;
    float4 held[HELD];

    static __device__ __forceinline__ int column(int n) {
        return ALONG ? n / (DEPTH / 4) : n % (WIDTH / 4) * 4;
    }
    static __device__ __forceinline__ int product(int n) {
        return ALONG ? n % (DEPTH / 4) * 4 : n / (WIDTH / 4);
    }

    // Loads columns, starting at `first`, and products, starting at k. Elements past the end
    // (column >= `columns` or product >= `stop`) are zero.
    __device__ __forceinline__ void fetch(const float* matrix, int pitch, int first, int columns,
                                          int k, int stop, int aligned) {
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            const int n = threadIdx.x + h * THREADS;
            const int i = first + column(n), d = k + product(n);
            int count = ALONG ? stop - d : columns - i;
            if (ALONG ? i >= columns : d >= stop) count = 0;
            if (QUADS % THREADS && n >= QUADS) count = 0;
            const long long at = ALONG ? (long long)i * pitch + d : (long long)d * pitch + i;
            held[h] = quad(matrix + at, count, aligned);
        }
    }

    __device__ __forceinline__ void put(float (*tile)[WIDTH]) const {
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            const int n = threadIdx.x + h * THREADS, d = product(n);
            if (QUADS % THREADS && n >= QUADS) break;
            const int i = turned<WIDTH>(d, column(n));
            if (ALONG) {
                tile[d][i] = held[h].x;
                tile[d + 1][i] = held[h].y;
                tile[d + 2][i] = held[h].z;
                tile[d + 3][i] = held[h].w;
            } else {
                *(float4*)&tile[d][i] = held[h];
            }
        }
    }
};

// A tile of ROWS x COLUMNS elements. A thread has T x U of these elements, in groups of 4 (or 2)
// adjacent elements.
template <int ROWS, int COLUMNS, int T, int U> struct Tile {
    static constexpr int ACROSS = COLUMNS / U;  // threads per row of the tile
    static_assert(ROWS / T * ACROSS == THREADS, "a thread for each group of elements");
    float sum[T][U];

    // Returns the row or column of element t of thread n, if `size` rows or columns are divided
    // among threads that have `own` each.
    template <int size, int own> static __device__ __forceinline__ int place(int n, int t) {
        constexpr int group = own < 4 ? own : 4;
        return t / group * (size / (own / group)) + n * group + t % group;
    }
    static __device__ __forceinline__ int row(int t) {
        return place<ROWS, T>(threadIdx.x / ACROSS, t);
    }
    static __device__ __forceinline__ int column(int u) {
        return place<COLUMNS, U>(threadIdx.x % ACROSS, u);
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int t = 0; t < T; t++)
#pragma unroll
            for (int u = 0; u < U; u++) sum[t][u] = 0.0f;
    }

    __device__ __forceinline__ void add(const Tile& other) {
#pragma unroll
        for (int t = 0; t < T; t++)
#pragma unroll
            for (int u = 0; u < U; u++) sum[t][u] += other.sum[t][u];
    }

    template <int WIDTH, int OWN>
    static __device__ __forceinline__ void take(float (&to)[OWN], const float (*tile)[WIDTH], int k,
                                                int n) {
        if (OWN >= 4) {
#pragma unroll
            for (int t = 0; t < OWN / 4; t++) {
                const float4 v =
                    *(const float4*)&tile[k][turned<WIDTH>(k, place<WIDTH, OWN>(n, 4 * t))];
                to[4 * t] = v.x, to[4 * t + 1] = v.y, to[4 * t + 2] = v.z, to[4 * t + 3] = v.w;
            }
        } else {
            const float2 v = *(const float2*)&tile[k][turned<WIDTH>(k, place<WIDTH, OWN>(n, 0))];
            to[0] = v.x, to[1] = v.y;
        }
    }

    // Adds the products of a stage to the sums.
    __device__ __forceinline__ void multiply(const float (*a)[ROWS], const float (*b)[COLUMNS]) {
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            float left[T], right[U];
            take(left, a, k, threadIdx.x / ACROSS);
            take(right, b, k, threadIdx.x % ACROSS);
#pragma unroll
            for (int t = 0; t < T; t++)
#pragma unroll
                for (int u = 0; u < U; u++) sum[t][u] = fmaf(left[t], right[u], sum[t][u]);
        }
    }

    // Writes the tile to a matrix (rows, columns), starting at `first_row` and `first_column`.
    // Elements outside the matrix are skipped. bias: a number that is added to each column, or
    // null.
    __device__ __forceinline__ void write(float* to, const float* bias, int first_row,
                                          int first_column, int rows, int columns,
                                          int aligned) const {
#pragma unroll
        for (int t = 0; t < T; t++) {
            const int m = first_row + row(t);
            if (m >= rows) continue;
            float* line = to + (long long)m * columns;
#pragma unroll
            for (int u = 0; u < U; u += U < 4 ? U : 4) {
                const int n = first_column + column(u);
                if (U >= 4 && aligned && !bias && n + 4 <= columns) {
                    *(float4*)(line + n) =
                        make_float4(sum[t][u], sum[t][u + 1], sum[t][u + 2], sum[t][u + 3]);
                } else {
#pragma unroll
                    for (int v = 0; v < (U < 4 ? U : 4); v++)
                        if (n + v < columns)
                            line[n + v] = bias ? sum[t][u + v] + bias[n + v] : sum[t][u + v];
                }
            }
        }
    }
};

// Returns one tile of a (rows x products) times b (products x columns), for products k to
// `stop`. The products are contiguous in a and, if ALONG, also in b. blockIdx.x and blockIdx.y
// select the columns and rows of the tile.
template <int ROWS, int COLUMNS, int T, int U, bool ALONG>
__device__ __forceinline__ Tile<ROWS, COLUMNS, T, U> multiplied(
    float (*tile_a)[DEPTH][ROWS], float (*tile_b)[DEPTH][COLUMNS], const float* a, const float* b,
    int rows, int columns, int pitch_a, int pitch_b, int k, int stop, int aligned_a,
    int aligned_b) {
    const int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
    Stage<ROWS, true> stage_a;
    Stage<COLUMNS, ALONG> stage_b;
    Tile<ROWS, COLUMNS, T, U> total, run;
    total.clear(), run.clear();
    stage_a.fetch(a, pitch_a, first_row, rows, k, stop, aligned_a);
    stage_b.fetch(b, pitch_b, first_column, columns, k, stop, aligned_b);
    for (int n = 0; k < stop; n++, k += DEPTH) {
        stage_a.put(tile_a[n & 1]);
        stage_b.put(tile_b[n & 1]);
        __syncthreads();
        if (k + DEPTH < stop) {
            stage_a.fetch(a, pitch_a, first_row, rows, k + DEPTH, stop, aligned_a);
            stage_b.fetch(b, pitch_b, first_column, columns, k + DEPTH, stop, aligned_b);
        }
        run.multiply(tile_a[n & 1], tile_b[n & 1]);
        if ((n + 1) % (RUN / DEPTH) == 0) {
            total.add(run);
            run.clear();
        }
    }
    total.add(run);
    return total;
}

// ---- forward ----

// sums[blockIdx.z] (images, outputs): the sums over chunk blockIdx.z of the features. If one chunk
// has all features, `sums` is y and the bias is added. Otherwise bias is null.
#define FORWARD(ROWS, COLUMNS, T, U)                                                               \
    alignas(16) __shared__ float tile_a[2][DEPTH][ROWS];                                           \
    alignas(16) __shared__ float tile_b[2][DEPTH][COLUMNS];                                        \
    const int first = blockIdx.z * chunk, stop = min(first + chunk, features);                     \
    multiplied<ROWS, COLUMNS, T, U, true>(tile_a, tile_b, x, weight, images, outputs, features,    \
                                          features, first, stop, aligned, aligned)                 \
        .write(sums + (long long)blockIdx.z * images * outputs, bias, blockIdx.y * ROWS,           \
               blockIdx.x * COLUMNS, images, outputs, aligned_out)

// The forward pass for at most 16 outputs, with tiles of 64 images x 16 outputs.
extern "C" __global__ void __launch_bounds__(128) dense_few(
    const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ sums, int images, int outputs, int features, int chunk, int aligned,
    int aligned_out) {
    FORWARD(64, 16, 4, 2);
}

// The forward pass with tiles of 64 images x 64 outputs.
extern "C" __global__ void __launch_bounds__(128) dense_many(
    const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ sums, int images, int outputs, int features, int chunk, int aligned,
    int aligned_out) {
    FORWARD(64, 64, 8, 4);
}

// The forward pass with tiles of 128 images x 64 outputs.
extern "C" __global__ void __launch_bounds__(128) dense_large(
    const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ sums, int images, int outputs, int features, int chunk, int aligned,
    int aligned_out) {
    FORWARD(128, 64, 8, 8);
}

// y = bias (if not null) + the sum of the chunks in order, for `count` elements, which is images x
// outputs.
extern "C" __global__ void __launch_bounds__(256) dense_chunks(
    const float* __restrict__ sums, const float* __restrict__ bias, float* __restrict__ y,
    long long count, int outputs, int chunks) {
    const long long i = blockIdx.x * 256LL + threadIdx.x;
    if (i >= count) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int c = 0; c < chunks; c++) sum += sums[c * count + i];
    y[i] = bias ? sum + bias[i % outputs] : sum;
}

// ---- backward ----

// dx (images, features) = dy (images, outputs) times weight (outputs, features).
#define BACKWARD(ROWS, COLUMNS, T, U)                                                              \
    alignas(16) __shared__ float tile_a[2][DEPTH][ROWS];                                           \
    alignas(16) __shared__ float tile_b[2][DEPTH][COLUMNS];                                        \
    multiplied<ROWS, COLUMNS, T, U, false>(tile_a, tile_b, dy, weight, images, features, outputs,  \
                                           features, 0, outputs, aligned_dy, aligned)              \
        .write(dx, (const float*)0, blockIdx.y * ROWS, blockIdx.x * COLUMNS, images, features,     \
               aligned)

// dx with tiles of 64 images x 64 features.
extern "C" __global__ void __launch_bounds__(128) dense_dx(
    const float* __restrict__ dy, const float* __restrict__ weight, float* __restrict__ dx,
    int images, int outputs, int features, int aligned_dy, int aligned) {
    BACKWARD(64, 64, 8, 4);
}

// dx with tiles of 128 images x 64 features.
extern "C" __global__ void __launch_bounds__(128) dense_dx_large(
    const float* __restrict__ dy, const float* __restrict__ weight, float* __restrict__ dx,
    int images, int outputs, int features, int aligned_dy, int aligned) {
    BACKWARD(128, 64, 8, 8);
}

// nodes (ranges, outputs, features): dy^T x for each range of blocks, where a leaf is a block of 16
// images. blockIdx.z is the number of the range.
//
// Leaves are folded one after the other. If bit l of i is set, level l holds the node of 2^l leaves
// that leaf i must be combined with. Leaf i is added to the nodes of the levels below its first 0
// bit, and the sum is stored at that level. The last leaf is added to all levels that hold a node.
// So LEVELS registers per element are enough for 2^LEVELS leaves. If `plain`, all leaves are added
// up from left to right.
//
// ranges: for each range, its first block, counted from the first block of this rank's share, and
// its number of blocks.
template <int LEVELS, int ROWS, int COLUMNS, int T, int U>
__device__ __forceinline__ void fold_leaves(float (*tile_a)[DEPTH][ROWS],
                                            float (*tile_b)[DEPTH][COLUMNS], const float* dy,
                                            const float* x, float* nodes, const int* ranges,
                                            int outputs, int features, int plain, int aligned_dy,
                                            int aligned) {
    const int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
    const int first = ranges[2 * blockIdx.z], leaves = ranges[2 * blockIdx.z + 1];
    const int stop = leaves * DEPTH;
    dy += (long long)first * DEPTH * outputs;
    x += (long long)first * DEPTH * features;
    Stage<ROWS, false> stage_a;
    Stage<COLUMNS, false> stage_b;
    Tile<ROWS, COLUMNS, T, U> level[LEVELS], sum;
    stage_a.fetch(dy, outputs, first_row, outputs, 0, stop, aligned_dy);
    stage_b.fetch(x, features, first_column, features, 0, stop, aligned);
    for (int leaf = 0; leaf < leaves; leaf++) {
        stage_a.put(tile_a[leaf & 1]);
        stage_b.put(tile_b[leaf & 1]);
        __syncthreads();
        const bool last = leaf + 1 == leaves;
        if (!last) {
            const int k = (leaf + 1) * DEPTH;
            stage_a.fetch(dy, outputs, first_row, outputs, k, stop, aligned_dy);
            stage_b.fetch(x, features, first_column, features, k, stop, aligned);
        }
        sum.clear();
        sum.multiply(tile_a[leaf & 1], tile_b[leaf & 1]);
        if (plain) {
            if (leaf) sum.add(level[0]);
            level[0] = sum;
        } else {
            bool open = true;
#pragma unroll
            for (int l = 0; l < LEVELS; l++) {
                if (open && (leaf >> l & 1)) {
                    sum.add(level[l]);
                } else if (open && !last) {
                    level[l] = sum;
                    open = false;
                }
            }
        }
    }
    sum.write(nodes + blockIdx.z * ((long long)outputs * features), (const float*)0, first_row,
              first_column, outputs, features, aligned);
}

#define DWEIGHT(LEVELS, ROWS, COLUMNS, T, U)                                                      \
    alignas(16) __shared__ float tile_a[2][DEPTH][ROWS];                                          \
    alignas(16) __shared__ float tile_b[2][DEPTH][COLUMNS];                                       \
    fold_leaves<LEVELS, ROWS, COLUMNS, T, U>(tile_a, tile_b, dy, x, nodes, ranges, outputs,       \
                                             features, plain, aligned_dy, aligned)

// dweight for at most 16 outputs and ranges of up to 2^6 blocks.
extern "C" __global__ void __launch_bounds__(128) dense_dweight_few(
    const float* __restrict__ dy, const float* __restrict__ x, float* __restrict__ nodes,
    const int* __restrict__ ranges, int outputs, int features, int plain, int aligned_dy,
    int aligned) {
    DWEIGHT(6, 16, 64, 2, 4);
}

// dweight for ranges of up to 2^4 blocks.
extern "C" __global__ void __launch_bounds__(128) dense_dweight_short(
    const float* __restrict__ dy, const float* __restrict__ x, float* __restrict__ nodes,
    const int* __restrict__ ranges, int outputs, int features, int plain, int aligned_dy,
    int aligned) {
    DWEIGHT(4, 64, 64, 8, 4);
}

// dweight for ranges of up to 2^8 blocks.
extern "C" __global__ void __launch_bounds__(128) dense_dweight_long(
    const float* __restrict__ dy, const float* __restrict__ x, float* __restrict__ nodes,
    const int* __restrict__ ranges, int outputs, int features, int plain, int aligned_dy,
    int aligned) {
    DWEIGHT(8, 64, 32, 4, 4);
}
