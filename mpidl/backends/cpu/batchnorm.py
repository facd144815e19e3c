"""Batch normalization and ReLU by the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import partial_of_rows, per_channel, source_of, tree_of
from mpidl.blocks import LANES
from mpidl.fold import Counter, merge_moments


def sizes(x):
    """(blocks, channels, pixels) of an array (blocks, C, ..., 16)."""
    blocks, channels = x.shape[:2]
    return blocks, channels, int(np.prod(x.shape[2:])) // LANES


def channel_sums(x, tree):
    """Partial of the sum over images and pixels: (C,). Unused lanes of x must be zero."""
    sums = np.empty(x.shape[:2], np.float32)
    height, width = x.shape[2:4] if x.ndim == 5 else (1, sizes(x)[2])
    kernels().channel_sums(np.ascontiguousarray(x), sums, *x.shape[:2], height, width)
    counter = Counter(tree)
    for row in sums:
        counter.push(row)
    return counter.partial(x.shape[1:2], np.float32)


def moments(x, counts, tree):
    """Partial of (count, mean, M2) by channel, packed for `merge_moments`: (1 + 2C,) float64."""
    blocks, channels, pixels = sizes(x)
    rows = np.empty((blocks, 1 + 2 * channels))
    kernels().moments(
        np.ascontiguousarray(x), rows, counts, blocks, channels, pixels, tree_of(tree)
    )
    return partial_of_rows(rows, tree, merge_moments)


def batchnorm(x, mean, scale, beta):
    """y = (x - mean) * scale + beta, each by channel."""
    source = [np.ascontiguousarray(x), *map(per_channel, (mean, scale, beta))]
    y = arenas.empty(x.shape)
    kernels().batchnorm(*source, y, 0, *sizes(x))
    return y


def activation(source):
    """max(0, (x - mean) * scale + beta) of a DeferredInput."""
    x, mean, scale, beta = source_of(source)
    y = arenas.empty(x.shape)
    kernels().batchnorm(x, mean, scale, beta, y, 1, *sizes(x))
    return y


def batchnorm_sums(dy, x, mean, tree):
    """Partial of [sum of dy, sum of dy * (x - mean)] by channel: (2C,) float64."""
    return _sums(dy, np.ascontiguousarray(x), per_channel(mean), None, None, tree)


def activation_sums(dy, source, tree):
    """The same of the cotangent behind the ReLU: dy counts where the activation is > 0."""
    x, mean, scale, beta = source_of(source)
    return _sums(dy, x, mean, scale, beta, tree)


def _sums(dy, x, mean, scale, beta, tree):
    blocks, channels, pixels = sizes(x)
    rows = np.empty((blocks, 2 * channels))
    kernels().batchnorm_sums(
        np.ascontiguousarray(dy),
        x,
        mean,
        scale,
        beta,
        rows,
        blocks,
        channels,
        pixels,
        tree_of(tree),
    )
    return partial_of_rows(rows, tree)


def batchnorm_dx(dy, x, mean, a, b, c, counts):
    """dx = a * dy + b * (x - mean) + c by channel, zero in unused lanes."""
    dx = arenas.empty(x.shape)
    vectors = map(per_channel, (mean, a, b, c))
    dy, x = np.ascontiguousarray(dy), np.ascontiguousarray(x)
    kernels().batchnorm_dx(dy, x, *vectors, dx, counts, *sizes(x))
    return dx


def relu(x):
    """max(x, 0)."""
    y = arenas.empty(x.shape)
    kernels().relu(np.ascontiguousarray(x), y, *sizes(x))
    return y


def relu_dx(dy, y):
    """dy where y > 0, else 0."""
    dx = arenas.empty(y.shape)
    kernels().relu_dx(np.ascontiguousarray(dy), np.ascontiguousarray(y), dx, *sizes(y))
    return dx
