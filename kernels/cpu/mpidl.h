/* Functions that the library exports. mpidl/backends/cpu/builds.py reads their names and argument
 * types from this file. An argument is an int64_t, double or float, a pointer to one of these types
 * or to int32_t, uint8_t or uint16_t, or a function without arguments. A result is a number or a
 * string. A pointer may be NULL only if its comment says so. Python checks the arguments. A function
 * fails only if the system refuses scratch memory. In this case the function sets
 * mpidl_missing_bytes, and the results are undefined.
 *
 * A function with arguments of the type `value` exists twice: `mpidl_relu` reads and writes float
 * arrays, and `mpidl_relu_bf16` bfloat16 arrays (see value.h). Only the first is declared here; an
 * array of uint16_t holds bfloat16 numbers, too.
 *
 * x has the shape (blocks, C, H, W, 16). A "source" is an input of a kernel. If its `mean` is NULL,
 * the source is `x`. Otherwise the source is min(max((x - mean) * scale + beta, low), high) per
 * channel, computed when it is read and never stored. */
#ifndef MPIDL_H
#define MPIDL_H

#include <stdint.h>

#include "value.h"

#pragma GCC visibility push(default) /* all other symbols are hidden */

/* about.c */
const char *mpidl_compiler(void);     /* for example "gcc 12.2.0" */
const char *mpidl_sources(void);      /* a hash of the library's sources */
const char *mpidl_declarations(void); /* the declarations in this file at compile time */

/* team.c */
int64_t mpidl_set_threads(int64_t count); /* returns the number of threads that started */
/* The number of bytes of scratch memory that the system refused, or 0. The caller resets the value
 * to 0. */
extern int64_t mpidl_missing_bytes;
/* Let the calling thread run `function`, the hook, about every millisecond during a pass. NULL
 * removes the hook. */
void mpidl_set_hook(void (*function)(void));

/* play.c: call functions of this file in sequence, until one of them lacks scratch memory, waits
 * for other ranks, or reads a number that is not finite. Return the number of completed calls. Each call is stored as the position of the
 * function in this file, the number of its arguments, and the arguments: integers, addresses, or
 * the bits of floating-point numbers. */
int64_t mpidl_play(const int64_t *calls, int64_t count);
/* End mpidl_play before the next call if the number is NaN or infinite. */
void mpidl_need_finite(const double *number);

/* sums.c: sums over the ranks of a host. `queue` and `sum` are structs of sums.c, in memory that
 * the caller owns. The hook may call these functions. */
void mpidl_sums_start(int64_t *queue, int64_t *sum);
void mpidl_sums_advance(int64_t *queue); /* does not wait */
/* Wait for a sum, at most for the queue's time limit (`patience`). Set mpidl_sums_waiting to 1 if
 * the sum is still incomplete, else to 0. */
void mpidl_sums_wait(int64_t *queue, const int64_t *sum);
void mpidl_sums_leave(const int64_t *queue); /* afterwards, no thread advances the queue */
extern int64_t mpidl_sums_waiting;

/* peak.c */
/* Add products in registers, `iterations` times. Return the number of operations, two per product.
 * result: 32 floats; the first 16 hold the factor and the last 16 the term. */
int64_t mpidl_fma_peak(int64_t iterations, float *result);

/* batchnorm.c: x and y are (blocks, channels, pixels, 16) */
void mpidl_moments(const value *x, double *rows, const int32_t *counts, int64_t blocks,
                   int64_t channels, int64_t pixels, const int64_t *tree);
void mpidl_batchnorm(const value *x, const float *mean, const float *scale, const float *beta,
                     float low, float high, value *y, int64_t blocks, int64_t channels,
                     int64_t pixels);
/* scale and beta are NULL if no activation follows */
void mpidl_batchnorm_sums(const value *dy, const value *x, const float *mean, const float *scale,
                          const float *beta, float low, float high, double *rows, int64_t blocks,
                          int64_t channels, int64_t pixels, const int64_t *tree);
void mpidl_batchnorm_dx(const value *dy, const value *x, const float *mean, const float *a,
                        const float *b, const float *c, value *dx, const int32_t *counts,
                        int64_t blocks, int64_t channels, int64_t pixels);
