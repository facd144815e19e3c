"""Losses of the overlap of regions for semantic segmentation, as differentiable ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidl import backends
from mpidl.backends.training_interface import OverlapRule
from mpidl.core.blocks import Blocked
from mpidl.core.fold import Partial
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Needs, Var, value_of
from mpidl.ops.check import are_numbers
from mpidl.ops.composed import composed
from mpidl.ops.label_checks import (
    check_ignored,
    check_scores,
    checked_number,
    checked_weights,
    label_lanes,
)

__all__ = ["dice_loss", "tversky_loss"]

EPSILON = 1e-8  # the default smoothing of the generalized loss, as in MATLAB


@op(blocks=True)
def _overlap(
    scores: Blocked, labels: Any, *, name: str, rule: OverlapRule, ignore_label: int | None
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
    name: str,
    scores: Blocked,
    labels: Blocked | Var,
    *,
    rule: OverlapRule,
    ignore_label: int | None,
) -> Partial:
    """Check the arguments of the op `name`, and return its loss."""
    value: Blocked = value_of(scores)
    check_scores(name, value)
    classes = value.shape[1]
    weights = checked_weights(name, "class_weights", rule.class_weights, classes)
    if weights is not None and not weights.any():
        raise ValueError(f"{name}: class_weights: expected a number > 0, got only 0")
    check_ignored(name, ignore_label, max(classes, 2))
    smooth = checked_number(name, "smooth", rule.smooth)
    rule = rule._replace(class_weights=weights, smooth=smooth)
    return _overlap(scores, labels, name=name, rule=rule, ignore_label=ignore_label)


@composed
def dice_loss(
    scores: Blocked,
    labels: Blocked | Var,
    *,
    class_weights: Sequence[float] | np.ndarray | None = None,
    smooth: float | None = None,
    ignore_label: int | None = None,
    generalized: bool = False,
) -> Partial:
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


@composed
def tversky_loss(
    scores: Blocked,
    labels: Blocked | Var,
    *,
    alpha: float = 0.3,
    beta: float = 0.7,
    class_weights: Sequence[float] | np.ndarray | None = None,
    smooth: float = 1.0,
    ignore_label: int | None = None,
) -> Partial:
    """Return the Tversky loss, which weights false positives and false negatives differently.

    For a class, let p be the class's probability at a pixel, and g be 1 if the label of the pixel
    is the class, else 0. With sums over the pixels of an image, let TP = sum p g, FP =
    sum p (1 - g) and FN = sum (1 - p) g. The similarity of the class in the image is
    (2 TP + s) / (2 TP + 2 alpha FP + 2 beta FN + s), with smoothing s. The loss is the mean of
    1 - similarity over the classes, and then over the images of the mini-batch.

    Parameters
    ----------
    scores
        Scores before the softmax, (N, K, ...), or before the sigmoid if K is 1, (N, 1, ...).
    labels
        Integers from 0 to K-1, (N, ...). If K is 1, the label 1 is the foreground, and 0 is the
        background.
    alpha, beta
        Weights of the false positives and the false negatives, numbers >= 0, at least one of them
        above 0. A larger beta finds more pixels of rare classes, with more false alarms.
    class_weights, smooth, ignore_label
        See `dice_loss`. The default of `smooth` is 1 pixel.

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
    See Salehi, Erdogmus and Gholipour, "Tversky loss function for image segmentation using 3D fully
    convolutional deep networks", 2017, arXiv:1706.05721. The paper's network is best with alpha =
    0.3 and beta = 0.7. With alpha = beta = 0.5, the loss is a Dice loss with p instead of p**2 in
    the denominator; with alpha = beta = 1, it is 1 minus the intersection over union, with a
    smoothing of s / 2.
    """
    check_error_weights("tversky_loss", alpha, beta)
    rule = OverlapRule(
        class_weights,
        smooth,
        is_squared=False,
        below=2.0 * (1 - alpha - beta),
        chances=2.0 * alpha,
        labelled=2.0 * beta,
    )
    return _overlap_loss("tversky_loss", scores, labels, rule=rule, ignore_label=ignore_label)


def check_error_weights(name: str, alpha: Any, beta: Any) -> None:
    """Raise ValueError unless the weights of a Tversky loss are valid."""
    valid = are_numbers(alpha, beta) and 0 <= alpha < math.inf and 0 <= beta < math.inf
    if not valid or alpha + beta == 0:
        raise ValueError(
            f"{name}: expected numbers alpha and beta >= 0, not both 0, got {alpha!r} and {beta!r}"
        )
