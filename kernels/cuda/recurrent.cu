// The steps of recurrent layers. kernels/cpu/recurrent.c has the formulas, and each launch computes
// one step, or its gradients, for all images. GATES is 4 for an LSTM and 3 for a GRU.
//
// A value is a matrix (images x steps, channels) in C order, and a state is a matrix (images, units).
// In memory, step `step` is row `time` of an image. The products with the recurrent weights use
// float32 multiply-adds in every precision: a step has few products for a tensor core.
#include "formulas.h"

constexpr int THREADS = 256, DEPTH = 32, IMAGES = 32, UNITS = 16, BACK = 32;

// Operands in shared memory, with the summed index first. The padding of `state` keeps rows aligned
// for vector reads, and that of `weight` lets writes along rows or columns use different banks.
template <int COLUMNS> struct alignas(16) Operands {
    float state[DEPTH][IMAGES + 4];
    float weight[DEPTH][COLUMNS + 1];
};

// Adds up products over `depth` terms for a tile of images and units. A thread has OWN neighbouring
// images of a unit and the unit's N columns of weights, which are `units` apart. state(m, k) and
// weight(column, k) return the operands. Neighbouring lanes read neighbouring terms of a weight, or
// neighbouring columns if BY_COLUMN.
template <int N, int TILE, bool BY_COLUMN, class State, class Weight>
__device__ __forceinline__ void add_products(Operands<N * TILE>& chunk, int depth, State state,
                                             Weight weight,
                                             float (&sums)[IMAGES * TILE / THREADS][N]) {
    constexpr int OWN = IMAGES * TILE / THREADS, COLUMNS = N * TILE, WARPS = THREADS / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = threadIdx.x % TILE, image = threadIdx.x / TILE * OWN;
    for (int first = 0; first < depth; first += DEPTH) {
        for (int m = warp; m < IMAGES; m += WARPS)
            chunk.state[lane][m] = first + lane < depth ? state(m, first + lane) : 0.f;
        for (int i = warp; i < (BY_COLUMN ? DEPTH : COLUMNS); i += WARPS) {
            const int k = BY_COLUMN ? i : lane, n = BY_COLUMN ? lane : i;
            chunk.weight[k][n] = first + k < depth ? weight(n, first + k) : 0.f;
        }
        __syncthreads();
        float part[OWN][N] = {};
#pragma unroll 8
        for (int k = 0; k < DEPTH; ++k)
#pragma unroll
            for (int g = 0; g < N; ++g) {
                const float w = chunk.weight[k][g * TILE + column];
#pragma unroll
                for (int i = 0; i < OWN; ++i)
                    part[i][g] = fmaf(w, chunk.state[k][image + i], part[i][g]);
            }
#pragma unroll
        for (int i = 0; i < OWN; ++i)
#pragma unroll
            for (int g = 0; g < N; ++g) sums[i][g] += part[i][g];
        __syncthreads();
    }
}

// Returns the offset of a channel of an image at a row.
__device__ __forceinline__ long long place(long long image, int steps, int time, int channels,
                                           int channel) {
    return (image * steps + time) * channels + channel;
}

// Returns a number of the hidden state before a step, as it is stored.
__device__ __forceinline__ float state_before(const value* y, const float* hidden, long long image,
                                              int unit, int units, int steps, int step,
                                              int before) {
    if (step) return get(y[place(image, steps, before, units, unit)]);
    return hidden ? as_stored(hidden[image * units + unit]) : 0.f;
}

// Grid: tiles of images, tiles of units. `before` is the row of the step before.
extern "C" __global__ void __launch_bounds__(THREADS)
recurrence_step(const value* __restrict__ x, const float* __restrict__ weight,
                const float* __restrict__ bias, const float* __restrict__ hidden,
                const float* __restrict__ cell, value* __restrict__ record, float* cells, value* y,
                float* __restrict__ last_hidden, float* __restrict__ last_cell, int images,
                int units, int steps, int step, int time, int before) {
    __shared__ Operands<GATES * UNITS> chunk;
    const long long first_image = (long long)blockIdx.x * IMAGES;
    const int first_unit = blockIdx.y * UNITS;
    constexpr int OWN = IMAGES * UNITS / THREADS;
    float sums[OWN][GATES] = {};
    const auto state = [&](int m, int k) {
        const long long image = first_image + m;
        return image < images ? state_before(y, hidden, image, k, units, steps, step, before) : 0.f;
    };
    const auto weight_of = [&](int column, int k) {
        const int unit = first_unit + column % UNITS;
        const long long row = (long long)(column / UNITS) * units + unit;
        return unit < units ? as_stored(weight[row * units + k]) : 0.f;
    };
    if (step || hidden) add_products<GATES, UNITS, false>(chunk, units, state, weight_of, sums);

    const int unit = first_unit + threadIdx.x % UNITS;
    if (unit >= units) return;
    for (int i = 0; i < OWN; ++i) {
        const long long image = first_image + threadIdx.x / UNITS * OWN + i;
        if (image >= images) return;
        const long long of_state = image * units + unit;
        float in[GATES], gate[4], h;
        for (int g = 0; g < GATES; ++g)
            in[g] = get(x[place(image, steps, time, GATES * units, g * units + unit)]);
        if (GATES == 4) {
            for (int g = 0; g < GATES; ++g) {
                const float sum = in[g] + sums[i][g];
                gate[g] = g == 2 ? hyperbolic_tangent(sum) : logistic(sum);
            }
            float c = step ? cells[place(image, steps, before, units, unit)]
                           : cell ? cell[of_state] : 0.f;
            c = fmaf(gate[1], c, gate[0] * gate[2]);
            cells[place(image, steps, time, units, unit)] = c;
            if (step == steps - 1) last_cell[of_state] = c;
            h = gate[3] * hyperbolic_tangent(c);
        } else {
            for (int g = 0; g < GATES; ++g) sums[i][g] += bias ? bias[g * units + unit] : 0.f;
            gate[0] = logistic(in[0] + sums[i][0]), gate[1] = logistic(in[1] + sums[i][1]);
            gate[2] = hyperbolic_tangent(fmaf(gate[0], sums[i][2], in[2])), gate[3] = sums[i][2];
            h = state_before(y, hidden, image, unit, units, steps, step, before);
            h = fmaf(gate[1], h - gate[2], gate[2]);
        }
        for (int g = 0; g < 4; ++g)
            record[place(image, steps, time, 4 * units, g * units + unit)] = put(gate[g]);
        y[place(image, steps, time, units, unit)] = put(h);
        if (step == steps - 1) last_hidden[of_state] = as_stored(h);
    }
}

