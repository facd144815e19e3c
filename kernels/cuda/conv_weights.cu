// Prepares filters for conv_gemm.cu: rounds them and, for backward-data, turns (K, R, S, C/groups)
// into (C, R, S, K/groups). Definitions: TERMS as there.
#ifndef TERMS
#define TERMS 3
#endif

// Row blockIdx.y of `table` describes the filters of a layer: the addresses of the weights (floats)
// and of the result (values), filters, channels, taps, groups, whether to turn them, and the number
// of channels of zeros that follow those of each tap. With three TERMS, the remainders follow the
// rounded weights. A block of threads prepares tiles of 32 x 32 weights of one group and tap.
extern "C" __global__ void __launch_bounds__(256)
conv_weights(const long long* __restrict__ table) {
    __shared__ float tile[32][33];
    table += 8 * blockIdx.y;
    const float* w = reinterpret_cast<const float*>(table[0]);
    value* prepared = reinterpret_cast<value*>(table[1]);
    const int taps = (int)table[4], groups = (int)table[5];
    const int KG = (int)table[2] / groups, CG = (int)table[3] / groups, is_turned = (int)table[6];
    const int CE = CG + (int)table[7];  // channels of the result
    const int tiles_k = (KG + 31) / 32, tiles_c = (CE + 31) / 32, lane = threadIdx.x & 31;
    const long long all = (long long)groups * KG * taps * CE;
    for (long long n = blockIdx.x; n < (long long)tiles_c * tiles_k * taps * groups;
         n += gridDim.x) {
        long long rest = n;
        const int c0 = (int)(rest % tiles_c) * 32;
        rest /= tiles_c;
        const int k0 = (int)(rest % tiles_k) * 32;
        rest /= tiles_k;
        const int tap = (int)(rest % taps), group = (int)(rest / taps);
        __syncthreads();  // the tile is no longer read
        for (int i = threadIdx.x >> 5; i < 32; i += 8) {
            const int k = k0 + i, c = c0 + lane;
            if (k < KG && c < CE)
                tile[i][lane] =
                    c < CG ? w[((long long)(group * KG + k) * taps + tap) * CG + c] : 0.0f;
        }
        __syncthreads();
        for (int i = threadIdx.x >> 5; i < 32; i += 8) {
            const int k = is_turned ? k0 + lane : k0 + i, c = is_turned ? c0 + i : c0 + lane;
            if (k >= KG || c >= CE) continue;
            const float weight = tile[k - k0][c - c0];
            const long long to = is_turned ? ((long long)(group * CE + c) * taps + tap) * KG + k
                                           : ((long long)(group * KG + k) * taps + tap) * CE + c;
#ifdef BF16
            prepared[to] = put(weight);
#elif TERMS == 1
            prepared[to] = rounded_to_tf32(weight);
#else
            u32 high, low;
            tf32_parts(__float_as_uint(weight), high, low);
            prepared[to] = __uint_as_float(high), prepared[all + to] = __uint_as_float(low);
#endif
        }
    }
}
