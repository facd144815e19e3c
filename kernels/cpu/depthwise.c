#include "depthwise.h"

#include "mpidl.h"

/* The size of the copy of a band of x; a band has at least one row. Bands of 7x7 filters are larger,
 * because six rows are moved from each band to the next. */
enum { BAND_BYTES = 32 << 10, BAND_BYTES_7 = 128 << 10 };
enum { MOST_TAPS = 7, SIZES = 3 }; /* taps of a row of the filter; 3, 5 or 7 of them */

/* The largest number of adjacent outputs whose sums and operands fit into registers. */
#if REGISTERS == 32
enum { PIXELS = 8 };
#else
enum { PIXELS = 4 };
#endif

int is_depthwise(const struct conv *c) {
    return c->groups == c->C && c->K == c->C && c->R == c->S &&
           (c->S == 3 || c->S == 5 || c->S == 7) && c->stride_w <= 2 &&
           c->dilation_h == 1 && c->dilation_w == 1;
}

/* A row of outputs, out[i] = bias + sum over r < rows and taps s of weight[r][s] * (an input of
 * row r). With -DBF16, the bias is added last. `in` is the input in row 0 of output 0, tap 0. */
struct row {
    const float *in;
    int64_t in_row; /* floats between rows of inputs */
    const float *weight;
    int64_t weight_row, rows;
    float bias;
    struct finish finish; /* the addend starts at the same pixel as `out` */
    value *out;
    int64_t columns;
};

/* Compute X outputs, starting at output `first`. The input of output i and tap s is in column
 * step * i + s or, if `back`, in column i - s. */
INLINE void convolve_tile(const struct row *r, int64_t first, const int X, const int S,
                          const int step, const int back) {
    const int begin = back ? 1 - S : 0;
    for (int part = 0; part < LANES; part += WIDTH) {
        const float *in = r->in + first * step * LANES + part, *weight = r->weight;
        vec sum[PIXELS];
        UNROLL for (int i = 0; i < X; i++) sum[i] = splat(NARROW ? 0 : r->bias);
        for (int64_t n = 0; n < r->rows; n++, in += r->in_row, weight += r->weight_row) {
            vec v[2 * (PIXELS - 1) + MOST_TAPS];
            UNROLL for (int j = 0; j < (X - 1) * step + S; j++) v[j] =
                load(in + (begin + j) * LANES);
            UNROLL for (int s = 0; s < S; s++) {
                vec f = splat(weight[s]);
                UNROLL for (int i = 0; i < X; i++) sum[i] =
                    muladd(f, v[i * step + (back ? S - 1 - s : s)], sum[i]);
            }
        }
        if (NARROW)
            UNROLL for (int i = 0; i < X; i++) sum[i] += splat(r->bias);
        if (r->finish.addend)
            UNROLL for (int i = 0; i < X; i++) sum[i] +=
                load(r->finish.addend + (first + i) * LANES + part);
        vec floor = floor_of(r->finish);
        UNROLL for (int i = 0; i < X; i++)
            store(r->out + (first + i) * LANES + part, larger(floor, sum[i]));
    }
}

/* The gradient of a convolution with stride 2: compute X pairs of outputs, starting at pair
 * `first`. Output j of pair i reads column i + (j + odd - s) / 2 for the taps s with an even
 * numerator. */
INLINE void spread_tile(const struct row *r, int64_t first, const int X, const int S,
                        const int odd) {
    const int begin = -((S - 1 - odd) / 2), end = (1 + odd) / 2; /* of the columns for pair 0 */
    for (int part = 0; part < LANES; part += WIDTH) {
        const float *in = r->in + first * LANES + part, *weight = r->weight;
        vec sum[PIXELS / 2][2];
        UNROLL for (int i = 0; i < X; i++) sum[i][0] = sum[i][1] = splat(NARROW ? 0 : r->bias);
        for (int64_t n = 0; n < r->rows; n++, in += r->in_row, weight += r->weight_row) {
            vec v[PIXELS / 2 + MOST_TAPS];
            UNROLL for (int j = 0; j < X + end - begin; j++) v[j] = load(in + (begin + j) * LANES);
            UNROLL for (int s = 0; s < S; s++) {
                const int j = (s + odd) % 2, column = (j + odd - s) / 2 - begin;
                vec f = splat(weight[s]);
                UNROLL for (int i = 0; i < X; i++) sum[i][j] =
                    muladd(f, v[i + column], sum[i][j]);
            }
        }
        if (NARROW)
            UNROLL for (int i = 0; i < X; i++)
                UNROLL for (int j = 0; j < 2; j++) sum[i][j] += splat(r->bias);
        value *out = r->out + 2 * first * LANES + part;
        UNROLL for (int i = 0; i < X; i++) {
            store(out + 2 * i * LANES, sum[i][0]);
            if (2 * (first + i) + 1 < r->columns) store(out + (2 * i + 1) * LANES, sum[i][1]);
        }
    }
}

