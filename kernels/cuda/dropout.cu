// Dropout. A random number for each element decides whether the element is kept. The random number
// depends only on (key, epoch, sample, element) and is computed by Philox4x32-10 (Salmon et al.,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011). kernels/cpu/dropout.c and
// mpidl/backends/reference/dropout.py compute the same bytes. The forward and backward passes use
// the same kernel.

typedef unsigned long long u64;

enum { GROUP = 8, ROUNDS = 10 };  // GROUP: elements per call of the generator

struct Words {
    u64 low, high;  // the first two words; the last two words
};

__device__ __forceinline__ Words philox(u32 a, u32 b, u32 c, u32 d, u32 low, u32 high) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const u64 first = (u64)a * 0xd2511f53u, second = (u64)c * 0xcd9e8d57u;
        a = (u32)(second >> 32) ^ b ^ low, b = (u32)second;
        c = (u32)(first >> 32) ^ d ^ high, d = (u32)first;
        low += 0x9e3779b9u, high += 0xbb67ae85u;
    }
    return {a | (u64)b << 32, c | (u64)d << 32};
}

// x and y are (images, pixels, C), epoch is (1,), samples is (images,). Pixel p of channel c is
// element number c * pixels + p. A thread processes up to 8 pixels of one channel, and neighbouring
// threads have neighbouring channels. `parts` blocks of threads share an image. If `whole_images`,
// all elements of an image have the random number of element 0.
extern "C" __global__ void __launch_bounds__(256)
dropout(const value* __restrict__ x, value* __restrict__ y, const int* __restrict__ epoch,
        const int* __restrict__ samples, int threshold, float scale, int key0, int key1, int C,
        int pixels, int parts, int whole_images) {
    const int image = blockIdx.x / parts;
    const int t = blockIdx.x % parts * blockDim.x + threadIdx.x, c = t % C, p = t / C * GROUP;
    if (p >= pixels) return;
    const int count = min((int)GROUP, pixels - p);
    const u64 element = whole_images ? 0 : (u64)c * pixels + p;
    const u32 group = (u32)(element / GROUP), sample = samples[image];
    int skip = (int)(element % GROUP);
    const Words here = philox(group, sample, 0, epoch[0], key0, key1);
    Words next = {};
    if (skip + count > GROUP) next = philox(group + 1, sample, 0, epoch[0], key0, key1);
    u64 low = here.low, high = here.high, then = next.low;  // 16 bits per element
    if (skip >= 4) low = high, high = then, then = next.high, skip -= 4;
    if (skip) {
        const int by = 16 * skip;
        low = low >> by | high << (64 - by);
        high = high >> by | then << (64 - by);
    }
    if (whole_images) low = high = (low & 0xffff) * 0x0001000100010001ull;
    const long long at = ((long long)image * pixels + p) * C + c;
    float v[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
        if (i < count) v[i] = get(x[at + (long long)i * C]);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        const int drawn = (int)((i < 4 ? low >> 16 * i : high >> 16 * (i - 4)) & 0xffff);
        if (i < count) y[at + (long long)i * C] = put(drawn >= threshold ? v[i] * scale : 0.f);
    }
}
