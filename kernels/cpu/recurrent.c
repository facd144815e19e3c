/* The steps of recurrent layers: LSTM (Hochreiter and Schmidhuber, 1997), with 4 gates per unit, and
 * GRU (Cho et al., 2014), with 3. A convolution has computed the products of the input for all steps,
 * x (blocks, gates * units, steps, 16). A step adds the products with the hidden state h of the step
 * before:
 *
 *     LSTM: i, f, o = sigmoid(x + W h), g = tanh(x + W h), c = f c + i g, h = o tanh(c)
 *     GRU:  r, z = sigmoid(x + W h + b), n = tanh(x + r q) with q = W h + b, h = n + z (h - n)
 *
 * The steps of a block depend on each other, so a block is the unit of work. A tile is UNITS units
 * with all their gates, or BACK units of the gradient of h. The weights are packed: the ones of a
 * tile that multiply the same number are neighbours.
 *
 * A sum of products has the order of a dense layer: runs of SEGMENT terms, and in bfloat16 pairs
 * whose odd number comes first. `place` puts terms into this order. */
#include "mpidl.h"
#include "special.h"
#include "team.h"

enum { UNITS = REGISTERS / 8, BACK = REGISTERS / 2, SEGMENT = 256, LSTM = 4 };
enum { PACKED }; /* scratch slots */

struct job {
    const value *x, *dy; /* x is NULL in the backward pass */
    const float *weight, *bias, *hidden, *cell; /* NULL stands for zeros, except for the weight */
    value *record;                              /* (blocks, 4 * units, steps, 16): i f g o, r z n q */
    float *cells;                               /* (blocks, units, steps, 16), LSTM only */
    value *y, *dx, *dproducts, *previous;
    float *last_hidden, *last_cell, *dhidden, *dcell;
    float *packed;
    int64_t units, steps, gates, reverse, truncate;
    int64_t terms, rows; /* of a packed tile: terms per sum (even in bfloat16), number of sums */
};

/* Return where a term of a sum is stored; see the top of the file. */
INLINE int64_t place(int64_t term) { return NARROW ? term ^ 1 : term; }
static int64_t padded(int64_t terms) { return NARROW ? (terms + 1) / 2 * 2 : terms; }
INLINE vec as_operand(vec v) { return NARROW ? rounded(v) : v; }

/* Return the offset of a channel's numbers at a step, in an array with this many channels. In
 * reverse, step 0 is the last row. */
INLINE int64_t offset(const struct job *job, int64_t block, int64_t channels, int64_t channel,
                      int64_t step) {
    int64_t time = job->reverse ? job->steps - 1 - step : step;
    return ((block * channels + channel) * job->steps + time) * LANES;
}

/* Return numbers of the state before the first step, (blocks, units, 16). */
INLINE vec first_state(const struct job *job, const float *state, int64_t block, int64_t unit,
                       int part) {
    return state ? load(state + (block * job->units + unit) * LANES + part) : zero();
}

/* ---- products ---- */

static void pack_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    const int64_t units = job->units, rows = job->rows, is_back = !job->x;
    const int64_t count = is_back ? job->gates * units : units;
    float *to = job->packed + tile * job->terms * rows;
    (void)own;
    memset(to, 0, (size_t)(job->terms * rows) * sizeof *to);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t unit = is_back ? tile * BACK + row : tile * UNITS + row / job->gates;
        if (unit >= units) break;
        const float *from = job->weight;
        from += is_back ? unit : (row % job->gates * units + unit) * units;
        for (int64_t t = 0; t < count; t++) {
            const float number = from[is_back ? t * units : t];
            to[place(t) * rows + row] = NARROW ? rounded_number(number) : number;
        }
    }
}

static void pack(struct job *job, int64_t tiles) {
    job->packed = scratch(PACKED, tiles * job->terms * job->rows);
    each_tile(tiles, pack_tile, job, 0);
}

