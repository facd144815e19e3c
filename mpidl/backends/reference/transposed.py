"""Transposed convolution in NumPy: the functions of convolution with the roles exchanged."""

import numpy as np

from mpidl import shapes
from mpidl.backends.reference.batchnorm import channel_sums
from mpidl.backends.reference.conv import conv2d, conv2d_dweight, conv2d_dx


def transposed_conv2d(x, weight, bias, stride, cropping):
    """The gradient with respect to its images of the convolution by `weight`, where x is the
    cotangent of its output, + bias; x (B, C, H, W, 16), weight (C, K, R, S), y (B, K, P, Q, 16)."""
    shape = shapes.transposed_conv2d_shape(x.shape[1:-1], weight.shape, stride, cropping)
    like = np.empty((len(x), *shape, x.shape[-1]), x.dtype)
    y = conv2d_dx(x, like, weight, stride, cropping, *shapes.PLAIN)
    y += bias[:, None, None, None]
    return y


def transposed_conv2d_backward(dy, x, weight, stride, cropping, counts, tree, needs):
    """(dx, dweight, dbias): the gradients that `needs` wants, None for the others. The convolution
    of dy by `weight`, and its gradient with respect to the weights for the cotangent x."""
    how = stride, cropping, *shapes.PLAIN
    none = np.zeros(len(weight), dy.dtype)
    return (
        conv2d(dy, weight, none, *how) if needs[0] else None,
        conv2d_dweight(x, dy, weight, *how, tree) if needs[1] else None,
        channel_sums(dy, tree) if needs[2] else None,
    )
