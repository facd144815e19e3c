#include "winograd.h"

#include "lanes.h"
#include "mpidl.h"
#include "winograd_tiles.h"

/* Winograd convolution of one block; see winograd.h. Sizes depend only on the layer's shape.
 *
 * The tiles of a block are processed in bands of consecutive tiles, so that the transformed inputs
 * V and the products M stay in cache. The layouts within a band are:
 *     V[point][panel][input][tiles of the panel]   a panel: up to PANEL vectors of tiles
 *     u[point][quad of outputs][input][4]
 *     M[point][output][tile]
 * For each point, M = u V is a matrix product. If its products are of bfloat16 numbers, V and u hold
 * words of pairs of inputs (see value.h); if a word holds one number, the inputs of a pair are
 * swapped. */
enum {
    QUAD = 4,                        /* outputs of a register tile */
    PANEL = REGISTERS == 32 ? 6 : 3, /* vectors of a register tile */
    MOST = 64,                       /* maximum number of tiles in a band */
    BAND_BYTES = 640 << 10,          /* maximum size of V and M for more than six tiles */
};

static int64_t points(const struct winograd *shape) {
    return (shape->m_h + shape->r - 1) * (shape->m_w + shape->r - 1);
}
static int64_t quads(int64_t outputs) { return parts_of(outputs, QUAD); }

/* Return the number of inputs in V and u, where pairs of inputs may be words. */
static int64_t items(const struct winograd *shape) {
    return is_narrow(shape) ? parts_of(shape->inputs, PER_WORD) : shape->inputs;
}

struct bands {
    int64_t across, tiles, most; /* tiles per row; all tiles; maximum number of tiles per band */
};

static struct bands bands_of(const struct winograd *shape) {
    struct bands bands;
    const int64_t step = shape->backward ? shape->step : 1;
    bands.across = parts_of(parts_of(shape->columns, step), shape->m_w);
    bands.tiles = bands.across * parts_of(parts_of(shape->rows, step), shape->m_h);
    int64_t bytes = points(shape) * (items(shape) + QUAD * quads(shape->outputs)) * LANES * 4;
    int64_t fit = BAND_BYTES / bytes / 6 * 6;
    bands.most = least(least(most(fit, 6), MOST), bands.tiles);
    return bands;
}

/* Return the stride of points in u, in floats. */
static int64_t u_stride(const struct winograd *shape) {
    return odd_lines(parts_of(quads(shape->outputs) * QUAD * items(shape), LANES));
}

int64_t winograd_weights_floats(const struct winograd *shape) {
    return points(shape) * u_stride(shape);
}

int64_t winograd_weights_tiles(int64_t outputs) { return quads(outputs); }

/* Copy the filters of up to four inputs and four outputs to taps[tap][input * 4 + output], with
 * zeros for missing filters. In w, outputs are `to` floats apart, and inputs are `from` floats
 * apart. If `swap` is 1, the inputs of each pair are swapped. */
APART void gather_taps(const float *w, int64_t to, int64_t from, int64_t outputs, int64_t inputs,
                       float (*taps)[16], int count, int swap) {
    memset(taps, 0, (size_t)count * sizeof *taps);
    for (int64_t i = 0; i < inputs; i++) {
        const int64_t place = (i ^ swap) < inputs ? i ^ swap : i;
        for (int64_t o = 0; o < outputs; o++)
            for (int tap = 0; tap < count; tap++)
                taps[tap][place * QUAD + o] = w[i * from + o * to + tap];
    }
}

/* Like gather_taps for exactly four inputs and four outputs. Reads whole vectors of each filter. */
APART void gather_all_taps(const float *w, int64_t to, int64_t from, float (*taps)[16], int count,
                           int swap) {
    for (int f = 0; f < 16; f += WIDTH)
        for (int tap = 0; tap < count; tap += WIDTH) {
            vec v[WIDTH];
            UNROLL for (int j = 0; j < WIDTH; j++)
                v[j] = load(w + ((f + j) / QUAD ^ swap) * from + (f + j) % QUAD * to + tap);
            transpose(v);
            UNROLL for (int j = 0; j < WIDTH; j++)
                if (tap + j < count) store(&taps[tap + j][f], v[j]);
        }
}

