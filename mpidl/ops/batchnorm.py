"""Batch normalization, by itself or in one pass with the convolution before and the ReLU behind."""

from typing import NamedTuple

import numpy as np

from mpidl import backends
from mpidl.autodiff.tape import op
from mpidl.blocks import DeferredActivation, GradientWithSums
from mpidl.ops import check
from mpidl.ops.conv import conv2d_arguments


class Statistics(NamedTuple):
    """What a mini-batch is normalized by: float64, (C,) but for the count; see
    `backends.reference.statistics`."""

    count: float
    mean: np.ndarray
    rstd: np.ndarray
    variance: np.ndarray
    shift: np.ndarray  # the mean and the scale as the backend's `batchnorm` takes them
    scale: np.ndarray


def _statistics(backend, moments, batch, gamma, epsilon, scope, record):
    """Statistics of a Partial of moments; `record` gets those of the whole mini-batch."""
    local = moments.local() if scope == "local" else None
    whole = batch.world.gplus(moments)
    s = Statistics(*backend.statistics(whole, gamma, epsilon))
    if record:
        record(s.mean, s.variance)
    return s if local is None else Statistics(*backend.statistics(local, gamma, epsilon))


def _gradients(backend, sums, batch, scope, gamma, s):
    """From the Partial of [sum of dy, sum of dy * (x - mean)]: the factors a, b, c of
    dx = a * dy + b * (x - mean) + c, and the gradients of gamma and beta, which are replicated, not
    Partials: their sums went over all ranks."""
    if scope == "global":
        *factors, dgamma, dbeta = backend.batchnorm_factors(batch.world.gplus(sums), gamma, s)
        return factors, dgamma, dbeta
    channels, sums = len(gamma), sums.local()
    total = batch.world.gplus(np.concatenate([sums[:channels], sums[channels:] * s.rstd]))
    *factors, _, _ = backend.batchnorm_factors(sums, gamma, s)
    return factors, total[channels:].astype(gamma.dtype), total[:channels].astype(gamma.dtype)


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
    s = _statistics(backend, moments, batch, gamma, epsilon, scope, record)
    y = backend.batchnorm(lanes, s.shift, s.scale, beta)

    def vjp(dy, needs):
        sums = backend.batchnorm_sums(dy.lanes, lanes, s.shift, batch.tree)
        factors, dgamma, dbeta = _gradients(backend, sums, batch, scope, gamma, s)
        dx = backend.batchnorm_dx(dy.lanes, lanes, s.shift, *factors, counts) if needs[0] else None
        return (None if dx is None else x.like(dx), dgamma, dbeta)

    return x.like(y), vjp


@op(blocks=True)
def batchnorm_predict(x, mean, variance, gamma, beta, *, epsilon=1e-5):
    """Normalize by the running state instead: what prediction does.

    x: (N, C, H, W) or (N, C); mean, variance, gamma, beta: (C,). x alone can be differentiated.
    """
    check.images("batchnorm_predict", x)
    backend, lanes = backends.of(x), x.lanes
    scale = backend.predict_scale(gamma, variance, epsilon)
    y = backend.batchnorm(lanes, mean, scale, beta)

    def vjp(dy, needs):
        _only_images(needs[1:])
        nothing = backend.zeros_like(scale)
        factors = scale, nothing, nothing
        dx = backend.batchnorm_dx(dy.lanes, lanes, mean, *factors, x.batch.counts())
        return x.like(dx), None, None, None, None

    return x.like(y), vjp


def _only_images(needs):
    if any(needs):
        raise TypeError(
            "batch normalization by running statistics is differentiated with respect to its "
            "images alone: train gamma and beta with batchnorm"
        )


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
    that the batch normalization before it asks for). For backends that read a DeferredActivation.
    """
    how = conv2d_arguments(x, weight, bias, stride, padding, dilation, groups)
    _check("conv2d_batchnorm_relu", len(weight), gamma, beta, scope, x.shape)
    backend, batch = backends.of(x), x.batch
    counts, tree = batch.counts(), batch.tree
    y, moments = backend.conv2d_moments(x.source, weight, bias, *how, counts, tree)
    s = _statistics(backend, moments, batch, gamma, epsilon, scope, record)
    value = backend.source(y, s.shift, s.scale, beta)

    def vjp(dy, needs):
        sums = dy.sums if isinstance(dy, GradientWithSums) else None
        if sums is None:
            sums = backend.activation_sums(dy.lanes, value, tree)
        factors, dgamma, dbeta = _gradients(backend, sums, batch, scope, gamma, s)
        return *_through(dy, x, value, weight, how, factors, needs[:3]), dgamma, dbeta

    return DeferredActivation(value, batch, backend.activation), vjp


def _through(dy, x, value, weight, how, factors, needs):
    """Cotangents of the convolution's images, weight and bias, of the cotangent of `value`, the
    DeferredInput of the activation; factors: those of the batch normalization between."""
    if not any(needs):
        return None, None, None
    backend, batch = backends.of(x), x.batch
    before = needs[0] and isinstance(x, DeferredActivation)
    dx, dweight, dbias, sums = backend.conv2d_backward(
        dy.lanes,
        x.source,
        weight,
        *how,
        batch.counts(),
        batch.tree,
        needs,
        behind=(value, *factors),
        sums=before,
        reuse=isinstance(dy, GradientWithSums),  # made by the op behind for this one alone
    )
    if before:
        dx = GradientWithSums(dx, batch, sums)
    elif dx is not None:
        dx = x.like(dx)
    return dx, dweight, dbias


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
    """The same with the running state: what prediction does, and a frozen batch normalization."""
    how = conv2d_arguments(x, weight, bias, stride, padding, dilation, groups)
    backend = backends.of(x)
    y = backend.conv2d(x.source, weight, bias, *how)
    scale = backend.predict_scale(gamma, variance, epsilon)
    value = backend.source(y, mean, scale, beta)

    def vjp(dy, needs):
        _only_images(needs[3:])
        nothing = backend.zeros_like(scale)
        factors = scale, nothing, nothing
        return *_through(dy, x, value, weight, how, factors, needs[:3]), None, None, None, None

    return DeferredActivation(value, x.batch, backend.activation), vjp
