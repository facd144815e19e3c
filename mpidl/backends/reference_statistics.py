"""What batch normalization computes of its folded sums, by channel in NumPy: (C,) float64.

Part of `reference`, where they are found; the C backend uses them too.
"""

import numpy as np

from mpidl.blocks import DeferredInput


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
    """The DeferredInput of an activation of y, its vectors in y's type."""
    return DeferredInput(y, *(np.ascontiguousarray(v, y.dtype) for v in (mean, scale, beta)))


def zeros_like(x):
    """Zeros of the same shape and type, C-ordered."""
    return np.zeros(np.shape(x), x.dtype)
