/* Convolutions with 1x1 filters, without padding or groups: products of matrices, pixel by pixel.
 *
 * A block is processed in bands of pixels that fit into the cache. The copy of a band applies the
 * activation to x, or backpropagates dy through the activation, so no whole image is copied. y and
 * dx have the same bytes as with the direct kernels, because sums run over the channels in order.
 */
#ifndef MPIDL_POINTWISE_H
#define MPIDL_POINTWISE_H

#include "conv.h"

/* Return whether these functions can compute a forward or a backward pass of this shape. */
int is_pointwise(const struct conv *c);
int is_pointwise_backward(const struct conv *c);

void pointwise_forward(const struct arguments *job, int64_t blocks);
void pointwise_backward(const struct arguments *job, int64_t blocks);

#endif
