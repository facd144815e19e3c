#include "lanes.h"
#include "mpidl.h"
#include "products.h"
#include "winograd.h"
#include "winograd_tiles.h"

/* Compute the gradient with respect to r x r weights with F(m x m, r x r) (n^2 points, n = m + r - 1):
 *
 *     dW = G^T [ sum over tiles and images of (B^T d B) . (A dy A^T) ] G
 *
 * Tiles are processed in bands, and points in the groups of winograd_tiles.h, so that V = B^T d B
 * and D = A dy A^T stay in cache. For each point, the sum S is a matrix product, in one of two
 * layouts:
 *
 *  - If the number of outputs is a multiple of 16, D is transposed. A vector holds outputs, and S
 *    sums over tiles and images:
 *        V[point][input][tile, image]   D[point][panel of outputs][tile, image][output]
 *        S[point][16 outputs][input][output]
 *  - Otherwise a vector holds images, which are added up at the end of a band:
 *        V[point][input][tile, image]   D[point][output][tile, image]
 *        S[point][quad of outputs][input][4]
 *
 * With -DBF16, x, dy, V and D are bfloat16 numbers, and D is always transposed: the number of
 * outputs is rounded up to a multiple of 16. See products.h for the order of the sums over images.
 */
enum {
    QUAD = 4,                         /* outputs of a register tile, if vectors hold images */
    INPUTS = REGISTERS == 32 ? 4 : 3, /* inputs of such a register tile */
    MOST = 64,                        /* maximum number of tiles in a band */
    BAND_BYTES = 512 << 10,           /* size of V and D, which hold two lines of points */
    VECTORS = NARROW ? LANES / 2 : LANES, /* vectors of outputs of a pixel of transposed dy */
};

/* The side of a tile. Larger tiles for 5x5 filters would amplify the rounding to bfloat16. */
#define M_OF(r) (NARROW && (r) == 5 ? 2 : 4)

/* How the work for a shape is divided. The division depends only on the shape, except for the width
 * of panels, which affects no sum. */
struct plan {
    const struct winograd *shape;
    int m, n;
    int64_t inputs, outputs, C, K; /* C and K: inputs and outputs rounded up to register tiles */
    int transposed;
    int64_t across, tiles, bands, most; /* tiles per row; all tiles; bands; tiles per band */
    struct products products;           /* used if D is transposed */
    int64_t channel; /* stride in floats of V's channels, and of D's if vectors hold images */
    int64_t v_point, d_point, s_point;
    float *V, *D, *S, *T;
};

static struct plan plan_of(const struct winograd *shape, float *scratch) {
    const int m = shape->m_h, n = m + shape->r - 1;
    struct plan p = {.shape = shape, .m = m, .n = n, .inputs = shape->inputs, .outputs = shape->outputs};
    p.transposed = NARROW || p.outputs % LANES == 0;
    const int64_t wide = p.transposed ? LANES : QUAD;
    p.C = parts_of(p.inputs, 4) * 4, p.K = parts_of(p.outputs, wide) * wide;
    p.across = parts_of(shape->columns, m);
    p.tiles = p.across * parts_of(shape->rows, m);
    int64_t fit = BAND_BYTES / (2 * n * (p.inputs + p.outputs) * LANES * (int64_t)sizeof(value));
    /* Each band adds to all of S. With `worth` tiles, V and D cause as much memory traffic as S. */
    int64_t worth = most(p.inputs * p.outputs / (8 * (p.inputs + p.outputs)), 4);
    p.bands = parts_of(p.tiles, least(most(fit, worth), MOST));
    p.most = parts_of(p.tiles, p.bands);
    p.channel = odd_lines(parts_of(p.most * TERMS_PER_PIXEL, LANES));
    p.products = products_of(p.inputs, p.K, p.most * TERMS_PER_PIXEL, p.channel);
    p.v_point = odd_lines(p.C * p.channel / LANES);
    p.d_point = odd_lines(p.transposed ? p.K * p.most * TERMS_PER_PIXEL / LANES
                                       : p.K * p.channel / LANES);
    p.s_point = odd_lines(p.C * p.K / LANES + 1);
    p.V = scratch;
    p.D = p.V + 2 * n * p.v_point;
    p.S = p.D + 2 * n * p.d_point;
    p.T = p.S + n * n * p.s_point;
    return p;
}

int64_t winograd_dweight_floats(const struct winograd *shape) {
    struct plan p = plan_of(shape, NULL);
    int64_t transposed = p.transposed ? p.most * p.m * p.m * p.K * VECTORS : 0;
    return 2 * p.n * (p.v_point + p.d_point) + p.n * p.n * p.s_point + transposed;
}

