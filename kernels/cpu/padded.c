/* Copy blocks into padded scratch memory. The copy may compute an activation that is not stored, or
 * backpropagate a gradient through ReLU and batch normalization. */
#include "conv.h"

static void clear(float *from, float *to) { memset(from, 0, (size_t)(to - from) * sizeof(float)); }

/* Set the border of a channel to zero; if the channel has phases, set the whole channel to zero.
 * Return the address of the channel. */
static float *clear_border(const struct padded *p, int64_t channel, int64_t height, int64_t width,
                           int64_t top, int64_t left) {
    float *data = p->data + channel * p->channel_stride;
    if (p->keep_border) return data;
    if (p->phases > 1) {
        clear(data, data + p->rows * p->row_stride);
        return data;
    }
    clear(data, data + top * p->row_stride);
    for (int64_t r = top; r < top + height; r++) {
        float *row = data + r * p->row_stride;
        clear(row, row + left * LANES);
        clear(row + (left + width) * LANES, row + p->columns * LANES);
    }
    clear(data + (top + height) * p->row_stride, data + p->rows * p->row_stride);
    return data;
}

void fill_source(const struct padded *p, int64_t channel, const struct source *source,
                 const float *x, int64_t height, int64_t width, int64_t top, int64_t left) {
    float *data = clear_border(p, channel, height, width, top, left);
    int64_t wide = p->columns / p->phases;
    struct norm n = norm_of(source, channel);
    for (int64_t r = 0; r < height; r++, x += width * LANES) {
        float *row = data + (top + r) * p->row_stride;
        for (int64_t phase = 0; phase < p->phases; phase++) {
            /* the first column of the image in this phase */
            int64_t first = ((phase - left) % p->phases + p->phases) % p->phases;
            const float *from = x + first * LANES;
            float *to = row + (phase * wide + (left + first) / p->phases) * LANES;
            int64_t step = p->phases * LANES, count = parts_of(width - first, p->phases);
            if (source->mean)
                for (int64_t i = 0; i < count; i++, from += step, to += LANES)
                    for (int part = 0; part < LANES; part += WIDTH)
                        store(to + part, activate(load(from + part), n));
            else
                for (int64_t i = 0; i < count; i++, from += step, to += LANES)
                    for (int part = 0; part < LANES; part += WIDTH)
                        store(to + part, load(from + part));
        }
    }
}

void fill_gradient(const struct padded *p, int64_t channel, const struct gradient *g,
                   const float *dy, const float *y, int valid, int64_t height, int64_t width,
                   int64_t top, int64_t left) {
    float *row = clear_border(p, channel, height, width, top, left) + top * p->row_stride +
                 left * LANES;
    if (!g->y.mean) {
        for (int64_t r = 0; r < height; r++, row += p->row_stride, dy += width * LANES)
            memcpy(row, dy, (size_t)(width * LANES) * sizeof(float));
        return;
    }
    struct norm n = norm_of(&g->y, channel);
    vec a = splat(g->a[channel]), b = splat(g->b[channel]), c = splat(g->c[channel]);
    ivec used[PARTS];
    for (int part = 0; part < PARTS; part++) used[part] = lanes_below(valid, part * WIDTH);
#define PIXELS(dz)                                                                                 \
    for (int64_t r = 0; r < height; r++, row += p->row_stride)                                     \
        for (int64_t i = 0; i < width * LANES; i += LANES, dy += LANES, y += LANES)                \
            for (int part = 0; part < PARTS; part++) {                                             \
                vec v = load(y + part * WIDTH), d = load(dy + part * WIDTH);                       \
                store(row + i + part * WIDTH,                                                      \
                      keep(used[part], normalize_back(dz, v, n.mean, a, b, c)));                   \
            }
    if (g->y.scale)
        PIXELS(activate_back(d, normalize(v, n), n))
    else
        PIXELS(d)
#undef PIXELS
}
