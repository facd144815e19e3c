"""Ops for losses of classification and regression, and counts of labels and correct predictions.

A Partial is a sum whose terms are not yet added up over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mpidl import backends
from mpidl.backends.training_interface import LabelRule
from mpidl.core.blocks import Blocked
from mpidl.core.fold import Partial
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Needs, Var, value_of
from mpidl.ops import check
from mpidl.ops.composed import composed
from mpidl.ops.label_checks import (
    check_ignored,
    check_scores,
    checked_number,
    checked_weights,
    label_lanes,
    squeezed,
)
from mpidl.ops.probabilities import is_soft, soft_correct_count, soft_cross_entropy

__all__ = [
    "correct_count",
    "label_count",
    "mean_absolute_error",
    "mean_squared_error",
    "softmax_cross_entropy",
]

ClassWeights: TypeAlias = Sequence[float] | np.ndarray | None


@op(blocks=True)
def _cross_entropy_of_labels(
    logits: Blocked, labels: Any, *, rule: LabelRule, ignore_label: int | None
) -> WithVjp[Partial]:
    lanes = label_lanes("softmax_cross_entropy", labels, logits, ignore_label)
    backend, batch = backends.of_value(logits), logits.batch
    counts = batch.counts()
    if rule.class_weights is None and ignore_label is None:
        weight = batch.per_image * (1.0 / math.prod(logits.image_shape[1:]))
    else:
        all_weights = backend.label_weight(lanes, counts, batch.tree, rule, logits.image_shape[0])
        weight = backend.reciprocal(batch.world.gplus(all_weights))
    total = backend.cross_entropy(logits.lanes, lanes, counts, batch.tree, rule)

    def vjp(dy: Any, needs: Needs) -> tuple[Any, ...]:
        scale = weight * float(dy)
        d = backend.cross_entropy_dlogits(logits.lanes, lanes, scale, counts, rule)
        return logits.like(d), None

    return total * weight, vjp


@composed
def softmax_cross_entropy(
    logits: Blocked,
    labels: Blocked | Var,
    *,
    class_weights: ClassWeights = None,
    label_smoothing: float = 0.0,
    ignore_label: int | None = None,
    focal_gamma: float = 0.0,
) -> Partial:
    """Return the mean of -log softmax(logits)[label] over all images and pixels.

    The mean is over the global mini-batch, and the softmax is over the K classes.

    Parameters
    ----------
    logits
        Scores, (N, K), or (N, K, ...) for one label per pixel.
    labels
        Integers from 0 to K-1, (N,) or (N, ...), or probabilities of the classes, such as one-hot
        targets. Probabilities are floats in the shape of the scores. For probabilities, the result
        is the mean of -sum(labels * log softmax(logits)), and only the option label_smoothing is
        supported.
    class_weights
        Weight of each class, (K,). The result is a weighted mean: the weight of a label is the
        weight of its class. By default, all weights are 1.
    label_smoothing
        Fraction of the target probability that is spread evenly over all K classes.
    ignore_label
        A label that is left out of the mean, such as 255 for unlabelled pixels.
    focal_gamma
        Exponent of the focal loss. If p is the probability of the label, the term of the label is
        multiplied by (1 - p)**focal_gamma.

    Returns
    -------
    Partial
        The mean, a float64 scalar. The mean is 0 if all labels are ignored.

    Raises
    ------
    ValueError
        If a label is outside 0..K-1 and is not ignored, or if an argument is out of range.

    Notes
    -----
    Label smoothing is described in Szegedy et al., "Rethinking the Inception architecture", 2016,
    section 7. Class weights have the same effect as in PyTorch's `cross_entropy`. The focal loss is
    equation 5 of Lin et al., "Focal loss for dense object detection", 2017.
    """
    scores = value_of(logits)
    check_scores("softmax_cross_entropy", scores)
    check_ignored("softmax_cross_entropy", ignore_label, scores.shape[1])
    rule = _rule(scores.shape[1], class_weights, label_smoothing, focal_gamma)
    if is_soft(labels, scores):
        if rule.class_weights is not None or rule.gamma or ignore_label is not None:
            raise ValueError(
                "softmax_cross_entropy: expected integer labels with class_weights, ignore_label "
                "or focal_gamma, got floats"
            )
        return soft_cross_entropy(logits, labels, smoothing=rule.smoothing)
    return _cross_entropy_of_labels(logits, labels, rule=rule, ignore_label=ignore_label)


def _rule(
    classes: int, class_weights: ClassWeights, label_smoothing: float, focal_gamma: float
) -> LabelRule:
    """Check the arguments of `softmax_cross_entropy`, and return them as a LabelRule."""
    name = "softmax_cross_entropy"
    weights = checked_weights(name, "class_weights", class_weights, classes)
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"{name}: label_smoothing must be at least 0 and below 1, got {label_smoothing}"
        )
    gamma = checked_number(name, "focal_gamma", focal_gamma)
    if label_smoothing and gamma:
        raise ValueError(f"{name}: the focal loss takes no label_smoothing")
    return LabelRule(weights, float(label_smoothing), gamma)


def label_count(
    scores: Blocked | Var,
    labels: Blocked,
    *,
    class_weights: ClassWeights = None,
    ignore_label: int | None = None,
) -> Partial:
    """Count the labels that are not ignored, or sum the class weights of these labels.

    Parameters
    ----------
    scores
        Scores of the classes, (N, K) or (N, K, ...).
    labels
        Integers, (N,) or (N, ...).
    class_weights
        Weight of each class, (K,). By default, all weights are 1.
    ignore_label
        A label that is not counted.

    Returns
    -------
    Partial
        The sum, a float64 scalar.
    """
    value: Blocked = value_of(scores)
    classes, batch = value.shape[1], value.batch
    check_ignored("label_count", ignore_label, classes)
    rule = _rule(classes, class_weights, 0.0, 0.0)
    lanes = label_lanes("label_count", labels, value, ignore_label)
    return backends.of_value(value).label_weight(lanes, batch.counts(), batch.tree, rule, classes)


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
    MATLAB's `mse` instead divides the sum over all elements of N images by 2N.
    """
    return _mean_error("mean_squared_error", y, target, 2)