void mpidl_relu(const value *x, value *y, int64_t blocks, int64_t channels, int64_t pixels);
void mpidl_relu_dx(const value *dy, const value *y, value *dx, int64_t blocks, int64_t channels,
                   int64_t pixels);

/* copy.c; `widen` and `narrow` convert float to and from bfloat16, and count is a multiple of 16 */
void mpidl_copy(const float *from, float *to, int64_t floats);
void mpidl_zero(float *to, int64_t floats);
void mpidl_widen(const uint16_t *from, float *to, int64_t count);
void mpidl_narrow(const float *from, uint16_t *to, int64_t count);

/* statistics.c */
void mpidl_channel_sums(const float *x, float *sums, int64_t blocks, int64_t channels,
                        int64_t height, int64_t width);
/* moments (1 + 2 * channels): count, means, M2; see backends/interface.py */
void mpidl_statistics(const double *moments, const float *gamma, double epsilon, double *rstd,
                      double *variance, float *shift, float *scale, int64_t channels);
void mpidl_batchnorm_factors(const double *sums, const float *gamma, const double *count,
                             const double *rstd, float *a, float *b, float *c, float *dgamma,
                             float *dbeta, int64_t channels);
void mpidl_running(const float *old, const double *value, double decay, float *updated,
                   int64_t channels);
void mpidl_predict_scale(const float *gamma, const float *variance, double epsilon, float *scale,
                         int64_t channels);

/* elementwise.c */
/* Apply a function of formulas.h, or its gradient if dy is not NULL. x is then the value that the
 * gradient reads: the input or the result. If mean is not NULL, this value is instead
 * (x - mean) * scale + beta per channel. Return 0 if formulas.h has no such function, else 1. */
int64_t mpidl_elementwise(const char *function, const value *x, const float *mean,
                          const float *scale, const float *beta, const value *dy, value *out,
                          float a, float b, int64_t blocks, int64_t channels, int64_t pixels);
/* slope has `slopes` elements: one per channel, or 1 */
void mpidl_prelu(const value *x, const float *slope, int64_t slopes, value *y, int64_t blocks,
                 int64_t channels, int64_t pixels);
void mpidl_prelu_dx(const value *dy, const value *x, const float *slope, int64_t slopes, value *dx,
                    int64_t blocks, int64_t channels, int64_t pixels);
void mpidl_prelu_products(const value *dy, const value *x, float *products, int64_t rows);

/* join.c: y = a + b, followed by ReLU if `relu`. a and b are sources. */
void mpidl_add(const value *a, const float *a_mean, const float *a_scale, const float *a_beta,
               float a_low, float a_high, const value *b, const float *b_mean, const float *b_scale,
               const float *b_beta, float b_low, float b_high, value *y, int64_t relu,
               int64_t blocks, int64_t channels, int64_t pixels);
/* dz = dy where y > 0, else 0. If more_dy is not NULL, it is added to dy first. If a_sums (blocks,
 * 2C) is not NULL, it receives the mpidl_batchnorm_sums of dz and a. The same applies to b_sums and
 * b. */
void mpidl_add_relu_dx(const value *dy, const value *more_dy, const value *y, value *dz,
                       const value *a, const float *a_mean, double *a_sums, const value *b,
                       const float *b_mean, double *b_sums, int64_t blocks, int64_t channels,
                       int64_t pixels, const int64_t *tree);

/* concat.c: x has `channels` of the `all` channels of y, starting at channel `first` of y. In
 * mpidl_concat, x is a source. */
void mpidl_concat(const value *x, const float *mean, const float *scale, const float *beta,
                  float low, float high, value *y, int64_t blocks, int64_t channels, int64_t pixels,
                  int64_t all, int64_t first);
void mpidl_split(const value *y, value *x, int64_t blocks, int64_t channels, int64_t pixels,
                 int64_t all, int64_t first);

