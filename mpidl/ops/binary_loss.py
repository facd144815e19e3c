"""Ops for the binary cross-entropy of several labels per image, and counts of these labels.

A Partial is a sum whose terms are not yet added up over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mpidl import backends
from mpidl.backends.training_interface import PLAIN, BinaryRule
from mpidl.core.blocks import Blocked
from mpidl.core.fold import Partial
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Needs, Var, value_of
from mpidl.ops import check
from mpidl.ops.composed import composed
from mpidl.ops.label_checks import (
    check_bounds,
    check_scores,
    checked_number,
    checked_weights,
    squeezed,
)

__all__ = ["binary_correct_count", "sigmoid_cross_entropy"]

PositiveWeights: TypeAlias = Sequence[float] | np.ndarray | None


@op(blocks=True)
def _cross_entropy(
    logits: Blocked, targets: Any, *, rule: BinaryRule, ignore_label: int | None
) -> WithVjp[Partial]:
    lanes = _target_lanes("sigmoid_cross_entropy", targets, logits, ignore_label)
    backend, batch = backends.of_value(logits), logits.batch
    counts = batch.counts()
    if ignore_label is None:
        weight = batch.per_image * (1.0 / math.prod(logits.image_shape))
    else:
        count = backend.label_weight(lanes, counts, batch.tree, PLAIN, 2)
        weight = backend.reciprocal(batch.world.gplus(count))
    total = backend.binary_cross_entropy(logits.lanes, lanes, counts, batch.tree, rule)

    def vjp(dy: Any, needs: Needs) -> tuple[Any, ...]:
        scale = weight * float(dy)
        d = backend.binary_cross_entropy_dlogits(logits.lanes, lanes, scale, counts, rule)
        return logits.like(d), None

    return total * weight, vjp


@composed
def sigmoid_cross_entropy(
    logits: Blocked,
    targets: Blocked | Var,
    *,
    positive_weights: PositiveWeights = None,
    ignore_label: int | None = None,
    focal_gamma: float = 0.0,
) -> Partial:
    """Return the mean binary cross-entropy of independent labels, given their scores.

    The result is the mean of -t log p - (1 - t) log(1 - p), with target t and p = sigmoid(logits),
    over all labels and pixels of all images of the global mini-batch. The logarithms are computed
    directly from the logits, so they are accurate for large logits.

    Parameters
    ----------
    logits
        Scores before the sigmoid, (N, K) or (N, K, ...).
    targets
        Integers 0 and 1, or floats from 0 to 1, in the shape of the scores. Dimensions of size 1
        are ignored, so (N,) matches (N, 1).
    positive_weights
        Factor of the first term, -t log p, for each label, (K,). The mean is not divided by these
        weights. By default, all factors are 1.
    ignore_label
        An integer target that is left out of the mean, such as -1 for unknown labels.
    focal_gamma
        Exponent of the focal loss. The first term is multiplied by (1 - p)**focal_gamma, and the
        second term by p**focal_gamma.

    Returns
    -------
    Partial
        The mean, a float64 scalar. The mean is 0 if all targets are ignored.

    Raises
    ------
    TypeError
        If the targets are not values per image, or if `ignore_label` is given with float targets.
    ValueError
        If the shapes differ, if an integer is neither 0 nor 1 and is not ignored, or if an argument
        is out of range.

    Notes
    -----
    PyTorch's `binary_cross_entropy_with_logits` computes the same loss with its argument
    `pos_weight`.
    The focal loss is equation 5 of Lin et al., "Focal loss for dense object detection", 2017. The
    positive weights correspond to alpha in that equation.
    """
    name, scores = "sigmoid_cross_entropy", value_of(logits)
    check_scores(name, scores)
    weights = checked_weights(name, "positive_weights", positive_weights, scores.shape[1], "label")
    rule = BinaryRule(weights, checked_number(name, "focal_gamma", focal_gamma))
    return _cross_entropy(logits, targets, rule=rule, ignore_label=ignore_label)


def binary_correct_count(
    logits: Blocked | Var, targets: Blocked, *, ignore_label: int | None = None
) -> Partial:
    """Count the correctly predicted labels or pixels.

    The prediction is 1 if the score is above 0, that is, if the probability is above 1/2.

    Parameters
    ----------
    logits
        Scores before the sigmoid, (N, K) or (N, K, ...).
    targets
        Integers 0 and 1, or floats, in the shape of the scores. Floats above 1/2 count as 1, and
        other floats as 0.
    ignore_label
        An integer target that is left out of the count.

    Returns
    -------
    Partial
        The count, a float64 scalar. The count is NaN if a score is NaN, unless its target is
        ignored.
    """
    scores: Blocked = value_of(logits)
    lanes = _target_lanes("binary_correct_count", targets, scores, ignore_label)
    backend, batch = backends.of_value(scores), scores.batch
    return backend.binary_correct_count(scores.lanes, lanes, batch.counts(), batch.tree)


def binary_label_count(
    logits: Blocked | Var, targets: Blocked, *, ignore_label: int | None = None
) -> Partial:
    """Count the targets that are not ignored.

    Parameters
    ----------
    logits
        Scores before the sigmoid, (N, K) or (N, K, ...).
    targets
        Integers 0 and 1 in the shape of the scores.
    ignore_label
        A target that is left out of the count.

    Returns
    -------
    Partial
        The count, a float64 scalar.
    """
    scores: Blocked = value_of(logits)
    lanes = _target_lanes("binary_label_count", targets, scores, ignore_label)
    backend, batch = backends.of_value(scores), scores.batch
    return backend.label_weight(lanes, batch.counts(), batch.tree, PLAIN, 2)


def _target_lanes(name: str, targets: Any, scores: Blocked, ignore_label: int | None) -> Any:
    """Check targets against scores; return the targets' lanes in the shape of the scores' lanes."""
    targets = value_of(targets)
    check.images(f"{name}: targets", targets)
    fits = squeezed(targets.shape[1:]) == squeezed(scores.shape[1:])
    if not fits or targets.shape[0] != scores.shape[0]:
        raise ValueError(f"{name}: expected targets of shape {scores.shape}, got {targets.shape}")
    lanes = targets.lanes.reshape(scores.lanes.shape)
    if targets.dtype.kind in "iu":
        if ignore_label in (0, 1):
            raise ValueError(f"{name}: ignore_label must not be 0 or 1, got {ignore_label}")
        check_bounds(name, targets.lanes, lanes, 2, ignore_label)
    elif ignore_label is not None:
        raise TypeError(f"{name}: expected integer targets with ignore_label, got {targets.dtype}")
    return lanes
