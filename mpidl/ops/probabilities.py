"""One-hot targets, and the cross-entropy of probabilities or scores with such soft targets.

A Partial is a sum whose terms are not yet added up over the ranks.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np

from mpidl import backends
from mpidl.core.blocks import Blocked, zero_unused
from mpidl.core.fold import Partial
from mpidl.core.op import WithVjp, op, refuse_gpu
from mpidl.core.tape import Needs, Var, value_of
from mpidl.ops import check
from mpidl.ops.composed import composed
from mpidl.ops.label_checks import check_scores, label_lanes
from mpidl.ops.reductions import mean

__all__ = ["cross_entropy", "one_hot"]

EXCESS = 1e-3  # maximum amount by which a probability may exceed 1
Labels = TypeVar("Labels", Blocked, np.ndarray)


def one_hot(labels: Labels, classes: int) -> Labels:
    """Return one-hot targets: 1 for the class of a label, and 0 for the other classes.

    Parameters
    ----------
    labels
        Integers from 0 to K-1, a Blocked value or an array, (N,) or (N, ...).
    classes
        Number of classes K.

    Returns
    -------
    Blocked or ndarray
        Zeros and ones in float32, (N, K) or (N, K, ...).

    Raises
    ------
    TypeError
        If the labels are not integers, or are on a GPU.
    ValueError
        If a label is outside 0..K-1.
    """
    check.integer("one_hot", "classes", classes)
    refuse_gpu("one_hot", labels)
    if isinstance(labels, Blocked):
        targets = _indicators(labels.lanes, classes)
        return labels.like(zero_unused(targets, labels.batch))
    return _indicators(np.asarray(labels), classes)


def _indicators(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return an array (N, K, ...) that is 1 where the index k on axis 1 is the label, else 0."""
    if labels.dtype.kind not in "iu" or labels.ndim == 0:
        raise TypeError(
            f"one_hot: expected integer labels (N, ...), got {labels.dtype} of shape {labels.shape}"
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"one_hot: expected labels in 0..{classes - 1}, got {labels.min()}..{labels.max()}"
        )
    numbers = np.arange(classes).reshape(-1, *(1,) * (labels.ndim - 1))
    targets: np.ndarray = (labels[:, None] == numbers).astype(np.float32)
    return targets


@op
def _cross_entropy_of_probabilities(p: np.ndarray, targets: np.ndarray) -> WithVjp[np.ndarray]:
    """Return the sum of -targets * log(p) for each image, float64 (n,)."""
    p = np.maximum(p, np.finfo(p.dtype).tiny)
    axes = tuple(range(1, p.ndim))
    logs = np.log(p, dtype=np.float64)

    def vjp(dy: np.ndarray) -> tuple[Any, ...]:
        dy = dy.reshape(-1, *(1,) * (p.ndim - 1))
        return (-dy * targets / p).astype(p.dtype), (-dy * logs).astype(targets.dtype)

    return -(targets * logs).sum(axis=axes), vjp


@op(blocks=True)
def soft_cross_entropy(logits: Blocked, targets: Any, *, smoothing: float) -> WithVjp[Partial]:
    """Return the mean of -sum(q * log(softmax(logits))) over all images and pixels.

    q is (1 - smoothing) * targets + smoothing / K.

    Parameters
    ----------
    logits
        Scores of K classes, (N, K) or (N, K, ...).
    targets
        Probabilities of the classes, floats in the shape of the scores.
    smoothing
        Label smoothing, at least 0 and below 1.

    Returns
    -------
    Partial
        The mean, a float64 scalar.
    """
    backend, batch, lanes = backends.of_value(logits), logits.batch, _target_lanes(logits, targets)
    counts = batch.counts()
    weight = batch.per_image * (1.0 / math.prod(logits.image_shape[1:]))
    total = backend.soft_cross_entropy(logits.lanes, lanes, counts, batch.tree, smoothing)

    def vjp(dy: Any, needs: Needs) -> tuple[Any, ...]:
        scale, d, dtargets = weight * float(dy), None, None
        if needs[0]:
            arguments = logits.lanes, lanes, scale, counts, smoothing
            d = logits.like(backend.soft_cross_entropy_dlogits(*arguments))
        if needs[1]:
            dtargets = targets.like(_dtargets(logits, targets, scale * (1 - smoothing)))
        return d, dtargets

    return total * weight, vjp


def _target_lanes(logits: Blocked, targets: Blocked) -> Any:
    """Return the lanes of the targets in the dtype of the logits."""
    lanes = targets.lanes
    return lanes if lanes.dtype == logits.dtype else lanes.astype(logits.dtype)


def _dtargets(logits: Blocked, targets: Blocked, scale: Any) -> np.ndarray:
    """Return -scale * log(softmax(logits)) as lanes, with zeros in unused lanes."""
    refuse_gpu("softmax_cross_entropy: the gradient of targets", logits)
    x = logits.lanes.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    logs = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return zero_unused((-scale * logs).astype(targets.dtype), logits.batch)


@composed
def cross_entropy(probabilities: Blocked, targets: Blocked | Var) -> Partial:
    """Return the mean of -sum(targets * log(probabilities)) over all images and pixels.

    The sum is over the K classes, and the mean is over the global mini-batch.

    Parameters
    ----------
    probabilities
        Probabilities of K classes, such as the result of `softmax`, (N, K) or (N, K, ...).
    targets
        One-hot targets or other probabilities, as floats in the shape of `probabilities`, or
        integer labels from 0 to K-1, (N,) or (N, ...). Float targets may be differentiated.

    Returns
    -------
    Partial
        The mean, a float64 scalar.

    Raises
    ------
    TypeError
        If an argument is not a value per image, or is on a GPU.
    ValueError
        If the shapes do not match, a label is outside 0..K-1, or a probability is not between 0
        and 1.

    Notes
    -----
    A probability below the smallest normal number of its dtype is replaced by this number, so the
    loss stays finite. `softmax_cross_entropy` computes the loss from scores before the softmax.
    That function is more accurate and faster, and has kernels for GPUs.
    """
    p: Blocked = value_of(probabilities)
    check_scores("cross_entropy", p)
    refuse_gpu("cross_entropy", p, value_of(targets))
    if p.dtype.kind != "f":
        raise TypeError(f"cross_entropy: expected probabilities that are floats, got {p.dtype}")
    local = p.local()
    low, high = local.min(initial=0), local.max(initial=0)
    if low < 0 or high > 1 + EXCESS:
        raise ValueError(
            f"cross_entropy: expected probabilities between 0 and 1, got {low:g} to {high:g}; "
            "dl.softmax_cross_entropy takes scores"
        )
    if not is_soft(targets, p):
        lanes = label_lanes("cross_entropy", value_of(targets), p)
        targets = one_hot(Blocked(lanes, p.batch), p.image_shape[0])
    losses = _cross_entropy_of_probabilities(probabilities, targets)
    return mean(losses) * (1.0 / math.prod(p.image_shape[1:]))


def soft_correct_count(scores: Blocked, targets: Blocked) -> Partial:
    """Sum the targets of the classes with the largest score, over images and pixels."""
    backend, batch, lanes = backends.of_value(scores), scores.batch, _target_lanes(scores, targets)
    return backend.soft_correct_count(scores.lanes, lanes, batch.counts(), batch.tree)


def is_soft(targets: object, scores: Blocked) -> bool:
    """Return whether targets are floats in the shape of the scores, such as one-hot targets."""
    value = value_of(targets)
    is_float = isinstance(value, Blocked) and value.dtype.kind == "f"
    return is_float and value.shape == scores.shape