typedef void row_kernel(const struct row *, int64_t first);
#define KERNEL(name, X, call)                                                                      \
    static void name##_##X(const struct row *r, int64_t first) { call; }
#define CONVOLVE(X)                                                                                \
    KERNEL(forward_3_1, X, convolve_tile(r, first, X, 3, 1, 0))                                    \
    KERNEL(forward_3_2, X, convolve_tile(r, first, X, 3, 2, 0))                                    \
    KERNEL(forward_5_1, X, convolve_tile(r, first, X, 5, 1, 0))                                    \
    KERNEL(forward_5_2, X, convolve_tile(r, first, X, 5, 2, 0))                                    \
    KERNEL(forward_7_1, X, convolve_tile(r, first, X, 7, 1, 0))                                    \
    KERNEL(forward_7_2, X, convolve_tile(r, first, X, 7, 2, 0))                                    \
    KERNEL(back_3, X, convolve_tile(r, first, X, 3, 1, 1))                                         \
    KERNEL(back_5, X, convolve_tile(r, first, X, 5, 1, 1))                                         \
    KERNEL(back_7, X, convolve_tile(r, first, X, 7, 1, 1))
#define SPREAD(X)                                                                                  \
    KERNEL(spread_3_0, X, spread_tile(r, first, X, 3, 0))                                          \
    KERNEL(spread_3_1, X, spread_tile(r, first, X, 3, 1))                                          \
    KERNEL(spread_5_0, X, spread_tile(r, first, X, 5, 0))                                          \
    KERNEL(spread_5_1, X, spread_tile(r, first, X, 5, 1))                                          \
    KERNEL(spread_7_0, X, spread_tile(r, first, X, 7, 0))                                          \
    KERNEL(spread_7_1, X, spread_tile(r, first, X, 7, 1))
CONVOLVE(1) CONVOLVE(2) CONVOLVE(3) CONVOLVE(4)
SPREAD(1) SPREAD(2)
#if REGISTERS == 32
CONVOLVE(5) CONVOLVE(6) CONVOLVE(7) CONVOLVE(8)
SPREAD(3) SPREAD(4)
#define WIDTHS(name)                                                                               \
    {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8}
#define HALF_WIDTHS(name) {name##_1, name##_2, name##_3, name##_4}
#else
#define WIDTHS(name) {name##_1, name##_2, name##_3, name##_4}
#define HALF_WIDTHS(name) {name##_1, name##_2}
#endif
/* By the size of the filter, and by the stride or whether the padding on the left is odd. */
static row_kernel *const FORWARD[SIZES][2][PIXELS] = {{WIDTHS(forward_3_1), WIDTHS(forward_3_2)},
                                                      {WIDTHS(forward_5_1), WIDTHS(forward_5_2)},
                                                      {WIDTHS(forward_7_1), WIDTHS(forward_7_2)}};
static row_kernel *const BACK[SIZES][PIXELS] = {WIDTHS(back_3), WIDTHS(back_5), WIDTHS(back_7)};
static row_kernel *const SPREAD[SIZES][2][PIXELS / 2] = {
    {HALF_WIDTHS(spread_3_0), HALF_WIDTHS(spread_3_1)},
    {HALF_WIDTHS(spread_5_0), HALF_WIDTHS(spread_5_1)},
    {HALF_WIDTHS(spread_7_0), HALF_WIDTHS(spread_7_1)}};

static int64_t size_of(const struct conv *c) { return (c->S - 3) / 2; }

/* Compute `count` outputs, or pairs of outputs, in tiles whose widths differ by at most one. */
static void compute_row(row_kernel *const *kernels, int64_t widest, const struct row *row,
                        int64_t count) {
    const int64_t tiles = parts_of(count, widest);
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t first = count * i / tiles, width = count * (i + 1) / tiles - first;
        kernels[width - 1](row, first);
    }
}

