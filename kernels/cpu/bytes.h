/* Convert bytes to and from vectors, one byte per lane. The compilers' own conversions convert one
 * element at a time. */
#ifndef MPIDL_BYTES_H
#define MPIDL_BYTES_H

#include "lanes.h"

INLINE ivec load_bytes(const uint8_t *p) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return (ivec){p[0], p[1], p[2], p[3]};
#endif
}

/* Store numbers from 0 to 255 as bytes. */
INLINE void store_bytes(uint8_t *p, ivec v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
    __m128i low = _mm256_castsi256_si128((__m256i)v), high = _mm256_extracti128_si256((__m256i)v, 1);
    __m128i words = _mm_packus_epi32(low, high);
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
#else
    for (int i = 0; i < WIDTH; i++) p[i] = (uint8_t)v[i];
#endif
}

#endif
