/* Dropout. A random number for each element decides whether the element is kept. The random number
 * depends only on (key, epoch, sample, element) and is computed by Philox4x32-10 (Salmon et al.,
 * "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Therefore the forward and backward
 * passes use the same function, and no mask is stored.
 *
 * Each call of the generator provides 16 bits for each of GROUP consecutive elements, in WIDTH
 * samples of a block. mpidl/backends/reference/dropout.py computes the same bytes. */
#include "mpidl.h"
#include "special.h"
#include "team.h"
#include "value.h"

enum { GROUP = 8, GROUPS = 128, ROUNDS = 10 }; /* GROUPS: number of groups per tile */

struct job {
    const value *x;
    value *y;
    const int64_t *samples;
    int64_t rows, tiles; /* rows and tiles per block */
    int32_t threshold;
    float scale;
    uint32_t epoch, key[2];
    int whole_images;
};

/* Compute the upper and the lower 32 bits of the products of a with m. */
INLINE void multiply(uvec a, uint32_t m, uvec *high, uvec *low) {
#if defined(__AVX512F__)
    __m512i factor = _mm512_set1_epi64(m);
    __m512i even = _mm512_mul_epu32((__m512i)a, factor);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    *high = (uvec)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    *low = (uvec)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#elif defined(__AVX2__)
    __m256i factor = _mm256_set1_epi64x(m);
    __m256i even = _mm256_mul_epu32((__m256i)a, factor);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
    *high = (uvec)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    *low = (uvec)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
    for (int i = 0; i < WIDTH; i++) {
        uint64_t product = (uint64_t)a[i] * m;
        (*high)[i] = (uint32_t)(product >> 32), (*low)[i] = (uint32_t)product;
    }
#endif
}

/* Compute the four random words of each lane for the counter (a, b, c, d). */
INLINE void philox(uvec a, uvec b, uvec c, uvec d, const uint32_t *key, uvec *words) {
    uint32_t low = key[0], high = key[1];
    UNROLL for (int round = 0; round < ROUNDS; round++) {
        uvec first_high, first_low, second_high, second_low;
        multiply(a, 0xd2511f53u, &first_high, &first_low);
        multiply(c, 0xcd9e8d57u, &second_high, &second_low);
        a = second_high ^ b ^ low, b = second_low;
        c = first_high ^ d ^ high, d = first_low;
        low += 0x9e3779b9u, high += 0xbb67ae85u;
    }
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

static void dropout_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    int64_t block = tile / job->tiles, first = tile % job->tiles * GROUPS;
    int64_t stop = least(first + GROUPS, parts_of(job->rows, GROUP));
    uint32_t low[LANES], high[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t sample = (uint64_t)job->samples[block * LANES + lane];
        low[lane] = (uint32_t)sample, high[lane] = (uint32_t)(sample >> 32);
    }
    vec scale = splat(job->scale);
    if (job->whole_images) { /* all rows have the random number of row 0 */
        int64_t at = block * job->rows * LANES, end = least(stop * GROUP, job->rows);
        for (int part = 0; part < LANES; part += WIDTH) {
            uvec words[GROUP / 2];
            philox((uvec){0}, *(const uvec *)(low + part), *(const uvec *)(high + part),
                   (uvec){0} + job->epoch, job->key, words);
            ivec stays = (ivec)(words[0] << 16 >> 16) >= job->threshold;
            for (int64_t i = at + first * GROUP * LANES; i < at + end * LANES; i += LANES)
                store(job->y + i + part, keep(stays, load(job->x + i + part) * scale));
        }
        return;
    }
    for (int64_t group = first; group < stop; group++)
        for (int part = 0; part < LANES; part += WIDTH) {
            uvec words[GROUP / 2];
            philox((uvec){0} + (uint32_t)group, *(const uvec *)(low + part),
                   *(const uvec *)(high + part), (uvec){0} + job->epoch, job->key, words);
            int64_t at = (block * job->rows + group * GROUP) * LANES + part;
            int64_t left = job->rows - group * GROUP;
            const value *x = job->x + at;
            value *y = job->y + at;
#define ELEMENT(i)                                                                                 \
    {                                                                                              \
        ivec drawn = (ivec)(words[i / 2] << (i % 2 ? 0 : 16) >> 16);                               \
        store(y + i * LANES, keep(drawn >= job->threshold, load(x + i * LANES) * scale));          \
    }
            if (left >= GROUP)
                UNROLL for (int i = 0; i < GROUP; i++) ELEMENT(i)
            else
                for (int i = 0; i < left; i++) ELEMENT(i)
#undef ELEMENT
        }
}

void mpidl_dropout(const value *x, value *y, const int64_t *samples, int64_t blocks, int64_t rows,
                   int64_t threshold, float scale, int64_t epoch, int64_t key0, int64_t key1,
                   int64_t whole_images) {
    struct job job = {.x = x,
                      .y = y,
                      .samples = samples,
                      .rows = rows,
                      .tiles = parts_of(parts_of(rows, GROUP), GROUPS),
                      .threshold = (int32_t)threshold,
                      .scale = scale,
                      .epoch = (uint32_t)epoch,
                      .key = {(uint32_t)key0, (uint32_t)key1},
                      .whole_images = (int)whole_images};
    each_tile(blocks * job.tiles, dropout_tile, &job, 0);
}
