"""Compute activation functions and their gradients with the C kernels."""

import math

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import channel_sums, sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import source_of
from mpidl.core.blocks import LANES


def elementwise(function, x, *numbers):
    return _elementwise(function, x, None, numbers)


def elementwise_dx(function, dy, value, *numbers):
    return _elementwise(function, value, np.ascontiguousarray(dy), numbers)


def _elementwise(function, x, dy, numbers):
    x, *norm = source_of(x)
    out, (a, b) = arenas.empty(x.shape, x.dtype), (*numbers, 0.0, 0.0)[:2]
    arguments = x, *norm[:3], dy, out, a, b, *sizes(x)
    if kernels().elementwise(function.encode(), *arguments) == 0:
        raise TypeError(f"kernels/formulas.h has no function {function}")
    return out


def relu(x):
    y = arenas.empty(x.shape, x.dtype)
    kernels().relu(np.ascontiguousarray(x), y, *sizes(x))
    return y


def relu_dx(dy, y):
    dx = arenas.empty(y.shape, y.dtype)
    kernels().relu_dx(np.ascontiguousarray(dy), np.ascontiguousarray(y), dx, *sizes(y))
    return dx


def prelu(x, slope):
    y = arenas.empty(x.shape, x.dtype)
    kernels().prelu(np.ascontiguousarray(x), *_slopes(slope), y, *sizes(x))
    return y


def prelu_dx(dy, x, slope):
    dx, arrays = arenas.empty(x.shape, x.dtype), map(np.ascontiguousarray, (dy, x))
    kernels().prelu_dx(*arrays, *_slopes(slope), dx, *sizes(x))
    return dx


def _slopes(slope):
    return np.ascontiguousarray(slope, np.float32), slope.size


def prelu_dslope(dy, x, slopes, tree):
    products = arenas.empty(x.shape)
    arrays = map(np.ascontiguousarray, (dy, x))
    kernels().prelu_products(*arrays, products, x.size // LANES)
    if slopes == 1:
        products = products.reshape(len(x), 1, math.prod(x.shape[1:-1]), LANES)
    return channel_sums(products, tree)
