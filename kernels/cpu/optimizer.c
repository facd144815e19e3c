/* Optimizers' steps: SGD with momentum; Adam and RMSProp, by moving means of the gradient and of its
 * square. Nothing is contracted, so that the bytes are those of the NumPy expressions.
 *
 * A store to a line that is not in the cache first reads the line. Where as many new weights are
 * written as no cache keeps until they are read, they go to memory past the caches. */
#include <math.h>

#include "lanes.h"
#include "mpidl.h"
#include "team.h"

enum {
    CHUNK = 1 << 14,  /* floats of a tile */
    PASSING = 1 << 22 /* floats of all parameters, from which they are written past the caches */
};
enum { SGDM, ADAM, RMSPROP };

struct parameter { /* as Python hands it over: int64_t[6] */
    int64_t weight, gradient, mean, kept, stepped; /* addresses; mean is Adam's */
    int64_t floats;
};

struct job {
    const struct parameter *parameters;
    const float *decays, *factors; /* of each: L2, of the learning rate */
    float learning_rate, old, new; /* of what is kept, and of what comes to it */
    float mean_old, mean_new, epsilon;
    int kind, past;
};

struct arrays {
    const float *weight, *gradient;
    float *mean, *kept, *stepped;
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

/* The step of WIDTH numbers from i on. */
INLINE void step(const struct job *job, int kind, int past, float decay, float rate,
                 struct arrays a, int64_t i) {
    vec w = load(a.weight + i), g = load(a.gradient + i), kept = load(a.kept + i), stepped;
    if (decay != 0) g = g + decay * w;
    if (kind == SGDM) {
        kept = job->old * kept - rate * g;
        stepped = w + kept;
    } else {
        vec towards = g;
        if (kind == ADAM) {
            towards = job->mean_old * load(a.mean + i) + job->mean_new * g;
            store(a.mean + i, towards);
        }
        kept = job->old * kept + job->new * (g * g);
        stepped = w - rate * (towards / (root(kept) + job->epsilon));
    }
    store(a.kept + i, kept);
    if (past)
        store_past_caches(a.stepped + i, stepped);
    else
        store(a.stepped + i, stepped);
}

INLINE void steps(const struct job *job, int kind, float decay, float rate, struct arrays a,
                  int64_t count) {
    int64_t i = 0;
    int past = job->past && (intptr_t)a.stepped % 64 == 0; /* whole lines at once */
    for (; i + WIDTH <= count; i += WIDTH) step(job, kind, past, decay, rate, a, i);
    size_t left = (size_t)(count - i) * sizeof(float);
    if (!left) return;
    float last[5][WIDTH] = {{0}}; /* what does not fill a vector */
    struct arrays of_last = {last[0], last[1], last[2], last[3], last[4]};
    memcpy(last[0], a.weight + i, left);
    memcpy(last[1], a.gradient + i, left);
    if (kind == ADAM) memcpy(last[2], a.mean + i, left);
    memcpy(last[3], a.kept + i, left);
    step(job, kind, 0, decay, rate, of_last, 0);
    if (kind == ADAM) memcpy(a.mean + i, last[2], left);
    memcpy(a.kept + i, last[3], left);
    memcpy(a.stepped + i, last[4], left);
}

static void step_tile(void *argument, int64_t tile, float *own) {
    const struct job job = *(const struct job *)argument;
    (void)own;
    const struct parameter *p = job.parameters;
    int64_t tiles;
    for (; tile >= (tiles = (p->floats + CHUNK - 1) / CHUNK); p++) tile -= tiles;
    int64_t first = tile * CHUNK, count = p->floats - first < CHUNK ? p->floats - first : CHUNK;
    int64_t which = p - job.parameters;
    float decay = job.decays[which], rate = job.learning_rate * job.factors[which];
#define FROM_FIRST(address) ((float *)(intptr_t)(address) + first)
    struct arrays a = {FROM_FIRST(p->weight), FROM_FIRST(p->gradient),
                       job.kind == ADAM ? FROM_FIRST(p->mean) : 0, FROM_FIRST(p->kept),
                       FROM_FIRST(p->stepped)};
    if (job.kind == SGDM)
        steps(&job, SGDM, decay, rate, a, count);
    else if (job.kind == ADAM)
        steps(&job, ADAM, decay, rate, a, count);
    else
        steps(&job, RMSPROP, decay, rate, a, count);
#if defined(__AVX2__)
    if (job.past) _mm_sfence(); /* before whoever waits for this tile reads it */
#endif
}

static void each_parameter(struct job *job, int64_t count) {
    int64_t tiles = 0, floats = 0;
    for (int64_t i = 0; i < count; i++) {
        tiles += (job->parameters[i].floats + CHUNK - 1) / CHUNK;
        floats += job->parameters[i].floats;
    }
    job->past = floats >= PASSING;
    each_tile(tiles, step_tile, job, 0);
}

void mpidl_sgdm(const int64_t *parameters, const float *decays, const float *factors,
                int64_t count, float learning_rate, float momentum) {
    struct job job = {.parameters = (const struct parameter *)parameters,
                      .decays = decays,
                      .factors = factors,
                      .learning_rate = learning_rate,
                      .old = momentum,
                      .kind = SGDM};
    each_parameter(&job, count);
}

void mpidl_adaptive(const int64_t *parameters, const float *decays, const float *factors,
                    int64_t count, float learning_rate, double gradient_decay,
                    double square_decay, float epsilon) {
    struct job job = {.parameters = (const struct parameter *)parameters,
                      .decays = decays,
                      .factors = factors,
                      .learning_rate = learning_rate,
                      .old = (float)square_decay,
                      .new = (float)(1 - square_decay),
                      .mean_old = (float)gradient_decay,
                      .mean_new = (float)(1 - gradient_decay),
                      .epsilon = epsilon,
                      .kind = count && parameters[2] ? ADAM : RMSPROP};
    each_parameter(&job, count);
}