/* resample.c: weighted sums of pixels. x (blocks, C, H, W, 16) is a source, y is (blocks, C, P, Q,
 * 16), and shape is C, H, W, P, Q. `rows` has the P + 1 positions at which the taps of each row of
 * y begin, followed by the taps. A tap has the row of x in the lower half of an integer, and the
 * bits of a float, its weight, in the upper half. `columns` has Q + 1 positions and the taps of the
 * columns. */
void mpidl_resample(const value *x, const float *mean, const float *scale, const float *beta,
                    float low, float high, value *y, int64_t blocks, const int64_t *shape,
                    const int64_t *rows, const int64_t *columns);
/* Channel c of y is channel indices[c] of x, or zeros if this index is negative. */
void mpidl_take_channels(const value *x, value *y, int64_t blocks, int64_t channels, int64_t pixels,
                         int64_t outputs, const int64_t *indices);

/* dropout.c: samples is (blocks, 16), rows is the number of elements per image, and threshold is
 * the dropout probability in units of 1/65536. If whole_images is 1, an image has one random number. */
void mpidl_dropout(const value *x, value *y, const int64_t *samples, int64_t blocks, int64_t rows,
                   int64_t threshold, float scale, int64_t epoch, int64_t key0, int64_t key1,
                   int64_t whole_images);

/* gates.c: axes is struct axes of gates.c, with the steps of a and b or, for mpidl_multiply_dx, of
 * x and dx. dx is the product of dy and x, summed over the axes that dx lacks. */
void mpidl_multiply(const value *a, const value *b, value *y, int64_t blocks, const int64_t *axes);
void mpidl_multiply_dx(const value *dy, const value *x, value *dx, int64_t blocks,
                       const int64_t *axes);
void mpidl_scale_channels(const value *x, const float *factor, value *y, int64_t blocks,
                          int64_t channels, int64_t pixels);
/* nodes (count, channels) receives this rank's nodes */
void mpidl_scale_channels_dfactor(const value *dy, const value *x, float *nodes, int64_t count,
                                  const int64_t *tree, int64_t channels, int64_t pixels);

/* group_norm.c: normalization within an image, over `groups` groups of channels, or over the channels
 * of each pixel if `groups` is 0. statistics (blocks, 2, groups or pixels, 16) receives the mean and
 * 1 / sqrt(variance + epsilon). gamma and beta (channels) or, if of_elements, (channels, pixels) may
 * both be NULL. dx may be NULL. nodes (node_count, 2 * size of gamma) or NULL receives the sums of
 * the gradients of gamma and of beta. */
void mpidl_group_norm(const value *x, const float *gamma, const float *beta, float *statistics,
                      value *y, int64_t blocks, int64_t channels, int64_t pixels, int64_t groups,
                      int64_t of_elements, double epsilon);
void mpidl_group_norm_backward(const value *dy, const value *x, const float *gamma,
                               const float *statistics, value *dx, float *nodes,
                               int64_t node_count, int64_t blocks, int64_t channels,
                               int64_t pixels, int64_t groups, int64_t of_elements,
                               const int64_t *tree);

/* recurrent.c: the steps of an LSTM (gates = 4) or a GRU (gates = 3). x (blocks, gates * units,
 * steps, 16) holds the products of the input, weight (gates * units, units) multiplies the hidden
 * state, and bias (gates * units) is added to these products, in a GRU only. hidden and cell
 * (blocks, units, 16) are the state before the first step; all three may be NULL. last_hidden and
 * last_cell receive the state after the last step. record (blocks, 4 * units, steps, 16) and cells
 * (blocks, units, steps, 16) receive what the gradient needs. A GRU has no cells: cell, cells,
 * last_cell and dcell are NULL. */
void mpidl_recurrence(const value *x, const float *weight, const float *bias, const float *hidden,
                      const float *cell, value *record, float *cells, value *y, float *last_hidden,
                      float *last_cell, int64_t blocks, int64_t units, int64_t steps,
                      int64_t gates, int64_t reverse);
/* previous (blocks, units, steps, 16) receives the hidden state before each step, and dproducts the
 * gradient of the products W h of a GRU; those of an LSTM are dx. dhidden and dcell (blocks, units,
 * 16) may be NULL. No gradient crosses the borders of runs of `truncate` steps. */