/* Set `total` to the sums of the products of a tile's packed weights and x (terms, 16). */
INLINE void products(const float *weight, const float *x, int64_t terms, vec *total,
                     const int rows) {
    UNROLL for (int j = 0; j < rows; j++) total[j] = zero();
    for (int64_t t = 0; t < terms;) {
        vec sum[REGISTERS / 2];
        UNROLL for (int j = 0; j < rows; j++) sum[j] = zero();
        for (int64_t stop = least(terms, t + SEGMENT); t < stop; t++) {
            vec v = load(x + t * LANES);
            UNROLL for (int j = 0; j < rows; j++)
                sum[j] = muladd(splat(weight[t * rows + j]), v, sum[j]);
        }
        UNROLL for (int j = 0; j < rows; j++) total[j] += sum[j];
    }
}

/* ---- forward ---- */

/* Compute a unit's part of a step from the sums of its gates, and return its hidden state. */
INLINE vec lstm_unit(const struct job *job, int64_t block, int64_t unit, int64_t step,
                     const vec *sums, int part) {
    const int64_t units = job->units;
    vec gate[LSTM], cell = first_state(job, job->cell, block, unit, part);
    UNROLL for (int g = 0; g < LSTM; g++) {
        const int64_t at = offset(job, block, LSTM * units, g * units + unit, step) + part;
        vec sum = load(job->x + at) + sums[g];
        gate[g] = g == 2 ? hyperbolic_tangent(sum) : logistic(sum);
        store(job->record + at, gate[g]);
    }
    if (step) cell = load(job->cells + offset(job, block, units, unit, step - 1) + part);
    cell = muladd(gate[1], cell, gate[0] * gate[2]);
    store(job->cells + offset(job, block, units, unit, step) + part, cell);
    if (step == job->steps - 1)
        store(job->last_cell + (block * units + unit) * LANES + part, cell);
    return gate[3] * hyperbolic_tangent(cell);
}

INLINE vec gru_unit(const struct job *job, int64_t block, int64_t unit, int64_t step,
                    const vec *sums, vec hidden, int part) {
    const int64_t units = job->units;
    vec x[3], of_state[3], gate[4];
    UNROLL for (int g = 0; g < 3; g++) {
        x[g] = load(job->x + offset(job, block, 3 * units, g * units + unit, step) + part);
        of_state[g] = sums[g] + splat(job->bias ? job->bias[g * units + unit] : 0);
    }
    gate[0] = logistic(x[0] + of_state[0]), gate[1] = logistic(x[1] + of_state[1]);
    gate[2] = hyperbolic_tangent(muladd(gate[0], of_state[2], x[2])), gate[3] = of_state[2];
    UNROLL for (int g = 0; g < 4; g++)
        store(job->record + offset(job, block, 4 * units, g * units + unit, step) + part, gate[g]);
    return muladd(gate[1], hidden - gate[2], gate[2]);
}

/* Compute a tile of a step: `from` and `to` are the hidden states before and after the step. */
INLINE void step_of_tile(const struct job *job, int64_t block, int64_t tile, int64_t step,
                         const float *from, float *to, const int gates) {
    const float *weight = job->packed + tile * job->terms * (UNITS * gates);
    for (int part = 0; part < LANES; part += WIDTH) {
        vec sums[UNITS * LSTM];
        products(weight, from + part, job->terms, sums, UNITS * gates);
        for (int i = 0; i < UNITS && tile * UNITS + i < job->units; i++) {
            const int64_t unit = tile * UNITS + i, at = place(unit) * LANES + part;
            vec hidden = gates == LSTM
                             ? lstm_unit(job, block, unit, step, sums + i * gates, part)
                             : gru_unit(job, block, unit, step, sums + i * gates, load(from + at), part);
            hidden = as_operand(hidden);
            store(to + at, hidden);
            store(job->y + offset(job, block, job->units, unit, step) + part, hidden);
            if (step == job->steps - 1)
                store(job->last_hidden + (block * job->units + unit) * LANES + part, hidden);
        }
    }
}