/* Compute A dy A^T of one tile, for one group of rows of A. Points of `out` are `point` floats
 * apart. */
INLINE void gradient_tile(const float *dy, int64_t row, float *out, int64_t point, const int m,
                          const int n, const int group) {
    const int lines = IN_GROUP(n, group);
    vec t[2][MOST_OUTPUTS], d[MOST_OUTPUTS], v[MOST_POINTS];
    UNROLL for (int c = 0; c < m; c++) {
        UNROLL for (int r = 0; r < m; r++) d[r] = load(dy + r * row + c * LANES);
        gradient_group(d, v, m, n, group);
        UNROLL for (int line = 0; line < lines; line++) t[line][c] = v[line];
    }
    UNROLL for (int line = 0; line < lines; line++) {
        gradient_line(t[line], v, m, n);
        UNROLL for (int c = 0; c < n; c++) store(out + (line * n + c) * point, v[c]);
    }
}

/* With -DBF16: the same for two images, which are the halves of the words of dy. Write the words of
 * D; if words hold single numbers, the second image is `next` floats further. */
INLINE void gradient_words(const float *dy, int64_t row, int64_t pixel, float *out, int64_t next,
                           int64_t point, const int m, const int n, const int group) {
    const int lines = IN_GROUP(n, group);
    vec t[2][2][MOST_OUTPUTS], d[2][MOST_OUTPUTS], v[2][MOST_POINTS];
    UNROLL for (int c = 0; c < m; c++) {
        UNROLL for (int r = 0; r < m; r++) {
            words both = (words)load(dy + r * row + c * pixel);
            d[0][r] = (vec)(both << 16), d[1][r] = (vec)(both & 0xffff0000);
        }
        UNROLL for (int image = 0; image < 2; image++) {
            gradient_group(d[image], v[image], m, n, group);
            UNROLL for (int line = 0; line < lines; line++) t[image][line][c] = v[image][line];
        }
    }
    UNROLL for (int line = 0; line < lines; line++) {
        UNROLL for (int image = 0; image < 2; image++) gradient_line(t[image][line], v[image], m, n);
        UNROLL for (int c = 0; c < n; c++) {
            float *to = out + (line * n + c) * point;
            if (PER_WORD == 2) store(to, paired(v[0][c], v[1][c]));
            else store(to, rounded(v[0][c])), store(to + next, rounded(v[1][c]));
        }
    }
}

/* Return where dy has a tile of an output. */
static const value *tile_of(const struct plan *p, struct pixels dy, int64_t output,
                            int64_t tile) {
    return (const value *)dy.at + output * dy.channel + tile / p->across * p->m * dy.row +
           tile % p->across * p->m * LANES;
}

/* Transpose dy of a band to vectors of outputs: T[16 outputs][tile][image][pixel of the
 * tile][output], or, with -DBF16, T[16 outputs][tile][pixel of the tile][pair of images][output]. */
static void transpose_band(const struct team *team, const struct plan *p, struct pixels dy,
                           int64_t first, int64_t tiles) {
    const int m = p->m;
    EACH_TILE(team, item, p->K / LANES * m) {
        const int64_t o = item / m * LANES, r = item % m;
        for (int64_t t = first; t < first + tiles; t++) {
            const float *from = (const float *)(tile_of(p, dy, o, t) + r * dy.row);
            float *to = p->T + (item / m * tiles + t - first) * m * m * VECTORS * LANES;
            if (NARROW) {
                for (int c = 0; c < m; c += 2) /* 16 words hold two pixels */
                    transpose_16(from + c * VECTORS, dy.channel / 2,
                                 to + (r * m + c) * VECTORS * LANES, LANES);
            } else {
                for (int c = 0; c < m; c++)
                    transpose_16(from + c * LANES, dy.channel, to + (r * m + c) * LANES,
                                 m * m * LANES);
            }
        }
    }
    meet(team);
}

