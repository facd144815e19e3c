"""Losses of the overlap of regions for semantic segmentation, as differentiable ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from mpidl import backends
from mpidl.backends.training_interface import OverlapRule
from mpidl.core.blocks import Blocked
from mpidl.core.fold import Partial
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Needs, Var, value_of
from mpidl.ops.label_checks import check_scores, label_lanes

__all__ = ["dice_loss"]

EPSILON = 1e-8  # the default smoothing of the generalized loss, as in MATLAB


@op(blocks=True)
def _overlap(
    scores: Blocked, labels: Blocked, *, name: str, rule: OverlapRule, ignore_label: int | None
) -> WithVjp[Partial]:
    lanes = label_lanes(name, labels, scores, ignore_label, max(scores.shape[1], 2))
    backend, batch, x = backends.of_value(scores), scores.batch, scores.lanes
    counts, is_single = batch.counts(), scores.shape[1] == 1
    if is_single:
        y = backend.elementwise("sigmoid", x)
        p = y.astype(np.float64)
    else:
        p = backend.softmax(x)
    total, slopes = backend.overlap(p, lanes, counts, batch.tree, rule)

    def vjp(dy: Any, needs: Needs) -> tuple[Any, ...]:
        d = backend.overlap_dp(p, lanes, slopes, batch.per_image * float(dy), counts, rule)
        d = backend.elementwise_dx("sigmoid", d, y) if is_single else backend.softmax_dx(d, p)
        return scores.like(d if d.dtype == x.dtype else d.astype(x.dtype)), None

    return total * batch.per_image, vjp


def _overlap_loss(
    name: str, scores: Any, labels: Any, *, rule: OverlapRule, ignore_label: int | None
) -> Partial | Var:
    """Check the arguments of the op `name`, and return its loss."""
    value: Blocked = value_of(scores)
    check_scores(name, value)
    classes = value.shape[1]
    if rule.class_weights is not None:
        weights = np.array(rule.class_weights, np.float64)
        valid = np.isfinite(weights) & (weights >= 0)
        if weights.shape != (classes,) or not valid.all() or not weights.any():
            raise ValueError(
                f"{name}: class_weights: expected {classes} numbers >= 0, one per class, got "
                f"{np.array2string(weights, threshold=10)}"
            )
        rule = rule._replace(class_weights=weights)
    if not 0 <= rule.smooth < math.inf:
        raise ValueError(f"{name}: smooth must be a number >= 0, got {rule.smooth}")
    if ignore_label is not None and 0 <= ignore_label < max(classes, 2):
        raise ValueError(
            f"{name}: ignore_label must be outside 0..{max(classes, 2) - 1}, the classes of the "
            f"scores, got {ignore_label}"
        )
    rule = rule._replace(smooth=float(rule.smooth))
    loss: Partial | Var = _overlap(scores, labels, name=name, rule=rule, ignore_label=ignore_label)
    return loss


@overload
def dice_loss(
    scores: Blocked,
    labels: Blocked,
    *,
    class_weights: Sequence[float] | np.ndarray | None = None,
    smooth: float | None = None,
    ignore_label: int | None = None,
    generalized: bool = False,
) -> Partial: ...
@overload
def dice_loss(
    scores: Var,
    labels: Blocked | Var,
    *,
    class_weights: Sequence[float] | np.ndarray | None = None,
    smooth: float | None = None,
    ignore_label: int | None = None,
    generalized: bool = False,
) -> Var: ...
def dice_loss(
    scores: Any,
    labels: Any,
    *,
    class_weights: Sequence[float] | np.ndarray | None = None,
    smooth: float | None = None,
    ignore_label: int | None = None,
    generalized: bool = False,
) -> Partial | Var:
    """Return the soft Dice loss: 1 minus the similarity of probabilities and labels.

    For a class, let p be the class's probability at a pixel, and g be 1 if the label of the pixel
    is the class, else 0. The similarity of the class in an image is
    (2 sum p g + s) / (sum p**2 + sum g + s), with sums over the pixels and smoothing s. The loss is
    the mean of 1 - similarity over the classes, and then over the images of the mini-batch.

    Parameters
    ----------
    scores
        Scores before the softmax, (N, K, ...), or before the sigmoid if K is 1, (N, 1, ...).
    labels
        Integers from 0 to K-1, (N, ...). If K is 1, the label 1 is the foreground, and 0 is the
        background.
    class_weights
        Weight of each class in the mean over the classes, (K,), such as 0 for the background. By
        default, all weights are equal.
    smooth
        The smoothing s, at least 0. The default is 1 pixel, or 1e-8 if `generalized` is True. With
        0, a class that is absent from an image has the similarity 0.
    ignore_label
        A label whose pixels are left out of the sums, such as 255 for unlabelled pixels.
    generalized
        Whether to compute the generalized loss. It adds up the sums of all classes before the
        division: 1 - (2 sum v I + s) / (sum v U + s), where I is the overlap `sum p g` of a class,
        and U is `sum p**2 + sum g`. The weight v of a class is its class weight divided by the
        square of the number of its pixels in the image, so a large s, such as 1, hides the other
        terms. A class without pixels in the image has the weight of the smallest class that has
        pixels.

    Returns
    -------
    Partial
        The mean, a float64 scalar that is not yet summed over the ranks.

    Raises
    ------
    ValueError
        If a label is outside the classes and is not ignored, or if an argument is out of range.

    Notes
    -----
    The loss is equation 3 of Milletari et al., "V-Net: fully convolutional neural networks for
    volumetric medical image segmentation", 2016, with smoothing and the mean over classes. The
    generalized loss is described in Sudre et al., "Generalised Dice overlap as a deep learning loss
    function", 2017. As in MATLAB's `generalizedDice`, the denominator contains p**2 instead of p.
    If a score is NaN or infinite, so that p is NaN, the loss is NaN.
    """
    if smooth is None:
        smooth = EPSILON if generalized else 1.0
    rule = OverlapRule(class_weights, smooth, bool(generalized))
    return _overlap_loss("dice_loss", scores, labels, rule=rule, ignore_label=ignore_label)
