"""Compute activation functions and their gradients with the C kernels."""

import math

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import channel_sums, sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.core.blocks import LANES


def _by_element(function, *arrays, scale=()):
    """Apply an elementwise kernel to arrays of equal shape, and return the result.

    `scale` holds the additional scalar arguments of the kernel.
    """
    y = arenas.empty(arrays[0].shape)
    function(*map(np.ascontiguousarray, arrays), y, *scale, y.size // LANES)
    return y


def relu(x):
    y = arenas.empty(x.shape)
    kernels().relu(np.ascontiguousarray(x), y, *sizes(x))
    return y


def relu_dx(dy, y):
    dx = arenas.empty(y.shape)
    kernels().relu_dx(np.ascontiguousarray(dy), np.ascontiguousarray(y), dx, *sizes(y))
    return dx


def leaky_relu(x, scale):
    return _by_element(kernels().leaky_relu, x, scale=(scale,))


def leaky_relu_dx(dy, y, scale):
    return _by_element(kernels().leaky_relu_dx, dy, y, scale=(scale,))


def tanh(x):
    # error at most 2 ulp
    return _by_element(kernels().tanh, x)


def tanh_dx(dy, y):
    return _by_element(kernels().tanh_dx, dy, y)


def sigmoid(x):
    # error at most 2.5 ulp
    return _by_element(kernels().sigmoid, x)


def sigmoid_dx(dy, y):
    return _by_element(kernels().sigmoid_dx, dy, y)


def gelu(x, approximate):
    # error at most 2.5 ulp, or 3 ulp with the tanh approximation
    exact = approximate == "none"
    return _by_element(kernels().gelu if exact else kernels().gelu_tanh, x)


def gelu_dx(dy, x, approximate):
    exact = approximate == "none"
    return _by_element(kernels().gelu_dx if exact else kernels().gelu_tanh_dx, dy, x)


def swish(x):
    # error at most 3.5 ulp
    return _by_element(kernels().swish, x)


def swish_dx(dy, x):
    return _by_element(kernels().swish_dx, dy, x)


def clip_range(x, low, high):
    return _by_element(kernels().clip_range, x, scale=(low, high))


def clip_range_dx(dy, y, low, high):
    return _by_element(kernels().clip_range_dx, dy, y, scale=(low, high))


def hard_sigmoid(x, alpha, beta):
    return _by_element(kernels().hard_sigmoid, x, scale=(alpha, beta))


def hard_sigmoid_dx(dy, y, alpha):
    return _by_element(kernels().hard_sigmoid_dx, dy, y, scale=(alpha,))


def hard_swish(x):
    return _by_element(kernels().hard_swish, x)


def hard_swish_dx(dy, x):
    return _by_element(kernels().hard_swish_dx, dy, x)


def prelu(x, slope):
    y = arenas.empty(x.shape)
    kernels().prelu(np.ascontiguousarray(x), *_slopes(slope), y, *sizes(x))
    return y


def prelu_dx(dy, x, slope):
    dx, arrays = arenas.empty(x.shape), map(np.ascontiguousarray, (dy, x))
    kernels().prelu_dx(*arrays, *_slopes(slope), dx, *sizes(x))
    return dx


def _slopes(slope):
    return np.ascontiguousarray(slope, np.float32), slope.size


def prelu_dslope(dy, x, slopes, tree):
    products = _by_element(kernels().prelu_products, dy, x)
    if slopes == 1:
        products = products.reshape(len(x), 1, math.prod(x.shape[1:-1]), LANES)
    return channel_sums(products, tree)