void mpidl_recurrence_backward(const value *dy, const value *record, const float *cells,
                               const value *y, const float *weight, const float *hidden,
                               const float *cell, value *dx, value *dproducts, value *previous,
                               float *dhidden, float *dcell, int64_t blocks, int64_t units,
                               int64_t steps, int64_t gates, int64_t reverse, int64_t truncate);

/* lrn.c: cross-channel normalization */
void mpidl_cross_channel_norm(const value *x, value *y, int64_t blocks, int64_t channels,
                              int64_t pixels, int64_t window, double alpha, double beta, double k);
void mpidl_cross_channel_norm_dx(const value *dy, const value *x, value *dx, int64_t blocks,
                                 int64_t channels, int64_t pixels, int64_t window, double alpha,
                                 double beta, double k);
/* Cross-channel normalization followed by max pooling; shape is struct windows of pool.h, and argmax
 * is as in pool.c. A ReLU has computed x. dz is the gradient before this ReLU. */
void mpidl_norm_max_pool(const value *x, value *y, uint8_t *argmax, int64_t blocks,
                         const int64_t *shape, int64_t window, double alpha, double beta,
                         double k);
void mpidl_norm_max_pool_relu_dx(const value *dy, const uint8_t *argmax, const value *x, value *dz,
                                 int64_t blocks, const int64_t *shape, int64_t window,
                                 double alpha, double beta, double k);

/* conv.c: shape is struct conv of conv.h. tile and dweight_tile are sizes of Winograd tiles, 10 *
 * rows + columns, or 0 for direct sums (winograd.h lists the sizes). moments (blocks, 1 + 2K) or
 * NULL receives (count, mean, M2) of y, folded into the first rows. addend (shape of y) or NULL is
 * added to y. If relu, max(0, y) follows. If more is not NULL, x has only the first `joined`
 * channels, and more (blocks, C - joined, H, W, 16) the others: mean is NULL, there is one group,
 * filters are larger than 1x1, and in bfloat16, joined is even. */
void mpidl_conv2d(const value *x, const float *mean, const float *scale, const float *beta,
                  float low, float high, const float *weight, const float *bias, value *y,
                  double *moments, const int32_t *counts, int64_t blocks, const int64_t *shape,
                  const int64_t *tree, int64_t tile, const value *addend, int64_t relu,
                  const value *more, int64_t joined);
/* conv_backward.c: dy is the gradient of y. If y_mean is not NULL, dy is the gradient of the
 * activation of y, and the gradient of y is a * dz + b * (y - mean) + c. If y_scale and y_beta are
 * NULL, no activation follows the normalization of y. If only y_mean is NULL, y is the output of a
 * ReLU, and dy is the gradient of this output. dy_out is NULL or dy, and the function may store the
 * gradient of y there. dx may be NULL or dy. sums (blocks, 2C) or NULL receives the
 * mpidl_batchnorm_sums of dx. bias (C) or NULL is added to dx. dweight or NULL has the shape (nodes,
 * K * C/groups * R * S + K); the gradient of the bias comes last. */
void mpidl_conv2d_backward(const value *dy, const value *y, const float *y_mean,
                           const float *y_scale, const float *y_beta, float y_low, float y_high,
                           const float *a, const float *b, const float *c, const value *x,
                           const float *mean, const float *scale, const float *beta, float low,
                           float high, const float *weight, const float *bias, value *dy_out,
                           value *dx, double *sums, float *dweight, int64_t nodes,
                           const int32_t *counts, int64_t blocks, const int64_t *shape,
                           const int64_t *tree, int64_t tile, int64_t dweight_tile);

/* pool.c: shape is struct windows of pool.h. x is a source. If argmax is NULL, pooling takes the
 * mean. Otherwise it takes the maximum, and argmax (blocks, C, P, Q, 16) holds the position of the
 * maximum in each window. sums (blocks, 2C) or NULL receives the mpidl_batchnorm_sums of dx. */
void mpidl_pool2d(const value *x, const float *mean, const float *scale, const float *beta,
                  float low, float high, value *y, uint8_t *argmax, int64_t blocks,
                  const int64_t *shape);
