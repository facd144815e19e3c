/* Elementwise passes: the functions of formulas.h, and PReLU. A function may follow a batch
 * normalization, which is then computed in the same pass. */
#include "activation.h"
#include "mpidl.h"
#include "special.h"
#include "team.h"

enum { ROWS = 1024 }; /* rows of most tiles; a row is the 16 lanes of a pixel */

struct job {
    const value *x, *dy;
    value *out;
    float *products, a, b;
    const float *slope;
    int64_t rows, channels, pixels, slopes;
    struct source source; /* the normalization of x; then a tile is one channel of one block */
    int64_t tile;         /* rows of a tile */
};

/* Define a tile function that sets `out`, a member of the job, to an expression in x, dy, a and b.
 * Elements of dy are loaded only by expressions that use DY. */
#define EACH_ELEMENT(name, out, ...)                                                               \
    static void name(void *argument, int64_t tile, float *own) {                                   \
        const struct job *job = argument;                                                          \
        (void)own;                                                                                 \
        vec a = splat(job->a), b = splat(job->b);                                                  \
        (void)a, (void)b;                                                                          \
        int64_t first = tile * job->tile, stop = least(job->rows, first + job->tile);               \
        if (job->source.mean) {                                                                    \
            const struct norm n = norm_of(&job->source, tile % job->channels);                     \
            for (int64_t i = first * LANES; i < stop * LANES; i += WIDTH) {                        \
                vec x = normalize(load(job->x + i), n);                                            \
                store(job->out + i, __VA_ARGS__);                                                  \
            }                                                                                      \
        } else                                                                                     \
            for (int64_t i = first * LANES; i < stop * LANES; i += WIDTH) {                        \
                vec x = load(job->x + i);                                                          \
                store(job->out + i, __VA_ARGS__);                                                  \
            }                                                                                      \
    }
#define DY load(job->dy + i)

#define TILES(name)                                                                                \
    EACH_ELEMENT(name##_tile, out, name##_y(x, a, b))                                              \
    EACH_ELEMENT(name##_dx_tile, out, name##_dx(DY, x, a, b))
EACH_FUNCTION(TILES)
EACH_ELEMENT(prelu_products_tile, products, choose(x > 0, zero(), DY * x))

#define ROW(name) {#name, name##_tile, name##_dx_tile},
static const struct {
    const char *name;
    tile_work *forward, *gradient;
} FUNCTIONS[] = {EACH_FUNCTION(ROW)};
enum { COUNT = sizeof FUNCTIONS / sizeof *FUNCTIONS };

static void each_row(tile_work *work, struct job job, int64_t rows) {
    job.rows = rows, job.tile = job.source.mean ? job.pixels : ROWS;
    each_tile(parts_of(rows, job.tile), work, &job, 0);
}

int64_t mpidl_elementwise(const char *function, const value *x, const float *mean,
                          const float *scale, const float *beta, const value *dy, value *out,
                          float a, float b, int64_t blocks, int64_t channels, int64_t pixels) {
    struct job job = {.x = x, .dy = dy, .out = out, .a = a, .b = b};
    job.source = (struct source){.mean = mean, .scale = scale, .beta = beta};
    job.channels = channels, job.pixels = pixels;
    for (int i = 0; i < COUNT; i++)
        if (!strcmp(FUNCTIONS[i].name, function)) {
            each_row(dy ? FUNCTIONS[i].gradient : FUNCTIONS[i].forward, job,
                     blocks * channels * pixels);
            return 1;
        }
    return 0;
}

/* ---- PReLU: a tile is one channel of one block ---- */

static void prelu_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    /* in the forward pass, where dy is NULL, the slope multiplies x */
    const value *positive = job->dy ? job->dy : job->x;
    vec slope = splat(job->slope[tile % job->slopes]);
    int64_t stop = (tile + 1) * job->pixels * LANES;
    for (int64_t i = tile * job->pixels * LANES; i < stop; i += WIDTH) {
        vec value = load(positive + i);
        store(job->out + i, choose(load(job->x + i) > 0, value, value * slope));
    }
}

static void each_channel(struct job job, int64_t blocks, int64_t channels) {
    each_tile(blocks * channels, prelu_tile, &job, 0);
}

void mpidl_prelu(const value *x, const float *slope, int64_t slopes, value *y, int64_t blocks,
                 int64_t channels, int64_t pixels) {
    struct job job = {.x = x, .out = y, .slope = slope, .slopes = slopes, .pixels = pixels};
    each_channel(job, blocks, channels);
}

void mpidl_prelu_dx(const value *dy, const value *x, const float *slope, int64_t slopes, value *dx,
                    int64_t blocks, int64_t channels, int64_t pixels) {
    struct job job = {
        .x = x, .dy = dy, .out = dx, .slope = slope, .slopes = slopes, .pixels = pixels};
    each_channel(job, blocks, channels);
}

void mpidl_prelu_products(const value *dy, const value *x, float *products, int64_t rows) {
    each_row(prelu_products_tile, (struct job){.x = x, .dy = dy, .products = products}, rows);
}
