"""Compute fully connected layers as convolutions with 1x1 filters on images of one pixel.

Images are stored in blocks of 16. In memory, an array (blocks, F, 16) with F features per image is
a matrix (images, F). Weights (K, F) are a matrix (outputs, F). The features have the same order in
both matrices, for any shape of the images before flattening.
"""

import math

import numpy as np

from mpidl.backends.gpu import array, batchnorm, conv
from mpidl.backends.gpu.array import Array
from mpidl.backends.shapes import POINT
from mpidl.core.blocks import LANES, DeferredInput


def rows_of(value, name):
    """Return the shape (images, K) of the matrix that stores an array (blocks, K, 16).

    Raise ValueError for images with several pixels and channels, because their memory order is
    different.
    """
    if sum(size != 1 for size in value.dims[1:-1]) > 1:
        raise ValueError(f"{name}: expected (blocks, K, 16), got images {value.dims}")
    return value.dims[0] * LANES, math.prod(value.dims[1:-1])


def _pixels(value):
    """Return the view (blocks, F, 1, 1, 16) of lanes with F features per image."""
    dims = value.dims[0], math.prod(value.dims[1:-1]), 1, 1, LANES
    return Array(value.buffer, value.dtype, dims, dims, array.IMAGES, value.offset)


def _filters(weight):
    """Return the view (K, F, 1, 1) of weights."""
    dims = len(weight), math.prod(weight.dims[1:]), 1, 1
    return Array(weight.buffer, weight.dtype, dims, dims, array.FILTERS, weight.offset)


def _stored(x):
    """Return the Array that x stores, which may be a DeferredInput."""
    return batchnorm.operand(x)[0]


def _input(x, weight):
    """Return x, which may be a DeferredInput, for the convolution; raise ValueError if it differs.

    The features of x and of the weights must have the same order.
    """
    values = _stored(x)
    if values.dims[1:-1] != weight.dims[1:] or values.order[2:] != weight.order[1:]:
        raise ValueError(
            f"dense: expected weights for images {values.dims[1:-1]}, got {weight.dims[1:]} per "
            f"output, weight shape {weight.shape}"
        )
    if not isinstance(x, DeferredInput):
        return _pixels(x)
    if conv.is_direct(_shape(weight)):
        return _pixels(batchnorm.read(x))
    return type(x)(_pixels(values), *x[1:])


def _shape(weight):
    dims = len(weight), math.prod(weight.dims[1:]), 1, 1
    return conv.shape_of((dims[1], 1, 1), dims, POINT)


def dense(x, weight, bias):
    values = _input(x, weight)
    y, _ = conv.forward(values, _filters(weight), bias, POINT, dtype=np.dtype(np.float32))
    return Array(y.buffer, y.dtype, (len(y), len(weight), LANES), None, array.VALUES, y.offset)


def dense_dx(dy, weight):
    return _dx(dy, weight, conv.stored_type())


def _dx(dy, weight, dtype):
    """Return dx, which has the same order of features as the weights."""
    rows_of(dy, "dense_dx")
    dx = array.empty_lanes((dy.dims[0], *weight.dims[1:], LANES), dtype)
    like = _pixels(dx)
    computed, *_ = conv.dx_of(_pixels(dy), like, _filters(weight), POINT, None)
    view = Array(computed.buffer, dx.dtype, dx.shape, dx.dims, dx.order, computed.offset)
    return view.reshape(dx.dims[0], like.dims[1], LANES)


def dense_dweight(dy, x, tree):
    return _gradients(dy, x, tree, with_bias=False)[0]


def _gradients(dy, x, tree, with_bias):
    """Return the Partials of the gradients of the weights and, if `with_bias`, of the bias."""
    outputs, values = rows_of(dy, "dense_dweight")[1], _stored(x)
    order, size = (0, *values.order[2:]), math.prod(values.dims[1:-1])
    like = Array(None, np.float32, (outputs, size), (outputs, *values.dims[1:-1]), order)
    arguments = _pixels(dy), _input(x, like), like, _shape(like), tree
    return conv.dweight_of(*arguments, with_bias)


def dense_backward(dy, x, weight, tree, needs):
    dx = sums = dweight = dbias = None
    if needs[0]:
        values = _stored(x)
        dx = _dx(dy, weight, values.dtype)
        if isinstance(x, DeferredInput):
            sums = batchnorm.activation_sums(dx.reshape(values.shape), x, tree)
    if needs[1] or needs[2]:
        dweight, dbias = _gradients(dy, x, tree, needs[2])
    return dx, dweight if needs[1] else None, dbias, sums