static void recurrence_block(const struct team *team, void *argument, int64_t block) {
    const struct job *job = argument;
    const int64_t tiles = parts_of(job->units, UNITS), size = job->terms * LANES;
    if (team->member == 0) {
        memset(team->shared, 0, (size_t)(2 * size) * sizeof(float));
        for (int64_t unit = 0; unit < job->units; unit++)
            for (int part = 0; part < LANES; part += WIDTH)
                store(team->shared + place(unit) * LANES + part,
                      as_operand(first_state(job, job->hidden, block, unit, part)));
    }
    meet(team);
    for (int64_t step = 0; step < job->steps; step++) {
        const float *from = team->shared + step % 2 * size;
        float *to = team->shared + (step + 1) % 2 * size;
        EACH_TILE(team, tile, tiles) {
            if (job->gates == LSTM) step_of_tile(job, block, tile, step, from, to, LSTM);
            else step_of_tile(job, block, tile, step, from, to, 3);
            tick();
        }
        meet(team);
    }
}

void mpidl_recurrence(const value *x, const float *weight, const float *bias, const float *hidden,
                      const float *cell, value *record, float *cells, value *y, float *last_hidden,
                      float *last_cell, int64_t blocks, int64_t units, int64_t steps,
                      int64_t gates, int64_t reverse) {
    struct job job = {.x = x,
                      .weight = weight,
                      .bias = bias,
                      .hidden = hidden,
                      .cell = cell,
                      .record = record,
                      .cells = cells,
                      .y = y,
                      .last_hidden = last_hidden,
                      .last_cell = last_cell,
                      .units = units,
                      .steps = steps,
                      .gates = gates,
                      .reverse = reverse,
                      .terms = padded(units),
                      .rows = UNITS * gates};
    pack(&job, parts_of(units, UNITS));
    each_block(blocks, recurrence_block, &job, 2 * job.terms * LANES, 0);
}

/* ---- backward ---- */

INLINE vec slope_of_logistic(vec y) { return y * (splat(1) - y); }
INLINE vec slope_of_tanh(vec y) { return muladd(-y, y, splat(1)); }

/* Compute the gradients of a unit's sums in a step. dstate is the gradient of h, and dcell that of
 * c; afterwards, they hold what the state of the step before receives, except through the products.
 * `dsums` receives the gradients of the products W h. */
INLINE void lstm_unit_back(const struct job *job, int64_t block, int64_t unit, int64_t step,
                           float *dstate, float *dcell, float *dsums, int part) {
    const int64_t units = job->units, of_cell = offset(job, block, units, unit, step) + part;
    vec gate[LSTM], grad[LSTM];
    UNROLL for (int g = 0; g < LSTM; g++)
        gate[g] = load(job->record + offset(job, block, LSTM * units, g * units + unit, step) + part);
    vec before = first_state(job, job->cell, block, unit, part);
    if (step) before = load(job->cells + offset(job, block, units, unit, step - 1) + part);
    vec bounded = hyperbolic_tangent(load(job->cells + of_cell));
    vec dh = load(job->dy + of_cell) + load(dstate);
    vec dc = muladd(dh * gate[3], slope_of_tanh(bounded), load(dcell));
    grad[0] = dc * gate[2] * slope_of_logistic(gate[0]);
    grad[1] = dc * before * slope_of_logistic(gate[1]);
    grad[2] = dc * gate[0] * slope_of_tanh(gate[2]);
    grad[3] = dh * bounded * slope_of_logistic(gate[3]);
    UNROLL for (int g = 0; g < LSTM; g++) {
        store(job->dx + offset(job, block, LSTM * units, g * units + unit, step) + part, grad[g]);
        store(dsums + place(g * units + unit) * LANES, as_operand(grad[g]));
    }
    store(dstate, zero()), store(dcell, dc * gate[1]);
}

