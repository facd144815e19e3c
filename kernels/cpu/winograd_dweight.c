#include "lanes.h"
#include "mpidl.h"
#include "winograd.h"
#include "winograd_tiles.h"

/* The gradient with respect to 3x3 weights by F(4x4, 3x3) (m = 4, 36 points):
 *
 *     dW = G^T [ sum over tiles and images of (B^T d B) . (A dy A^T) ] G
 *
 * Tiles are taken in bands, points in the groups of winograd_tiles.h, so that the transformed
 * inputs V and gradients D of both stay in cache. For each point S = sum of V D^T is a matrix
 * product in one of two layouts:
 *
 *  - where the inputs are a multiple of 16, V is transposed, so that a vector holds input channels,
 *    and tiles and images are the one dimension that is summed over:
 *        V[point][panel of inputs][tile, image][input]   D[point][output][tile, image]
 *        S[point][output][input]
 *  - else a vector holds images, which are added up at the end of a band:
 *        V[point][input][tile, image]   D[point][output][tile, image]
 *        S[point][quad of outputs][input][4]
 */
enum {
    M = 4,
    N = 6,
    QUAD = 4,
    GAP = 64,                   /* floats between points and 16 between channels: no two on the */
                                /* same 4 KiB */
    BAND_BYTES = 768 << 10,     /* of V and D of one group of points */
    MOST = 64,                  /* tiles of a band */
};

/* The plain reference, with the arguments of mpidl_winograd_dweight. */
void mpidl_winograd_dweight_plain(const float *x, const float *dy, float *dweight,
                                  const int64_t *shape) {
    const int64_t inputs = shape[0], outputs = shape[1], P = shape[2], Q = shape[3];
    const int64_t rows = winograd_extent(P, M), columns = winograd_extent(Q, M);
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t i = 0; i < inputs; i++)
            for (int64_t tap = 0; tap < 9; tap++) {
                double sum = 0;
                for (int64_t p = 0; p < P; p++) {
                    int64_t row = i * rows + p + tap / 3, dy_row = o * (rows - 2) + p;
                    const float *from = x + (row * columns + tap % 3) * LANES;
                    const float *times = dy + dy_row * (columns - 2) * LANES;
                    for (int64_t q = 0; q < Q * LANES; q++) sum += (double)from[q] * times[q];
                }
                *dweight++ = (float)sum;
            }
}

/* Register tiles: outputs by vectors of inputs where V is transposed, else quads of outputs by
 * inputs. */
#if WIDTH == 16
enum { INPUTS = 4 };
#elif REGISTERS == 32
enum { INPUTS = 4 };
#else
enum { INPUTS = 2 };
#endif

static int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

/* How a shape is worked on: by the shape alone, except for the widths of panels, which do not
 * matter for any sum. */
struct plan {
    int64_t inputs, outputs, K; /* K: outputs, rounded up to register tiles */
    int transposed;
    int64_t across, tiles, bands, most; /* tiles in a row of tiles, in all; bands; tiles of one */
    int64_t panel;                      /* inputs of a panel, transposed */
    int64_t v_point, d_channel, d_point, s_point; /* strides in floats */
    float *V, *D, *S;
};

static struct plan plan_of(const struct winograd *shape, float *scratch) {
    struct plan p = {.inputs = shape->inputs, .outputs = shape->outputs};
    p.transposed = p.inputs % 16 == 0;
    p.K = round_up(p.outputs, p.transposed ? 8 : QUAD);
    p.across = (shape->columns + M - 1) / M;
    p.tiles = p.across * ((shape->rows + M - 1) / M);
    int64_t fit = BAND_BYTES / (2 * N * (p.inputs + p.outputs) * LANES * 4);
    fit = fit < 4 ? 4 : fit > MOST ? MOST : fit;
    p.bands = (p.tiles + fit - 1) / fit;
    p.most = (p.tiles + p.bands - 1) / p.bands;
    p.panel = WIDTH;
    if (WIDTH == 16) p.panel = p.inputs % 64 == 0 ? 64 : p.inputs % 48 == 0 ? 48 : p.inputs % 32 == 0 ? 32 : 16;
    else p.panel = REGISTERS == 32 ? 4 * WIDTH : 2 * WIDTH;
    p.d_channel = (p.most + 1) * LANES;
    p.d_point = p.K * p.d_channel + GAP;
    p.v_point = round_up(p.inputs, INPUTS) * (p.transposed ? p.most * LANES : p.d_channel) + GAP;
    p.s_point = p.K * round_up(p.inputs, 4) + 16;
    p.V = scratch;
    p.D = p.V + 2 * N * p.v_point;
    p.S = p.D + 2 * N * p.d_point;
    return p;
}

