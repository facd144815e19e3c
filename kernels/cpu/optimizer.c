/* Optimizer steps: SGD with momentum, Adam, RMSProp, and the moving average of the weights. Adam
 * and RMSProp keep moving averages of the gradient or of its square. Expressions are not
 * contracted, so the results equal NumPy's results bit for bit.
 *
 * A store to a line that is not in the cache first reads the line. If the new weights are larger
 * than a cache, their stores bypass the caches. */
#include <math.h>

#include "lanes.h"
#include "mpidl.h"
#include "team.h"

enum {
    CHUNK = 1 << 14,   /* floats per tile */
    PASSING = 1 << 22, /* from this number of floats on, stores of new weights bypass caches */
    NUMBERS = 7,       /* maximum number of scalars of a formula, including the learning rate */
    ARRAYS = 2         /* maximum number of arrays that a formula keeps per parameter */
};

/* The name of each formula, its number of scalars, and the number of arrays that it keeps. */
enum { SGDM, NESTEROV, ADAM, ADAMW, RMSPROP, AVERAGE, FORMULAS };
static const struct {
    const char *name;
    int64_t numbers, arrays;
} FORMULA[FORMULAS] = {
    [SGDM] = {"sgdm", 2, 1},
    [NESTEROV] = {"nesterov", 2, 1},
    [ADAM] = {"adam", 6, 2},
    [ADAMW] = {"adamw", 7, 2},
    [RMSPROP] = {"rmsprop", 4, 1},
    [AVERAGE] = {"average", 1, 1},
};

struct parameter { /* Python passes it as int64_t[6] */
    int64_t floats;
    int64_t weight, gradient, stepped, kept[ARRAYS]; /* addresses */
};

struct job {
    const struct parameter *parameters;
    const float *decays, *factors; /* per parameter: weight decay, factor of the learning rate */
    float numbers[NUMBERS];
    int formula, past;
};

struct arrays {
    const float *weight, *gradient;
    float *stepped, *kept[ARRAYS];
};

INLINE void store_past_caches(float *p, vec v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
    _mm256_stream_ps(p, (__m256)v);
#else
    store(p, v);
#endif
}

INLINE vec root(vec v) {
#if defined(__AVX512F__)
    return (vec)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
    return (vec)_mm256_sqrt_ps((__m256)v);
#else
    UNROLL for (int i = 0; i < WIDTH; i++) v[i] = sqrtf(v[i]);
    return v;
#endif
}

/* Update WIDTH weights, starting at i, by a formula of backends/reference/optimizer.py. */
INLINE void step(const float *numbers, int formula, int past, float decay, float rate,
                 struct arrays a, int64_t i) {
    vec w = load(a.weight + i), g = load(a.gradient + i), first = load(a.kept[0] + i), stepped;
    if (formula != ADAMW && decay != 0) g = g + decay * w;
    if (formula == SGDM) { /* numbers: momentum; arrays: velocity */
        first = numbers[1] * first - rate * g;
        stepped = w + first;
    } else if (formula == NESTEROV) { /* numbers and arrays as for SGDM */
        vec change = rate * g;
        first = numbers[1] * first - change;
        stepped = w + (numbers[1] * first - change);
    } else if (formula == ADAM || formula == ADAMW) {
        /* numbers: decay and share of both means, epsilon, correction (ADAMW); arrays: means */
        vec square = load(a.kept[1] + i);
        first = numbers[1] * first + numbers[2] * g;
        square = numbers[3] * square + numbers[4] * (g * g);
        store(a.kept[1] + i, square);
        vec direction = first / (root(square) + numbers[5]);
        if (formula == ADAMW) {
            direction = numbers[6] * direction;
            if (decay != 0) direction = direction + decay * w;
        }
        stepped = w - rate * direction;
    } else if (formula == AVERAGE) { /* arrays: the average */
        first = first + rate * (w - first);
        stepped = w;
    } else { /* RMSPROP: numbers: decay, share, epsilon; arrays: mean square */
        first = numbers[1] * first + numbers[2] * (g * g);
        stepped = w - rate * (g / (root(first) + numbers[3]));
    }
    store(a.kept[0] + i, first);
    if (past)
        store_past_caches(a.stepped + i, stepped);
    else
        store(a.stepped + i, stepped);
}