/* Write u of `count` floats, [input][output], of which the vector v begins at `part`. */
INLINE void put_weights(float *u, vec v, int part, int64_t count, const int narrow) {
#if PER_WORD == 2
    if (narrow) { /* [pair of inputs][output] */
        vec even = SHUFFLE(v, v, 0, 1, 2, 3, 8, 9, 10, 11, 0, 1, 2, 3, 8, 9, 10, 11);
        vec odd = SHUFFLE(v, v, 4, 5, 6, 7, 12, 13, 14, 15, 4, 5, 6, 7, 12, 13, 14, 15);
        vec pairs = paired(even, odd);
        if (count == 4 * QUAD) memcpy(u, &pairs, 2 * QUAD * sizeof(float)); /* without a call */
        else memcpy(u, &pairs, (size_t)parts_of(count, 2 * QUAD) * QUAD * sizeof(float));
        return;
    }
#endif
    if (narrow) v = rounded(v);
    if (part + WIDTH <= count) store(u + part, v);
    else memcpy(u + part, &v, (size_t)(count - part) * sizeof(float));
}

/* Compute G g G^T for four outputs, for the 16 filters of four inputs at a time. */
INLINE void weights_of_quad(const struct winograd *shape, const float *w, float *u, const int m_h,
                            const int m_w, const int r, const int narrow, int64_t quad) {
    const int backward = shape->backward, per_word = narrow ? PER_WORD : 1;
    const int swap = narrow && PER_WORD == 1;
    const int64_t inputs = shape->inputs, outputs = shape->outputs;
    const int n_h = m_h + r - 1, n_w = m_w + r - 1, filter = r * r;
    const int64_t to = backward ? filter : inputs * filter;
    const int64_t from = backward ? outputs * filter : filter;
    const int64_t point = u_stride(shape);
    const float *end = w + inputs * outputs * filter;
    int64_t many = least(outputs - quad * QUAD, QUAD);
    w += quad * QUAD * to;
    u += quad * QUAD * items(shape);
    for (int64_t input = 0; input < inputs; input += 4, w += 4 * from, u += 4 / per_word * QUAD) {
        int64_t count = least(inputs - input, 4);
        float taps[MOST_TAPS * MOST_TAPS][16] __attribute__((aligned(64)));
        const float *tap = taps[backward ? filter - 1 : 0]; /* dx has the filter in reverse */
        const int64_t next = backward ? -16 : 16;
        if (many == QUAD && count == 4 &&
            w + 3 * to + 3 * from + parts_of(filter, WIDTH) * WIDTH <= end)
            gather_all_taps(w, to, from, taps, filter, swap);
        else
            gather_taps(w, to, from, many, count, taps, filter, swap);
        for (int part = 0; part < count * QUAD; part += WIDTH) {
            vec t[MOST_POINTS][MOST_TAPS], out[MOST_POINTS];
            UNROLL for (int s = 0; s < r; s++) {
                vec g[MOST_TAPS];
                UNROLL for (int i = 0; i < r; i++)
                    g[i] = load(tap + (r * i + s) * next + part);
                filter_line(g, out, m_h, r);
                UNROLL for (int i = 0; i < n_h; i++) t[i][s] = out[i];
            }
            UNROLL for (int i = 0; i < n_h; i++) {
                filter_line(t[i], out, m_w, r);
                UNROLL for (int j = 0; j < n_w; j++)
                    put_weights(u + (i * n_w + j) * point, out[j], part, count * QUAD, narrow);
            }
        }
    }
}

void winograd_weights(const struct winograd *shape, const float *w, float *u, int64_t tile) {
#define IF(m_h_, m_w_, r_, narrow)                                                                 \
    if (shape->m_h == m_h_ && shape->m_w == m_w_ && shape->r == r_ && is_narrow(shape) == (narrow))
#define SIZE(m_h, m_w, r) IF(m_h, m_w, r, 0) weights_of_quad(shape, w, u, m_h, m_w, r, 0, tile);
#define NARROW_SIZE(m_h, m_w, r)                                                                   \
    IF(m_h, m_w, r, 1) weights_of_quad(shape, w, u, m_h, m_w, r, 1, tile);
    EACH_SIZE(SIZE, NARROW_SIZE)
#undef NARROW_SIZE
#undef SIZE
}

