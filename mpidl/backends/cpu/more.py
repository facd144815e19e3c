"""Activations, dropout, cross-channel normalization, sums and concatenations by the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import source_of
from mpidl.blocks import LANES


def _by_element(function, *arrays, scale=()):
    """What a kernel makes of arrays of one shape."""
    y = arenas.empty(arrays[0].shape)
    function(*map(np.ascontiguousarray, arrays), y, *scale, y.size // LANES)
    return y


def leaky_relu(x, scale):
    """x where it is > 0, else scale * x."""
    return _by_element(kernels().leaky_relu, x, scale=(scale,))


def leaky_relu_dx(dy, y, scale):
    """dy where y > 0, else scale * dy; scale >= 0, so that y has the sign of x."""
    return _by_element(kernels().leaky_relu_dx, dy, y, scale=(scale,))


def tanh(x):
    """Hyperbolic tangent, at most 2 ulp off."""
    return _by_element(kernels().tanh, x)


def tanh_dx(dy, y):
    """dy * (1 - y**2)."""
    return _by_element(kernels().tanh_dx, dy, y)


def sigmoid(x):
    """1 / (1 + exp(-x)), at most 2.5 ulp off."""
    return _by_element(kernels().sigmoid, x)


def sigmoid_dx(dy, y):
    """dy * y * (1 - y)."""
    return _by_element(kernels().sigmoid_dx, dy, y)


def add(a, b):
    """a + b, each an array or a DeferredInput."""
    a, b = source_of(a), source_of(b)
    y = arenas.empty(a[0].shape)
    kernels().add(*a, *b, y, *sizes(y))
    return y


def concat(arrays):
    """Values (B, C1, ..., 16), (B, C2, ..., 16), ... as one, (B, C1 + C2 + ..., ..., 16); each an
    array or a DeferredInput."""
    sources = [source_of(a) for a in arrays]
    blocks, _, *rest = sources[0][0].shape
    y = arenas.empty((blocks, sum(s[0].shape[1] for s in sources), *rest))
    first = 0
    for source in sources:
        blocks, channels, pixels = sizes(source[0])
        kernels().concat(*source, y, blocks, channels, pixels, y.shape[1], first)
        first += channels
    return y


def split(x, channels):
    """The inverse of `concat`: a list of values with so many channels each."""
    x = np.ascontiguousarray(x)
    blocks, every, pixels = sizes(x)
    found, first = [], 0
    for count in channels:
        part = arenas.empty((blocks, count, *x.shape[2:]))
        kernels().split(x, part, blocks, count, pixels, every, first)
        found.append(part)
        first += count
    return found


def dropout(x, threshold, scale, key, epoch, samples):
    """x * scale, and 0 where the element's chance is below `threshold` (of 65536): the bytes of
    `reference_more.dropout`, which says what an element's chance is."""
    y = arenas.empty(x.shape)
    blocks, channels, pixels = sizes(x)
    samples = np.ascontiguousarray(samples, np.int64)
    kernels().dropout(
        np.ascontiguousarray(x),
        y,
        samples,
        blocks,
        channels * pixels,
        threshold,
        scale,
        epoch,
        *key,
    )
    return y


def cross_channel_norm(x, window, alpha, beta, k):
    """y = x * d**-beta with d = k + alpha / window * (sum of x**2 over the window's channels)."""
    y = arenas.empty(x.shape)
    kernels().cross_channel_norm(np.ascontiguousarray(x), y, *sizes(x), window, alpha, beta, k)
    return y


def cross_channel_norm_dx(dy, x, window, alpha, beta, k):
    """Gradient with respect to x; d is computed again."""
    dx = arenas.empty(x.shape)
    dy, x = np.ascontiguousarray(dy), np.ascontiguousarray(x)
    kernels().cross_channel_norm_dx(dy, x, dx, *sizes(x), window, alpha, beta, k)
    return dx