/* Compute V and D of a band, which has the tiles [first, first + tiles). */
INLINE void transform_band(const struct team *team, const struct plan *p, struct pixels x,
                           struct pixels dy, int64_t first, int64_t tiles, const int r,
                           const int group) {
    const int m = M_OF(r), n = m + r - 1;
    const int64_t across = p->across;
    int64_t place[MOST * PARTS];
    for (int64_t t = 0; t < tiles; t++) place[t * PARTS] = t * LANES;
    EACH_TILE(team, i, p->inputs) {
        const int64_t input = input_offset(&x, place_of_phase(p->shape, i));
        for (int64_t t = first, next; t < first + tiles; t = next) {
            next = least(t / across * across + across, first + tiles);
            const int64_t from = input + t / across * m * x.row + t % across * m * LANES;
            const int64_t to = i * p->channel * PER_WORD + (t - first) * LANES;
            for (int part = 0; part < LANES; part += WIDTH)
                input_row(x.at, from + part, x.row, next - t, p->V, to + part,
                          p->v_point * PER_WORD, place, place, m, m, r, group, NARROW);
        }
    }
    if (NARROW || p->transposed) {
        EACH_TILE(team, item, p->K / LANES * tiles) {
            const int64_t o = item / tiles * LANES, t = item % tiles;
            const float *from = p->T + item * m * m * VECTORS * LANES;
            const int64_t panel = p->products.panel, pixel = VECTORS * LANES;
            float *to = p->D + place_of(&p->products, o, t * TERMS_PER_PIXEL);
            for (int part = 0; part < LANES; part += WIDTH)
                for (int i = 0; i < VECTORS; i++) {
                    if (NARROW)
                        gradient_words(from + i * LANES + part, m * pixel, pixel,
                                       to + TERMS_PER_PIXEL / VECTORS * i * panel + part, panel,
                                       p->d_point, m, n, group);
                    else
                        gradient_tile(from + i * m * m * LANES + part, m * LANES,
                                      to + i * panel + part, p->d_point, m, n, group);
                }
        }
        return;
    }
    EACH_TILE(team, o, p->outputs) {
        for (int64_t t = first; t < first + tiles; t++) {
            const float *from = (const float *)tile_of(p, dy, o, t);
            float *to = p->D + o * p->channel + (t - first) * LANES;
            for (int part = 0; part < LANES; part += WIDTH)
                gradient_tile(from + part, dy.row, to + part, p->d_point, m, n, group);
        }
    }
}

/* One stage of the tree that sums lanes; see sum_across. */
#define ADD_LANES(a, b, step) (LOWER(a, b, step) + HIGHER(a, b, step))

/* Sum over tiles for `inputs` inputs and four outputs, in one part of the lanes. Each input has
 * LANES floats of `sums`. Two stages of the sum over lanes are already complete: lane j belongs to
 * output j % 4. */
INLINE void multiply_lanes(const struct plan *p, const float *V, const float *D, int64_t tiles,
                           float *sums, const int inputs) {
    vec sum[INPUTS][QUAD];
    UNROLL for (int i = 0; i < inputs; i++)
        UNROLL for (int o = 0; o < QUAD; o++) sum[i][o] = zero();
    for (int64_t t = 0; t < tiles; t++, D += LANES, V += LANES) {
        vec x[INPUTS];
        UNROLL for (int i = 0; i < inputs; i++) x[i] = load(V + i * p->channel);
        UNROLL for (int o = 0; o < QUAD; o++) {
            vec d = load(D + o * p->channel);
            UNROLL for (int i = 0; i < inputs; i++) sum[i][o] = muladd(x[i], d, sum[i][o]);
        }
    }
    UNROLL for (int i = 0; i < inputs; i++) {
        vec low = ADD_LANES(sum[i][0], sum[i][1], 1), high = ADD_LANES(sum[i][2], sum[i][3], 1);
        store(sums + i * LANES, ADD_LANES(low, high, 2));
    }
}

/* Do the remaining stages of the sum over lanes: compute S of four inputs and four outputs. */
INLINE void add_lanes(const float *sums, float *S, int add) {
    UNROLL for (int s = 0; s < QUAD; s += WIDTH / 4, S += WIDTH) {
        vec part_sum[PARTS];
        UNROLL for (int part = 0; part < PARTS; part++) {
            vec v[WIDTH / 4];
            UNROLL for (int i = 0; i < WIDTH / 4; i++)
                v[i] = load(sums + (s + i) * LANES + part * WIDTH);
#if WIDTH == 16
            v[0] = ADD_LANES(v[0], v[1], 4), v[1] = ADD_LANES(v[2], v[3], 4);
            v[0] = ADD_LANES(v[0], v[1], 8);
#elif WIDTH == 8
            v[0] = ADD_LANES(v[0], v[1], 4);
#endif
            part_sum[part] = v[0];
        }
        vec sum = sum_of_parts(part_sum);
        if (add) sum += load(S);
        store(S, sum);
    }
}