/* Add the products of `rows` rows of dy and x to the sums of R rows of S taps, (R, S, 16). */
INLINE void dweight_tile(const float *dy, int64_t dy_row, const float *x, int64_t x_row,
                         int64_t rows, int64_t step_row, int64_t columns, float *sums, const int R,
                         const int S, const int step) {
    for (int part = 0; part < LANES; part += WIDTH) {
        vec sum[4 * MOST_TAPS];
        UNROLL for (int t = 0; t < R * S; t++) sum[t] = load(sums + t * LANES + part);
        for (int64_t p = 0; p < rows; p++) {
            const float *d = dy + p * dy_row + part, *v = x + p * step_row + part;
            for (int64_t q = 0; q < columns; q++, d += LANES, v += step * LANES) {
                const vec grad = load(d);
                UNROLL for (int r = 0; r < R; r++) UNROLL for (int s = 0; s < S; s++)
                    sum[r * S + s] = muladd(grad, load(v + r * x_row + s * LANES), sum[r * S + s]);
            }
        }
        UNROLL for (int t = 0; t < R * S; t++) store(sums + t * LANES + part, sum[t]);
    }
}

struct pass {
    struct arguments job;
    int64_t band;                /* rows of y in a band */
    int64_t x_columns, x_rows;   /* size of the copy of a band of x */
    int64_t dy_columns, dy_rows; /* and of dy */
    int64_t before, left;        /* rows and columns of zeros before dy */
    int64_t dy_height;           /* rows of dy with the rows of zeros before and after it */
    struct leaves *leaves;       /* NULL if dweight is not needed */
};

/* The copy of the rows [first, stop) of an image with a border. */
struct window {
    float *rows;
    int64_t row, first, stop;
};

/* Drop the rows before `first`. */
static void advance(struct window *w, int64_t first) {
    const int64_t kept = most(w->stop - first, 0);
    if (first > w->first && kept)
        memmove(w->rows, w->rows + (first - w->first) * w->row,
                (size_t)(kept * w->row) * sizeof(float));
    w->first = first, w->stop = first + kept;
}

/* Prepare to copy the rows up to `stop`. Return the number of rows of the image to copy, which has
 * `height` rows after `top` rows of zeros, and the first of them, and where to copy them. */
static int64_t extend(struct window *w, int64_t stop, int64_t top, int64_t height, int64_t *first,
                      struct padded *to) {
    const int64_t start = w->stop, count = stop - start;
    const int64_t above = least(most(top - start, 0), count);
    const int64_t rows = most(least(stop, top + height) - most(start, top), 0);
    float *at = w->rows + (start - w->first) * w->row;
    memset(at, 0, (size_t)(above * w->row) * sizeof(float));
    at += above * w->row;
    memset(at + rows * w->row, 0, (size_t)((count - above - rows) * w->row) * sizeof(float));
    *first = most(start - top, 0);
    *to = (struct padded){.data = at, .phases = 1, .row_stride = w->row, .keep_border = 1};
    w->stop = stop;
    return rows;
}

static const float *row_at(const struct window *w, int64_t row) {
    return w->rows + (row - w->first) * w->row;
}

/* Copy the rows of x for the rows [p, stop) of y. */
static void bring_x(const struct pass *pass, struct window *w, int64_t channel, const value *x,
                    int64_t p, int64_t stop) {
    const struct conv *c = &pass->job.c;
    int64_t first;
    struct padded to;
    advance(w, p * c->stride_h);
    const int64_t rows =
        extend(w, (stop - 1) * c->stride_h + c->R, c->top, c->H, &first, &to);
    to.columns = pass->x_columns;
    fill_source(&to, channel, &pass->job.x, x + first * c->W * LANES,
                (struct picture){.height = rows, .width = c->W, .left = c->left});
}

static struct pass pass_of(const struct arguments *job) {
    const struct conv *c = &job->c;
    struct pass pass = {.job = *job};
    pass.x_columns = most(c->W + c->left, (c->Q - 1) * c->stride_w + c->S);
    const int64_t bytes = c->S == 7 ? BAND_BYTES_7 : BAND_BYTES;
    const int64_t fit = bytes / (pass.x_columns * LANES * (int64_t)sizeof(float));
    pass.band = least(most((fit - c->R) / c->stride_h + 1, 1), c->P);
    pass.band = parts_of(c->P, parts_of(c->P, pass.band)); /* bands of about equal size */
    pass.x_rows = (pass.band - 1) * c->stride_h + c->R;
    return pass;
}

