"""Compute batch normalization and its gradient in NumPy."""

import math

import numpy as np

from mpidl.backends.reference import direct
from mpidl.backends.reference.bf16 import widened
from mpidl.core.blocks import DeferredInput
from mpidl.core.fold import Counter, merge_moments
from mpidl.core.values import BF16


def channel_sums(x, tree):
    if x.dtype == BF16:
        return ordered_sums(widened(x), tree)
    counter = Counter(tree)
    for block in x:
        counter.push(block.reshape(len(block), -1).sum(axis=1))
    return counter.partial(x.shape[1:2], x.dtype)


def ordered_sums(x, tree):
    """Sum the channels of float32 numbers in the order of the C kernels."""
    counter = Counter(tree)
    for sums in direct.channel_sums(x):
        counter.push(sums)
    return counter.partial(x.shape[1:2], np.float32)


def moments(x, counts, tree):
    # M2 is the sum of squared deviations from the rounded mean, corrected for the rounding
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
    mean, scale, beta = (_per_channel(v, x.dtype, x.ndim) for v in (mean, scale, beta))
    y = np.empty_like(x)
    for block, out in zip(x, y, strict=True):
        np.subtract(block, mean, out=out)
        out *= scale
        out += beta
    return y


def batchnorm_sums(dy, x, mean, tree):
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
    channels = len(moments) // 2
    count, mean = max(moments[0], 1), moments[1 : 1 + channels]
    variance = moments[1 + channels :] / count
    rstd = 1 / np.sqrt(variance + epsilon)
    return count, mean, rstd, variance, mean, gamma * rstd


def batchnorm_factors(sums, gamma, statistics):
    count, _, rstd, *_ = statistics
    channels = len(gamma)
    total = np.concatenate([sums[:channels], sums[channels:] * rstd])
    a = gamma * rstd
    b = -a * rstd * rstd * sums[channels:] / count
    c = -a * sums[:channels] / count
    return a, b, c, total[channels:].astype(gamma.dtype), total[:channels].astype(gamma.dtype)


def running(olds, values, decay):
    return [
        (old + decay * (value - old)).astype(old.dtype)
        for old, value in zip(olds, values, strict=True)
    ]


def predict_scale(gamma, variance, epsilon):
    return gamma / np.sqrt(variance.astype(np.float64) + epsilon)


def source(y, mean, scale, beta, low=0.0, high=math.inf):
    dtype = np.float32 if y.dtype == BF16 else y.dtype
    mean, scale, beta = (np.ascontiguousarray(v, dtype) for v in (mean, scale, beta))
    return DeferredInput(y, mean, scale, beta, low, high)
