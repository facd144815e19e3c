/* The arguments and filters of the Winograd convolutions of a pass; see conv_pass.h. */
#include "conv_pass.h"

/* Return the number of rows or columns of a tile, which Python passes as 10 * rows + columns. */
static int rows_of(int64_t tile) { return (int)(tile / 10); }
static int columns_of(int64_t tile) { return (int)(tile % 10); }

struct winograd winograd_forward(const struct conv *c, int64_t tile) {
    const int64_t s = c->stride_h;
    return (struct winograd){.inputs = c->C / c->groups * s * s,
                             .outputs = c->K / c->groups,
                             .rows = c->P,
                             .columns = c->Q,
                             .m_h = rows_of(tile),
                             .m_w = columns_of(tile),
                             .r = (int)phase_taps(c->R, s, 0),
                             .step = s,
                             .taps = c->R};
}

struct winograd winograd_backward(const struct conv *c, int64_t tile) {
    const int64_t s = c->stride_h;
    const int64_t r = most(phase_taps(c->R, s, c->top), phase_taps(c->R, s, c->left));
    return (struct winograd){.inputs = c->K / c->groups,
                             .outputs = c->C / c->groups * s * s,
                             .rows = c->H,
                             .columns = c->W,
                             .m_h = rows_of(tile),
                             .m_w = columns_of(tile),
                             .r = (int)r,
                             .backward = 1,
                             .step = s,
                             .taps = c->R,
                             .top = c->top,
                             .left = c->left};
}

enum { MOST_FILTER = 25 }; /* the largest number of taps of a phase */

/* Find the taps of the channels that begin with spread channel `index`: for each tap of their
 * filters, its position in the original filter, or -1. */
static void find_spread_taps(const struct winograd *w, int64_t index, int64_t *position) {
    const struct place phase = place_of_phase(w, index);
    for (int64_t r = 0; r < w->r; r++)
        for (int64_t s = 0; s < w->r; s++) {
            const int64_t row = original_tap(w, w->top, phase.row, r);
            const int64_t column = original_tap(w, w->left, phase.column, s);
            *position++ = row < 0 || column < 0 ? -1 : row * w->taps + column;
        }
}

/* Copy the filters of one output to `spread`. */
static void spread_filters(const struct winograd *w, const float *weight, float *spread) {
    const int64_t phases = w->step * w->step, filter = w->taps * w->taps;
    const int64_t channels = (w->backward ? w->outputs : w->inputs) / phases;
    int64_t position[MOST_FILTER];
    for (int64_t phase = 0; phase < phases; phase++) {
        find_spread_taps(w, phase * channels, position);
        for (int64_t c = 0; c < channels; c++)
            for (int tap = 0; tap < w->r * w->r; tap++)
                *spread++ = position[tap] < 0 ? 0 : weight[c * filter + position[tap]];
    }
}

void gather_filters(const struct winograd *w, const float *spread, float *weight) {
    const int64_t phases = w->step * w->step, filter = w->taps * w->taps;
    const int64_t channels = w->inputs / phases;
    int64_t position[MOST_FILTER];
    for (int64_t phase = 0; phase < phases; phase++) {
        find_spread_taps(w, phase * channels, position);
        for (int64_t c = 0; c < channels; c++)
            for (int tap = 0; tap < w->r * w->r; tap++, spread++)
                if (position[tap] >= 0) weight[c * filter + position[tap]] = *spread;
    }
}

static void spread_tile(void *job, int64_t k, float *own) {
    const struct pass *pass = job;
    const struct conv *c = &pass->c;
    spread_filters(&pass->winograd, pass->weight + k * c->C / c->groups * c->R * c->S,
                   (float *)pass->filters + k * spread_floats(&pass->winograd));
}

static void transform_tile(void *job, int64_t tile, float *own) {
    const struct pass *pass = job;
    const struct winograd *w = &pass->winograd;
    int64_t each = winograd_weights_tiles(w->outputs);
    winograd_weights(w, pass->filters + tile / each * w->inputs * w->outputs * w->r * w->r,
                     (float *)pass->packed + tile / each * pass->packed_group,
                     tile % each);
}

int64_t transform_weights(struct pass *pass) {
    const struct winograd *w = &pass->winograd;
    pass->filters = pass->weight;
    if (pass->c.stride_h > 1) {
        pass->filters = scratch(FILTERS, pass->c.K * spread_floats(w));
        each_tile(pass->c.K, spread_tile, pass, 0);
    }
    pass->packed_group = winograd_weights_floats(w);
    pass->packed = scratch(WEIGHTS, pass->c.groups * pass->packed_group);
    each_tile(pass->c.groups * winograd_weights_tiles(w->outputs), transform_tile, pass, 0);
    return winograd_conv_floats(w);
}
