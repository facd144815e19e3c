/* The arithmetic of batch normalization between the passes over images, and sums of channels. */
#include <math.h>

#include "activation.h"
#include "mpidl.h"
#include "team.h"

/* The arguments of mpidl_channel_sums. A tile is one channel of one block. */
struct sums {
    const float *x;
    float *sums;
    int64_t height, width;
};

static void sum_tile(void *argument, int64_t tile, float *own) {
    const struct sums *job = argument;
    const int64_t row = job->width * LANES;
    job->sums[tile] = channel_sum(job->x + tile * job->height * row, job->height, job->width, row);
}

void mpidl_channel_sums(const float *x, float *sums, int64_t blocks, int64_t channels,
                        int64_t height, int64_t width) {
    struct sums job = {x, sums, height, width};
    each_tile(blocks * channels, sum_tile, &job, 0);
}

/* The arithmetic between the passes is in double precision. Only the results are rounded to float.
 */
void mpidl_statistics(const double *moments, const float *gamma, double epsilon, double *rstd,
                      double *variance, float *shift, float *scale, int64_t channels) {
    double count = moments[0] > 1 ? moments[0] : 1;
    const double *mean = moments + 1, *m2 = mean + channels;
    for (int64_t c = 0; c < channels; c++) {
        variance[c] = m2[c] / count;
        rstd[c] = 1 / sqrt(variance[c] + epsilon);
        shift[c] = (float)mean[c];
        scale[c] = (float)(gamma[c] * rstd[c]);
    }
}

/* sums (2 * channels): the sums of dy, then of dy * (x - mean); see backends/reference/batchnorm.py
 */
void mpidl_batchnorm_factors(const double *sums, const float *gamma, const double *count,
                             const double *rstd, float *a, float *b, float *c, float *dgamma,
                             float *dbeta, int64_t channels) {
    double n = *count > 1 ? *count : 1;
    const double *products = sums + channels;
    for (int64_t i = 0; i < channels; i++) {
        double factor = gamma[i] * rstd[i];
        a[i] = (float)factor;
        b[i] = (float)(-factor * rstd[i] * rstd[i] * products[i] / n);
        c[i] = (float)(-factor * sums[i] / n);
        dgamma[i] = (float)(products[i] * rstd[i]);
        dbeta[i] = (float)sums[i];
    }
}

void mpidl_running(const float *old, const double *value, double decay, float *updated,
                   int64_t channels) {
    for (int64_t c = 0; c < channels; c++)
        updated[c] = (float)(old[c] + decay * (value[c] - old[c]));
}

void mpidl_predict_scale(const float *gamma, const float *variance, double epsilon, float *scale,
                         int64_t channels) {
    for (int64_t c = 0; c < channels; c++)
        scale[c] = (float)(gamma[c] / sqrt(variance[c] + epsilon));
}