void mpidl_pool2d_dx(const value *dy, const uint8_t *argmax, const value *x, const float *mean,
                     const float *scale, const float *beta, float low, float high, value *dx,
                     double *sums, int64_t blocks, const int64_t *shape, const int64_t *tree);

/* pad.c: `channels` counts the channels of all blocks together; shape is struct geometry of pad.c
 */
void mpidl_pad2d(const value *x, value *y, float border, int64_t channels, const int64_t *shape);

/* winograd.c, winograd_dweight.c: compute one block, for tests. shape holds inputs, outputs, rows,
 * columns, m_h, m_w, r and backward. y is (outputs, rows, columns, 16), x (inputs, rows, columns, 16), and
 * dy (outputs, rows, columns, 16). The rows and columns of x and dy are extended to whole tiles
 * (see winograd.h). dweight is (outputs, inputs, r, r), and so is w, except that w is (inputs,
 * outputs, r, r) if `backward`. u receives the transformed weights. */
int64_t mpidl_winograd_weights_floats(const int64_t *shape);
void mpidl_winograd_conv(const float *x, const float *w, const float *bias, float *u, float *y,
                         const int64_t *shape);
void mpidl_winograd_dweight(const float *x, const float *dy, float *dweight, const int64_t *shape);

/* loss.c: logits (blocks, classes, pixels, 16), labels (blocks, pixels, 16), y and target (blocks,
 * elements, 16). rows (blocks) receives the sums over each block's images, folded into the first
 * rows. class_weights (classes) may be NULL, which means weights of 1. For smoothing and gamma, see
 * LabelRule in backends/training_interface.py. power is 1 or 2; see backends/reference/loss.py. */
void mpidl_exp(const double *x, double *y, int64_t count);
void mpidl_softmax(const float *logits, double *p, int64_t blocks, int64_t classes, int64_t pixels);
void mpidl_softmax_dx(const float *dy, const double *p, float *dx, int64_t blocks, int64_t classes,
                      int64_t pixels);
void mpidl_cross_entropy(const float *logits, const int32_t *labels, const int32_t *counts,
                         double *rows, int64_t blocks, int64_t classes, int64_t pixels,
                         const int64_t *tree, const double *class_weights, double smoothing,
                         double gamma);
void mpidl_cross_entropy_dlogits(const float *logits, const int32_t *labels,
                                 const int32_t *counts, double scale, float *dlogits,
                                 int64_t blocks, int64_t classes, int64_t pixels,
                                 const double *class_weights, double smoothing, double gamma);
void mpidl_label_weight(const int32_t *labels, const int32_t *counts, double *rows, int64_t blocks,
                        int64_t classes, int64_t pixels, const int64_t *tree,
                        const double *class_weights);
void mpidl_correct_count(const float *logits, const int32_t *labels, const int32_t *counts,
                         double *rows, int64_t blocks, int64_t classes, int64_t pixels,
                         const int64_t *tree);
/* targets (blocks, classes, pixels, 16): the target probability of each class. */
void mpidl_soft_cross_entropy(const float *logits, const float *targets, const int32_t *counts,
                              double *rows, int64_t blocks, int64_t classes, int64_t pixels,
                              const int64_t *tree, double smoothing);
void mpidl_soft_cross_entropy_dlogits(const float *logits, const float *targets,
                                      const int32_t *counts, double scale, float *dlogits,
                                      int64_t blocks, int64_t classes, int64_t pixels,
                                      double smoothing);
void mpidl_soft_correct_count(const float *logits, const float *targets, const int32_t *counts,
                              double *rows, int64_t blocks, int64_t classes, int64_t pixels,
                              const int64_t *tree);
void mpidl_errors(const float *y, const float *target, int64_t power, const int32_t *counts,
                  double *rows, int64_t blocks, int64_t elements, const int64_t *tree);
void mpidl_errors_dy(const float *y, const float *target, int64_t power, double scale,
                     const int32_t *counts, float *dy, int64_t blocks, int64_t elements);

/* binary.c: the targets are floats (`targets`) or, if `targets` is NULL, ints (`labels`), with the
 * shape of the logits. positive_weights (classes) may be NULL, which means weights of 1. For gamma,
 * see BinaryRule. */
