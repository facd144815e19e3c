"""Compute transposed convolutions in NumPy: the forward pass is a convolution's backward pass."""

import numpy as np

from mpidl.backends import shapes
from mpidl.backends.reference.batchnorm import channel_sums
from mpidl.backends.reference.bf16 import as_type, operand
from mpidl.backends.reference.conv import conv2d, conv2d_dweight, conv2d_dx


def transposed_conv2d(x, weight, bias, stride, cropping):
    x = operand(x)
    shape = shapes.transposed_conv2d_shape(x.shape[1:-1], weight.shape, stride, cropping)
    like = np.empty((len(x), *shape, x.shape[-1]), x.dtype)
    return conv2d_dx(x, like, weight, shapes.Geometry(stride, cropping), bias)


def transposed_conv2d_backward(dy, x, weight, stride, cropping, counts, tree, needs):
    geometry = shapes.Geometry(stride, cropping)
    x = operand(x)
    dy = as_type(dy, x.dtype)
    return (
        conv2d(dy, weight, None, geometry) if needs[0] else None,
        conv2d_dweight(x, dy, weight, geometry, tree) if needs[1] else None,
        channel_sums(dy, tree) if needs[2] else None,
    )
