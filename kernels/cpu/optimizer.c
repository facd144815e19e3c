/* SGD with momentum. Nothing is contracted, so that the bytes are those of the NumPy expression. */
#include "mpidl.h"
#include "team.h"

enum { CHUNK = 1 << 14 }; /* floats of a tile */

struct parameter { /* as Python hands it over: int64_t[5] */
    int64_t weight, gradient, velocity, stepped; /* addresses */
    int64_t floats;
};

struct job {
    const struct parameter *parameters;
    const float *decays, *factors; /* of each: L2, of the learning rate */
    float learning_rate, momentum;
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
    float *restrict velocity = (float *)(intptr_t)p->velocity + first;
    float *restrict stepped = (float *)(intptr_t)p->stepped + first;
    int64_t which = p - job->parameters;
    float decay = job->decays[which], rate = job->learning_rate * job->factors[which];
    for (int64_t i = 0; i < count; i++) {
        float g = decay != 0 ? gradient[i] + decay * weight[i] : gradient[i];
        velocity[i] = job->momentum * velocity[i] - rate * g;
        stepped[i] = weight[i] + velocity[i];
    }
}

void mpidl_sgdm(const int64_t *parameters, const float *decays, const float *factors,
                int64_t count, float learning_rate, float momentum) {
    struct job job = {(const struct parameter *)parameters, decays, factors, learning_rate,
                      momentum};
    int64_t tiles = 0;
    for (int64_t i = 0; i < count; i++) tiles += (job.parameters[i].floats + CHUNK - 1) / CHUNK;
    each_tile(tiles, step_tile, &job, 0);
}