void mpidl_binary_cross_entropy(const float *logits, const float *targets, const int32_t *labels,
                                const int32_t *counts, double *rows, int64_t blocks,
                                int64_t classes, int64_t pixels, const int64_t *tree,
                                const double *positive_weights, double gamma);
void mpidl_binary_cross_entropy_dlogits(const float *logits, const float *targets,
                                        const int32_t *labels, const int32_t *counts, double scale,
                                        float *dlogits, int64_t blocks, int64_t classes,
                                        int64_t pixels, const double *positive_weights,
                                        double gamma);
void mpidl_binary_correct_count(const float *logits, const float *targets, const int32_t *labels,
                                const int32_t *counts, double *rows, int64_t blocks,
                                int64_t classes, int64_t pixels, const int64_t *tree);

/* overlap.c: p (blocks, classes, pixels, 16). slopes (blocks, 2, classes, 16) are derivatives of an
 * image's loss with respect to p; see backends/reference/overlap.py. class_weights (classes) may be
 * NULL, which means weights of 1. The other numbers are those of OverlapRule. */
void mpidl_overlap(const double *p, const int32_t *labels, const int32_t *counts, double *slopes,
                   double *rows, int64_t blocks, int64_t classes, int64_t pixels,
                   const int64_t *tree, const double *class_weights, double smooth,
                   int64_t generalized, int64_t is_squared, double above, double below,
                   double chances, double labelled);
void mpidl_overlap_dp(const double *p, const int32_t *labels, const int32_t *counts,
                      const double *slopes, double scale, float *dp, int64_t blocks,
                      int64_t classes, int64_t pixels, int64_t is_squared);

/* optimizer.c, clip.c: `parameters` points to structs of these files. decays, factors, coefficients
 * and scales have the shape (count). `formula` is a name. numbers (given) has the learning rate and
 * the formula's other numbers. The formula keeps `arrays` arrays for each parameter.
 * mpidl_optimizer_step returns 0 if no formula with this name has `given` numbers and `arrays`
 * arrays. In mpidl_clip, `method` is 0 to limit the norm of each gradient, 1 to limit the norm of
 * all gradients together, and 2 to limit each number. In mpidl_trust, `method` is 0 for LARS and 1
 * for LAMB. In mpidl_clip, sums has one element for each run of at most 2^14 floats of a parameter;
 * in mpidl_trust, two. */
int64_t mpidl_optimizer_step(const char *formula, const int64_t *parameters, const float *decays,
                             const float *factors, int64_t count, const float *numbers,
                             int64_t given, int64_t arrays);
void mpidl_clip(const int64_t *parameters, const float *decays, double *sums, double *scales,
                int64_t count, int64_t method, double threshold);
void mpidl_trust(const int64_t *parameters, const float *decays, const float *coefficients,
                 double *sums, double *scales, int64_t count, int64_t method);

/* dense.c, dense_dx.c, dense_dweight.c: fully connected layers. x is (blocks, features, 16), with
 * features / channels pixels per channel. weight is (outputs, features), and dy and y are (blocks,
 * outputs, 16). nodes receives this rank's nodes of the gradient. */
void mpidl_dense(const value *x, const float *mean, const float *scale, const float *beta,
                 float low, float high, const float *weight, const float *bias, float *y,
                 int64_t blocks, int64_t features, int64_t channels, int64_t outputs);
/* sums (blocks, 2 * channels) or NULL receives the mpidl_batchnorm_sums of dx; x is used only to
 * compute sums */
void mpidl_dense_dx(const float *dy, const value *x, const float *mean, const float *scale,
                    const float *beta, float low, float high, const float *weight, value *dx,
                    double *sums, const int64_t *tree, int64_t features, int64_t channels,
                    int64_t outputs);
void mpidl_dense_dweight(const float *dy, const value *x, const float *mean, const float *scale,
                         const float *beta, float low, float high, float *nodes,
                         const int64_t *tree, int64_t features, int64_t channels, int64_t outputs);