int64_t winograd_dweight_floats(const struct winograd *shape) {
    struct plan p = plan_of(shape, NULL);
    return 2 * N * (p.v_point + p.d_point) + N * N * p.s_point;
}

/* B^T d B of one tile, for one group of rows of B^T: out[line * 6 + c] at `stride` floats. */
INLINE void input_tile(const float *x, int64_t row, float *out, int64_t stride, const int group) {
    const int lines = IN_GROUP(M, group);
    vec t[2][N], d[N], v[N];
    UNROLL for (int c = 0; c < N; c++) {
        UNROLL for (int r = 0; r < N; r++) d[r] = load(x + r * row + c * LANES);
        input_group(d, v, M, group);
        UNROLL for (int line = 0; line < lines; line++) t[line][c] = v[line];
    }
    UNROLL for (int line = 0; line < lines; line++) {
        input_line(t[line], v, M);
        UNROLL for (int c = 0; c < N; c++) store(out + (line * N + c) * stride, v[c]);
    }
}

/* A dy A^T of one tile, for one group of rows of A. */
INLINE void gradient_tile(const float *dy, int64_t row, float *out, int64_t stride,
                          const int group) {
    const int lines = IN_GROUP(M, group);
    vec t[2][M], d[M], v[N];
    UNROLL for (int c = 0; c < M; c++) {
        UNROLL for (int r = 0; r < M; r++) d[r] = load(dy + r * row + c * LANES);
        gradient_group(d, v, group);
        UNROLL for (int line = 0; line < lines; line++) t[line][c] = v[line];
    }
    UNROLL for (int line = 0; line < lines; line++) {
        gradient_line(t[line], v);
        UNROLL for (int c = 0; c < N; c++) store(out + (line * N + c) * stride, v[c]);
    }
}

/* 16 inputs of one tile: transformed, then transposed to vectors of inputs. */
INLINE void transposed_tile(const float *x, int64_t channel, int64_t row, float *V,
                            const struct plan *p, const int group) {
    float t[2 * N][LANES][LANES] __attribute__((aligned(64))); /* [point][input][image] */
    const int count = IN_GROUP(M, group) * N;
    for (int i = 0; i < LANES; i++)
        for (int part = 0; part < LANES; part += WIDTH)
            input_tile(x + i * channel + part, row, &t[0][i][part], LANES * LANES, group);
    for (int point = 0; point < count; point++)
        for (int i = 0; i < LANES; i += WIDTH)
            for (int image = 0; image < LANES; image += WIDTH) {
                vec v[WIDTH];
                UNROLL for (int j = 0; j < WIDTH; j++) v[j] = load(&t[point][i + j][image]);
                transpose(v);
                UNROLL for (int j = 0; j < WIDTH; j++)
                    store(V + point * p->v_point + i / p->panel * p->panel * p->most * LANES +
                              (image + j) * p->panel + i % p->panel, v[j]);
            }
}

/* V and D of a band: tiles [first, first + tiles). */
INLINE void transform_band(const struct team *team, const struct plan *p, struct pixels x,
                           struct pixels dy, int64_t first, int64_t tiles, const int group) {
    if (p->transposed) {
        EACH_TILE(team, sixteen, p->inputs / 16) {
            const int64_t i = sixteen * 16;
            float *to = p->V + i / p->panel * p->panel * p->most * LANES + i % p->panel;
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t r = (first + t) / p->across, c = (first + t) % p->across;
                transposed_tile(x.at + i * x.channel + r * M * x.row + c * M * LANES, x.channel,
                                x.row, to + t * LANES * p->panel, p, group);
            }
        }
    } else {
        EACH_TILE(team, i, p->inputs) {
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t r = (first + t) / p->across, c = (first + t) % p->across;
                const float *from = x.at + i * x.channel + r * M * x.row + c * M * LANES;
                float *to = p->V + i * p->d_channel + t * LANES;
                for (int part = 0; part < LANES; part += WIDTH)
                    input_tile(from + part, x.row, to + part, p->v_point, group);
            }
        }
    }
    EACH_TILE(team, o, p->outputs) {
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t r = (first + t) / p->across, c = (first + t) % p->across;
            const float *from = dy.at + o * dy.channel + r * M * dy.row + c * M * LANES;
            float *to = p->D + o * p->d_channel + t * LANES;
            for (int part = 0; part < LANES; part += WIDTH)
                gradient_tile(from + part, dy.row, to + part, p->d_point, group);
        }
    }
}

