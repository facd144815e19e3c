/* Convert pixels (bytes or floats) of images to blocks of normalized floats. A `line` holds one
 * pixel of each of 16 images. The threads that load data call these functions while the main thread
 * computes, so the functions do not use team.h. */
#include "images.h"

#include "bytes.h"
#include "mpidl.h"

enum { CHUNK = 16 }; /* pixels of a row that are transposed together */

typedef uint8_t line __attribute__((vector_size(LANES), aligned(1), may_alias));

enum { LEFT_TO_RIGHT = 1, TOP_TO_BOTTOM = 2 }; /* the bits of `mirrored` */

/* Return the option's value for an image, or 0 if the option is not given. */
static int64_t of(const int32_t *option, int64_t image) { return option ? option[image] : 0; }

/* Return the index in `centre` and `divisor` for pixel (c, p, q) of the window. */
static int64_t place(const struct crop *s, int64_t c, int64_t p, int64_t q) {
    return s->of_pixels ? (c * s->P + p) * s->Q + q : c;
}

/* Convert floats. If centre is NULL, the floats are not normalized. */
void mpidl_images_of_floats(const float *pixels, int64_t images, const int64_t *shape,
                            const int32_t *mirrored, const int32_t *top, const int32_t *left,
                            const float *fill, const float *centre, const float *divisor,
                            float *lanes) {
    const struct crop *s = (const struct crop *)shape;
    if (!mirrored && !top && !left && s->P == s->H && s->Q == s->W) {
        blocks_of_floats(pixels, NULL, images, s, centre, divisor, lanes);
        return;
    }
    for (int64_t n = 0; n < (images + LANES - 1) / LANES * LANES; n++)
        for (int64_t c = 0; c < s->C; c++)
            for (int64_t p = 0; p < s->P; p++)
                for (int64_t q = 0; q < s->Q; q++) {
                    float value = 0;
                    if (n < images) {
                        int64_t h = p + of(top, n), w = q + of(left, n), at = place(s, c, p, q);
                        int inside = h >= 0 && h < s->H && w >= 0 && w < s->W;
                        if (of(mirrored, n) & LEFT_TO_RIGHT) w = s->W - 1 - w;
                        if (of(mirrored, n) & TOP_TO_BOTTOM) h = s->H - 1 - h;
                        value = fill ? fill[c] : 0;
                        if (inside) value = pixels[((n * s->C + c) * s->H + h) * s->W + w];
                        if (centre) value = (value - centre[at]) / divisor[at];
                    }
                    lanes[(((n / LANES * s->C + c) * s->P + p) * s->Q + q) * LANES + n % LANES] =
                        value;
                }
}

/* Convert bytes: 16 pixels of a row of 16 images at a time. */

#define PAIRS(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#define LOW(i) (i), 16 + (i)
#define HIGH(i) 8 + (i), 24 + (i)
#if defined(__clang__)
#define ZIP(a, b, half) __builtin_shufflevector(a, b, PAIRS(half))
#else
#define ZIP(a, b, half) __builtin_shuffle(a, b, (line){PAIRS(half)})
#endif

/* Transpose 16 x 16 bytes. Each round interleaves the bytes of rows i and i + 8. After four rounds,
 * the rows have become columns. */
INLINE void turn(line *rows) {
    UNROLL for (int round = 0; round < 4; round++) {
        line to[16];
        UNROLL for (int i = 0; i < 8; i++) {
            to[2 * i] = ZIP(rows[i], rows[i + 8], LOW);
            to[2 * i + 1] = ZIP(rows[i], rows[i + 8], HIGH);
        }
        UNROLL for (int i = 0; i < 16; i++) rows[i] = to[i];
    }
}

INLINE line load_line(const uint8_t *p) { return *(const line *)p; }

#if !defined(__AVX2__)
INLINE line reversed(line v) {
#if defined(__clang__)
    return __builtin_shufflevector(v, v, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#else
    return __builtin_shuffle(v, (line){15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0});
#endif
}
#endif

/* Return v, reversed if `mirrored`, without a branch, because images are mirrored at random. */
INLINE line ordered(line v, int64_t mirrored) {
#if defined(__AVX2__)
    static const int8_t order[2][CHUNK] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                           {15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}};
    return (line)_mm_shuffle_epi8((__m128i)v, _mm_loadu_si128((const __m128i *)order[mirrored]));
#else
    return mirrored ? reversed(v) : v;
#endif
}