void mpidl_dense_dbias(const float *dy, float *nodes, const int64_t *tree, int64_t outputs);
/* Compute dx, its sums and dweight in one pass over x, for layers with few outputs. The results
 * equal those of mpidl_dense_dx and mpidl_dense_dweight bit for bit. */
void mpidl_dense_backward(const float *dy, const value *x, const float *mean, const float *scale,
                          const float *beta, float low, float high, const float *weight, value *dx,
                          double *sums, float *nodes, const int64_t *tree, int64_t features,
                          int64_t channels, int64_t outputs);

/* images.c: convert pixels (images, C, H, W) to lanes (blocks, C, P, Q, 16), with zeros in unused
 * lanes. shape is struct crop of images.c. mirrored, top and left may be NULL, which means zeros.
 * For each image, mirrored is 1 to mirror it left to right, 2 for top to bottom, 3 for both, and 0
 * for neither. top and left are the position of the window's first pixel in the mirrored image.
 * Pixels outside the image have the value of fill (C), or 0 if fill is NULL. A result is (pixel -
 * centre) / divisor, where both have the shape (C) or (C, P, Q). If centre and divisor are NULL,
 * bytes are divided by 255 and floats are unchanged. Any thread may call these functions. */
void mpidl_images(const uint8_t *pixels, int64_t images, const int64_t *shape,
                  const int32_t *mirrored, const int32_t *top, const int32_t *left,
                  const uint8_t *fill, const float *centre, const float *divisor, float *lanes);
void mpidl_images_of_floats(const float *pixels, int64_t images, const int64_t *shape,
                            const int32_t *mirrored, const int32_t *top, const int32_t *left,
                            const float *fill, const float *centre, const float *divisor,
                            float *lanes);
/* Prepare a mini-batch of images in memory, on all threads. Image i is the row samples[i] % count of
 * the array `floats` or `bytes` (count, C, H, W); the other of these two is NULL. Images of bytes are
 * moved as in mpidl_images, images of floats are not. The label of image i is in the same row of
 * `all_labels`, unless `labels` is NULL. The labels are written to `labels` (blocks, 16), with 0 in
 * unused lanes. Return 0 if a pixel is NaN or infinite, or if a label is neither `ignored` nor in
 * [0, classes), else 1. If classes is negative, all labels are valid. */
int64_t mpidl_minibatch(const float *floats, const uint8_t *bytes, const int64_t *all_labels,
                        int64_t count, const int64_t *samples, int64_t images,
                        const int64_t *shape, const int32_t *mirrored, const int32_t *top,
                        const int32_t *left, const uint8_t *fill, const float *centre,
                        const float *divisor, int64_t classes, int64_t ignored, float *lanes,
                        int32_t *labels);
/* convert rows of a decoded picture to planes (C, H, W); shape is struct picture of images.c */
void mpidl_planes(const uint8_t *pixels, const int64_t *shape, uint8_t *planes);
/* the same for a picture in a struct ArrowArray (Arrow C data interface) at the address `array` */
void mpidl_planes_of_arrow(int64_t array, const int64_t *shape, uint8_t *planes);

/* warp.c: transform images (count, C, H, W) to (count, C, P, Q), each by its affine map m of maps
 * (count, 6). Pixel (p, q) is the value of the image at row m[3] * q + m[4] * p + m[5] and at
 * column m[0] * q + m[1] * p + m[2], interpolated bilinearly. Pixels outside the image have the
 * value of fill (C). shape: C, H, W, P, Q. Any thread may call these functions. */
void mpidl_warp(const uint8_t *pixels, int64_t count, const int64_t *shape, const double *maps,
                const uint8_t *fill, uint8_t *out);
void mpidl_warp_of_floats(const float *pixels, int64_t count, const int64_t *shape,
                          const double *maps, const float *fill, float *out);

/* keyed.c: compute the random words (samples, count) that mpidl/core/keyed.py defines for each sample,
 * with Philox4x64-10. key has two words. Any thread may call this function. */
void mpidl_keyed_words(const int64_t *key, int64_t epoch, const int64_t *samples, int64_t n,
                       int64_t count, int64_t *words);

#pragma GCC visibility pop /* end of the exported declarations */
#endif