/* Return the number of panels into which the vectors of a band are divided. */
static int64_t panel_count(int64_t vectors) { return parts_of(vectors, PANEL); }
static int64_t panel_start(int64_t vectors, int64_t count, int64_t panel) {
    return vectors * panel / count;
}

/* The points of a tile are of four kinds: those at infinity of neither rows nor columns, of rows,
 * of columns, and of both. Only the last output depends on the point infinity. Therefore a tile that
 * extends beyond the output needs no products there. */
enum { OF_ROWS = 1, OF_COLUMNS = 2, KINDS = 4 };

/* The tiles of a band that have products at the points of a kind. */
struct tiles {
    int64_t count;
    int64_t index[MOST]; /* index of each tile of the band among these tiles, or -1 */
};

static void find_tiles(const struct winograd *shape, const struct bands *bands, int64_t first,
                       int64_t stop, int narrow, struct tiles *tiles) {
    const int64_t step = shape->backward ? shape->step : 1;
    const int ends = (parts_of(shape->rows, step) % shape->m_h ? OF_ROWS : 0) |
                     (parts_of(shape->columns, step) % shape->m_w ? OF_COLUMNS : 0);
    const int beyond = narrow ? 0 : ends; /* pairs of channels have products in all tiles */
    for (int kind = 0; kind < KINDS; kind++) {
        tiles[kind].count = 0;
        for (int64_t t = first; t < stop; t++) {
            const int last = (t / bands->across == bands->tiles / bands->across - 1 ? OF_ROWS : 0) |
                             (t % bands->across == bands->across - 1 ? OF_COLUMNS : 0);
            tiles[kind].index[t - first] = kind & last & beyond ? -1 : tiles[kind].count++;
        }
    }
}

/* The offset in V of vector v (tile * PARTS + part) is base[v] + c * step[v] for channel c. The
 * step is 0 and the base is negative if the tile has no products. */
struct places {
    int64_t base[MOST * PARTS], step[MOST * PARTS];
};

static void find_places(const struct tiles *tiles, int64_t all, int64_t inputs,
                        struct places *places) {
    const int64_t vectors = tiles->count * PARTS, count = panel_count(vectors);
    for (int64_t v = 0, panel = -1, start = 0, stop = 0; v < all * PARTS; v++) {
        const int64_t at = tiles->index[v / PARTS] * PARTS + v % PARTS;
        if (tiles->index[v / PARTS] < 0) {
            places->base[v] = -1, places->step[v] = 0;
            continue;
        }
        while (at >= stop)
            start = stop, panel++, stop = panel_start(vectors, count, panel + 1);
        places->base[v] = (start * inputs + at - start) * WIDTH;
        places->step[v] = (stop - start) * WIDTH;
    }
}

/* Compute M of one panel and four outputs from `inputs` inputs, at one point. A long sum of floats
 * would lose accuracy, so it is divided into sums of at most `most` terms. */
INLINE void multiply(const float *V, const float *u, int64_t inputs, int64_t most, float *M,
                     int64_t output, const int vectors, const int narrow) {
    const int64_t sums = parts_of(inputs, most);
    for (int64_t s = 0, c = 0; s < sums; s++) {
        const int64_t stop = inputs * (s + 1) / sums;
        vec sum[QUAD][PANEL];
        UNROLL for (int o = 0; o < QUAD; o++)
            UNROLL for (int v = 0; v < vectors; v++) sum[o][v] = zero();
        for (; c < stop; c++, u += QUAD, V += vectors * WIDTH) {
            vec x[PANEL];
            UNROLL for (int v = 0; v < vectors; v++) x[v] = load(V + v * WIDTH);
            UNROLL for (int o = 0; o < QUAD; o++) {
                vec weight = splat(u[o]);
                UNROLL for (int v = 0; v < vectors; v++)
                    sum[o][v] = narrow ? add_words(weight, x[v], sum[o][v])
                                       : muladd(weight, x[v], sum[o][v]);
            }
        }
        UNROLL for (int o = 0; o < QUAD; o++)
            UNROLL for (int v = 0; v < vectors; v++) {
                float *to = M + o * output + v * WIDTH;
                if (s > 0) sum[o][v] += load(to);
                store(to, sum[o][v]);
            }
    }
}

