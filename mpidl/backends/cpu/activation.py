"""Activation functions and their gradients with the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.blocks import LANES


def _by_element(function, *arrays, scale=()):
    """Apply an elementwise kernel to arrays of equal shape, and return the result."""
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