__device__ __forceinline__ float slope_of_logistic(float y) { return y * (1.f - y); }
__device__ __forceinline__ float slope_of_tanh(float y) { return fmaf(-y, y, 1.f); }

// The gradients of a step. dproducts has those of the products with the state before each step, and
// is dx in an LSTM. `next` is the row of the next step, or -1 if no gradient comes from it. dstate
// (images, units) and dcell pass from step to step what does not come from the products. If `step`
// is -1, dstate only receives the gradient of the state before the first step.
extern "C" __global__ void __launch_bounds__(THREADS)
recurrence_back_step(const value* __restrict__ dy, const value* __restrict__ record,
                     const float* __restrict__ cells, const value* __restrict__ y,
                     const float* __restrict__ weight, const float* __restrict__ hidden,
                     const float* __restrict__ cell, value* dx, value* dproducts,
                     value* __restrict__ previous, float* __restrict__ dstate,
                     float* __restrict__ dcell, int images, int units, int steps, int step,
                     int time, int before, int next) {
    __shared__ Operands<BACK> chunk;
    const long long first_image = (long long)blockIdx.x * IMAGES;
    const int first_unit = blockIdx.y * BACK;
    constexpr int OWN = IMAGES * BACK / THREADS;
    float sums[OWN][1] = {};
    const auto gradient_of = [&](int m, int k) {
        const long long image = first_image + m;
        if (image >= images) return 0.f;
        return get(dproducts[place(image, steps, next, GATES * units, k)]);
    };
    const auto weight_of = [&](int column, int k) {
        const int unit = first_unit + column;
        return unit < units ? as_stored(weight[(long long)k * units + unit]) : 0.f;
    };
    if (next >= 0)
        add_products<1, BACK, true>(chunk, GATES * units, gradient_of, weight_of, sums);

    const int unit = first_unit + threadIdx.x % BACK;
    if (unit >= units) return;
    for (int i = 0; i < OWN; ++i) {
        const long long image = first_image + threadIdx.x / BACK * OWN + i;
        if (image >= images) return;
        const long long of_state = image * units + unit;
        float dh = sums[i][0], gate[4], grad[4];
        if (GATES == 3 && next >= 0) dh += dstate[of_state];
        if (step < 0) {
            dstate[of_state] = dh;
            continue;
        }
        const long long of_unit = place(image, steps, time, units, unit);
        dh += get(dy[of_unit]);
        for (int g = 0; g < 4; ++g)
            gate[g] = get(record[place(image, steps, time, 4 * units, g * units + unit)]);
        const float h = state_before(y, hidden, image, unit, units, steps, step, before);
        previous[of_unit] = put(h);
        if (GATES == 4) {
            const float bounded = hyperbolic_tangent(cells[of_unit]);
            const float c = step ? cells[place(image, steps, before, units, unit)]
                                 : cell ? cell[of_state] : 0.f;
            const float dc = fmaf(dh * gate[3], slope_of_tanh(bounded),
                                  next >= 0 ? dcell[of_state] : 0.f);
            grad[0] = dc * gate[2] * slope_of_logistic(gate[0]);
            grad[1] = dc * c * slope_of_logistic(gate[1]);
            grad[2] = dc * gate[0] * slope_of_tanh(gate[2]);
            grad[3] = dh * bounded * slope_of_logistic(gate[3]);
            dcell[of_state] = dc * gate[1];
        } else {
            grad[2] = dh * (1.f - gate[1]) * slope_of_tanh(gate[2]);
            grad[1] = dh * (h - gate[2]) * slope_of_logistic(gate[1]);
            grad[0] = grad[2] * gate[3] * slope_of_logistic(gate[0]);
            grad[3] = grad[2] * gate[0];
            dstate[of_state] = dh * gate[1];
        }
        for (int g = 0; g < GATES; ++g) {
            const long long at = place(image, steps, time, GATES * units, g * units + unit);
            dx[at] = put(grad[g]);
            if (GATES == 3) dproducts[at] = put(g == 2 ? grad[3] : grad[g]);
        }
    }
}
