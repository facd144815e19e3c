/* Elementwise passes: the functions of formulas.h, and PReLU. */
#include "mpidl.h"
#include "special.h"
#include "team.h"

enum { ROWS = 1024 }; /* rows of a tile; a row is the 16 lanes of a pixel */

struct job {
    const value *x, *dy;
    value *out;
    float *products, a, b;
    const float *slope;
    int64_t rows, channels, pixels, slopes;
};

/* Define a tile function that sets `out`, a member of the job, to an expression in x, dy, a and b. Elements of dy are
 * loaded only by expressions that use DY. */
#define EACH_ELEMENT(name, out, ...)                                                                    \
    static void name(void *argument, int64_t tile, float *own) {                                   \
        const struct job *job = argument;                                                          \
        (void)own;                                                                                 \
        vec a = splat(job->a), b = splat(job->b);                                                  \
        (void)a, (void)b;                                                                          \
        int64_t stop = least(job->rows, (tile + 1) * ROWS) * LANES;                                \
        for (int64_t i = tile * ROWS * LANES; i < stop; i += WIDTH) {                              \
            vec x = load(job->x + i);                                                              \
            store(job->out + i, __VA_ARGS__);                                                      \
        }                                                                                          \
    }
#define DY load(job->dy + i)

#define TILES(name)                                                                                \
    EACH_ELEMENT(name##_tile, out, name##_y(x, a, b))                                                   \
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
    job.rows = rows;
    each_tile((rows + ROWS - 1) / ROWS, work, &job, 0);
}

int64_t mpidl_elementwise(const char *function, const value *x, const value *dy, value *out,
                          float a, float b, int64_t rows) {
    struct job job = {.x = x, .dy = dy, .out = out, .a = a, .b = b};
    for (int i = 0; i < COUNT; i++)
        if (!strcmp(FUNCTIONS[i].name, function)) {
            each_row(dy ? FUNCTIONS[i].gradient : FUNCTIONS[i].forward, job, rows);
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