static void point_lanes(const struct plan *p, struct range inputs, const float *V, const float *D,
                        int64_t tiles, float *S, int add) {
    enum { CHUNK = 48 }; /* inputs per pass; a multiple of 4 and of INPUTS */
    float sums[CHUNK * LANES] __attribute__((aligned(64)));
    for (int64_t first = inputs.first; first < inputs.stop; first += CHUNK) {
        const int64_t count = least(inputs.stop - first, CHUNK);
        for (int64_t i = count; i % 4; i++) memset(sums + i * LANES, 0, LANES * sizeof(float));
        for (int64_t o = 0; o < p->K; o += QUAD) {
            for (int part = 0; part < LANES; part += WIDTH)
                for (int64_t i = 0; i < count; i += INPUTS) {
                    const float *v = V + (first + i) * p->channel + part;
                    const float *d = D + o * p->channel + part;
                    float *to = sums + i * LANES + part;
                    int64_t left = count - i;
                    if (left >= INPUTS) multiply_lanes(p, v, d, tiles, to, INPUTS);
                    else if (left == INPUTS - 1) multiply_lanes(p, v, d, tiles, to, INPUTS - 1);
                    else if (left == 2) multiply_lanes(p, v, d, tiles, to, 2);
                    else multiply_lanes(p, v, d, tiles, to, 1);
                }
            for (int64_t i = 0; i < count; i += 4)
                add_lanes(sums + i * LANES, S + (o * p->C + (first + i) * QUAD), add);
        }
    }
}

/* Compute G^T S G for 16 pairs of an input and an output: taps[i * r + j][pair]. */
INLINE void filters(const float *S, int64_t point, float (*taps)[16], const int r) {
    const int m = M_OF(r), n = m + r - 1;
    UNROLL for (int part = 0; part < 16; part += WIDTH) {
        const float *from = S + part;
        vec t[MOST_TAPS][MOST_POINTS], v[MOST_POINTS], out[MOST_TAPS];
        UNROLL for (int i = 0; i < n; i++, from += n * point) {
            UNROLL for (int c = 0; c < n; c++) v[c] = load(from + c * point);
            filter_sums(v, out, m, r);
            UNROLL for (int s = 0; s < r; s++) t[s][i] = out[s];
        }
        UNROLL for (int s = 0; s < r; s++) {
            filter_sums(t[s], out, m, r);
            UNROLL for (int i = 0; i < r; i++) store(&taps[r * i + s][part], out[i]);
        }
    }
}

/* Write tile `tile` of dweight, which has 16 outputs. Sixteen inputs at a time are collected, so
 * that each output is written contiguously. */
INLINE void finish_transposed(const struct plan *p, int64_t tile, float *dweight, const int r) {
    enum { MOST_FILTER = MOST_TAPS * MOST_TAPS, ALL = 32 }; /* rows for whole transposes of taps */
    const int filter = r * r, row = 16 * filter + 16;
    float filters_of[LANES * (16 * MOST_FILTER + 16)] __attribute__((aligned(64)));
    float taps[ALL][LANES] __attribute__((aligned(64))) = {{0}};
    const float *S = p->S + tile * p->C * LANES;
    for (int64_t i = 0; i < p->inputs; i += 16) {
        int64_t count = least(p->inputs - i, 16);
        for (int64_t j = 0; j < count; j++) {
            filters(S + (i + j) * LANES, p->s_point, taps, r);
            for (int tap = 0; tap < filter; tap += 16) /* the next input overwrites 7 extra taps */
                transpose_16(taps[tap], LANES, filters_of + j * filter + tap, row);
        }
        for (int64_t o = 0; o < least(p->outputs - tile * LANES, LANES); o++)
            memcpy(dweight + ((tile * LANES + o) * p->inputs + i) * filter, filters_of + o * row,
                   (size_t)(count * filter) * sizeof(float));
    }
}

/* Write the weights of four outputs to dweight. */
INLINE void finish_lanes(const struct plan *p, int64_t tile, float *dweight, const int r) {
    float taps[MOST_TAPS * MOST_TAPS][16] __attribute__((aligned(64))); /* [tap][input][output] */
    for (int64_t i = 0; i < p->inputs; i += 4) {
        filters(p->S + (tile * p->C + i) * QUAD, p->s_point, taps, r);
        for (int64_t o = 0; o < QUAD && tile * QUAD + o < p->outputs; o++)
            for (int64_t j = 0; j < 4 && i + j < p->inputs; j++) {
                float *to = dweight + ((tile * QUAD + o) * p->inputs + i + j) * (r * r);
                UNROLL for (int tap = 0; tap < r * r; tap++) to[tap] = taps[tap][j * QUAD + o];
            }
    }
}

