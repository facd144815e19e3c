"""Activations in NumPy."""

import numpy as np


def relu(x):
    """max(x, 0)."""
    return np.maximum(x, 0)


def relu_dx(dy, y):
    """dy where y > 0, else 0."""
    return np.multiply(dy, y > 0)


def leaky_relu(x, scale):
    """x where it is > 0, else scale * x."""
    return np.where(x > 0, x, x * x.dtype.type(scale))


def leaky_relu_dx(dy, y, scale):
    """dy where y > 0, else scale * dy; scale >= 0, so that y has the sign of x."""
    return np.where(y > 0, dy, dy * dy.dtype.type(scale))


def tanh(x):
    """Hyperbolic tangent."""
    return np.tanh(x)


def tanh_dx(dy, y):
    """dy * (1 - y**2)."""
    return dy * (1 - y * y)


def sigmoid(x):
    """1 / (1 + exp(-x)), by the exponential of -|x|, which cannot overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def sigmoid_dx(dy, y):
    """dy * y * (1 - y)."""
    return dy * y * (1 - y)