/* Compute M of one panel, at one point, for the quads of outputs in a range, from a range of all
 * `inputs`. */
INLINE void multiply_panel(const float *V, const float *u, int64_t inputs, struct range from,
                           struct range to, int64_t most, float *M, int64_t output,
                           int64_t vectors, const int narrow) {
    V += from.first * vectors * WIDTH;
    for (int64_t quad = to.first; quad < to.stop; quad++) {
        const float *weight = u + (quad * inputs + from.first) * QUAD;
        float *sum = M + quad * QUAD * output;
        const int64_t count = from.stop - from.first;
        switch (vectors) {
        case 1: multiply(V, weight, count, most, sum, output, 1, narrow); break;
        case 2: multiply(V, weight, count, most, sum, output, 2, narrow); break;
        case 3: multiply(V, weight, count, most, sum, output, 3, narrow); break;
#if REGISTERS == 32
        case 4: multiply(V, weight, count, most, sum, output, 4, narrow); break;
        case 5: multiply(V, weight, count, most, sum, output, 5, narrow); break;
        case 6: multiply(V, weight, count, most, sum, output, 6, narrow); break;
#endif
        }
    }
}

/* Return whether the filters of a phase of dx, along one dimension with n points, are zero at a
 * point. They are flipped, so the value at infinity is the first tap. */
static int is_zero(const struct winograd *shape, int64_t before, int64_t phase, int n, int point) {
    if (point == n - 1) return original_tap(shape, before, phase, 0) < 0;
    return ZERO(n) && point == 0 && original_tap(shape, before, phase, shape->r - 1) < 0;
}

/* Compute M of one band, at one point. M is zero where all weights are zero. Outputs are `output`
 * floats apart. */
INLINE void multiply_point(const struct winograd *shape, const struct tiles *tiles, const float *V,
                           const float *u, float *M, int64_t output, int64_t point,
                           const int narrow) {
    const int n_h = shape->m_h + shape->r - 1, n_w = shape->m_w + shape->r - 1;
    const int row = (int)(point / n_w), column = (int)(point % n_w);
    const int kind = (row == n_h - 1 ? OF_ROWS : 0) | (column == n_w - 1 ? OF_COLUMNS : 0);
    const int64_t vectors = tiles[kind].count * PARTS, panels = panel_count(vectors);
    const int64_t step = shape->backward ? shape->step : 1;
    const int64_t channels = shape->outputs / (step * step), inputs = items(shape);
    const int64_t longest = narrow ? 1 << 30 : n_h > 4 ? 24 : 32;
    const struct range from = narrow ? (struct range){0, inputs} : inputs_at(shape, row, column);
    for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t start = panel_start(vectors, panels, panel);
        const int64_t width = panel_start(vectors, panels, panel + 1) - start;
        struct range to = {0, 0};
        for (int64_t phase = 0; phase < step * step; phase++) {
            if (is_zero(shape, shape->top, phase / step, n_h, row) ||
                is_zero(shape, shape->left, phase % step, n_w, column)) {
                for (int64_t o = phase * channels; o < (phase + 1) * channels; o++)
                    memset(M + o * output + start * WIDTH, 0, (size_t)width * sizeof(vec));
                continue;
            }
            to.first = most(to.stop, phase * channels / QUAD); /* a quad may have two phases */
            to.stop = quads((phase + 1) * channels);
            multiply_panel(V + start * inputs * WIDTH, u, inputs, from, to, longest,
                           M + start * WIDTH, output, width, narrow);
        }
    }
}

APART void multiply_floats(const struct winograd *shape, const struct tiles *tiles, const float *V,
                           const float *u, float *M, int64_t output, int64_t point) {
    multiply_point(shape, tiles, V, u, M, output, point, 0);
}

#ifdef BF16
APART void multiply_words(const struct winograd *shape, const struct tiles *tiles, const float *V,
                          const float *u, float *M, int64_t output, int64_t point) {
    multiply_point(shape, tiles, V, u, M, output, point, 1);
}
#else
#define multiply_words multiply_floats /* no size has words */
#endif