INLINE void dweight_group(const struct team *team, const struct plan *p, struct pixels x,
                          struct pixels dy, int64_t first, int64_t tiles, const int r,
                          const int group) {
    const int n = M_OF(r) + r - 1;
    transform_band(team, p, x, dy, first, tiles, r, group);
    meet(team);
    tick();
    EACH_TILE(team, point, IN_GROUP(n, group) * n) {
        const float *V = p->V + point * p->v_point, *D = p->D + point * p->d_point;
        const int64_t index = FIRST(n, group) * n + point;
        float *S = p->S + index * p->s_point;
        struct range inputs = inputs_at(p->shape, (int)(index / n), (int)(index % n));
        inputs.first = inputs.first / 8 * 8; /* register tiles have eight inputs */
        if (NARROW || p->transposed)
            add_products(&p->products, V, D, tiles * TERMS_PER_PIXEL, (struct range){0, p->K},
                         inputs, S, first > 0);
        else
            point_lanes(p, inputs, V, D, tiles, S, first > 0);
        tick();
    }
    meet(team);
}

INLINE void dweight_of(const struct team *team, const struct plan *p, struct pixels x,
                       struct pixels dy, float *dweight, const int r) {
    for (int64_t band = 0; band < p->bands; band++) {
        const int64_t first = p->tiles * band / p->bands;
        const int64_t tiles = p->tiles * (band + 1) / p->bands - first;
        if (p->transposed) transpose_band(team, p, dy, first, tiles);
        dweight_group(team, p, x, dy, first, tiles, r, 0);
        dweight_group(team, p, x, dy, first, tiles, r, 1);
        dweight_group(team, p, x, dy, first, tiles, r, 2);
        if (GROUPS(M_OF(r) + r - 1) > 3) dweight_group(team, p, x, dy, first, tiles, r, 3);
        if (GROUPS(M_OF(r) + r - 1) > 4) dweight_group(team, p, x, dy, first, tiles, r, 4);
    }
    if (NARROW || p->transposed)
        EACH_TILE(team, tile, p->K / LANES) finish_transposed(p, tile, dweight, r);
    else
        EACH_TILE(team, tile, p->K / QUAD) finish_lanes(p, tile, dweight, r);
}

/* Each size is a function of its own: compilers need less time for several small functions than for
 * a large one. */
#define SIZE(r)                                                                                    \
    APART void dweight_##r(const struct team *team, const struct plan *p, struct pixels x,         \
                           struct pixels dy, float *dweight) {                                     \
        dweight_of(team, p, x, dy, dweight, r);                                                    \
    }
SIZE(3)
SIZE(5)
#if !defined(BF16) /* there, strided convolutions are direct */
SIZE(2)
SIZE(4)
#endif
#undef SIZE

void winograd_dweight(const struct team *team, const struct winograd *shape, struct pixels x,
                      struct pixels dy, float *dweight, float *scratch) {
    const struct plan plan = plan_of(shape, scratch);
    switch (shape->r) {
    case 3: dweight_3(team, &plan, x, dy, dweight); break;
    case 5: dweight_5(team, &plan, x, dy, dweight); break;
#if !defined(BF16)
    case 2: dweight_2(team, &plan, x, dy, dweight); break;
    case 4: dweight_4(team, &plan, x, dy, dweight); break;
#endif
    }
}

#ifndef BF16
/* The arguments of a pass over one block, for tests. */
struct example {
    struct winograd shape;
    struct pixels x, dy;
    float *dweight;
};

static void example_dweight(const struct team *team, void *job, int64_t block) {
    const struct example *e = job;
    winograd_dweight(team, &e->shape, e->x, e->dy, e->dweight, team->shared);
}

void mpidl_winograd_dweight(const float *x, const float *dy, float *dweight,
                            const int64_t *shape) {
    const int m = (int)shape[4], r = (int)shape[6];
    struct example e = {.shape = {shape[0], shape[1], shape[2], shape[3], m, m, r, 0, 1, r, 0, 0},
                        .dweight = dweight};
    const int64_t rows = winograd_extent(shape[2], m, r), row = winograd_extent(shape[3], m, r);
    const int64_t dy_rows = rows - (r - 1), dy_row = row - (r - 1);
    e.x = (struct pixels){(float *)x, rows * row * LANES, row * LANES, 0, 0};
    e.dy = (struct pixels){(float *)dy, dy_rows * dy_row * LANES, dy_row * LANES, 0, 0};
    each_block(1, example_dweight, &e, winograd_dweight_floats(&e.shape), 0);
}
#endif
