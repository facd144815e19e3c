"""Compute transposed convolutions with the convolution kernels.

The forward pass uses the backward kernel, and the backward pass uses the forward kernel.
"""

from mpidl.backends import shapes
from mpidl.backends.gpu import array, batchnorm, conv
from mpidl.backends.gpu.array import Array


def transposed_conv2d(x, weight, bias, stride, cropping):
    blocks, *image, lanes = x.dims
    shape = blocks, *shapes.transposed_conv2d_shape(image, weight.dims, stride, cropping), lanes
    like = Array(None, x.dtype, shape, order=array.order_of_lanes(shape))  # an Array without memory
    return conv.dx_of(x, like, weight, shapes.Geometry(stride, cropping), None, bias)[0]


def transposed_conv2d_backward(dy, x, weight, stride, cropping, counts, tree, needs):
    geometry = shapes.Geometry(stride, cropping)
    dx = dweight = None
    if needs[0]:
        dx = conv.conv2d(dy, weight, None, geometry)
    if needs[1]:
        shape = conv.shape_of(dy.dims[1:-1], weight.dims, geometry)
        dweight, _ = conv.dweight_of(x, dy, weight, shape, tree)
    return dx, dweight, batchnorm.channel_sums(dy, tree) if needs[2] else None
