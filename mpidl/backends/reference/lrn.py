"""Compute cross-channel (local response) normalization in NumPy."""

import numpy as np

from mpidl.backends import shapes


def _over(x, channels_before, channels_after):
    """Sum x over the window of each channel; return an array with the shape of x, (C, ..., 16).

    The window of a channel contains the channel, the `channels_before` channels before it, and the
    `channels_after` channels after it, if they exist.
    """
    total = np.zeros_like(x)
    last = len(x) - 1
    for step in range(-min(channels_before, last), min(channels_after, last) + 1):
        to = slice(max(0, -step), min(len(x), len(x) - step))
        total[to] += x[max(0, step) : len(x) + min(0, step)]
    return total


def cross_channel_norm(x, norm):
    window, alpha, beta, k = norm
    channels_before, channels_after = shapes.channel_window(window)
    y = np.empty_like(x)
    for block, out in zip(x, y, strict=True):
        d = x.dtype.type(k) + x.dtype.type(alpha / window) * _over(
            block**2, channels_before, channels_after
        )
        out[...] = block * d ** x.dtype.type(-beta)
    return y


def cross_channel_norm_dx(dy, x, norm):
    window, alpha, beta, k = norm
    channels_before, channels_after = shapes.channel_window(window)
    kind = x.dtype.type
    dx = np.empty_like(x)
    for grad, block, out in zip(dy, x, dx, strict=True):
        d = kind(k) + kind(alpha / window) * _over(block**2, channels_before, channels_after)
        power = d ** kind(-beta)
        sums = _over(grad * block * power / d, channels_after, channels_before)
        out[...] = grad * power - kind(2 * alpha * beta / window) * block * sums
    return dx
