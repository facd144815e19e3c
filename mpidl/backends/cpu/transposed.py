"""Compute transposed convolutions with the convolution kernels.

The forward pass uses the backward kernel, and the backward pass uses the forward kernel.
"""

import numpy as np

from mpidl.backends import shapes
from mpidl.backends.cpu import arenas, conv
from mpidl.backends.cpu.batchnorm import channel_sums
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import NO_NORM, operand, per_channel


def transposed_conv2d(x, weight, bias, stride, cropping):
    x = np.ascontiguousarray(operand(x))
    shape = shapes.transposed_conv2d_shape(x.shape[1:-1], weight.shape, stride, cropping)
    y = arenas.empty((len(x), *shape, x.shape[-1]), x.dtype)
    sizes, _, (_, tile, _) = conv.plan(y, weight, shapes.Geometry(stride, cropping))
    # x is passed as dy, and y as dx. The kernel computes no sums or weight gradients.
    source, after, outputs = (y, *NO_NORM), conv.NOTHING_AFTER, (None, y, None, None, 0)
    numbers = np.zeros(len(x), np.int32), len(x), sizes, np.zeros(4, np.int64), tile, 0
    weight, bias = per_channel(weight), per_channel(bias)
    kernels().conv2d_backward(x, *after, *source, weight, bias, *outputs, *numbers)
    return y


def transposed_conv2d_backward(dy, x, weight, stride, cropping, counts, tree, needs):
    geometry = shapes.Geometry(stride, cropping)
    dx = dweight = None
    if needs[0]:
        dx = conv.conv2d(dy, weight, None, geometry)
    if needs[1]:
        weight_alone = False, True, False
        dweight = conv.conv2d_backward(x, dy, weight, geometry, counts, tree, weight_alone)[1]
    return dx, dweight, channel_sums(dy, tree) if needs[2] else None
