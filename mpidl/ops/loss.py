"""Ops for losses and for sums and means over the images of a mini-batch, with gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from mpidl import backends
from mpidl.autodiff.tape import Array, Var, WithVjp, op, refuse_gpu, value_of
from mpidl.blocks import LANES, Blocked, zero_unused
from mpidl.fold import Partial
from mpidl.ops import check

__all__ = [
    "correct_count",
    "mean",
    "mean_absolute_error",
    "mean_squared_error",
    "softmax_cross_entropy",
    "sum",
]


@op(blocks=True)
def sum(x: Blocked) -> WithVjp[Partial]:
    """Return the sum over the images of the global mini-batch, in float64.

    Parameters
    ----------
    x
        One element per image, (N,), or one array per image, (N, ...).

    Returns
    -------
    Partial
        The sum, of shape (...).
    """
    check.images("sum", x)
    refuse_gpu("sum", x)
    batch = x.batch

    def vjp(dy, needs):
        lanes = np.empty_like(x.lanes)
        lanes[...] = np.asarray(dy, x.dtype)[..., None]
        return (x.like(zero_unused(lanes, batch)),)

    return backends.of(x).image_sums(x.lanes, batch.counts(), batch.tree), vjp


@overload
def mean(x: Blocked) -> Partial: ...
@overload
def mean(x: Var) -> Var: ...
def mean(x: Blocked | Var) -> Partial | Var:
    """Return the mean over the images of the global mini-batch, on any number of ranks.

    Parameters
    ----------
    x
        One element per image, (N,), or one array per image, (N, ...).

    Returns
    -------
    Partial
        The mean, of shape (...). It is a scalar if x is (N,), and has 3 elements if x is (N, 3).
    """
    return multiply_partial(sum(x), 1.0 / x.shape[0])


@op(blocks=True)
def multiply_partial(x: Partial, factor: Array | float) -> WithVjp[Partial]:
    """Multiply a Partial by a scalar that is the same on all ranks and may be differentiated."""
    value = float(np.asarray(factor))

    def vjp(dy, needs):
        dfactor = x * float(dy) if needs[1] and x.shape == () else None
        if needs[1] and dfactor is None:
            raise TypeError(
                "the factor of a Partial can be differentiated only if it is a single number"
            )
        return (dy * value if needs[0] else None, dfactor)

    return x * value, vjp


def label_lanes(name: str, labels: Any, scores: Blocked) -> Any:
    """Check labels against scores, and return the labels as lanes (blocks, ..., 16).

    A lane is the slot of one image in a block of 16 images.

    Parameters
    ----------
    name
        Name of the op, for error messages.
    labels
        Integers from 0 to K-1, (N, ...). The shape must match the scores, except for dimensions of
        size 1.
    scores
        Scores of K classes, (N, K, ...).

    Raises
    ------
    TypeError
        If the labels are not blocked integers.
    ValueError
        If the labels' shape does not match the scores, or if a label is outside 0..K-1.
    """
    if not isinstance(labels, Blocked):
        raise TypeError(
            f"{name}: expected integer labels, one per image (Blocked), got "
            f"{type(labels).__name__}; {check.BLOCKED}"
        )
    if labels.dtype.kind not in "iu":
        raise TypeError(
            f"{name}: expected integer labels, got {labels.dtype} of shape {labels.shape}"
        )
    classes, *pixels = scores.image_shape
    if squeezed(labels.image_shape) != squeezed(pixels):
        raise ValueError(
            f"{name}: expected labels of shape {(scores.shape[0], *pixels)}, one for each "
            f"{'pixel' if pixels else 'image'} of scores {scores.shape}, got {labels.shape}"
        )
    lanes = labels.lanes.reshape(len(labels.lanes), *pixels, LANES)
    if not lanes.size:
        return lanes

    def check_bounds(low, high):
        if not 0 <= low <= high < classes:
            raise ValueError(
                f"{name}: expected labels in 0..{classes - 1}, the classes of the scores, got "
                f"{low}..{high}"
            )

    if isinstance(lanes, np.ndarray):
        check_bounds(lanes.min(), lanes.max())
    else:  # the host checks the bounds of labels on a GPU later
        labels.lanes.bounds.hold(check_bounds)
    return lanes


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without its dimensions of size 1."""
    return tuple(n for n in shape if n != 1)


@op(blocks=True)
def softmax_cross_entropy(logits: Blocked, labels: Blocked) -> WithVjp[Partial]:
    """Return the mean of -log softmax(logits)[label] over all images and pixels.

    The mean is over the global mini-batch. The softmax is over the K classes.

    Parameters
    ----------
    logits
        Scores, (N, K), or (N, K, ...) for one label per pixel.
    labels
        Integers from 0 to K-1, (N,) or (N, ...).

    Returns
    -------
    Partial
        The mean, a float64 scalar.
    """
    _check_scores("softmax_cross_entropy", logits)
    lanes = label_lanes("softmax_cross_entropy", labels, logits)
    backend, batch = backends.of(logits), logits.batch
    counts, weight = batch.counts(), batch.per_image * (1.0 / math.prod(logits.image_shape[1:]))
    total = backend.cross_entropy(logits.lanes, lanes, counts, batch.tree)

    def vjp(dy, needs):
        d = backend.cross_entropy_dlogits(logits.lanes, lanes, weight * float(dy), counts)
        return logits.like(d), None

    return total * weight, vjp


def _check_scores(name, scores):
    """Raise an error unless the scores are blocked and of shape (N, K) or (N, K, ...)."""
    check.images(name, scores)
    if len(scores.shape) < 2:
        raise ValueError(f"{name}: expected scores (N, K) or (N, K, ...), got {scores.shape}")


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
    """Return the mean of |y - target| over all elements of the global mini-batch.

    See `mean_squared_error` for arguments and result. The gradient is 0 where y equals target.
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
    backend, batch, lanes = backends.of(y), y.batch, y.lanes
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
        Integers from 0 to K-1, (N,) or (N, ...).

    Returns
    -------
    Partial
        The count, a scalar.
    """
    scores: Blocked = value_of(logits)
    _check_scores("correct_count", scores)
    lanes = label_lanes("correct_count", labels, scores)
    batch = scores.batch
    return backends.of(scores).correct_count(scores.lanes, lanes, batch.counts(), batch.tree)