/* S of one point, `outputs` outputs and one panel of `vectors` vectors of inputs. */
INLINE void multiply_transposed(const float *D, int64_t d_channel, const float *V, int64_t terms,
                                float *S, int64_t inputs, int add, const int outputs,
                                const int vectors) {
    vec sum[8][4];
    UNROLL for (int o = 0; o < outputs; o++)
        UNROLL for (int v = 0; v < vectors; v++) sum[o][v] = zero();
    for (int64_t term = 0; term < terms; term++, V += vectors * WIDTH) {
        vec x[4];
        UNROLL for (int v = 0; v < vectors; v++) x[v] = load(V + v * WIDTH);
        UNROLL for (int o = 0; o < outputs; o++) {
            vec d = splat(D[o * d_channel + term]);
            UNROLL for (int v = 0; v < vectors; v++) sum[o][v] = muladd(d, x[v], sum[o][v]);
        }
    }
    UNROLL for (int o = 0; o < outputs; o++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *to = S + o * inputs + v * WIDTH;
            if (add) sum[o][v] += load(to);
            store(to, sum[o][v]);
        }
}

static void point_transposed(const struct plan *p, const float *V, const float *D, int64_t tiles,
                             float *S, int add) {
    const int64_t terms = tiles * LANES;
    for (int64_t i = 0; i < p->inputs; i += p->panel, V += p->panel * p->most * LANES, S += p->panel)
        for (int64_t o = 0; o < p->K; o += 4) {
            const float *d = D + o * p->d_channel;
            float *s = S + o * p->inputs;
#define CASE(outputs, vectors)                                                                     \
    multiply_transposed(d, p->d_channel, V, terms, s, p->inputs, add, outputs, vectors)
#if WIDTH == 16
            if (p->panel == 64) {
                CASE(4, 4);
                continue;
            }
            if (p->panel == 48) CASE(8, 3);
            else if (p->panel == 32) CASE(8, 2);
            else CASE(8, 1);
            o += 4;
#elif REGISTERS == 32
            CASE(4, 4);
#else
            CASE(4, 2);
#endif
#undef CASE
        }
}

/* rows[i * 4 + o] = the sum over tiles of input i and output o, of one part of the lanes. */
INLINE void multiply_lanes(const float *D, const float *V, int64_t channel, int64_t tiles,
                           vec *rows, const int inputs) {
    vec sum[INPUTS * QUAD];
    UNROLL for (int s = 0; s < INPUTS * QUAD; s++) sum[s] = zero();
    for (int64_t t = 0; t < tiles; t++, D += LANES, V += LANES) {
        vec d[QUAD];
        UNROLL for (int o = 0; o < QUAD; o++) d[o] = load(D + o * channel);
        UNROLL for (int i = 0; i < inputs; i++) {
            vec x = load(V + i * channel);
            UNROLL for (int o = 0; o < QUAD; o++)
                sum[i * QUAD + o] = muladd(x, d[o], sum[i * QUAD + o]);
        }
    }
    UNROLL for (int s = 0; s < INPUTS * QUAD; s++) rows[s] = sum[s];
}

static void point_lanes(const struct plan *p, const float *V, const float *D, int64_t tiles,
                        float *S, int add) {
    const int64_t channel = p->d_channel, across = round_up(p->inputs, 4);
    for (int64_t i = 0; i < p->inputs; i += 4)
        for (int64_t o = 0; o < p->K; o += QUAD) {
            const float *d = D + o * channel, *v = V + i * channel;
            vec part_sum[PARTS][16 / WIDTH];
            for (int part = 0; part < PARTS; part++) {
                vec rows[16];
                UNROLL for (int j = 0; j < 4; j += INPUTS) {
                    const int64_t left = p->inputs - i - j;
                    const float *dp = d + part * WIDTH, *vp = v + j * channel + part * WIDTH;
                    vec *to = rows + j * QUAD;
                    if (left >= INPUTS) multiply_lanes(dp, vp, channel, tiles, to, INPUTS);
                    else if (INPUTS > 2 && left == 3) multiply_lanes(dp, vp, channel, tiles, to, INPUTS > 2 ? 3 : 1);
                    else if (INPUTS > 2 && left == 2) multiply_lanes(dp, vp, channel, tiles, to, 2);
                    else if (left == 1) multiply_lanes(dp, vp, channel, tiles, to, 1);
                    else UNROLL for (int s = 0; s < INPUTS * QUAD; s++) to[s] = zero();
                }
                UNROLL for (int s = 0; s < 16 / WIDTH; s++)
                    part_sum[part][s] = sum_across(rows + s * WIDTH);
            }
            UNROLL for (int s = 0; s < 16 / WIDTH; s++) {
#if PARTS == 4
                vec all = (part_sum[0][s] + part_sum[1][s]) + (part_sum[2][s] + part_sum[3][s]);
#elif PARTS == 2
                vec all = part_sum[0][s] + part_sum[1][s];
#else
                vec all = part_sum[0][s];
#endif
                float *to = S + o * across + i * QUAD + s * WIDTH;
                if (add) all += load(to);
                store(to, all);
            }
        }
}

