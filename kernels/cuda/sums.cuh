// Sums over the rows of a matrix (images x pixels, C) in C order.
//
// A block processes the channels of one tile (blockIdx.y) for a range of rows. Thread t has VEC
// channels, starting at VEC * (t % tile), and rows t / tile, t / tile + rows, and so on. So a
// thread's channels are constant, and neighbouring threads read neighbouring memory. VEC is 4 if C
// is a multiple of 4, else 1.

constexpr int THREADS = 256;
// The number of rows that are loaded and summed at once, for parallel loads and short sums.
constexpr int TOGETHER = 8;
constexpr int FEW = TOGETHER / 2; // the same if each row is read from several arrays

struct Place {
    int channel, row, rows; // first channel; first row; rows that a block processes at once
    bool inside;
};

template <int VEC> __device__ __forceinline__ Place place(int channels, int tile) {
    Place p;
    p.channel = VEC * (blockIdx.y * tile + threadIdx.x % tile);
    p.row = threadIdx.x / tile;
    p.rows = THREADS / tile;
    p.inside = p.row < p.rows && p.channel < channels;
    return p;
}

// Adds up v over the rows of each column, in an order that depends only on `tile`. Row 0 gets the
// sum.
template <int N> __device__ __forceinline__ void add_rows(double (&v)[N], Place p, int tile) {
    __shared__ double shared[N][THREADS];
    for (int live = p.rows; live > 1;) { // each element of `shared` is written once
        const int half = (live + 1) / 2;
        if (p.row >= half && p.row < live)
#pragma unroll
            for (int k = 0; k < N; ++k) shared[k][threadIdx.x] = v[k];
        __syncthreads();
        if (p.row + half < live)
#pragma unroll
            for (int k = 0; k < N; ++k) v[k] += shared[k][threadIdx.x + half * tile];
        live = half;
    }
}

// The sums of dz and dz * (x - mean) over at most FEW rows. dz is dy if the activation of x is
// within its limits, else 0.
template <int VEC> struct Products {
    float dz[VEC], product[VEC];

    __device__ __forceinline__ void add(const Floats<VEC>& dy, const Floats<VEC>& x,
                                        const Source& source, const Norm<VEC>& norm) {
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const float d = gated(dy.at[k], x.at[k], source, norm, k);
            dz[k] += d;
            product[k] = fmaf(d, x.at[k] - norm.mean.at[k], product[k]);
        }
    }
    __device__ __forceinline__ void move_to(float (&sum)[2 * VEC]) {
#pragma unroll
        for (int k = 0; k < VEC; ++k) sum[k] += dz[k], sum[VEC + k] += product[k];
    }
};

// Writes leaf blockIdx.x of leaves (leaves, 2C): the sums of dz, then of dz * (x - mean).
template <int VEC>
__device__ __forceinline__ void write_leaf(double* leaves, const double* sums,
                                           const double* products, int channel, int channels) {
    leaves += blockIdx.x * 2 * (long long)channels + channel;
#pragma unroll
    for (int k = 0; k < VEC; ++k) leaves[k] = sums[k], leaves[channels + k] = products[k];
}

// Adds up the sums of a block's threads, and writes its leaf.
template <int VEC>
__device__ __forceinline__ void write_products(double* leaves, const float (&sum)[2 * VEC], Place p,
                                               int channels, int tile) {
    double total[2 * VEC];
#pragma unroll
    for (int k = 0; k < 2 * VEC; ++k) total[k] = sum[k];
    add_rows(total, p, tile);
    if (p.inside && p.row == 0)
        write_leaf<VEC>(leaves, total, total + VEC, p.channel, channels);
}
