"""Batch normalization in NumPy: sums by channel, and what is computed of them."""

import numpy as np

from mpidl.blocks import Source
from mpidl.fold import Counter, merge_moments


def channel_sums(x, tree):
    """Partial of the sum over images and pixels: (C,). Unused lanes of x must be zero."""
    counter = Counter(tree)
    for block in x:
        counter.push(block.reshape(len(block), -1).sum(axis=1))
    return counter.partial(x.shape[1:2], x.dtype)


def moments(x, counts, tree):
    """Partial of (count, mean, M2) by channel, packed for `merge_moments`: (1 + 2C,) float64.

    The mean is taken first and M2 about it; the mean's own rounding is corrected.
    """
    channels = x.shape[1]
    counter = Counter(tree, merge_moments)
    for block, valid in zip(x, counts, strict=True):
        values = np.ascontiguousarray(block[..., :valid]).reshape(channels, -1)
        count = values.shape[1]
        mean = values.mean(axis=1, keepdims=True)
        centred = values - mean
        error = centred.sum(axis=1).astype(np.float64) / count
        np.square(centred, out=centred)
        m2 = centred.sum(axis=1).astype(np.float64) - count * error * error
        counter.push(np.concatenate([[count], mean[:, 0] + error, m2]))
    return counter.partial((1 + 2 * channels,), np.float64)


def _per_channel(vector, dtype, ndim):
    return np.asarray(vector, dtype).reshape(-1, *(1,) * (ndim - 2))


def batchnorm(x, mean, scale, beta):
    """y = (x - mean) * scale + beta, each by channel."""
    mean, scale, beta = (_per_channel(v, x.dtype, x.ndim) for v in (mean, scale, beta))
    y = np.empty_like(x)
    for block, out in zip(x, y, strict=True):
        np.subtract(block, mean, out=out)
        out *= scale
        out += beta
    return y


def batchnorm_sums(dy, x, mean, tree):
    """Partial of [sum of dy, sum of dy * (x - mean)] by channel: (2C,) float64."""
    channels = x.shape[1]
    mean = _per_channel(mean, x.dtype, x.ndim)
    counter = Counter(tree)
    for grad, block in zip(dy, x, strict=True):
        product = block - mean
        product *= grad
        sums = [v.reshape(channels, -1).sum(axis=1) for v in (grad, product)]
        counter.push(np.concatenate(sums).astype(np.float64))
    return counter.partial((2 * channels,), np.float64)


def batchnorm_dx(dy, x, mean, a, b, c, counts):
    """dx = a * dy + b * (x - mean) + c by channel, zero in unused lanes."""
    mean, a, b, c = (_per_channel(v, x.dtype, x.ndim) for v in (mean, a, b, c))
    dx = np.empty_like(x)
    for grad, block, out, valid in zip(dy, x, dx, counts, strict=True):
        np.subtract(block, mean, out=out)
        out *= b
        out += c
        out += a * grad
        out[..., valid:] = 0
    return dx


def statistics(moments, gamma, epsilon):
    """(count, mean, rstd, variance, mean, scale) of folded moments (1 + 2C,).

    rstd = 1 / sqrt(variance + epsilon), scale = gamma * rstd; `mean` comes twice, the second time
    as `batchnorm` takes it.
    """
    channels = len(moments) // 2
    count, mean = max(moments[0], 1), moments[1 : 1 + channels]
    variance = moments[1 + channels :] / count
    rstd = 1 / np.sqrt(variance + epsilon)
    return count, mean, rstd, variance, mean, gamma * rstd


def batchnorm_factors(sums, gamma, statistics):
    """(a, b, c, dgamma, dbeta) of the folded [sum of dy, sum of dy * (x - mean)], (2C,):
    dx = a * dy + b * (x - mean) + c."""
    count, _, rstd, *_ = statistics
    channels = len(gamma)
    total = np.concatenate([sums[:channels], sums[channels:] * rstd])
    a = gamma * rstd
    b = -a * rstd * rstd * sums[channels:] / count
    c = -a * sums[:channels] / count
    return a, b, c, total[channels:].astype(gamma.dtype), total[:channels].astype(gamma.dtype)


def running(olds, values, decay):
    """New running values: old + decay * (value - old), each of its old one's type."""
    return [
        (old + decay * (value - old)).astype(old.dtype)
        for old, value in zip(olds, values, strict=True)
    ]


def predict_scale(gamma, variance, epsilon):
    """gamma / sqrt(variance + epsilon)."""
    return gamma / np.sqrt(variance.astype(np.float64) + epsilon)


def source(y, mean, scale, beta):
    """The Source of an activation of y, its vectors in y's type."""
    return Source(y, *(np.ascontiguousarray(v, y.dtype) for v in (mean, scale, beta)))
