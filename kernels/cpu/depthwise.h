/* Convolutions that filter each channel separately, with 3x3 or 5x5 filters.
 *
 * A pass handles one channel of a block after the other, in bands of rows that stay in the
 * first-level cache. Each row of x and dy is read from memory once: its copy applies the preceding
 * activation or backpropagates through the following one, and serves all of the filter's taps. All
 * results have the same bytes as with the direct kernels, because all sums have the same order.
 */
#ifndef MPIDL_DEPTHWISE_H
#define MPIDL_DEPTHWISE_H

#include "conv.h"

/* Return whether these functions can compute the passes of this shape. */
int is_depthwise(const struct conv *c);

void depthwise_forward(const struct arguments *job, int64_t blocks);
void depthwise_backward(const struct arguments *job, int64_t blocks);

#endif