/* The window of an image. `row` is the row of the image that corresponds to the current row of the
 * window, or NULL if that row is outside the image. */
struct look {
    int64_t top, left, mirrored;
    const uint8_t *row;
};

/* Return the pixels [q, q + CHUNK) of the window's row, mirrored if necessary. Pixels outside the
 * image are `outside`. The image has rows of W pixels. Memory from `all` to `end` may be read. */
INLINE line row_chunk(const struct look *look, int64_t W, int64_t q, const uint8_t *all,
                      const uint8_t *end, line outside) {
    static const uint8_t index[CHUNK] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint8_t *row = look->row;
    int64_t first = q + look->left, mirrored = look->mirrored & LEFT_TO_RIGHT;
    int64_t begin = first < 0 ? -first : 0, stop = W - first < CHUNK ? W - first : CHUNK;
    const uint8_t *from = row + (mirrored ? W - first - CHUNK : first);
    if (begin >= stop) return outside;
    if (from >= all && end - from >= CHUNK) { /* pixels of other rows are masked out */
        line seen = ordered(load_line(from), mirrored);
        if (begin == 0 && stop == CHUNK) return seen;
        line at = load_line(index);
        line inside = (line)(at >= (uint8_t)begin) & (line)(at < (uint8_t)stop);
        return (seen & inside) | (outside & ~inside);
    }
    uint8_t chunk[CHUNK];
    memcpy(chunk, &outside, sizeof chunk);
    for (int64_t i = begin; i < stop; i++) chunk[i] = row[mirrored ? W - 1 - first - i : first + i];
    return load_line(chunk);
}

/* Prefetch the next row of a mirrored image, because processors prefetch only from left to right.
 */
INLINE void soon(const struct look *look, const struct crop *s, const uint8_t *all,
                 const uint8_t *end) {
    if (!(look->mirrored & LEFT_TO_RIGHT)) return;
    const uint8_t *next = look->row + (look->mirrored & TOP_TO_BOTTOM ? -s->W : s->W);
    if (next >= all && next + s->W <= end)
        for (int64_t w = 0; w < s->W; w += 64) __builtin_prefetch(next + w);
}

void block_of_bytes(const uint8_t *all, const uint8_t *end, const int64_t *rows, int valid,
                    const struct crop *s, const struct moves *moves, int64_t first,
                    const float *centre, const float *divisor, float *lanes) {
    struct look look[LANES] = {0};
    for (int lane = 0; lane < valid; lane++) {
        int64_t n = first + lane;
        look[lane] = (struct look){of(moves->top, n), of(moves->left, n), of(moves->mirrored, n),
                                   NULL};
    }
    for (int64_t c = 0; c < s->C; c++) {
        line outside = (line){0} + (uint8_t)(moves->fill ? moves->fill[c] : 0);
        for (int64_t p = 0; p < s->P; p++, lanes += s->Q * LANES) {
            for (int lane = 0; lane < valid; lane++) {
                int64_t h = p + look[lane].top;
                int inside = h >= 0 && h < s->H;
                if (look[lane].mirrored & TOP_TO_BOTTOM) h = s->H - 1 - h;
                look[lane].row =
                    inside ? all + ((rows[lane] * s->C + c) * s->H + h) * s->W : NULL;
                if (look[lane].row) soon(&look[lane], s, all, end);
            }
            for (int64_t q = 0; q < s->Q; q += CHUNK) {
                line lines[LANES];
                for (int lane = 0; lane < LANES; lane++) {
                    lines[lane] = outside;
                    if (look[lane].row)
                        lines[lane] = row_chunk(&look[lane], s->W, q, all, end, outside);
                }
                turn(lines);
                uint8_t bytes[CHUNK * LANES];
                memcpy(bytes, lines, sizeof bytes);
                int64_t count = s->Q - q < CHUNK ? s->Q - q : CHUNK;
                for (int64_t i = 0; i < count; i++) {
                    int64_t at = place(s, c, p, q + i);
                    vec less = splat(centre ? centre[at] : 0.0f);
                    vec by = splat(centre ? divisor[at] : 255.0f);
                    for (int part = 0; part < LANES; part += WIDTH) {
                        ivec pixel = load_bytes(bytes + i * LANES + part);
                        vec v = (__builtin_convertvector(pixel, vec) - less) / by;
                        if (valid < LANES) v = keep(lanes_below(valid, part), v);
                        store(lanes + (q + i) * LANES + part, v);
                    }
                }
            }
        }
    }
}