/* Compute y of one tile from M, whose points are `point` floats apart, add `addend` (unless NULL)
 * and replace values below `floor`. M of each kind of points begins at M + at[kind]. Only
 * rows x columns pixels are written. */
INLINE void output_tile(const float *M, const int64_t *at, int64_t point, vec bias,
                        const value *addend, vec floor, value *y, int64_t row, int64_t pixel,
                        int64_t rows, int64_t columns, const int m_h, const int m_w, const int r) {
    const int n_h = m_h + r - 1, n_w = m_w + r - 1;
    vec t[MOST_OUTPUTS][MOST_POINTS], v[MOST_POINTS], out[MOST_OUTPUTS];
    UNROLL for (int i = 0; i < n_h; i++, M += n_w * point) { /* few pointers stay in registers */
        const int rows_end = i == n_h - 1 ? OF_ROWS : 0;
        UNROLL for (int c = 0; c < n_w; c++)
            v[c] = load(M + at[c == n_w - 1 ? rows_end | OF_COLUMNS : rows_end] + c * point);
        output_line(v, out, m_w, r);
        UNROLL for (int c = 0; c < m_w; c++) t[c][i] = out[c];
    }
    UNROLL for (int c = 0; c < m_w; c++) {
        if (c >= columns) break;
        output_line(t[c], out, m_h, r);
        UNROLL for (int i = 0; i < m_h; i++) {
            if (i >= rows) break;
            vec sum = out[i] + bias;
            if (addend) sum += load(addend + i * row + c * pixel);
            store(y + i * row + c * pixel, larger(floor, sum));
        }
    }
}

/* Return the place of an input. */
static struct place input_place(const struct winograd *shape, int64_t c) {
    return shape->backward ? (struct place){c, 0, 0} : place_of_phase(shape, c);
}

/* Return the place of an output. */
static struct place output_place(const struct winograd *shape, int64_t o) {
    return shape->backward ? place_of_phase(shape, o) : (struct place){o, 0, 0};
}

/* Compute V of the tiles [first, stop). */
INLINE void transform_inputs(const struct team *team, const struct winograd *shape,
                             const struct bands *bands, const struct tiles *with, int64_t first,
                             int64_t stop, struct pixels x, float *V, int64_t point, const int m_h,
                             const int m_w, const int r) {
    const int n_h = m_h + r - 1, n_w = m_w + r - 1;
    const int64_t inputs = shape->inputs, across = bands->across, tiles = stop - first;
    struct places places[KINDS];
    for (int kind = 0; kind < KINDS; kind++) find_places(&with[kind], tiles, inputs, &places[kind]);
    EACH_TILE(team, c, inputs) {
        int64_t place[KINDS][MOST * PARTS];
        const int64_t input = input_offset(&x, input_place(shape, c));
        for (int kind = 0; kind < KINDS; kind++)
            for (int64_t v = 0; v < tiles * PARTS; v++)
                place[kind][v] = places[kind].base[v] + c * places[kind].step[v];
        for (int64_t t = first, next; t < stop; t = next) {
            next = least(t / across * across + across, stop);
            const int64_t from = input + t / across * m_h * x.row + t % across * m_w * LANES;
            for (int part = 0; part < PARTS; part++) {
                const int64_t at = (t - first) * PARTS + part;
#define GROUP(group)                                                                               \
    if (group < GROUPS(n_h) && place[group == GROUPS(n_h) - 1 ? OF_ROWS : 0][at] >= 0)             \
    input_row(x.at, from + part * WIDTH, x.row, next - t, V, FIRST(n_h, group) * n_w * point,      \
              point, place[group == GROUPS(n_h) - 1 ? OF_ROWS : 0] + at,                           \
              place[group == GROUPS(n_h) - 1 ? OF_ROWS | OF_COLUMNS : OF_COLUMNS] + at, m_h, m_w,  \
              r, group, 0)
                GROUP(0);
                GROUP(1);
                GROUP(2);
                GROUP(3);
                GROUP(4);
#undef GROUP
            }
        }
    }
}

