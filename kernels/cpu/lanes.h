/* Vectors of a build's native width over the 16 images of a block.
 *
 * A pixel of a block is LANES = 16 floats, one per image, in one 64-byte line. A build uses vectors
 * of WIDTH floats (16, 8 or 4), so a pixel consists of PARTS vectors. Kernels are written once for
 * all widths. Their outer loop runs over the parts:
 *
 *     for (int part = 0; part < LANES; part += WIDTH)
 *         ... load(x + pixel * LANES + part) ...
 *
 * The result of a lane does not depend on the width. `muladd` adds a product, with one rounding if
 * the machine has FMA. The compiler must not contract any other expression (-ffp-contract=off).
 * Sums over lanes use the same tree for all widths. Therefore the AVX2 and AVX-512 builds return
 * results that are equal bit for bit.
 */
#ifndef MPIDL_LANES_H
#define MPIDL_LANES_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define LANES 16
#if defined(__AVX512F__)
#define WIDTH 16
#define REGISTERS 32
#elif defined(__AVX2__)
#define WIDTH 8
#define REGISTERS 16
#elif defined(__aarch64__)
#define WIDTH 4
#define REGISTERS 32
#else
#define WIDTH 4
#define REGISTERS 16
#endif
#define PARTS (LANES / WIDTH)

/* A function that is compiled for the constants of each call, and one that is compiled once. */
#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Return how many parts of `size` items cover `count` items. The last part may be smaller. */
INLINE int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)") /* "GCC unroll" comes too late for registers */
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

typedef float vec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
#if defined(__AVX512F__) /* also for words of value.h, which no arithmetic may change */
INLINE vec splat(float f) { return (vec)_mm512_set1_ps(f); }
#else
INLINE vec splat(float f) { return f - (vec){0}; } /* f - 0 is f, even if f is -0 */
#endif
INLINE vec zero(void) { return (vec){0}; }

/* Return a * b + c, rounded once if the machine has FMA. */
INLINE vec muladd(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* Return v where the mask is set, else 0. A mask is the result of a comparison of vectors. */
INLINE vec keep(ivec mask, vec v) { return (vec)(mask & (ivec)v); }

/* Return a where the mask is set, else b. */
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

/* Return the larger of a and b, or b if one of them is NaN. */
INLINE vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    ivec a_is = a > b;
    return (vec)((a_is & (ivec)a) | (~a_is & (ivec)b));
#endif
}

/* Return the smaller of a and b, or b if one of them is NaN. */
INLINE vec smaller(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return choose(a < b, a, b);
#endif
}

/* Return a mask of the lanes below `valid` for the vector that starts at lane `part`. */
INLINE ivec lanes_below(int valid, int part) {
    static const int32_t index[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return *(const ivec *)(index + part) < valid;
}

/* Select elements of two vectors by their indices, 0 .. 2 * WIDTH - 1. */
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#if WIDTH == 16
#define EACH_LANE(f, s)                                                                            \
    f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s), f(8, s), f(9, s),      \
        f(10, s), f(11, s), f(12, s), f(13, s), f(14, s), f(15, s)
#elif WIDTH == 8
#define EACH_LANE(f, s) f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s)
#else
#define EACH_LANE(f, s) f(0, s), f(1, s), f(2, s), f(3, s)
#endif
#define LOW_LANE(j, s) (((j) & (s)) ? WIDTH + (j) - (s) : (j))
#define HIGH_LANE(j, s) (((j) & (s)) ? WIDTH + (j) : (j) + (s))
/* Form pairs of lanes that are s apart, where s is a power of two. LOWER takes the lower lane of
 * each pair of a and of b; HIGHER takes the higher lanes. A lane of the result comes from a if bit
 * s of its index is clear, and from b if the bit is set. */
#define LOWER(a, b, s) SHUFFLE(a, b, EACH_LANE(LOW_LANE, s))
#define HIGHER(a, b, s) SHUFFLE(a, b, EACH_LANE(HIGH_LANE, s))

/* Transpose WIDTH vectors of WIDTH lanes in registers. */
INLINE void transpose(vec *rows) {
#define STAGE(s)                                                                                   \
    UNROLL for (int i = 0; i < WIDTH; i++) if (!(i & s)) {                                         \
        vec a = rows[i], b = rows[i + s];                                                          \
        rows[i] = LOWER(a, b, s), rows[i + s] = HIGHER(a, b, s);                                   \
    }
    STAGE(1)
    STAGE(2)
#if WIDTH >= 8
    STAGE(4)
#endif
#if WIDTH >= 16
    STAGE(8)
#endif
#undef STAGE
}

/* Return a stride in floats: an odd number of lines of 16 floats, at least `lines`. Data at such
 * strides use different sets of a cache. */
static inline int64_t odd_lines(int64_t lines) { return (lines | 1) * LANES; }

/* Transpose a matrix of 16 x 16 floats. Rows of `from` are `row` floats apart, and rows of `to` are
 * `column` floats apart. */
INLINE void transpose_16(const float *from, int64_t row, float *to, int64_t column) {
    for (int r = 0; r < 16; r += WIDTH)
        for (int c = 0; c < 16; c += WIDTH) {
            vec v[WIDTH];
            UNROLL for (int i = 0; i < WIDTH; i++) v[i] = load(from + (r + i) * row + c);
            transpose(v);
            UNROLL for (int i = 0; i < WIDTH; i++) store(to + (c + i) * column + r, v[i]);
        }
}

/* Return a vector whose lane i is the sum of the lanes of rows[i], i < WIDTH. Adjacent lanes are
 * added first. */
INLINE vec sum_across(vec *rows) {
#define STAGE(s, n)                                                                                \
    UNROLL for (int i = 0; i < n; i++) rows[i] =                                                   \
        LOWER(rows[2 * i], rows[2 * i + 1], s) + HIGHER(rows[2 * i], rows[2 * i + 1], s);
    STAGE(1, WIDTH / 2)
    STAGE(2, WIDTH / 4)
#if WIDTH >= 8
    STAGE(4, WIDTH / 8)
#endif
#if WIDTH >= 16
    STAGE(8, WIDTH / 16)
#endif
#undef STAGE
    return rows[0];
}

/* Return the sum of the vectors of a pixel. Adjacent vectors are added first. */
INLINE vec sum_of_parts(const vec *part) {
#if PARTS == 4
    return (part[0] + part[1]) + (part[2] + part[3]);
#elif PARTS == 2
    return part[0] + part[1];
#else
    return part[0];
#endif
}

/* Set sums[i] to the sum of the 16 lanes of rows + i * LANES, for 16 rows. A binary tree adds the
 * lanes, adjacent lanes first, for every width. */
INLINE void lane_sums(const float *rows, float *sums) {
    UNROLL for (int i = 0; i < LANES; i += WIDTH) {
        vec part[PARTS];
        UNROLL for (int p = 0; p < PARTS; p++) {
            vec v[WIDTH];
            UNROLL for (int j = 0; j < WIDTH; j++) v[j] = load(rows + (i + j) * LANES + p * WIDTH);
            part[p] = sum_across(v);
        }
        store(sums + i, sum_of_parts(part));
    }
}

/* Return the sum of one row's 16 lanes, added by the tree of lane_sums. */
INLINE float lane_sum(const float *row) {
    float s[LANES];
    memcpy(s, row, sizeof s);
    for (int step = 1; step < LANES; step *= 2)
        for (int i = 0; i < LANES; i += 2 * step) s[i] += s[i + step];
    return s[0];
}

#endif
