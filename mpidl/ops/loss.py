"""The ops of losses, with gradients, and the count of correct answers."""

from __future__ import annotations

import math
from typing import Any, overload

import numpy as np

from mpidl import backends
from mpidl.autodiff.tape import Var, WithVjp, op, refuse_gpu, value_of
from mpidl.blocks import Blocked
from mpidl.fold import Partial
from mpidl.ops import check
from mpidl.ops.label_checks import check_scores, label_lanes, squeezed
from mpidl.ops.probabilities import is_soft, of_soft_targets

__all__ = [
    "correct_count",
    "mean_absolute_error",
    "mean_squared_error",
    "softmax_cross_entropy",
]


@op(blocks=True)
def _cross_entropy_of_labels(logits: Blocked, labels: Blocked) -> WithVjp[Partial]:
    lanes = label_lanes("softmax_cross_entropy", labels, logits)
    backend, batch = backends.of_value(logits), logits.batch
    counts, weight = batch.counts(), batch.per_image * (1.0 / math.prod(logits.image_shape[1:]))
    total = backend.cross_entropy(logits.lanes, lanes, counts, batch.tree)

    def vjp(dy, needs):
        d = backend.cross_entropy_dlogits(logits.lanes, lanes, weight * float(dy), counts)
        return logits.like(d), None

    return total * weight, vjp


@overload
def softmax_cross_entropy(logits: Blocked, labels: Blocked) -> Partial: ...
@overload
def softmax_cross_entropy(logits: Var, labels: Blocked | Var) -> Var: ...
def softmax_cross_entropy(logits: Any, labels: Any) -> Partial | Var:
    """Return the mean of -log softmax(logits)[label] over all images and pixels.

    The mean is over the global mini-batch. The softmax is over the K classes.

    Parameters
    ----------
    logits
        Scores, (N, K), or (N, K, ...) for one label per pixel.
    labels
        Integers from 0 to K-1, (N,) or (N, ...). Or probabilities of the classes, such as one-hot
        targets: floats in the shape of the scores, on CPUs only. For these, the mean of
        -sum(labels * log softmax(logits)) is computed.

    Returns
    -------
    Partial
        The mean, a float64 scalar.
    """
    scores = value_of(logits)
    check_scores("softmax_cross_entropy", scores)
    if is_soft(labels, scores):
        return of_soft_targets(logits, labels)
    return _cross_entropy_of_labels(logits, labels)


@op(blocks=True)
def mean_squared_error(y: Blocked, target: Blocked | Var) -> WithVjp[Partial]:
    """Return the mean of (y - target)**2 over all elements of the global mini-batch.

    Parameters
    ----------
    y
        Floats, (N, ...).
    target
        Floats in the shape of y. Dimensions of size 1 are ignored, so (N,) matches (N, 1).

    Returns
    -------
    Partial
        The mean, a float64 scalar.

    Notes
    -----
    MATLAB's `mse` instead sums over the elements of an image and divides the sum by 2.
    """
    return _mean_error("mean_squared_error", y, target, 2)


@op(blocks=True)
def mean_absolute_error(y: Blocked, target: Blocked | Var) -> WithVjp[Partial]:
    """Return the mean absolute difference of `y` and `target` over the global mini-batch.

    The gradient is 0 where `y` equals `target`.

    Parameters
    ----------
    y : Blocked
        The network's outputs, (N, ...).
    target : Blocked
        The targets; their shape may differ by dimensions of 1.

    Returns
    -------
    Partial
        The mean over all elements of all images, a scalar.
    """
    return _mean_error("mean_absolute_error", y, target, 1)


def _mean_error(name, y, target, power):
    """Return the mean of |y - target|**power, and its vjp, after checking the arguments."""
    check.images(name, y)
    check.images(f"{name}: target", target)
    fits = squeezed(target.shape[1:]) == squeezed(y.shape[1:])
    if not fits or target.shape[0] != y.shape[0]:
        raise ValueError(f"{name}: expected a target of shape {y.shape}, got {target.shape}")
    if target.dtype.kind != "f":
        raise TypeError(f"{name}: expected a floating-point target, got {target.dtype}")
    backend, batch, lanes = backends.of_value(y), y.batch, y.lanes
    target_lanes = target.lanes.reshape(lanes.shape)
    if target_lanes.dtype != y.dtype:
        target_lanes = target_lanes.astype(y.dtype)
    counts, weight = batch.counts(), batch.per_image * (1.0 / math.prod(y.image_shape))
    total = backend.errors(lanes, target_lanes, power, counts, batch.tree)

    def vjp(dy, needs):
        def slope(a, b):
            return backend.errors_dy(a, b, power, weight * (power * float(dy)), counts)

        return (
            y.like(slope(lanes, target_lanes)) if needs[0] else None,
            target.like(slope(target_lanes, lanes).reshape(target.lanes.shape))
            if needs[1]
            else None,
        )

    return total * weight, vjp


def correct_count(logits: Blocked | Var, labels: Blocked) -> Partial:
    """Count the images, or pixels, for which the label's class has the largest score.

    Ties go to the first class. The count is not differentiable.

    Parameters
    ----------
    logits
        Scores, (N, K), or (N, K, ...) for one label per pixel.
    labels
        Integers from 0 to K-1, (N,) or (N, ...), or one-hot targets: floats in the shape of the
        scores, whose class has the largest number.

    Returns
    -------
    Partial
        The count, a scalar.
    """
    scores: Blocked = value_of(logits)
    check_scores("correct_count", scores)
    if is_soft(labels, scores):
        refuse_gpu("correct_count", labels)
        labels = labels.like(labels.lanes.argmax(axis=1).astype(np.int32))
    lanes = label_lanes("correct_count", labels, scores)
    batch = scores.batch
    return backends.of_value(scores).correct_count(scores.lanes, lanes, batch.counts(), batch.tree)
