/* The type of a stored activation or cotangent. Sources that use this type are compiled twice: once
 * with float, and with -DBF16 once with bfloat16, the upper 16 bits of a float. `load` and
 * `store` convert by the type of the pointer; arithmetic is in float. In the second compilation,
 * build.py renames the functions NAME of these sources to NAME_bf16: those that mpidl.h declares
 * with arguments of this type, and all that a header with this type declares.
 *
 * Rounding to bfloat16 is to nearest, ties to even. Numbers of magnitude below 2^-56 become zero.
 * Then the product of two of them is a multiple of 2^-126, and so is every sum of such products. So
 * no sum is subnormal, and the results do not depend on how an instruction treats subnormal
 * numbers. For the same reason, a bias is added after the products. */
#ifndef MPIDL_VALUE_H
#define MPIDL_VALUE_H

#include "lanes.h"

#ifdef BF16
typedef uint16_t value;
#else
typedef float value;
#endif
enum { NARROW = sizeof(value) == 2 };

typedef uint32_t words __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

/* Round to bfloat16; the lower 16 bits of the result are zero. */
INLINE vec rounded(vec v) {
    words bits = (words)v, odd = bits >> 16 & 1;
    words result = (bits + 0x7fff + odd) & 0xffff0000;
    ivec is_number = v == v, is_small = ((ivec)bits & 0x7fffffff) < 0x23800000; /* 2^-56 */
    result = (result & (words)is_number) | (((bits & 0xffff0000) | 0x400000) & ~(words)is_number);
    return (vec)(result & ~(words)is_small);
}

#if defined(__AVX512BF16__)
/* Round to bfloat16. */
INLINE __m256i narrowed(vec v) {
    __mmask16 stays = _mm512_cmp_ps_mask(_mm512_abs_ps((__m512)v), _mm512_set1_ps(0x1p-56f),
                                         _CMP_NLT_UQ);
    return (__m256i)_mm512_maskz_cvtneps_pbh(stays, (__m512)v);
}
#endif

INLINE vec load_narrow(const uint16_t *p) {
#if defined(__AVX512F__)
    __m256i half = _mm256_loadu_si256((const __m256i *)p);
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif defined(__AVX2__)
    __m128i half = _mm_loadu_si128((const __m128i *)p);
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
    words bits;
    UNROLL for (int i = 0; i < WIDTH; i++) bits[i] = (uint32_t)p[i] << 16;
    return (vec)bits;
#endif
}

#if defined(__AVX512F__)
typedef __m256i halves; /* bfloat16 numbers of a vector */
#elif defined(__AVX2__)
typedef __m128i halves;
#endif
#if defined(__AVX2__) || defined(__AVX512F__)
INLINE halves halves_of(vec v) {
#if defined(__AVX512BF16__)
    return narrowed(v);
#elif defined(__AVX512F__)
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rounded(v), 16));
#else
    __m256i bits = _mm256_srli_epi32((__m256i)rounded(v), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
#endif
}
#endif

INLINE void store_narrow(uint16_t *p, vec v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, halves_of(v));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i *)p, halves_of(v));
#else
    words bits = (words)rounded(v) >> 16;
    UNROLL for (int i = 0; i < WIDTH; i++) p[i] = (uint16_t)bits[i];
#endif
}

/* Store to memory without reading its lines into the caches. `p` is aligned to the vector. */
INLINE void stream_wide(float *p, vec v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
    _mm256_stream_ps(p, (__m256)v);
#else
    store(p, v);
#endif
}

INLINE void stream_narrow(uint16_t *p, vec v) {
#if defined(__AVX512F__)
    _mm256_stream_si256((__m256i *)p, halves_of(v));
#elif defined(__AVX2__)
    _mm_stream_si128((__m128i *)p, halves_of(v));
#else
    store_narrow(p, v);
#endif
}

/* Make the streamed stores visible to other threads. */
INLINE void streamed(void) {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

#define load(p)                                                                                    \
    _Generic((p), uint16_t *: load_narrow, const uint16_t *: load_narrow, default: load)(p)
#define store(p, v) _Generic((p), uint16_t *: store_narrow, default: store)(p, v)
#define stream(p, v) _Generic((p), uint16_t *: stream_narrow, default: stream_wide)(p, v)

/* ---- operands of products of bfloat16 numbers ----
 *
 * A product of two bfloat16 numbers is exact in float. The sum over channels adds the products of a
 * pair of channels (2 i, 2 i + 1) in the order (sum + odd) + even, with one rounding each, and so
 * does a sum over images. vdpbf16ps computes this for a word, which holds a pair: the even number in
 * the lower half. Other builds keep each rounded number as a float and add the products one by one
 * in the same order. AMX (tdpbf16ps) and Arm's bfdot compute other sums. */
#if defined(BF16) && defined(__AVX512BF16__)
#define PER_WORD 2
#else
#define PER_WORD 1
#endif
/* The number of terms of a sum over the images of a pixel. With SWAP, such a sum adds term t ^ 1 at
 * position t, so that the odd number of a pair comes first. */
enum { TERMS_PER_PIXEL = LANES / PER_WORD, SWAP = NARROW && PER_WORD == 1 };

/* Return sum + the products of the numbers in the words a and b. */
INLINE vec add_words(vec a, vec b, vec sum) {
#if PER_WORD == 2
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return muladd(a, b, sum);
#endif
}

/* Return the words of two vectors of numbers that are already rounded. */
INLINE vec joined(vec even, vec odd) { return (vec)((words)even >> 16 | (words)odd); }

/* Return the words of two vectors of numbers. */
INLINE vec paired(vec even, vec odd) {
#if PER_WORD == 2
    __m512i low = _mm512_cvtepu16_epi32(narrowed(even));
    __m512i high = _mm512_cvtepu16_epi32(narrowed(odd));
    return (vec)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
#else
    return joined(rounded(even), rounded(odd));
#endif
}

#if PER_WORD == 2
/* Return the words of 2 * WIDTH adjacent numbers. */
INLINE vec words_of(vec low, vec high) {
    const __m512 size = _mm512_set1_ps(0x1p-56f);
    __mmask16 first = _mm512_cmp_ps_mask(_mm512_abs_ps((__m512)low), size, _CMP_NLT_UQ);
    __mmask16 second = _mm512_cmp_ps_mask(_mm512_abs_ps((__m512)high), size, _CMP_NLT_UQ);
    return (vec)_mm512_maskz_cvtne2ps_pbh(_mm512_kunpackw(second, first), (__m512)high,
                                          (__m512)low);
}
#endif

/* The same for single numbers: the bits of a number rounded to bfloat16, this number, and a word. */
INLINE uint32_t rounded_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    const uint32_t size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (bits & 0xffff0000) | 0x400000; /* NaN */
    return size < 0x23800000 ? 0 : (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
}

INLINE float rounded_number(float number) {
    const uint32_t bits = rounded_bits(number);
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE float word_of(float even, float odd) {
    const uint32_t bits = rounded_bits(even) >> 16 | rounded_bits(odd);
    float word;
    memcpy(&word, &bits, sizeof word);
    return word;
}

#endif
