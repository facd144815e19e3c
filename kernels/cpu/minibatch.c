/* Prepare mini-batches of images and labels that are in memory. */
#include "images.h"

#include <stdatomic.h>

#include "lanes.h"
#include "mpidl.h"
#include "team.h"

int64_t blocks_of_floats(const float *all, const int64_t *rows, int64_t images,
                         const struct crop *shape, const float *centre, const float *divisor,
                         float *lanes) {
    enum { PIECE = 256, ROW = PIECE + 16 }; /* floats of an image that are transposed together */
    union {
        float floats[LANES][ROW];
        uint32_t bits[LANES * ROW];
    } piece;
    int64_t pixels = shape->H * shape->W, step = shape->C * pixels;
    uint32_t is_bad = 0;
    for (int64_t n = 0; n < images; n += LANES) {
        int valid = images - n < LANES ? (int)(images - n) : LANES;
        if (valid < LANES) memset(&piece, 0, sizeof piece);
        for (int64_t first = 0; first < step; first += PIECE, lanes += PIECE * LANES) {
            int64_t count = step - first < PIECE ? step - first : PIECE, i = 0;
            for (int lane = 0; lane < valid; lane++) {
                const float *row = all + (rows ? rows[n + lane] : n + lane) * step;
                memcpy(piece.floats[lane], row + first, (size_t)count * sizeof(float));
            }
            for (int lane = 0; lane < valid; lane++)
                for (int64_t k = lane * ROW; k < lane * ROW + count; k++)
                    is_bad |= (piece.bits[k] & 0x7fffffff) >= 0x7f800000;
            for (; i + LANES <= count; i += LANES)
                transpose_16(&piece.floats[0][i], ROW, lanes + i * LANES, LANES);
            for (; i < count; i++)
                for (int lane = 0; lane < LANES; lane++)
                    lanes[i * LANES + lane] = piece.floats[lane][i];
            for (i = 0; centre && i < count; i++) {
                int64_t at = shape->of_pixels ? first + i : (first + i) / pixels;
                for (int part = 0; part < LANES; part += WIDTH) {
                    float *line = lanes + i * LANES + part;
                    vec v = (load(line) - splat(centre[at])) / splat(divisor[at]);
                    store(line, valid < LANES ? keep(lanes_below(valid, part), v) : v);
                }
            }
        }
        lanes -= (step + PIECE - 1) / PIECE * PIECE * LANES - step * LANES;
    }
    return !is_bad;
}

/* A mini-batch, and whether one of its blocks was invalid. Either `floats` or `bytes` is NULL. */
struct minibatch {
    const float *floats;
    const uint8_t *bytes;
    const int64_t *all_labels;
    int64_t count;
    const int64_t *samples;
    int64_t images;
    const struct crop *shape;
    struct moves moves;
    const float *centre, *divisor;
    int64_t classes, ignored;
    float *lanes;
    int32_t *labels;
    atomic_int is_invalid;
};

static void prepare(const struct team *team, void *minibatch, int64_t block) {
    struct minibatch *m = minibatch;
    const struct crop *s = m->shape;
    if (team->member > 0) return;
    int64_t rows[LANES], first = block * LANES, valid = least(LANES, m->images - first);
    int64_t is_valid = 1;
    float *lanes = m->lanes + first * s->C * s->P * s->Q;
    for (int64_t i = 0; i < valid; i++) rows[i] = m->samples[first + i] % m->count;
    if (m->floats)
        is_valid = blocks_of_floats(m->floats, rows, valid, s, m->centre, m->divisor, lanes);
    else
        block_of_bytes(m->bytes, m->bytes + m->count * s->C * s->H * s->W, rows, (int)valid, s,
                       &m->moves, first, m->centre, m->divisor, lanes);
    for (int64_t i = 0; m->labels && i < LANES; i++) {
        int64_t label = i < valid ? m->all_labels[rows[i]] : 0;
        is_valid &= m->classes < 0 || label == m->ignored || (label >= 0 && label < m->classes);
        m->labels[first + i] = (int32_t)label;
    }
    if (!is_valid) atomic_store(&m->is_invalid, 1);
}

int64_t mpidl_minibatch(const float *floats, const uint8_t *bytes, const int64_t *all_labels,
                        int64_t count, const int64_t *samples, int64_t images,
                        const int64_t *shape, const int32_t *mirrored, const int32_t *top,
                        const int32_t *left, const uint8_t *fill, const float *centre,
                        const float *divisor, int64_t classes, int64_t ignored, float *lanes,
                        int32_t *labels) {
    struct minibatch m = {floats, bytes, all_labels, count, samples, images,
                          (const struct crop *)shape, {mirrored, top, left, fill}, centre,
                          divisor, classes, ignored, lanes, labels, 0};
    each_block(parts_of(images, LANES), prepare, &m, 0, 0);
    return !m.is_invalid;
}
