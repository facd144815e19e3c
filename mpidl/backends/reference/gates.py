"""Multiply values with broadcasting, and scale channels, in NumPy."""

import numpy as np

from mpidl.core.fold import Counter


def multiply(a, b):
    a, b = aligned(a, b)
    return a * b


def aligned(*values):
    """Return arrays (blocks, ..., 16) with equally many axes; features (C,) become (C, 1, 1)."""
    ndim = max(value.ndim for value in values)
    return [
        value.reshape(*value.shape[:-1], *(1,) * (ndim - value.ndim), value.shape[-1])
        for value in values
    ]


def multiply_dx(dy, other, x):
    dx = np.empty(x.shape, dy.dtype)
    dy, other, results = aligned(dy, other, dx)
    axes = tuple(i - 1 for i in range(1, dy.ndim - 1) if results.shape[i] != dy.shape[i])
    for grad, factor, result in zip(dy, other, results, strict=True):
        result[...] = (grad * factor).sum(axis=axes, keepdims=True)
    return dx


def _per_channel(factor, x):
    return factor.astype(x.dtype, copy=False).reshape(-1, *(1,) * (x.ndim - 2))


def scale_channels(x, factor):
    return x * _per_channel(factor, x)


def scale_channels_dfactor(dy, x, tree):
    counter = Counter(tree)
    for grad, block in zip(dy, x, strict=True):
        counter.push((grad * block).reshape(len(block), -1).sum(axis=1))
    return counter.partial(x.shape[1:2], x.dtype)