/* Compute V of the tiles [first, stop), for products of bfloat16 numbers. */
INLINE void transform_pairs(const struct team *team, const struct winograd *shape,
                            const struct bands *bands, const struct tiles *with, int64_t first,
                            int64_t stop, struct pixels x, float *V, int64_t point, const int m_h,
                            const int m_w, const int r) {
#ifdef BF16
    const int64_t across = bands->across, vectors = (stop - first) * PARTS;
    struct places places;
    find_places(with, stop - first, items(shape), &places);
    EACH_TILE(team, pair, parts_of(shape->inputs, 2)) {
        int64_t place[MOST * PARTS], even_place[MOST * PARTS];
        const int64_t c = 2 * pair, has_odd = c + 1 < shape->inputs;
        for (int64_t v = 0; v < vectors; v++) {
            place[v] = places.base[v] + c / PER_WORD * places.step[v];
            even_place[v] = place[v] + has_odd * places.step[v];
        }
        for (int64_t t = first, next; t < stop; t = next) {
            next = least(t / across * across + across, stop);
            const value *even = (const value *)x.at + c * x.channel + t / across * m_h * x.row +
                                t % across * m_w * LANES;
            for (int part = 0; part < PARTS; part++) {
                const int64_t to = (t - first) * PARTS + part;
                input_words(even + part * WIDTH, has_odd ? even + x.channel + part * WIDTH : NULL,
                            x.row, next - t, V, point, place + to, even_place + to, m_h, m_w, r);
            }
        }
    }
#endif
}

/* Compute y of one band, which has the tiles [first, stop). */
INLINE void convolve_band(const struct team *team, const struct winograd *shape,
                          const struct bands *bands, int64_t first, int64_t stop, struct pixels x,
                          const float *u, const float *bias, struct outputs y,
                          struct finish finish, float *scratch, const int m_h, const int m_w,
                          const int r, const int narrow) {
    const int n_h = m_h + r - 1, n_w = m_w + r - 1;
    const int64_t outputs = shape->outputs, across = bands->across;
    const int64_t padded = quads(outputs) * QUAD, tiles = stop - first;
    const int64_t v_point = odd_lines(tiles * items(shape)), m_point = odd_lines(tiles * padded);
    float *V = scratch;
    float *M = scratch + n_h * n_w * odd_lines(bands->most * items(shape));

    struct tiles with[KINDS]; /* tiles with products at the points of each kind */
    find_tiles(shape, bands, first, stop, narrow, with);
    if (narrow) transform_pairs(team, shape, bands, with, first, stop, x, V, v_point, m_h, m_w, r);
    else transform_inputs(team, shape, bands, with, first, stop, x, V, v_point, m_h, m_w, r);
    meet(team);
    tick();
    EACH_TILE(team, point, n_h * n_w) {
        (narrow ? multiply_words : multiply_floats)(shape, with, V + point * v_point,
                                                    u + point * u_stride(shape),
                                                    M + point * m_point, tiles * LANES, point);
        tick();
    }
    meet(team);
    /* the phases of a channel of dx are close in memory, so they are written together */
    const int64_t step = shape->backward ? shape->step : 1, phases = step * step;
    EACH_TILE(team, i, outputs) {
        const int64_t each = outputs / phases, o = i % phases * each + i / phases;
        const int64_t following = least(i + 1, outputs - 1);
        const int64_t next = following % phases * each + following / phases;
        const struct place place = output_place(shape, o);
        const value *ahead = output_at(&y, output_place(shape, next));
        vec add = bias ? splat(bias[place.channel]) : zero(), floor = floor_of(finish);
        for (int64_t t = first; t < stop; t++) {
            const int64_t row = t / across * m_h, column = t % across * m_w;
            const int64_t rows = parts_of(shape->rows - place.row, step) - row;
            const int64_t columns = parts_of(shape->columns - place.column, step) - column;
            const int64_t offset = row * y.row + column * y.pixel;
            value *to = output_at(&y, place) + offset;
            const float *from = M + o * tiles * LANES;
            int64_t at[KINDS];
            for (int kind = 0; kind < KINDS; kind++) /* any memory if M is not used */
                at[kind] = most(with[kind].index[t - first], 0) * LANES;
            if (next != o) /* prefetch the next lines of y, which are rarely in cache */
                UNROLL for (int i = 0; i < m_h; i++)
                    UNROLL for (int j = 0; j < m_w; j++)
                        __builtin_prefetch(ahead + offset + i * y.row + j * y.pixel, 1);
            for (int part = 0; part < LANES; part += WIDTH) {
                const value *addend = finish.addend ? finish.addend + (to - y.at) + part : NULL;
                if (rows < m_h || columns < m_w)
                    output_tile(from + part, at, m_point, add, addend, floor, to + part, y.row,
                                y.pixel, rows, columns, m_h, m_w, r);
                else if (addend)
                    output_tile(from + part, at, m_point, add, addend, floor, to + part, y.row,
                                y.pixel, m_h, m_w, m_h, m_w, r);
                else
                    output_tile(from + part, at, m_point, add, NULL, floor, to + part, y.row,
                                y.pixel, m_h, m_w, m_h, m_w, r);
            }
        }
    }
}

