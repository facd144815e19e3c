"""Batch normalization ops, some fused with the preceding convolution and the following activation.

A Partial is a sum whose terms are not yet added up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpidl import backends
from mpidl.backends.deferred import (
    DeferredActivation,
    DeferredNormalization,
    DeferredValue,
    GradientWithSums,
    NormalizedInput,
)
from mpidl.backends.interface import Backend
from mpidl.backends.shapes import Geometry
from mpidl.core.blocks import Batch, Blocked, DeferredInput
from mpidl.core.fold import Partial
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Array, Needs
from mpidl.ops import check
from mpidl.ops.conv import conv2d_geometry

__all__ = ["batchnorm", "batchnorm_predict"]

Limits: TypeAlias = tuple[float, float]  # the range of an activation's results


class Statistics(NamedTuple):
    """The statistics that normalize a mini-batch, as returned by a backend's `statistics`.

    Attributes
    ----------
    pixels
        Number of pixels per channel.
    mean, rstd, variance
        Mean, 1 / sqrt(variance + epsilon) and biased variance of each channel, (C,) float64.
    shift, scale
        The mean and gamma * rstd of each channel, in the dtype that the backend's `batchnorm`
        expects.
    """

    pixels: float
    mean: np.ndarray
    rstd: np.ndarray
    variance: np.ndarray
    shift: np.ndarray
    scale: np.ndarray


def _statistics(
    backend: Backend,
    moments: Partial,
    batch: Batch,
    gamma: Any,
    epsilon: float,
    scope: str,
    record: Callable[[Any, Any], None] | None,
) -> Statistics:
    """Convert the Partial `moments` to Statistics.

    Call record(mean, variance) with the statistics of the global mini-batch unless `record` is
    None.
    """
    local = moments.local() if scope == "local" else None
    s = Statistics(*backend.statistics(batch.world.gplus(moments), gamma, epsilon))
    if record:
        record(s.mean, s.variance)
    return s if local is None else Statistics(*backend.statistics(local, gamma, epsilon))


def _gradients(
    backend: Backend, sums: Partial, batch: Batch, scope: str, gamma: Any, s: Statistics
) -> tuple[tuple[Any, Any, Any], Any, Any]:
    """Return the factors (a, b, c) of dx, and the gradients of gamma and beta.

    `sums` is the Partial of [sum of dy, sum of dy * (x - mean)]. With the factors,
    dx = a * dy + b * (x - mean) + c. The gradients are arrays, not Partials, because the function
    sums them over all ranks.
    """
    if scope == "global":
        a, b, c, dgamma, dbeta = backend.batchnorm_factors(batch.world.gplus(sums), gamma, s)
        return (a, b, c), dgamma, dbeta
    channels, local = len(gamma), sums.local()
    total = batch.world.gplus(np.concatenate([local[:channels], local[channels:] * s.rstd]))
    a, b, c, _, _ = backend.batchnorm_factors(local, gamma, s)
    return (a, b, c), total[channels:].astype(gamma.dtype), total[:channels].astype(gamma.dtype)


def _check(
    name: str, channels: int, gamma: Array, beta: Array, scope: str, shape: tuple[int, ...]
) -> None:
    """Raise ValueError if gamma or beta has the wrong shape, or if the scope is unknown."""
    if gamma.shape != (channels,) or beta.shape != (channels,):
        raise ValueError(
            f"{name}: expected gamma and beta ({channels},) for x {shape}, got {gamma.shape} and "
            f"{beta.shape}"
        )
    if scope not in ("global", "local"):
        raise ValueError(f"{name}: scope must be 'global' or 'local', got {scope!r}")


@op(blocks=True)
def batchnorm(
    x: Blocked,
    gamma: Array,
    beta: Array,
    *,
    epsilon: float = 1e-5,
    scope: str = "global",
    record: Callable[[Any, Any], None] | None = None,
) -> WithVjp[Blocked]:
    """Normalize with the statistics of the mini-batch: y = gamma * (x - mean) * rstd + beta.

    Parameters
    ----------
    x
        The input, (N, C, H, W) or (N, C).
    gamma, beta
        Scale and offset of each channel, (C,).
    epsilon
        Constant added to the variance: rstd = 1 / sqrt(variance + epsilon). The variance is biased
        (divided by the count).
    scope
        With "global", the forward and backward passes use the statistics of the mini-batch over all
        ranks. With "local", each rank uses the statistics of its own images, so the result depends
        on the number of ranks.
    record
        A function record(mean, variance), for example to update the running state. In both scopes,
        the arguments are the float64 statistics of the global mini-batch.

    Returns
    -------
    Blocked
        The normalized value, with the shape of x.

    Notes
    -----
    See Ioffe and Szegedy, "Batch normalization", 2015, algorithm 1.
    """
    check.images("batchnorm", x)
    _check("batchnorm", x.shape[1], gamma, beta, scope, x.shape)
    backend, batch, lanes = backends.of_value(x), x.batch, x.raw
    counts = batch.counts()
    moments = backend.moments(lanes, counts, batch.tree)
    s = _statistics(backend, moments, batch, gamma, epsilon, scope, record)
    y = backend.batchnorm(lanes, s.shift, s.scale, beta)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        sums = backend.batchnorm_sums(dy.raw, lanes, s.shift, batch.tree)
        factors, dgamma, dbeta = _gradients(backend, sums, batch, scope, gamma, s)
        dx = backend.batchnorm_dx(dy.raw, lanes, s.shift, *factors, counts) if needs[0] else None
        return (None if dx is None else x.like(dx), dgamma, dbeta)

    return x.like(y), vjp


@op(blocks=True)
def batchnorm_predict(
    x: Blocked,
    mean: Array,
    variance: Array,
    gamma: Array,
    beta: Array,
    *,
    epsilon: float = 1e-5,
) -> WithVjp[Blocked]:
    """Normalize with the running mean and variance, as in prediction.

    Only x can be differentiated.

    Parameters
    ----------
    x
        The input, (N, C, H, W) or (N, C).
    mean, variance
        Running mean and variance of each channel, (C,).
    gamma, beta
        Scale and offset of each channel, (C,).
    epsilon
        Constant added to the variance.

    Returns
    -------
    Blocked
        The normalized value, with the shape of x.
    """
    check.images("batchnorm_predict", x)
    backend, lanes = backends.of_value(x), x.raw
    scale = backend.predict_scale(gamma, variance, epsilon)
    y = backend.batchnorm(lanes, mean, scale, beta)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        _refuse_learnables(needs[1:])
        zeros = backend.zeros_like(scale)
        factors = scale, zeros, zeros
        dx = backend.batchnorm_dx(dy.raw, lanes, mean, *factors, x.batch.counts())
        return x.like(dx), None, None, None, None

    return x.like(y), vjp


def _refuse_learnables(needs: Needs) -> None:
    """Raise TypeError if an argument other than the images, weight and bias needs a cotangent.

    `needs` has one boolean for each of these other arguments.
    """
    if any(needs):
        raise TypeError(
            "batch normalization with running statistics can be differentiated only with respect "
            "to images: train gamma and beta with batchnorm"
        )


@op(blocks=True)
def conv2d_batchnorm(
    x: Blocked,
    /,
    weight: Array,
    bias: Array | None,
    gamma: Array,
    beta: Array,
    *,
    epsilon: float = 1e-5,
    scope: str = "global",
    record: Callable[[Any, Any], None] | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> WithVjp[Blocked]:
    """Return batchnorm(conv2d(x, weight, bias), gamma, beta), clipped to `limits` if given.

    The limits of a ReLU are 0 and infinity. In float32, the result has the same bytes as the result
    of separate ops. The other arguments are as in `conv2d` (`options`) and `batchnorm`. The
    backend's `fuses_convolutions` must be True.

    Notes
    -----
    Only the output of the convolution is stored. Later ops normalize this output while they read
    it. The forward pass reads each block of 16 images once, to compute the activation of the input,
    the convolution and the moments. The backward pass also reads each block once. It computes the
    gradient through the activation and the batch normalization, the gradients of weight, bias and
    x, and the sums for the preceding batch normalization.
    """
    geometry = conv2d_geometry(x, weight, bias, **options)
    _check("conv2d_batchnorm", len(weight), gamma, beta, scope, x.shape)
    backend, batch = backends.of_value(x), x.batch
    counts, tree = batch.counts(), batch.tree
    y, moments = backend.conv2d_moments(x.source, weight, bias, geometry, counts, tree)
    s = _statistics(backend, moments, batch, gamma, epsilon, scope, record)
    value = _deferred(backend, batch, y, s.shift, s.scale, beta, limits)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        if isinstance(dy, GradientWithSums):
            sums = dy.sums
        elif limits:
            sums = backend.activation_sums(dy.raw, value.deferred, tree)
        else:
            sums = backend.batchnorm_sums(dy.raw, y, s.shift, tree)
        factors, dgamma, dbeta = _gradients(backend, sums, batch, scope, gamma, s)
        gradients = _conv2d_backward(dy, x, value.deferred, weight, geometry, factors, needs[:3])
        return *gradients, dgamma, dbeta

    return value, vjp


def _deferred(
    backend: Backend, batch: Batch, y: Any, mean: Any, scale: Any, beta: Any, limits: Limits | None
) -> DeferredValue:
    """Return the normalization of y, clipped to `limits`, as a value that is not stored."""
    if limits:
        source = backend.source(y, mean, scale, beta, *limits)
        return DeferredActivation(source, batch, backend.activation)

    def compute(operand: DeferredInput) -> Any:
        return backend.batchnorm(*operand[:4])

    operand = NormalizedInput(*backend.source(y, mean, scale, beta)[:4])
    return DeferredNormalization(operand, batch, compute)


def _conv2d_backward(
    dy: Blocked,
    x: Blocked,
    value_after: DeferredInput,
    weight: Any,
    geometry: Geometry,
    factors: tuple[Any, Any, Any],
    needs: Needs,
) -> tuple[Any, Any, Any]:
    """Return the cotangents of the convolution's images, weight and bias.

    dy is the cotangent of `value_after`, the DeferredInput or NormalizedInput of the batch
    normalization that follows the convolution. `factors` (from `_gradients`) belong to this
    normalization.
    """
    if not any(needs):
        return None, None, None
    backend, batch = backends.of_value(x), x.batch
    activation_before = needs[0] and isinstance(x, DeferredActivation)
    dx, dweight, dbias, sums = backend.conv2d_backward(
        dy.raw,
        x.source,
        weight,
        geometry,
        batch.counts(),
        batch.tree,
        needs,
        activation_after=(value_after, *factors),
        sums=activation_before,
        overwrite=isinstance(dy, GradientWithSums) and not dy.is_shared,
    )
    if sums is not None:
        dx = GradientWithSums(dx, batch, sums)
    elif dx is not None:
        dx = x.like(dx)
    return dx, dweight, dbias


@op(blocks=True)
def conv2d_batchnorm_predict(
    x: Blocked,
    /,
    weight: Array,
    bias: Array | None,
    mean: Array,
    variance: Array,
    gamma: Array,
    beta: Array,
    *,
    epsilon: float = 1e-5,
    limits: Limits | None = None,
    **options: Any,
) -> WithVjp[Blocked]:
    """Compute `conv2d_batchnorm` with the running mean and variance.

    Prediction and frozen layers use this op. The arguments are as in `conv2d` (`options`) and
    `batchnorm_predict`.
    """
    geometry = conv2d_geometry(x, weight, bias, **options)
    backend = backends.of_value(x)
    y = backend.conv2d(x.source, weight, bias, geometry)
    scale = backend.predict_scale(gamma, variance, epsilon)
    value = _deferred(backend, x.batch, y, mean, scale, beta, limits)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        _refuse_learnables(needs[3:])
        zeros = backend.zeros_like(scale)
        factors = scale, zeros, zeros
        gradients = _conv2d_backward(dy, x, value.deferred, weight, geometry, factors, needs[:3])
        return *gradients, None, None, None, None

    return value, vjp