static int64_t window_floats(int64_t rows, int64_t columns) { return rows * columns * LANES; }

/* Return an empty window whose border is zero. */
static struct window window_at(float *memory, int64_t rows, int64_t columns) {
    memset(memory, 0, (size_t)window_floats(rows, columns) * sizeof(float));
    return (struct window){.rows = memory, .row = columns * LANES};
}

/* Leave out the rows of 7x7 filters that read rows of zeros, a quarter of them on 7x7 images. Row n
 * of the filter reads row start + n * step of an image of `height` rows. */
static void skip_zeros(struct row *row, int64_t start, int64_t step, int64_t height) {
    const int64_t before = step > 0 ? -start : start - height + 1;
    const int64_t inside = step > 0 ? height - start : start + 1;
    const int64_t first = most(before, 0);
    row->in += first * row->in_row;
    row->weight += first * row->weight_row;
    row->rows = least(row->rows, inside) - first;
}

static void forward_channel(const struct pass *pass, int64_t block, int64_t k,
                            struct window window) {
    const struct arguments *job = &pass->job;
    const struct conv *c = &job->c;
    const int64_t channel = block * c->K + k, y_row = c->Q * LANES;
    const value *x = job->x.x + channel * c->H * c->W * LANES;
    value *y = job->y + channel * c->P * y_row;
    row_kernel *const *kernels = FORWARD[size_of(c)][c->stride_w - 1];
    struct row row = {.in_row = window.row,
                      .weight_row = c->S,
                      .bias = job->bias ? job->bias[k] : 0,
                      .finish = job->finish,
                      .out = y,
                      .columns = c->Q};
    if (row.finish.addend) row.finish.addend += channel * c->P * y_row;
    for (int64_t p = 0; p < c->P; p += pass->band) {
        const int64_t stop = least(p + pass->band, c->P);
        bring_x(pass, &window, k, x, p, stop);
        for (int64_t i = p; i < stop; i++, row.out += y_row) {
            row.in = row_at(&window, i * c->stride_h), row.rows = c->R;
            row.weight = job->weight + k * c->R * c->S;
            if (c->S == 7) skip_zeros(&row, i * c->stride_h - c->top, 1, c->H);
            compute_row(kernels, PIXELS, &row, c->Q);
            if (row.finish.addend) row.finish.addend += y_row;
        }
    }
    if (job->rows) {
        double *moments = job->rows + block * (1 + 2 * c->K) + 1 + k;
        channel_moments(y, c->P * c->Q, job->counts[block], moments, moments + c->K);
    }
}

static void forward_block(const struct team *team, void *argument, int64_t block) {
    const struct pass *pass = argument;
    const struct conv *c = &pass->job.c;
    const struct window window = window_at(team->own, pass->x_rows, pass->x_columns);
    if (pass->job.rows && team->member == 0)
        pass->job.rows[block * (1 + 2 * c->K)] = (double)(c->P * c->Q * pass->job.counts[block]);
    EACH_TILE(team, k, c->K) {
        forward_channel(pass, block, k, window);
        tick();
    }
}

void depthwise_forward(const struct arguments *job, int64_t blocks) {
    struct pass pass = pass_of(job);
    each_block(blocks, forward_block, &pass, 0, window_floats(pass.x_rows, pass.x_columns));
}

/* The backward pass */

/* The sums of a channel: for the bias (4, 16), and for the weights (R, S, 16). lane_sums reads 16
 * rows at a time. */
enum { BIAS_SUMS = 4 * LANES, MOST_SUMS = MOST_TAPS * MOST_TAPS + LANES - 1 };

static int64_t sums_of(const struct conv *c) {
    return BIAS_SUMS + parts_of(c->R * c->S, LANES) * LANES * LANES;
}

/* Set the size of the copy of dy, with the zeros around dy that dx reads. If dx overwrites dy, rows
 * of dx may not be ahead of rows of dy. */
