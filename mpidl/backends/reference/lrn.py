"""Cross-channel (local response) normalization in NumPy."""

import numpy as np

from mpidl import shapes


def _over(x, before, behind):
    """The sum of x, (C, ..., 16), over the channels c - before .. c + behind."""
    total = np.zeros_like(x)
    last = len(x) - 1
    for step in range(-min(before, last), min(behind, last) + 1):
        to = slice(max(0, -step), min(len(x), len(x) - step))
        total[to] += x[max(0, step) : len(x) + min(0, step)]
    return total


def cross_channel_norm(x, window, alpha, beta, k):
    before, behind = shapes.channel_window(window)
    y = np.empty_like(x)
    for block, out in zip(x, y, strict=True):
        d = x.dtype.type(k) + x.dtype.type(alpha / window) * _over(block**2, before, behind)
        out[...] = block * d ** x.dtype.type(-beta)
    return y


def cross_channel_norm_dx(dy, x, window, alpha, beta, k):
    before, behind = shapes.channel_window(window)
    kind = x.dtype.type
    dx = np.empty_like(x)
    for grad, block, out in zip(dy, x, dx, strict=True):
        d = kind(k) + kind(alpha / window) * _over(block**2, before, behind)
        power = d ** kind(-beta)
        sums = _over(grad * block * power / d, behind, before)
        out[...] = grad * power - kind(2 * alpha * beta / window) * block * sums
    return dx