void mpidl_images(const uint8_t *pixels, int64_t images, const int64_t *shape,
                  const int32_t *mirrored, const int32_t *top, const int32_t *left,
                  const uint8_t *fill, const float *centre, const float *divisor, float *lanes) {
    const struct crop *s = (const struct crop *)shape;
    const uint8_t *end = pixels + images * s->C * s->H * s->W;
    struct moves moves = {mirrored, top, left, fill};
    for (int64_t first = 0; first < images; first += LANES, lanes += s->C * s->P * s->Q * LANES) {
        int valid = (int)least(LANES, images - first);
        int64_t rows[LANES];
        for (int lane = 0; lane < valid; lane++) rows[lane] = first + lane;
        block_of_bytes(pixels, end, rows, valid, s, &moves, first, centre, divisor, lanes);
    }
}

/* ---- rows of decoded pictures to planes ---- */

/* The layout of a decoded picture; Python passes it as int64_t[5]. A pixel has `stride` bytes; only
 * the first C bytes are used. A row has `row` bytes. */
struct picture {
    int64_t C, H, W, stride, row;
};

typedef int32_t four __attribute__((vector_size(LANES), aligned(1), may_alias));

#if defined(__clang__)
#define PICK(type, a, b, ...) __builtin_shufflevector((type)(a), (type)(b), __VA_ARGS__)
#else
#define PICK(type, a, b, ...) __builtin_shuffle((type)(a), (type)(b), (type){__VA_ARGS__})
#endif

/* Split 16 pixels of 4 bytes into 16 bytes of each of the first three channels. */
INLINE void part(const uint8_t *from, uint8_t *red, uint8_t *green, uint8_t *blue) {
    line v[4];
    UNROLL for (int i = 0; i < 4; i++) {
        v[i] = load_line(from + LANES * i);
        v[i] = PICK(line, v[i], v[i], 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    }
    four a = PICK(four, v[0], v[1], 0, 4, 1, 5), b = PICK(four, v[2], v[3], 0, 4, 1, 5);
    four c = PICK(four, v[0], v[1], 2, 6, 3, 7), d = PICK(four, v[2], v[3], 2, 6, 3, 7);
    *(four *)red = PICK(four, a, b, 0, 1, 4, 5);
    *(four *)green = PICK(four, a, b, 2, 3, 6, 7);
    *(four *)blue = PICK(four, c, d, 0, 1, 4, 5);
}

void mpidl_planes(const uint8_t *pixels, const int64_t *shape, uint8_t *planes) {
    const struct picture *s = (const struct picture *)shape;
    int64_t plane = s->H * s->W;
    for (int64_t h = 0; h < s->H; h++) {
        const uint8_t *from = pixels + h * s->row;
        uint8_t *to = planes + h * s->W;
        int64_t w = 0;
        if (s->C == 3 && s->stride == 4)
            for (; w + LANES <= s->W; w += LANES)
                part(from + 4 * w, to + w, to + plane + w, to + 2 * plane + w);
        else if (s->C == s->stride && s->C == 1)
            memcpy(to, from, (size_t)(w = s->W));
        for (; w < s->W; w++)
            for (int64_t c = 0; c < s->C; c++) to[c * plane + w] = from[s->stride * w + c];
    }
}

/* The struct of the Arrow C data interface. */
struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers; /* a mask and the values */
    struct ArrowArray **children;
};

void mpidl_planes_of_arrow(int64_t array, const int64_t *shape, uint8_t *planes) {
    const struct ArrowArray *a = (const struct ArrowArray *)(intptr_t)array;
    if (a->n_children) a = a->children[0]; /* pixels of several bytes are in a child array */
    mpidl_planes((const uint8_t *)a->buffers[1], shape, planes);
}