INLINE void steps(const struct job *job, int formula, float decay, float rate, struct arrays a,
                  int64_t count) {
    int64_t i = 0;
    /* stores that bypass the caches need whole lines that were not read before */
    int past = job->past && a.stepped != a.weight && (intptr_t)a.stepped % 64 == 0;
    for (; i + WIDTH <= count; i += WIDTH)
        step(job->numbers, formula, past, decay, rate, a, i);
    size_t left = (size_t)(count - i) * sizeof(float);
    if (!left) return;
    float last[3 + ARRAYS][WIDTH] = {{0}}; /* the last elements, which do not fill a vector */
    struct arrays of_last = {last[0], last[1], last[2], {last[3], last[4]}};
    memcpy(last[0], a.weight + i, left);
    memcpy(last[1], a.gradient + i, left);
    for (int k = 0; k < FORMULA[formula].arrays; k++) memcpy(last[3 + k], a.kept[k] + i, left);
    step(job->numbers, formula, 0, decay, rate, of_last, 0);
    for (int k = 0; k < FORMULA[formula].arrays; k++) memcpy(a.kept[k] + i, last[3 + k], left);
    memcpy(a.stepped + i, last[2], left);
}

static void step_tile(void *argument, int64_t tile, float *own) {
    const struct job job = *(const struct job *)argument;
    (void)own;
    const struct parameter *p = job.parameters;
    int64_t tiles;
    for (; tile >= (tiles = (p->floats + CHUNK - 1) / CHUNK); p++) tile -= tiles;
    int64_t first = tile * CHUNK, count = p->floats - first < CHUNK ? p->floats - first : CHUNK;
    int64_t which = p - job.parameters;
    float decay = job.decays[which], rate = job.numbers[0] * job.factors[which];
#define FROM_FIRST(address) ((address) ? (float *)(intptr_t)(address) + first : 0)
    struct arrays a = {FROM_FIRST(p->weight), FROM_FIRST(p->gradient), FROM_FIRST(p->stepped),
                       {FROM_FIRST(p->kept[0]), FROM_FIRST(p->kept[1])}};
    switch (job.formula) { /* a separate loop for each formula */
        case SGDM: steps(&job, SGDM, decay, rate, a, count); break;
        case NESTEROV: steps(&job, NESTEROV, decay, rate, a, count); break;
        case ADAM: steps(&job, ADAM, decay, rate, a, count); break;
        case ADAMW: steps(&job, ADAMW, decay, rate, a, count); break;
        case RMSPROP: steps(&job, RMSPROP, decay, rate, a, count); break;
        case AVERAGE: steps(&job, AVERAGE, decay, rate, a, count); break;
    }
#if defined(__AVX2__)
    if (job.past) _mm_sfence(); /* complete the stores before other threads read the tile */
#endif
}

int64_t mpidl_optimizer_step(const char *formula, const int64_t *parameters, const float *decays,
                             const float *factors, int64_t count, const float *numbers,
                             int64_t given, int64_t arrays) {
    struct job job = {.parameters = (const struct parameter *)parameters,
                      .decays = decays,
                      .factors = factors};
    while (job.formula < FORMULAS && strcmp(FORMULA[job.formula].name, formula)) job.formula++;
    if (job.formula == FORMULAS || given != FORMULA[job.formula].numbers ||
        arrays != FORMULA[job.formula].arrays)
        return 0;
    memcpy(job.numbers, numbers, (size_t)given * sizeof(float));
    int64_t tiles = 0, floats = 0;
    for (int64_t i = 0; i < count; i++) {
        tiles += (job.parameters[i].floats + CHUNK - 1) / CHUNK;
        floats += job.parameters[i].floats;
    }
    job.past = floats >= PASSING;
    each_tile(tiles, step_tile, &job, 0);
    return 1;
}
