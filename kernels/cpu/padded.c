/* Copy blocks into padded scratch memory. The copy may compute an activation that is not stored, or
 * backpropagate a gradient through an activation and batch normalization. */
#include "conv.h"

static size_t size_of(enum form form) {
    return form == HALVES ? sizeof(uint16_t) : sizeof(float);
}

static void *item(enum form form, void *data, int64_t number) {
    return (char *)data + number * (int64_t)size_of(form);
}

static void clear(enum form form, void *data, int64_t first, int64_t stop) {
    memset(item(form, data, first), 0, (size_t)(stop - first) * size_of(form));
}

/* Set the border of a channel to zero; if the channel has phases, set the whole channel to zero.
 * Return the address of the channel. */
static void *clear_border(const struct padded *p, int64_t channel, struct picture size) {
    void *data = item(p->form, p->data, channel * p->channel_stride);
    if (p->keep_border) return data;
    const int64_t all = p->rows * p->row_stride;
    if (p->phases > 1) {
        clear(p->form, data, 0, all);
        return data;
    }
    clear(p->form, data, 0, size.top * p->row_stride);
    for (int64_t r = size.top; r < size.top + size.height; r++) {
        clear(p->form, data, r * p->row_stride, r * p->row_stride + size.left * LANES);
        clear(p->form, data, r * p->row_stride + (size.left + size.width) * LANES,
              (r + 1) * p->row_stride);
    }
    clear(p->form, data, (size.top + size.height) * p->row_stride, all);
    return data;
}

/* Prefetch the same pixel of the next channel: bands are too short for the processor to see where
 * the next one begins. */
INLINE void fetch(const value *pixel) { __builtin_prefetch(pixel); }

/* Write the items of a pixel. */
INLINE void put(const enum form form, void *to, vec even, vec odd) {
    if (form == HALVES) store((uint16_t *)to, even);
    else if (form == PAIRS) store((float *)to, paired(even, odd));
    else store((float *)to, form == ROUNDED ? rounded(even) : even);
}

/* Copy pixels whose numbers stay as they are. */
INLINE void put_stored(const enum form form, void *to, const value *even, const value *odd) {
#if PER_WORD == 2
    __m256i first = _mm256_loadu_si256((const __m256i *)even);
    if (form == HALVES) {
        _mm256_storeu_si256(to, first);
        return;
    }
    if (form == PAIRS) {
        __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)odd));
        _mm512_storeu_si512(
            to, _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(high, 16)));
        return;
    }
#endif
    put(form, to, load(even), load(odd));
}

/* Copy `count` pixels of one channel or, if the items are pairs, of two. If an odd channel is
 * missing, `odd_step` is 0. */
INLINE void copy_form(const enum form form, char *to, const value *even, const value *odd,
                      int64_t step, int64_t odd_step, int64_t ahead, int64_t count,
                      const struct norm *norms, const int is_activated) {
    const int64_t size = (int64_t)size_of(form);
    for (int64_t i = 0; i < count; i++, even += step, odd += odd_step, to += LANES * size) {
        fetch(even + ahead);
        if (form == PAIRS) fetch(odd + ahead);
        for (int part = 0; part < LANES; part += WIDTH) {
            if (is_activated)
                put(form, to + part * size, activate(load(even + part), norms[0]),
                    form == PAIRS ? activate(load(odd + part), norms[1]) : zero());
            else
                put_stored(form, to + part * size, even + part, odd + part);
        }
    }
}

void copy_pixels(enum form form, void *to, int64_t item_channel, const struct source *source,
                 const value *x, int64_t group, int64_t stride, int64_t step, int64_t count) {
    static const value nothing[LANES];
    int64_t channel = item_channel, odd_step = step, ahead = stride;
    const value *odd = x;
    const struct norm none = {zero(), zero(), zero(), zero(), zero()};
    struct norm norms[2] = {none, none};
    if (form == PAIRS) {
        const int64_t pairs = parts_of(group, 2), second = item_channel % pairs * 2 + 1;
        channel = item_channel / pairs * group + second - 1;
        odd = x + (channel + 1) * stride, ahead = 2 * stride;
        if (second == group) odd = nothing, odd_step = 0;
        else norms[1] = norm_of(source, channel + 1);
    }
    norms[0] = norm_of(source, channel);
    x += channel * stride;
#define COPY(form)                                                                                 \
    if (source->mean) copy_form(form, to, x, odd, step, odd_step, ahead, count, norms, 1);         \
    else copy_form(form, to, x, odd, step, odd_step, ahead, count, norms, 0);                      \
    break
    switch (form) {
    case FLOATS: COPY(FLOATS);
    case ROUNDED: COPY(ROUNDED);
    case HALVES: COPY(HALVES);
    case PAIRS: COPY(PAIRS);
    }
#undef COPY
}