@op(blocks=True)
def mean_absolute_error(y: Blocked, target: Blocked | Var) -> WithVjp[Partial]:
    """Return the mean of |y - target| over all elements of the global mini-batch.

    The gradient is 0 where `y` equals `target`.

    Parameters
    ----------
    y : Blocked
        The network's outputs, (N, ...).
    target : Blocked
        The targets, in the shape of `y`. Dimensions of size 1 are ignored.

    Returns
    -------
    Partial
        The mean, a float64 scalar.
    """
    return _mean_error("mean_absolute_error", y, target, 1)


def _mean_error(name: str, y: Blocked, target: Any, power: int) -> WithVjp[Partial]:
    """Check the arguments; return the mean of |y - target|**power and its vjp."""
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

    def vjp(dy: Any, needs: Needs) -> tuple[Any, ...]:
        def slope(a: Any, b: Any) -> Any:
            return backend.errors_dy(a, b, power, weight * (power * float(dy)), counts)

        return (
            y.like(slope(lanes, target_lanes)) if needs[0] else None,
            target.like(slope(target_lanes, lanes).reshape(target.lanes.shape))
            if needs[1]
            else None,
        )

    return total * weight, vjp


def correct_count(
    logits: Blocked | Var, labels: Blocked, *, ignore_label: int | None = None
) -> Partial:
    """Count the images or pixels whose label is the class with the largest score.

    If several classes have the largest score, the first of these classes is the prediction. The
    count is not differentiable.

    Parameters
    ----------
    logits
        Scores, (N, K), or (N, K, ...) for one label per pixel.
    labels
        Integers from 0 to K-1, (N,) or (N, ...), or probabilities of the classes, such as one-hot
        targets. Probabilities are floats in the shape of the scores. In this case, an image adds
        the probability of the class with the largest score to the count.
    ignore_label
        A label outside 0..K-1, which is never correct.

    Returns
    -------
    Partial
        The count, a scalar. The count is NaN if a score is NaN, unless its label is ignored.
    """
    scores: Blocked = value_of(logits)
    check_scores("correct_count", scores)
    if is_soft(labels, scores):
        return soft_correct_count(scores, value_of(labels))
    lanes = label_lanes("correct_count", labels, scores, ignore_label)
    batch = scores.batch
    return backends.of_value(scores).correct_count(scores.lanes, lanes, batch.counts(), batch.tree)