void winograd_conv(const struct team *team, const struct winograd *shape, struct pixels x,
                   const float *u, const float *bias, struct outputs y, struct finish finish,
                   float *scratch) {
    struct bands bands = bands_of(shape);
    int64_t count = parts_of(bands.tiles, bands.most);
    for (int64_t band = 0; band < count; band++) {
        int64_t first = bands.tiles * band / count, stop = bands.tiles * (band + 1) / count;
#define SIZE(m_h, m_w, r)                                                                          \
    IF(m_h, m_w, r, 0)                                                                             \
    convolve_band(team, shape, &bands, first, stop, x, u, bias, y, finish, scratch, m_h, m_w, r, 0);
#define NARROW_SIZE(m_h, m_w, r)                                                                   \
    IF(m_h, m_w, r, 1)                                                                             \
    convolve_band(team, shape, &bands, first, stop, x, u, bias, y, finish, scratch, m_h, m_w, r, 1);
        EACH_SIZE(SIZE, NARROW_SIZE)
#undef NARROW_SIZE
#undef IF
#undef SIZE
    }
}

int64_t winograd_conv_floats(const struct winograd *shape) {
    struct bands bands = bands_of(shape);
    return points(shape) * (odd_lines(bands.most * items(shape)) +
                            odd_lines(bands.most * quads(shape->outputs) * QUAD));
}

#ifndef BF16
/* The arguments of a pass over one block, for tests. */
struct example {
    struct winograd shape;
    const float *w, *bias;
    float *u;
    struct pixels x;
    struct outputs y;
};

static void example_weights(void *job, int64_t tile, float *own) {
    const struct example *e = job;
    winograd_weights(&e->shape, e->w, e->u, tile);
}

static void example_conv(const struct team *team, void *job, int64_t block) {
    const struct example *e = job;
    winograd_conv(team, &e->shape, e->x, e->u, e->bias, e->y, (struct finish){0}, team->shared);
}

static struct winograd example_shape(const int64_t *s) {
    return (struct winograd){s[0], s[1], s[2], s[3], (int)s[4], (int)s[5], (int)s[6], .step = 1,
                             .taps = s[6]};
}

int64_t mpidl_winograd_weights_floats(const int64_t *shape) {
    const struct winograd winograd = example_shape(shape);
    return winograd_weights_floats(&winograd);
}

void mpidl_winograd_conv(const float *x, const float *w, const float *bias, float *u, float *y,
                         const int64_t *shape) {
    struct example e = {.shape = example_shape(shape), .w = w, .bias = bias, .u = u};
    e.shape.backward = (int)shape[7];
    const struct winograd *s = &e.shape;
    const int64_t row = winograd_extent(s->columns, s->m_w, s->r) * LANES;
    e.x = (struct pixels){(float *)x, winograd_extent(s->rows, s->m_h, s->r) * row, row, 0, 0};
    e.y = (struct outputs){y, s->rows * s->columns * LANES, s->columns * LANES, LANES, 0, 0};
    each_tile(winograd_weights_tiles(shape[1]), example_weights, &e, 0);
    each_block(1, example_conv, &e, winograd_conv_floats(&e.shape), 0);
}
#endif
