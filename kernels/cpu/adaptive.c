/* Steps by moving means of the gradient and of its square: Adam and RMSProp. Nothing is contracted,
 * so that the bytes are those of the NumPy expression. */
#include <math.h>

#include "mpidl.h"
#include "team.h"

enum { CHUNK = 1 << 14 }; /* floats of a tile */

struct parameter { /* as Python hands it over: int64_t[6] */
    int64_t weight, gradient, mean, square, stepped; /* addresses; mean 0: RMSProp */
    int64_t floats;
};

struct job {
    const struct parameter *parameters;
    const float *decays, *factors; /* of each: L2, of the learning rate */
    float learning_rate, epsilon;
    float mean_kept, mean_new, square_kept, square_new;
};

static void step_tile(void *argument, int64_t tile, float *own) {
    const struct job *job = argument;
    (void)own;
    const struct parameter *p = job->parameters;
    int64_t tiles;
    for (; tile >= (tiles = (p->floats + CHUNK - 1) / CHUNK); p++) tile -= tiles;
    int64_t first = tile * CHUNK, count = p->floats - first < CHUNK ? p->floats - first : CHUNK;
    const float *restrict weight = (const float *)(intptr_t)p->weight + first;
    const float *restrict gradient = (const float *)(intptr_t)p->gradient + first;
    float *restrict square = (float *)(intptr_t)p->square + first;
    float *restrict stepped = (float *)(intptr_t)p->stepped + first;
    int64_t which = p - job->parameters;
    float decay = job->decays[which], rate = job->learning_rate * job->factors[which];
    float epsilon = job->epsilon, kept = job->square_kept, new = job->square_new;
    float mean_kept = job->mean_kept, mean_new = job->mean_new;
    float *restrict mean = p->mean ? (float *)(intptr_t)p->mean + first : 0;
    if (mean) {
        for (int64_t i = 0; i < count; i++) {
            float w = weight[i], g = decay != 0 ? gradient[i] + decay * w : gradient[i];
            float m = mean_kept * mean[i] + mean_new * g, s = kept * square[i] + new * (g * g);
            mean[i] = m;
            square[i] = s;
            stepped[i] = w - rate * (m / (sqrtf(s) + epsilon));
        }
    } else {
        for (int64_t i = 0; i < count; i++) {
            float w = weight[i], g = decay != 0 ? gradient[i] + decay * w : gradient[i];
            float s = kept * square[i] + new * (g * g);
            square[i] = s;
            stepped[i] = w - rate * (g / (sqrtf(s) + epsilon));
        }
    }
}

void mpidl_adaptive(const int64_t *parameters, const float *decays, const float *factors,
                    int64_t count, float learning_rate, double gradient_decay,
                    double square_decay, float epsilon) {
    struct job job = {
        (const struct parameter *)parameters, decays, factors, learning_rate, epsilon,
        (float)gradient_decay, (float)(1 - gradient_decay),
        (float)square_decay, (float)(1 - square_decay),
    };
    int64_t tiles = 0;
    for (int64_t i = 0; i < count; i++) tiles += (job.parameters[i].floats + CHUNK - 1) / CHUNK;
    each_tile(tiles, step_tile, &job, 0);
}
