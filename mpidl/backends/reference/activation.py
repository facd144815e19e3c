"""Compute activation functions and their gradients in NumPy."""

import math
from collections.abc import Callable

import numpy as np

from mpidl.backends.reference.batchnorm import channel_sums

# Nodes (n + 1/2) / 2 and weights of the trapezoidal rule for the normal distribution.
NODES = np.arange(0.25, 6.5, 0.5)
NODE_WEIGHTS = np.exp(-(NODES**2))


def elementwise(function, x, *numbers):
    return FUNCTIONS[function][0](x, *numbers)


def elementwise_dx(function, dy, value, *numbers):
    return FUNCTIONS[function][1](dy, value, *numbers)


def relu(x):
    return np.maximum(x, 0)


def relu_dx(dy, y):
    return np.multiply(dy, y > 0)


def leaky_relu(x, scale):
    return np.where(x > 0, x, x * x.dtype.type(scale))


def leaky_relu_dx(dy, y, scale):  # y has the sign of x, because scale >= 0
    return np.where(y > 0, dy, dy * dy.dtype.type(scale))


def tanh(x):
    return np.tanh(x)


def tanh_dx(dy, y):
    return dy * (1 - y * y)


def sigmoid(x):
    # exp(-|x|) cannot overflow
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def sigmoid_dx(dy, y):
    return dy * y * (1 - y)


def _upper_tail(t):
    """Return Phi(-t) in float64 for 0 <= t <= 40. Phi is the normal distribution function.

    Phi(-t) is erfc(z) / 2 with z = t / sqrt(2). The trapezoidal rule computes erfc, with a
    correction for the pole of the integrand (Matta and Reichel, 1971). All terms are positive, so
    the relative error is small.
    """
    z = t / math.sqrt(2)
    weights = sum(w / (t * t / 2 + n * n) for n, w in zip(NODES, NODE_WEIGHTS, strict=True))
    pole = np.where(z < 2 * math.pi, 1 / (1 + np.exp(4 * math.pi * z)), 0)
    return np.exp(-t * t / 2) * z * weights / (2 * math.pi) + pole


def _with_magnitude(x):
    """Return x and min(|x|, 40) in float64. GELU of a negative x follows from GELU of |x|."""
    x = x.astype(np.float64)
    return x, np.minimum(np.abs(x), 40)


def _tanh_argument(t):
    """Return w(t) and its derivative. The tanh approximation of GELU is t / (1 + exp(-w(t)))."""
    b = math.sqrt(8 / math.pi)
    return b * t * (1 + 0.044715 * t * t), b * (1 + 3 * 0.044715 * t * t)


def gelu(x):
    signed, t = _with_magnitude(x)
    tail = t * _upper_tail(t)
    return np.where(signed >= 0, signed - tail, -tail).astype(x.dtype)


def gelu_dx(dy, x):
    signed, t = _with_magnitude(x)
    slope = _upper_tail(t) - t * np.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    return (dy * np.where(signed >= 0, 1 - slope, slope)).astype(x.dtype)


def gelu_tanh(x):
    signed, t = _with_magnitude(x)
    e = np.exp(-_tanh_argument(t)[0])
    tail = t * e / (1 + e)
    return np.where(signed >= 0, signed - tail, -tail).astype(x.dtype)


def gelu_tanh_dx(dy, x):
    signed, t = _with_magnitude(x)
    w, dw = _tanh_argument(t)
    e = np.exp(-w)
    slope = e / (1 + e) * (1 - t * dw / (1 + e))
    return (dy * np.where(signed >= 0, 1 - slope, slope)).astype(x.dtype)


def swish(x):
    return np.maximum(x, -700) * sigmoid(x)  # the result is 0 at -inf


def swish_dx(dy, x):
    x = np.clip(x, -700, 700)
    s = sigmoid(x)
    return dy * (s * (1 + x * (1 - s)))


def clip_range(x, low, high):
    return np.clip(x, x.dtype.type(low), x.dtype.type(high))


def clip_range_dx(dy, y, low, high):
    return np.multiply(dy, (y > y.dtype.type(low)) & (y < y.dtype.type(high)))


def hard_sigmoid(x, alpha, beta):
    return np.clip(x * x.dtype.type(alpha) + x.dtype.type(beta), 0, 1)


def hard_sigmoid_dx(dy, y, alpha, beta):
    return np.multiply(dy * dy.dtype.type(alpha), (y > 0) & (y < 1))


def hard_swish(x):
    return x * hard_sigmoid(x, 1 / 6, 0.5)


def hard_swish_dx(dy, x):
    slope = np.where(x < 3, x / x.dtype.type(3) + x.dtype.type(0.5), 1)
    return dy * np.where(x > -3, slope, 0).astype(x.dtype)


# {name: (function, gradient)} for `elementwise`. The gradient reads the result y or the input x.
FUNCTIONS: dict[str, tuple[Callable, Callable]] = {
    "leaky_relu": (leaky_relu, leaky_relu_dx),
    "tanh": (tanh, tanh_dx),
    "sigmoid": (sigmoid, sigmoid_dx),
    "gelu": (gelu, gelu_dx),
    "gelu_tanh": (gelu_tanh, gelu_tanh_dx),
    "swish": (swish, swish_dx),
    "clip_range": (clip_range, clip_range_dx),
    "hard_sigmoid": (hard_sigmoid, hard_sigmoid_dx),
    "hard_swish": (hard_swish, hard_swish_dx),
}


def _per_channel(slope, x):
    """Reshape the slopes so that they broadcast to x, (blocks, C, ..., 16)."""
    return slope.reshape(-1, *(1,) * (x.ndim - 2))


def prelu(x, slope):
    return np.where(x > 0, x, x * _per_channel(slope, x))


def prelu_dx(dy, x, slope):
    return np.where(x > 0, dy, dy * _per_channel(slope, x))


def prelu_dslope(dy, x, slopes, tree):
    products = np.where(x > 0, 0, dy * x)
    if slopes == 1:
        products = products.reshape(len(x), 1, math.prod(x.shape[1:-1]), x.shape[-1])
    return channel_sums(products, tree)