INLINE void gru_unit_back(const struct job *job, int64_t block, int64_t unit, int64_t step,
                          vec before, float *dstate, float *dsums, int part) {
    const int64_t units = job->units;
    vec gate[4], grad[4];
    UNROLL for (int g = 0; g < 4; g++)
        gate[g] = load(job->record + offset(job, block, 4 * units, g * units + unit, step) + part);
    vec dh = load(job->dy + offset(job, block, units, unit, step) + part) + load(dstate);
    grad[2] = dh * (splat(1) - gate[1]) * slope_of_tanh(gate[2]);
    grad[1] = dh * (before - gate[2]) * slope_of_logistic(gate[1]);
    grad[0] = grad[2] * gate[3] * slope_of_logistic(gate[0]);
    grad[3] = grad[2] * gate[0];
    UNROLL for (int g = 0; g < 3; g++) {
        const int64_t at = offset(job, block, 3 * units, g * units + unit, step) + part;
        const vec of_product = g == 2 ? grad[3] : grad[g];
        store(job->dx + at, grad[g]), store(job->dproducts + at, of_product);
        store(dsums + place(g * units + unit) * LANES, as_operand(of_product));
    }
    store(dstate, dh * gate[1]);
}

/* Scratch memory of a team: the gradients of h and c (units, 16), and of W h (terms, 16). */
static void recurrence_back_block(const struct team *team, void *argument, int64_t block) {
    const struct job *job = argument;
    const int64_t units = job->units, size = units * LANES;
    float *dstates = team->shared, *dcells = dstates + size, *dsums = dcells + size;
    if (team->member == 0)
        memset(team->shared, 0, (size_t)(2 * size + job->terms * LANES) * sizeof(float));
    meet(team);
    for (int64_t step = job->steps - 1; step >= 0; step--) {
        const int is_cut = step && step % job->truncate == 0; /* no gradient of the state before */
        EACH_TILE(team, unit, units) {
            for (int part = 0; part < LANES; part += WIDTH) {
                float *dstate = dstates + unit * LANES + part, *dcell = dcells + unit * LANES + part;
                vec before = as_operand(first_state(job, job->hidden, block, unit, part));
                if (step) before = load(job->y + offset(job, block, units, unit, step - 1) + part);
                store(job->previous + offset(job, block, units, unit, step) + part, before);
                if (job->gates == LSTM)
                    lstm_unit_back(job, block, unit, step, dstate, dcell, dsums + part, part);
                else
                    gru_unit_back(job, block, unit, step, before, dstate, dsums + part, part);
                if (is_cut) store(dstate, zero()), store(dcell, zero());
            }
        }
        meet(team);
        if (is_cut || (!step && !job->dhidden)) continue;
        EACH_TILE(team, tile, parts_of(units, BACK)) {
            for (int part = 0; part < LANES; part += WIDTH) {
                vec sums[BACK];
                const float *weight = job->packed + tile * job->terms * BACK;
                products(weight, dsums + part, job->terms, sums, BACK);
                for (int i = 0; i < BACK && tile * BACK + i < units; i++) {
                    float *dstate = dstates + (tile * BACK + i) * LANES + part;
                    store(dstate, load(dstate) + sums[i]);
                }
            }
            tick();
        }
        meet(team);
    }
    if (job->dhidden && team->member == 0)
        memcpy(job->dhidden + block * size, dstates, (size_t)size * sizeof(float));
    if (job->dcell && team->member == 0)
        memcpy(job->dcell + block * size, dcells, (size_t)size * sizeof(float));
    meet(team); /* before the next block overwrites the scratch memory */
}

void mpidl_recurrence_backward(const value *dy, const value *record, const float *cells,
                               const value *y, const float *weight, const float *hidden,
                               const float *cell, value *dx, value *dproducts, value *previous,
                               float *dhidden, float *dcell, int64_t blocks, int64_t units,
                               int64_t steps, int64_t gates, int64_t reverse, int64_t truncate) {
    struct job job = {.dy = dy,
                      .record = (value *)(uintptr_t)record,
                      .cells = (float *)(uintptr_t)cells,
                      .y = (value *)(uintptr_t)y,
                      .weight = weight,
                      .hidden = hidden,
                      .cell = cell,
                      .dx = dx,
                      .dproducts = dproducts,
                      .previous = previous,
                      .dhidden = dhidden,
                      .dcell = dcell,
                      .units = units,
                      .steps = steps,
                      .gates = gates,
                      .reverse = reverse,
                      .truncate = truncate,
                      .terms = padded(gates * units),
                      .rows = BACK};
    pack(&job, parts_of(units, BACK));
    each_block(blocks, recurrence_back_block, &job, (2 * units + job.terms) * LANES, 0);
}
