"""Batch normalization, by itself or in one pass with the convolution before and the ReLU behind."""

from typing import NamedTuple

import numpy as np

from mpidl import backends
from mpidl.blocks import Activation, Gradient, Source
from mpidl.ops import check
from mpidl.ops.conv import conv2d_arguments
from mpidl.tape import op


class Statistics(NamedTuple):
    """What a mini-batch is normalized by: float64, (C,) but for the count."""

    count: float
    mean: np.ndarray
    rstd: np.ndarray


def _statistics(moments, batch, epsilon, scope, record):
    """Statistics of a Partial of moments; `record` gets those of the whole mini-batch."""
    channels = moments.shape[0] // 2
    local = moments.local() if scope == "local" else None
    whole = batch.world.gplus(moments)
    if record:
        record(whole[1 : 1 + channels], whole[1 + channels :] / whole[0])
    used = whole if local is None else local
    count = max(used[0], 1)
    return Statistics(
        count, used[1 : 1 + channels], 1 / np.sqrt(used[1 + channels :] / count + epsilon)
    )


def _gradients(sums, batch, scope, gamma, s):
    """From the Partial of [sum of dy, sum of dy * (x - mean)]: the factors a, b, c of
    dx = a * dy + b * (x - mean) + c, and the gradients of gamma and beta."""
    channels = len(gamma)
    if scope == "global":
        sums = batch.world.gplus(sums)
        total = np.concatenate([sums[:channels], sums[channels:] * s.rstd])
    else:
        sums = sums.local()
        total = batch.world.gplus(np.concatenate([sums[:channels], sums[channels:] * s.rstd]))
    a = gamma * s.rstd
    b = -a * s.rstd * s.rstd * sums[channels:] / s.count
    c = -a * sums[:channels] / s.count
    # total went over all ranks: these two are replicated, not Partials
    return (a, b, c), total[channels:].astype(gamma.dtype), total[:channels].astype(gamma.dtype)


def _check(name, channels, gamma, beta, scope, shape):
    if gamma.shape != (channels,) or beta.shape != (channels,):
        raise ValueError(
            f"{name}: expected gamma and beta ({channels},) for x {shape}, got {gamma.shape} and "
            f"{beta.shape}"
        )
    if scope not in ("global", "local"):
        raise ValueError(f"{name}: scope must be 'global' or 'local', got {scope!r}")


@op(blocks=True)
def batchnorm(x, gamma, beta, *, epsilon=1e-5, scope="global", record=None):
    """Normalize by the statistics of the mini-batch: y = gamma * (x - mean) * rstd + beta.

    x: (N, C, H, W) or (N, C); gamma, beta: (C,); rstd = 1 / sqrt(variance + epsilon), the variance
    divided by the count (biased). Ioffe and Szegedy, "Batch normalization", 2015, algorithm 1.
    scope "global": statistics of the whole mini-batch over all ranks, forward and backward;
    "local": each rank normalizes by those of its own share, so that the result depends on the
    number of ranks. `record(mean, variance)` is called with the statistics of the whole mini-batch
    (float64) either way, for the running state.
    """
    check.images("batchnorm", x)
    _check("batchnorm", x.shape[1], gamma, beta, scope, x.shape)
    backend, batch, lanes = backends.of(x), x.batch, x.lanes
    counts = batch.counts()
    moments = backend.moments(lanes, counts, batch.tree)
    s = _statistics(moments, batch, epsilon, scope, record)
    y = backend.batchnorm(lanes, s.mean, gamma * s.rstd, beta)

    def vjp(dy, needs):
        sums = backend.batchnorm_sums(dy.lanes, lanes, s.mean, batch.tree)
        factors, dgamma, dbeta = _gradients(sums, batch, scope, gamma, s)
        dx = backend.batchnorm_dx(dy.lanes, lanes, s.mean, *factors, counts) if needs[0] else None
        return (None if dx is None else x.like(dx), dgamma, dbeta)

    return x.like(y), vjp


def _running(mean, variance, gamma, epsilon):
    return mean, gamma / np.sqrt(variance.astype(np.float64) + epsilon)


@op(blocks=True)
def batchnorm_predict(x, mean, variance, gamma, beta, *, epsilon=1e-5):
    """Normalize by the running state instead: what prediction does.

    x: (N, C, H, W) or (N, C); mean, variance, gamma, beta: (C,).
    """
    check.images("batchnorm_predict", x)
    y = backends.of(x).batchnorm(x.lanes, *_running(mean, variance, gamma, epsilon), beta)
    return x.like(y), _not_differentiated


def _not_differentiated(dy, needs):
    raise TypeError("batchnorm_predict is not differentiated: train with batchnorm")


def _source(y, mean, scale, beta):
    return Source(y, *(np.ascontiguousarray(v, y.dtype) for v in (mean, scale, beta)))


@op(blocks=True)
def conv2d_batchnorm_relu(
    x,
    weight,
    bias,
    gamma,
    beta,
    *,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    epsilon=1e-5,
    scope="global",
    record=None,
):
    """relu(batchnorm(conv2d(x, weight, bias), gamma, beta)), with the bytes of the three ops.

    Only the convolution's output is stored: who reads the value normalizes on the way. Each block
    is read once forward (its input's activation, the convolution, the moments) and once backward
    (the gradient through ReLU and batch normalization, those of weight, bias and x, and the sums
    that the batch normalization before it asks for). For backends that read an Activation.
    """
    how = conv2d_arguments(x, weight, bias, stride, padding, dilation, groups)
    _check("conv2d_batchnorm_relu", len(weight), gamma, beta, scope, x.shape)
    backend, batch = backends.of(x), x.batch
    counts, tree = batch.counts(), batch.tree
    y, moments = backend.conv2d_moments(x.source, weight, bias, *how, counts, tree)
    s = _statistics(moments, batch, epsilon, scope, record)
    value = _source(y, s.mean, gamma * s.rstd, beta)

    def vjp(dy, needs):
        sums = dy.sums if isinstance(dy, Gradient) else None
        if sums is None:
            sums = backend.activation_sums(dy.lanes, value, tree)
        factors, dgamma, dbeta = _gradients(sums, batch, scope, gamma, s)
        before = needs[0] and isinstance(x, Activation)
        dx, dweight, dbias, sums = backend.conv2d_backward(
            dy.lanes,
            x.source,
            weight,
            *how,
            counts,
            tree,
            needs,
            behind=(value, *factors),
            sums=before,
            reuse=isinstance(dy, Gradient),  # made by the op behind for this one alone
        )
        if before:
            dx = Gradient(dx, batch, sums)
        elif dx is not None:
            dx = x.like(dx)
        return dx, dweight, dbias, dgamma, dbeta

    return Activation(value, batch, backend.activation), vjp


@op(blocks=True)
def conv2d_batchnorm_relu_predict(
    x,
    weight,
    bias,
    mean,
    variance,
    gamma,
    beta,
    *,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    epsilon=1e-5,
):
    """The same with the running state: what prediction does."""
    how = conv2d_arguments(x, weight, bias, stride, padding, dilation, groups)
    backend = backends.of(x)
    y = backend.conv2d(x.source, weight, bias, *how)
    mean, scale = _running(mean, variance, gamma, epsilon)
    value = _source(y, mean, scale, beta)
    return Activation(value, x.batch, backend.activation), _not_differentiated