static void lay_out_dy(struct pass *pass) {
    const struct arguments *job = &pass->job;
    const struct conv *c = &job->c;
    if (job->dx == job->dy.dy && c->stride_h > 1) {
        pass->band = c->P;
        pass->x_rows = (c->P - 1) * c->stride_h + c->R;
    }
    pass->dy_columns = c->Q, pass->dy_height = c->P, pass->dy_rows = pass->band;
    if (!job->dx) return;
    const int64_t up = most(c->R - 1 - c->top, 0), left = most(c->S - 1 - c->left, 0);
    const int64_t last_row = (c->H - 1 + c->top) / c->stride_h;
    const int64_t width = parts_of(c->W, c->stride_w) * c->stride_w; /* whole pairs */
    pass->before = parts_of(up, c->stride_h), pass->left = parts_of(left, c->stride_w);
    pass->dy_columns = pass->left + most(c->Q, (width - 1 + c->left) / c->stride_w + 1);
    pass->dy_height = pass->before + most(c->P, last_row + 1);
    pass->dy_rows = least(pass->dy_height, pass->dy_height - c->P + pass->band + c->R);
}

/* Copy the rows up to `stop` of the gradient of y, counted with the zeros before it, and drop the
 * rows before `first`. */
static void bring_dy(const struct pass *pass, struct window *w, int64_t block, int64_t k,
                     int64_t first, int64_t stop) {
    const struct arguments *job = &pass->job;
    const struct conv *c = &job->c;
    int64_t row;
    struct padded to;
    advance(w, first);
    const int64_t rows = extend(w, stop, pass->before, c->P, &row, &to);
    const int64_t at = ((block * c->K + k) * c->P + row) * c->Q * LANES;
    to.columns = pass->dy_columns;
    fill_gradient(&to, k, &job->dy, job->dy.dy + at, job->dy.y.x ? job->dy.y.x + at : NULL,
                  job->counts[block],
                  (struct picture){.height = rows, .width = c->Q, .left = pass->left});
}

/* Add rows of dy to the four accumulators of channel_sum. */
static void add_to_bias(const float *dy, int64_t dy_row, int64_t rows, int64_t columns,
                        float *sums) {
    for (int part = 0; part < LANES; part += WIDTH) {
        vec a[4];
        UNROLL for (int i = 0; i < 4; i++) a[i] = load(sums + i * LANES + part);
        for (int64_t p = 0; p < rows; p++) {
            const float *row = dy + p * dy_row + part;
            int64_t j = 0;
            for (; j + 4 <= columns; j += 4)
                UNROLL for (int i = 0; i < 4; i++) a[i] += load(row + (j + i) * LANES);
            for (int i = 0; j < columns; j++, i++) a[i] += load(row + j * LANES);
        }
        UNROLL for (int i = 0; i < 4; i++) store(sums + i * LANES + part, a[i]);
    }
}

static void add_to_weights(const struct conv *c, const struct window *dy, const float *d,
                           const struct window *x, const float *v, int64_t rows, float *sums) {
    const int64_t step = c->stride_h * x->row;
#define ADD(R, S, step_w, r)                                                                       \
    dweight_tile(d, dy->row, v + (r) * x->row, x->row, rows, step, c->Q, sums + (r) * S * LANES,   \
                 R, S, step_w)
#define ROWS(R, S, r)                                                                              \
    {                                                                                              \
        if (c->stride_w == 1) ADD(R, S, 1, r);                                                     \
        else ADD(R, S, 2, r);                                                                      \
    }
    if (c->S == 3) ROWS(3, 3, 0)
#if REGISTERS == 32
    else if (c->S == 5) ROWS(5, 5, 0)
    else {
        ROWS(4, 7, 0)
        ROWS(3, 7, 4)
    }
#else
    else if (c->S == 5)
        for (int64_t r = 0; r < 5; r++) ROWS(1, 5, r)
    else
        for (int64_t r = 0; r < 7; r++) ROWS(1, 7, r)
#endif
#undef ROWS
#undef ADD
}

/* Compute row h of dx. */
static void compute_dx(const struct pass *pass, const struct window *dy, int64_t k, int64_t h,
                       value *out) {
    const struct arguments *job = &pass->job;
    const struct conv *c = &job->c;
    const int64_t r = (h + c->top) % c->stride_h; /* the first of the filter's rows that reach h */
    const float *in = row_at(dy, (h + c->top) / c->stride_h + pass->before) + pass->left * LANES;
    struct row row = {.in = in + c->left / c->stride_w * LANES,
                      .in_row = -dy->row,
                      .weight = job->weight + (k * c->R + r) * c->S,
                      .weight_row = c->stride_h * c->S,
                      .rows = r < c->R ? parts_of(c->R - r, c->stride_h) : 0,
                      .bias = job->bias ? job->bias[k] : 0,
                      .out = out,
                      .columns = c->W};
    if (c->S == 7) skip_zeros(&row, (h + c->top) / c->stride_h, -1, c->P);
    if (c->stride_w == 1)
        compute_row(BACK[size_of(c)], PIXELS, &row, c->W);
    else
        compute_row(SPREAD[size_of(c)][c->left % 2], PIXELS / 2, &row, parts_of(c->W, 2));
}