/* G^T S G of 16 pairs of an input and an output: taps[r * 3 + s][pair]. */
INLINE void filters(const float *S, int64_t point, float (*taps)[16]) {
    for (int part = 0; part < 16; part += WIDTH) {
        vec t[3][N];
        UNROLL for (int c = 0; c < N; c++) {
            vec v[N], out[3];
            UNROLL for (int r = 0; r < N; r++) v[r] = load(S + (r * N + c) * point + part);
            filter_sums(v, out);
            UNROLL for (int r = 0; r < 3; r++) t[r][c] = out[r];
        }
        UNROLL for (int r = 0; r < 3; r++) {
            vec out[3];
            filter_sums(t[r], out);
            UNROLL for (int s = 0; s < 3; s++) store(&taps[3 * r + s][part], out[s]);
        }
    }
}

static void dweight_of(const struct plan *p, int64_t quad, float *dweight) {
    float taps[9][16] __attribute__((aligned(64)));
    if (p->transposed) {
        for (int64_t o = quad * QUAD; o < quad * QUAD + QUAD && o < p->outputs; o++)
            for (int64_t i = 0; i < p->inputs; i += 16) {
                filters(p->S + o * p->inputs + i, p->s_point, taps);
                float *to = dweight + (o * p->inputs + i) * 9;
                for (int j = 0; j < 16; j++)
                    UNROLL for (int tap = 0; tap < 9; tap++) to[j * 9 + tap] = taps[tap][j];
            }
    } else {
        const int64_t across = round_up(p->inputs, 4);
        for (int64_t i = 0; i < p->inputs; i += 4) {
            filters(p->S + quad * QUAD * across + i * QUAD, p->s_point, taps);
            for (int64_t o = 0; o < QUAD && quad * QUAD + o < p->outputs; o++)
                for (int64_t j = 0; j < 4 && i + j < p->inputs; j++) {
                    float *to = dweight + ((quad * QUAD + o) * p->inputs + i + j) * 9;
                    UNROLL for (int tap = 0; tap < 9; tap++) to[tap] = taps[tap][j * QUAD + o];
                }
        }
    }
}

INLINE void dweight_group(const struct team *team, const struct plan *p, struct pixels x,
                          struct pixels dy, int64_t first, int64_t tiles, const int group) {
    transform_band(team, p, x, dy, first, tiles, group);
    meet(team);
    EACH_TILE(team, point, IN_GROUP(M, group) * N) {
        const float *V = p->V + point * p->v_point, *D = p->D + point * p->d_point;
        float *S = p->S + (FIRST(M, group) * N + point) * p->s_point;
        (p->transposed ? point_transposed : point_lanes)(p, V, D, tiles, S, first > 0);
    }
    meet(team);
}

void winograd_dweight(const struct team *team, const struct winograd *shape, struct pixels x,
                      struct pixels dy, float *dweight, float *scratch) {
    const struct plan plan = plan_of(shape, scratch), *p = &plan;
    for (int64_t band = 0; band < p->bands; band++) {
        const int64_t first = p->tiles * band / p->bands;
        const int64_t tiles = p->tiles * (band + 1) / p->bands - first;
        dweight_group(team, p, x, dy, first, tiles, 0);
        dweight_group(team, p, x, dy, first, tiles, 1);
        dweight_group(team, p, x, dy, first, tiles, 2);
        dweight_group(team, p, x, dy, first, tiles, 3);
    }
    EACH_TILE(team, quad, (p->outputs + QUAD - 1) / QUAD) dweight_of(p, quad, dweight);
}

/* One block, as tests call it. */
struct example {
    struct winograd shape;
    struct pixels x, dy;
    float *dweight;
};

static void example_dweight(const struct team *team, void *job, int64_t block) {
    const struct example *e = job;
    (void)block;
    winograd_dweight(team, &e->shape, e->x, e->dy, e->dweight, team->shared);
}

void mpidl_winograd_dweight(const float *x, const float *dy, float *dweight,
                            const int64_t *shape) {
    struct example e = {.shape = {shape[0], shape[1], shape[2], shape[3], M}, .dweight = dweight};
    const int64_t rows = winograd_extent(shape[2], M), columns = winograd_extent(shape[3], M);
    e.x = (struct pixels){(float *)x, rows * columns * LANES, columns * LANES};
    e.dy = (struct pixels){(float *)dy, (rows - 2) * (columns - 2) * LANES, (columns - 2) * LANES};
    each_block(1, example_dweight, &e, winograd_dweight_floats(&e.shape), 0);
}
