// Transposes filters for backward-data: (K, R, S, C/groups) -> (C, R, S, K/groups). A block of
// threads transposes a tile of 32 x 32 weights of one group and tap.
extern "C" __global__ void __launch_bounds__(256)
conv_weights(const float* __restrict__ w, float* __restrict__ turned, int filters, int channels,
             int taps, int groups) {
    __shared__ float tile[32][33];
    const int KG = filters / groups, CG = channels / groups;
    const int tiles_k = (KG + 31) / 32, tiles_c = (CG + 31) / 32;
    int rest = blockIdx.x;
    const int c0 = rest % tiles_c * 32;
    rest /= tiles_c;
    const int k0 = rest % tiles_k * 32;
    rest /= tiles_k;
    const int tap = rest % taps, group = rest / taps;
    const int lane = threadIdx.x & 31;
    for (int i = threadIdx.x >> 5; i < 32; i += 8) {
        const int k = k0 + i, c = c0 + lane;
        if (k < KG && c < CG)
            tile[i][lane] = w[((long long)(group * KG + k) * taps + tap) * CG + c];
    }
    __syncthreads();
    for (int i = threadIdx.x >> 5; i < 32; i += 8) {
        const int k = k0 + lane, c = c0 + i;
        if (k < KG && c < CG)
            turned[((long long)(group * CG + c) * taps + tap) * KG + k] = tile[lane][i];
    }
}
