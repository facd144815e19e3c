/* Optimizer steps: the formulas of formulas.h on all parameters. Expressions are not contracted, so
 * the results equal NumPy's results bit for bit.
 *
 * A store to a line that is not in the cache first reads the line. If the new weights are larger
 * than a cache, their stores bypass the caches. */
#include "mpidl.h"
#include "special.h"
#include "team.h"

enum {
    CHUNK = 1 << 14,  /* floats per tile */
    PASSING = 1 << 22 /* from this number of floats on, stores of new weights bypass caches */
};

typedef vec formula(vec w, vec g, float decay, float rate, const float *numbers, vec *kept);

struct parameter { /* Python passes it as int64_t[6] */
    int64_t floats;
    int64_t weight, gradient, stepped, kept[MOST_KEPT]; /* addresses */
};

struct job {
    const struct parameter *parameters;
    const float *decays, *factors; /* per parameter: weight decay, factor of the learning rate */
    float numbers[MOST_NUMBERS];
    int past;
};

struct arrays {
    const float *weight, *gradient;
    float *stepped, *kept[MOST_KEPT];
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

/* Update WIDTH weights, starting at i. */
INLINE void step(formula *f, int arrays, const struct job *job, int past, float decay, float rate,
                 struct arrays a, int64_t i) {
    vec kept[MOST_KEPT];
    UNROLL for (int k = 0; k < arrays; k++) kept[k] = load(a.kept[k] + i);
    vec stepped = f(load(a.weight + i), load(a.gradient + i), decay, rate, job->numbers + 1, kept);
    UNROLL for (int k = 0; k < arrays; k++) store(a.kept[k] + i, kept[k]);
    if (past)
        store_past_caches(a.stepped + i, stepped);
    else
        store(a.stepped + i, stepped);
}

INLINE void steps(formula *f, int arrays, const struct job *job, float decay, float rate,
                  struct arrays a, int64_t count) {
    int64_t i = 0;
    /* stores that bypass the caches need whole lines that were not read before */
    int past = job->past && a.stepped != a.weight && (intptr_t)a.stepped % 64 == 0;
    for (; i + WIDTH <= count; i += WIDTH) step(f, arrays, job, past, decay, rate, a, i);
    size_t left = (size_t)(count - i) * sizeof(float);
    if (!left) return;
    float last[3 + MOST_KEPT][WIDTH] = {{0}}; /* the last elements, which do not fill a vector */
    struct arrays of_last = {last[0], last[1], last[2], {last[3], last[4]}};
    memcpy(last[0], a.weight + i, left);
    memcpy(last[1], a.gradient + i, left);
    for (int k = 0; k < arrays; k++) memcpy(last[3 + k], a.kept[k] + i, left);
    step(f, arrays, job, 0, decay, rate, of_last, 0);
    for (int k = 0; k < arrays; k++) memcpy(a.kept[k] + i, last[3 + k], left);
    memcpy(a.stepped + i, last[2], left);
}

/* Return the parameter of a tile, the tile's first float in it, and its number of floats. */
static const struct parameter *parameter_of(const struct job *job, int64_t tile, int64_t *first,
                                            int64_t *count) {
    const struct parameter *p = job->parameters;
    int64_t tiles;
    for (; tile >= (tiles = parts_of(p->floats, CHUNK)); p++) tile -= tiles;
    *first = tile * CHUNK;
    *count = least(p->floats - *first, CHUNK);
    return p;
}

/* Complete the stores that bypass the caches, before other threads read the tile. */
INLINE void complete_stores(const struct job *job) {
#if defined(__AVX2__)
    if (job->past) _mm_sfence();
#endif
}

#define FROM_FIRST(address) ((address) ? (float *)(intptr_t)(address) + first : 0)

/* Define a tile function for a formula. */
#define STEP_TILE(name, numbers_, kept_)                                                           \
    static void name##_tile(void *argument, int64_t tile, float *own) {                            \
        int64_t first, count;                                                                      \
        const struct job job = *(const struct job *)argument;                                      \
        const struct parameter *p = parameter_of(&job, tile, &first, &count);                      \
        struct arrays a = {FROM_FIRST(p->weight), FROM_FIRST(p->gradient), FROM_FIRST(p->stepped), \
                           {FROM_FIRST(p->kept[0]), FROM_FIRST(p->kept[1])}};                      \
        int64_t which = p - job.parameters;                                                        \
        float decay = job.decays[which], rate = job.numbers[0] * job.factors[which];               \
        (void)own;                                                                                 \
        steps(name, kept_, &job, decay, rate, a, count);                                           \
        complete_stores(&job);                                                                     \
    }
EACH_STEP(STEP_TILE)

#define ROW(name, numbers, kept) {#name, numbers, kept, name##_tile},
static const struct {
    const char *name;
    int64_t numbers, arrays;
    tile_work *tile;
} FORMULAS[] = {EACH_STEP(ROW)};
enum { COUNT = sizeof FORMULAS / sizeof *FORMULAS };

int64_t mpidl_optimizer_step(const char *formula, const int64_t *parameters, const float *decays,
                             const float *factors, int64_t count, const float *numbers,
                             int64_t given, int64_t arrays) {
    struct job job = {.parameters = (const struct parameter *)parameters,
                      .decays = decays,
                      .factors = factors};
    int i = 0;
    while (i < COUNT && strcmp(FORMULAS[i].name, formula)) i++;
    if (i == COUNT || given != FORMULAS[i].numbers || arrays != FORMULAS[i].arrays) return 0;
    memcpy(job.numbers, numbers, (size_t)given * sizeof(float));
    int64_t tiles = 0, floats = 0;
    for (int64_t p = 0; p < count; p++) {
        tiles += parts_of(job.parameters[p].floats, CHUNK);
        floats += job.parameters[p].floats;
    }
    job.past = floats >= PASSING;
    each_tile(tiles, FORMULAS[i].tile, &job, 0);
    return 1;
}
