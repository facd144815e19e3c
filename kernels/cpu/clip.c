/* Clip gradients at a threshold, or scale them by trust ratios. Squares are summed in double
 * precision, in an order that does not depend on the number of threads: a tree sums the 16 lanes of
 * a tile, and then the sums of tiles and of parameters are added in order. */
#include <math.h>

#include "lanes.h"
#include "mpidl.h"
#include "team.h"

enum { CHUNK = 1 << 14 };             /* floats per tile */
enum { EACH, ALL, NUMBERS };          /* method of mpidl_clip: what the threshold limits */
enum { LARS, LAMB };                  /* method of mpidl_trust: the divisor of the ratio */

struct parameter { /* Python passes it as int64_t[4] */
    int64_t weight, gradient, clipped; /* addresses */
    int64_t floats;
};

struct job {
    const struct parameter *parameters;
    const float *decays;
    double *sums, *scales; /* `sums`: one or two per tile; `scales`: one per parameter */
    int64_t method;
    float threshold;
};

struct part { /* the part of a parameter in one tile */
    const float *weight, *gradient;
    float *clipped, decay;
    int64_t which, count;
};

static int64_t tiles_of(const struct parameter *p) { return parts_of(p->floats, CHUNK); }

static struct part part_of(const struct job *job, int64_t tile) {
    const struct parameter *p = job->parameters;
    for (int64_t tiles; tile >= (tiles = tiles_of(p)); p++) tile -= tiles;
    int64_t first = tile * CHUNK, which = p - job->parameters;
    return (struct part){
        (const float *)(intptr_t)p->weight + first, (const float *)(intptr_t)p->gradient + first,
        (float *)(intptr_t)p->clipped + first, job->decays[which], which,
        least(p->floats - first, CHUNK),
    };
}

/* Add the L2 regularization to the gradient, and store the result in `clipped`. */
static void regularize(struct part part) {
    float *restrict to = part.clipped;
    for (int64_t i = 0; i < part.count; i++)
        to[i] = part.decay != 0 ? part.gradient[i] + part.decay * part.weight[i] : part.gradient[i];
}

/* Return the sum of the squares of a tile. */
static double squares(const float *x, int64_t count) {
    double lanes[LANES] = {0};
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += (double)x[i + j] * x[i + j];
    for (int64_t i = whole; i < count; i++) lanes[i - whole] += (double)x[i] * x[i];
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
    return lanes[0];
}

static void square_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    struct part part = part_of(job, tile);
    float *to = part.clipped;
    regularize(part);
    if (job->method == NUMBERS) {
        float t = job->threshold;
        for (int64_t i = 0; i < part.count; i++) to[i] = to[i] > t ? t : to[i] < -t ? -t : to[i];
        return;
    }
    job->sums[tile] = squares(to, part.count);
}

/* Store two sums of squares of a tile: of the weights, and of the divisor of the trust ratio. */
static void trust_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    struct part part = part_of(job, tile);
    regularize(part);
    job->sums[2 * tile] = squares(part.weight, part.count);
    job->sums[2 * tile + 1] =
        squares(job->method == LARS ? part.gradient : part.clipped, part.count);
}

static void scale_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    struct part part = part_of(job, tile);
    float scale = (float)job->scales[part.which];
    if (scale == 1) return;
    for (int64_t i = 0; i < part.count; i++) part.clipped[i] *= scale;
}

/* Return the factor that limits a gradient's norm, given the square of the norm. NaN stays NaN. */
static double factor(double square, double threshold) {
    double norm = sqrt(square);
    return norm <= threshold ? 1 : threshold / norm;
}

void mpidl_clip(const int64_t *parameters, const float *decays, double *sums, double *scales,
                int64_t count, int64_t method, double threshold) {
    struct job job = {(const struct parameter *)parameters, decays, sums, scales, method,
                      (float)threshold};
    int64_t tiles = 0;
    for (int64_t i = 0; i < count; i++) tiles += tiles_of(job.parameters + i);
    each_tile(tiles, square_tile, &job, 0);
    if (method == NUMBERS) return;
    double all = 0;
    int64_t tile = 0;
    for (int64_t i = 0; i < count; i++) {
        double square = 0;
        for (int64_t n = tiles_of(job.parameters + i); n; n--) square += sums[tile++];
        all += square;
        scales[i] = factor(square, threshold);
    }
    if (method == ALL)
        for (int64_t i = 0; i < count; i++) scales[i] = factor(all, threshold);
    each_tile(tiles, scale_tile, &job, 0);
}

void mpidl_trust(const int64_t *parameters, const float *decays, const float *coefficients,
                 double *sums, double *scales, int64_t count, int64_t method) {
    struct job job = {(const struct parameter *)parameters, decays, sums, scales, method, 0};
    int64_t tiles = 0;
    for (int64_t i = 0; i < count; i++) tiles += tiles_of(job.parameters + i);
    each_tile(tiles, trust_tile, &job, 0);
    for (int64_t i = 0; i < count; i++) {
        double weight = 0, update = 0;
        for (int64_t n = tiles_of(job.parameters + i); n; n--, sums += 2)
            weight += sums[0], update += sums[1];
        double norm = sqrt(weight), divisor = sqrt(update);
        if (method == LARS) divisor += (double)decays[i] * norm;
        int scaled = coefficients[i] != 0 && norm > 0 && divisor > 0;
        scales[i] = scaled ? (double)coefficients[i] * norm / divisor : 1;
    }
    each_tile(tiles, scale_tile, &job, 0);
}
