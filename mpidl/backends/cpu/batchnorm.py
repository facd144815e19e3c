"""Compute batch normalization and its gradient with the C kernels."""

import math

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import (
    NO_NORM,
    as_type,
    partial_of_rows,
    per_channel,
    source_of,
    tree_of,
)
from mpidl.core.blocks import LANES, DeferredInput
from mpidl.core.fold import Counter, merge_moments


def sizes(x):
    """Return (blocks, channels, pixels) of an array (blocks, C, ..., 16), 16 images per block."""
    blocks, channels = x.shape[:2]
    return blocks, channels, int(np.prod(x.shape[2:])) // LANES


def channel_sums(x, tree):
    x = as_type(x, np.dtype(np.float32))
    sums = np.empty(x.shape[:2], np.float32)
    height, width = x.shape[2:4] if x.ndim == 5 else (1, sizes(x)[2])
    kernels().channel_sums(np.ascontiguousarray(x), sums, *x.shape[:2], height, width)
    counter = Counter(tree)
    for row in sums:
        counter.push(row)
    return counter.partial(x.shape[1:2], np.float32)


def moments(x, counts, tree):
    blocks, channels, pixels = sizes(x)
    rows = arenas.empty((blocks, 1 + 2 * channels), np.float64)
    geometry = blocks, channels, pixels, tree_of(tree)
    kernels().moments(np.ascontiguousarray(x), rows, counts, *geometry)
    return partial_of_rows(rows, tree, merge_moments)


def batchnorm(x, mean, scale, beta):
    return activation(source(x, mean, scale, beta, -math.inf, math.inf))


def activation(source):
    x, *norm = source_of(source)
    y = arenas.empty(x.shape, x.dtype)
    kernels().batchnorm(x, *norm, y, *sizes(x))
    return y


def batchnorm_sums(dy, x, mean, tree):
    return _sums(dy, (np.ascontiguousarray(x), per_channel(mean), *NO_NORM[1:]), tree)


def activation_sums(dy, source, tree):
    return _sums(dy, source_of(source), tree)


def _sums(dy, source, tree):
    blocks, channels, pixels = sizes(source[0])
    rows = arenas.empty((blocks, 2 * channels), np.float64)
    geometry = blocks, channels, pixels, tree_of(tree)
    kernels().batchnorm_sums(np.ascontiguousarray(dy), *source, rows, *geometry)
    return partial_of_rows(rows, tree)


def batchnorm_dx(dy, x, mean, a, b, c, counts):
    dx = arenas.empty(x.shape, x.dtype)
    vectors = map(per_channel, (mean, a, b, c))
    dy, x = np.ascontiguousarray(dy), np.ascontiguousarray(x)
    kernels().batchnorm_dx(dy, x, *vectors, dx, counts, *sizes(x))
    return dx


def _vectors(channels, *dtypes):
    return [arenas.empty((channels,), dtype) for dtype in dtypes]


def statistics(moments, gamma, epsilon):
    # count (1,), mean, rstd and variance are float64; shift and scale are float32
    channels = len(gamma)
    rstd, variance, shift, scale = _vectors(channels, "f8", "f8", "f4", "f4")
    arguments = epsilon, rstd, variance, shift, scale, channels
    kernels().statistics(moments, per_channel(gamma), *arguments)
    return moments[:1], moments[1 : 1 + channels], rstd, variance, shift, scale


def batchnorm_factors(sums, gamma, statistics):
    # the kernel computes in float64 and writes float32
    channels, (count, _, rstd, *_) = len(gamma), statistics
    vectors = _vectors(channels, *5 * ("f4",))
    kernels().batchnorm_factors(sums, per_channel(gamma), count, rstd, *vectors, channels)
    return tuple(vectors)


def running(olds, values, decay):
    news = [arenas.empty(old.shape) for old in olds]
    for old, value, new in zip(map(per_channel, olds), values, news, strict=True):
        kernels().running(old, np.ascontiguousarray(value, np.float64), decay, new, len(new))
    return news


def predict_scale(gamma, variance, epsilon):
    (scale,) = _vectors(len(gamma), "f4")
    kernels().predict_scale(per_channel(gamma), per_channel(variance), epsilon, scale, len(scale))
    return scale


def source(y, mean, scale, beta, low=0.0, high=math.inf):
    return DeferredInput(y, per_channel(mean), per_channel(scale), per_channel(beta), low, high)