static void finish_leaf(const struct conv *c, int64_t k, const float *sums, float *leaf) {
    const int64_t taps = c->R * c->S;
    float totals[MOST_SUMS];
    for (int64_t t = 0; t < taps; t += LANES)
        lane_sums(sums + BIAS_SUMS + t * LANES, totals + t);
    memcpy(leaf + k * taps, totals, (size_t)taps * sizeof(float));
    vec total[PARTS];
    for (int p = 0; p < PARTS; p++) {
        vec a[4];
        UNROLL for (int i = 0; i < 4; i++) a[i] =
            load(sums + i * LANES + p * WIDTH);
        total[p] = four(a);
    }
    leaf[c->K * taps + k] = lanes_total(total);
}

static void backward_channel(const struct pass *pass, int64_t block, int64_t k, struct window dy,
                             struct window x, float *sums, float *leaf) {
    const struct arguments *job = &pass->job;
    const struct conv *c = &job->c;
    const int64_t pixels = c->H * c->W * LANES, at = (block * c->C + k) * pixels;
    value *dx = job->dx ? job->dx + at : NULL;
    if (leaf) memset(sums, 0, (size_t)sums_of(c) * sizeof(float));
    for (int64_t p = 0, done = 0; p < c->P; p += pass->band) { /* `done` rows of dx */
        const int64_t stop = least(p + pass->band, c->P);
        const int64_t next = stop < c->P ? most(least(stop * c->stride_h - c->top, c->H), 0) : c->H;
        const int64_t lowest = done + c->top - (c->R - 1);
        int64_t first = p;
        if (dx && done < c->H)
            first = least(p, lowest > 0 ? parts_of(lowest, c->stride_h) : lowest / c->stride_h);
        bring_dy(pass, &dy, block, k, first + pass->before,
                 stop < c->P ? stop + pass->before : pass->dy_height);
        if (leaf) {
            const float *d = row_at(&dy, p + pass->before) + pass->left * LANES;
            add_to_bias(d, dy.row, stop - p, c->Q, sums);
            bring_x(pass, &x, k, job->x.x + at, p, stop);
            add_to_weights(c, &dy, d, &x, row_at(&x, p * c->stride_h), stop - p,
                           sums + BIAS_SUMS);
        }
        if (dx)
            for (; done < next; done++)
                compute_dx(pass, &dy, k, done, dx + done * c->W * LANES);
    }
    if (leaf) finish_leaf(c, k, sums, leaf);
    if (job->rows) {
        double *row = job->rows + block * 2 * c->C + k;
        channel_norm_sums(dx, job->x.x + at, c->H * c->W, &job->x, k, row, row + c->C);
    }
}

static void backward_block(const struct team *team, void *argument, int64_t block) {
    const struct pass *pass = argument;
    const int64_t x_floats = window_floats(pass->x_rows, pass->x_columns);
    const struct window x = window_at(team->own, pass->x_rows, pass->x_columns);
    const struct window dy = window_at(team->own + x_floats, pass->dy_rows, pass->dy_columns);
    float *sums = dy.rows + window_floats(pass->dy_rows, pass->dy_columns);
    float *leaf = pass->leaves ? leaf_of(team, pass->leaves, block) : NULL;
    EACH_TILE(team, k, pass->job.c.K) {
        backward_channel(pass, block, k, dy, x, sums, leaf);
        tick();
    }
    if (leaf) leaf_done(team, pass->leaves, block);
}

void depthwise_backward(const struct arguments *job, int64_t blocks) {
    const struct conv *c = &job->c;
    struct leaves leaves;
    struct pass pass = pass_of(job);
    lay_out_dy(&pass);
    if (job->dweight) {
        pass.leaves = &leaves;
        leaves_begin(&leaves, job->tree, c->K * c->R * c->S + c->K, job->dweight, job->nodes,
                     LEAVES);
    }
    each_block(blocks, backward_block, &pass, 0,
               window_floats(pass.x_rows, pass.x_columns) +
                   window_floats(pass.dy_rows, pass.dy_columns) + sums_of(c));
    if (mpidl_missing_bytes) return;
    if (job->dweight) leaves_end(&leaves);
}