void fill_source(const struct padded *p, int64_t item_channel, const struct source *source,
                 const value *x, struct picture size) {
    void *data = clear_border(p, item_channel, size);
    const int64_t wide = p->columns / p->phases;
    for (int64_t r = 0; r < size.height; r++, x += size.width * LANES) {
        const int64_t row = (size.top + r) * p->row_stride;
        for (int64_t phase = 0; phase < p->phases; phase++) {
            /* the first column of the image in this phase */
            int64_t first = ((phase - size.left) % p->phases + p->phases) % p->phases;
            int64_t to = row + (phase * wide + (size.left + first) / p->phases) * LANES;
            copy_pixels(p->form, item(p->form, data, to), item_channel, source, x + first * LANES,
                        size.group, size.stride, p->phases * LANES,
                        parts_of(size.width - first, p->phases));
        }
    }
}

/* Compute the gradient of a row of y, see struct gradient. */
INLINE void fill_row(const enum form form, char *to, const value *dy, const value *y,
                     const struct gradient *g, int64_t channel, int valid, int64_t pixels,
                     int64_t ahead, const int is_activated) {
    const int64_t size = (int64_t)size_of(form);
    const struct norm n = norm_of(&g->y, channel);
    const vec a = splat(g->a[channel]), b = splat(g->b[channel]), c = splat(g->c[channel]);
    ivec used[PARTS];
    for (int part = 0; part < PARTS; part++) used[part] = lanes_below(valid, part * WIDTH);
    for (int64_t i = 0; i < pixels; i++, dy += LANES, y += LANES, to += LANES * size) {
        fetch(dy + ahead), fetch(y + ahead);
        for (int part = 0; part < PARTS; part++) {
            vec v = load(y + part * WIDTH), d = load(dy + part * WIDTH);
            vec dz = is_activated ? activate_back(d, normalize(v, n), n) : d;
            put(form, to + part * WIDTH * size,
                keep(used[part], normalize_back(dz, v, n.mean, a, b, c)), zero());
        }
    }
}

/* The same if only a ReLU follows, whose output is y. */
INLINE void fill_relu_row(const enum form form, char *to, const value *dy, const value *y,
                          int64_t pixels, int64_t ahead) {
    const int64_t size = (int64_t)size_of(form);
    for (int64_t i = 0; i < pixels; i++, dy += LANES, y += LANES, to += LANES * size) {
        fetch(dy + ahead), fetch(y + ahead);
        for (int part = 0; part < LANES; part += WIDTH)
            put(form, to + part * size, relu_back(load(dy + part), load(y + part)), zero());
    }
}

void fill_gradient(const struct padded *p, int64_t channel, const struct gradient *g,
                   const value *dy, const value *y, int valid, struct picture size) {
    const struct source plain = {.x = dy};
    if (!g->y.x) {
        fill_source(p, channel, &plain, dy, size);
        return;
    }
    void *data = clear_border(p, channel, size);
    dy += channel * size.stride, y += channel * size.stride;
    for (int64_t r = 0; r < size.height; r++, dy += size.width * LANES, y += size.width * LANES) {
        char *row = item(p->form, data, (size.top + r) * p->row_stride + size.left * LANES);
#define ROW(form)                                                                                  \
    if (!g->y.mean) fill_relu_row(form, row, dy, y, size.width, size.stride);                      \
    else if (g->y.scale) fill_row(form, row, dy, y, g, channel, valid, size.width, size.stride, 1);                \
    else fill_row(form, row, dy, y, g, channel, valid, size.width, size.stride, 0)
        if (p->form == FLOATS) ROW(FLOATS);
        else if (p->form == ROUNDED) ROW(ROUNDED);
        else ROW(HALVES);
#undef ROW
    }
}

/* Return the numbers at item i. */
INLINE vec load_item(const struct padded *p, int64_t i) {
    if (p->form == HALVES) return load((const uint16_t *)p->data + i);
    return load((const float *)p->data + i);
}

void convert_copy(const struct padded *to, int64_t item_channel, const struct padded *from,
                  int64_t group) {
    const int64_t pairs = parts_of(group, 2), second = item_channel % pairs * 2 + 1;
    int64_t channel = item_channel, has_odd = 0;
    if (to->form == PAIRS) {
        channel = item_channel / pairs * group + second - 1;
        has_odd = second < group;
    }
    for (int64_t r = 0; r < to->rows; r++) {
        const int64_t even = channel * from->channel_stride + r * from->row_stride;
        const int64_t odd = even + from->channel_stride;
        char *row = item(to->form, to->data,
                         item_channel * to->channel_stride + r * to->row_stride);
        for (int64_t i = 0; i < to->columns * LANES; i += WIDTH, row += WIDTH * size_of(to->form)) {
            vec v = load_item(from, even + i), w = has_odd ? load_item(from, odd + i) : zero();
            if (to->form == PAIRS) put(PAIRS, row, v, w);
            else if (to->form == HALVES) put(HALVES, row, v, w);
            else if (to->form == ROUNDED) put(ROUNDED, row, v, w);
            else put(FLOATS, row, v, w);
        }
    }
}
