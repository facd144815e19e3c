/* Rotate, scale and shear images: each output pixel is interpolated at its position in the input.
 * The threads that load data call these functions, so the functions do not use team.h. Each sum and
 * each product is rounded separately, in the order written, so the results of all builds are equal
 * bit for bit. */
#include <math.h>

#include "mpidl.h"

/* The sizes of the input and the output; Python passes them as int64_t[5]. */
struct warp {
    int64_t C, H, W, P, Q;
};

/* The position of an output pixel in the input: the input pixel above and to the left, and the
 * distance from that pixel (0 to 1). */
struct from {
    int64_t h, w;
    float down, across;
};

/* Clamp a position far outside the image, where all pixels have the same value. */
static double near(double at, int64_t size) {
    return at < -2 ? -2 : at > (double)size + 1 ? (double)size + 1 : at;
}

static struct from place(const double *m, int64_t p, int64_t q, const struct warp *s) {
    double x = near(m[0] * (double)q + (m[1] * (double)p + m[2]), s->W);
    double y = near(m[3] * (double)q + (m[4] * (double)p + m[5]), s->H);
    double column = floor(x), row = floor(y);
    return (struct from){(int64_t)row, (int64_t)column, (float)(y - row), (float)(x - column)};
}

static uint8_t rounded_uint8_t(float value) { return (uint8_t)(value + 0.5f); } /* for 0 .. 255 */
static float rounded_float(float value) { return value; }

#define WARP(name, type)                                                                           \
    static float name##_at(const type *plane, const struct warp *s, int64_t h, int64_t w,          \
                           type outside) {                                                         \
        return h >= 0 && h < s->H && w >= 0 && w < s->W ? plane[h * s->W + w] : outside;           \
    }                                                                                              \
                                                                                                   \
    void name(const type *pixels, int64_t count, const int64_t *shape, const double *maps,         \
              const type *fill, type *out) {                                                       \
        const struct warp *s = (const struct warp *)shape;                                         \
        int64_t plane = s->H * s->W, size = s->P * s->Q;                                           \
        for (int64_t n = 0; n < count; n++, maps += 6, pixels += s->C * plane, out += s->C * size) \
            for (int64_t p = 0; p < s->P; p++)                                                     \
                for (int64_t q = 0; q < s->Q; q++) {                                               \
                    struct from f = place(maps, p, q, s);                                          \
                    int inside = f.h >= 0 && f.h + 1 < s->H && f.w >= 0 && f.w + 1 < s->W;         \
                    for (int64_t c = 0; c < s->C; c++) {                                           \
                        const type *image = pixels + c * plane, *corner = image;                   \
                        float v[4];                                                                \
                        if (inside) {                                                              \
                            corner += f.h * s->W + f.w;                                            \
                            v[0] = corner[0], v[1] = corner[1];                                    \
                            v[2] = corner[s->W], v[3] = corner[s->W + 1];                          \
                        } else                                                                     \
                            for (int i = 0; i < 4; i++)                                            \
                                v[i] = name##_at(image, s, f.h + i / 2, f.w + i % 2, fill[c]);     \
                        float above = v[0] + f.across * (v[1] - v[0]);                             \
                        float below = v[2] + f.across * (v[3] - v[2]);                             \
                        out[c * size + p * s->Q + q] =                                             \
                            rounded_##type(above + f.down * (below - above));                      \
                    }                                                                              \
                }                                                                                  \
    }

WARP(mpidl_warp, uint8_t)
WARP(mpidl_warp_of_floats, float)
