"""Check labels and targets against the scores of a network, for the ops of losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidl.core.blocks import LANES, Blocked
from mpidl.ops import check


def label_lanes(
    name: str,
    labels: Any,
    scores: Blocked,
    ignore_label: int | None = None,
    classes: int | None = None,
) -> Any:
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
    ignore_label
        A label outside 0..K-1 that is valid too.
    classes
        Number of classes K; by default the number of classes of the scores.

    Raises
    ------
    TypeError
        If the labels are not blocked integers.
    ValueError
        If the shape of the labels does not match the scores, or if a label is neither in 0..K-1 nor
        `ignore_label`.
    """
    if not isinstance(labels, Blocked):
        raise TypeError(
            f"{name}: expected integer labels, one per image (Blocked), got "
            f"{type(labels).__name__}; {check.BLOCKED}"
        )
    if labels.dtype.kind not in "iu":
        raise TypeError(
            f"{name}: expected integer labels, or floats of shape {scores.shape} as targets, got "
            f"{labels.dtype} of shape {labels.shape}"
        )
    channels, *pixels = scores.image_shape
    classes = channels if classes is None else classes
    if squeezed(labels.image_shape) != squeezed(pixels):
        raise ValueError(
            f"{name}: expected labels of shape {(scores.shape[0], *pixels)}, one for each "
            f"{'pixel' if pixels else 'image'} of scores {scores.shape}, got {labels.shape}"
        )
    lanes = labels.lanes.reshape(len(labels.lanes), *pixels, LANES)
    check_bounds(name, labels.lanes, lanes, classes, ignore_label)
    return lanes


def check_bounds(
    name: str, uploaded: Any, lanes: Any, classes: int, ignore_label: int | None
) -> None:
    """Raise ValueError if a label is outside 0..classes-1 and is not ignored.

    The host checks labels on a GPU later, when it knows the smallest and largest label.

    Parameters
    ----------
    name
        Name of the op, for error messages.
    uploaded
        The labels as they are stored. On a GPU, the Array has the attribute `bounds`.
    lanes
        The same labels in another shape.
    classes
        Number of classes.
    ignore_label
        A label that is valid too.
    """
    if not lanes.size:
        return

    def check_limits(low: Any, high: Any) -> None:
        if ignore_label is not None:  # on a GPU, low or high may be the ignored label
            low = max(low, 0) if low == ignore_label else low
            high = min(high, classes - 1) if high == ignore_label else high
        if not 0 <= low <= high < classes:
            raise ValueError(
                f"{name}: expected labels in 0..{classes - 1}, the classes of the scores, got "
                f"{low}..{high}"
            )

    if isinstance(lanes, np.ndarray):
        counted = lanes if ignore_label is None else lanes[lanes != ignore_label]
        if counted.size:
            check_limits(counted.min(), counted.max())
    else:  # the host checks the bounds of labels on a GPU later
        uploaded.bounds.hold(check_limits)


def checked_weights(
    name: str, option: str, weights: Any, count: int, noun: str = "class"
) -> np.ndarray | None:
    """Return weights as float64 (count,), or None; raise ValueError if they are invalid."""
    if weights is None:
        return None
    numbers = np.array(weights, np.float64)
    if numbers.shape != (count,) or not (np.isfinite(numbers) & (numbers >= 0)).all():
        raise ValueError(
            f"{name}: {option}: expected {count} numbers >= 0, one per {noun}, got "
            f"{np.array2string(numbers, threshold=10)}"
        )
    return numbers


def check_ignored(name: str, ignore_label: int | None, classes: int) -> None:
    """Raise ValueError if the ignored label is one of the classes."""
    if ignore_label is not None and 0 <= ignore_label < classes:
        raise ValueError(
            f"{name}: ignore_label must be outside 0..{classes - 1}, the classes of the scores, "
            f"got {ignore_label}"
        )


def checked_number(name: str, option: str, value: float) -> float:
    """Return a number as a float; raise ValueError unless it is at least 0 and finite."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}: {option} must be a number >= 0, got {value}")
    return float(value)


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without its dimensions of size 1."""
    return tuple(n for n in shape if n != 1)


def check_scores(name: str, scores: Any) -> None:
    """Raise an error unless the scores are Blocked and have the shape (N, K) or (N, K, ...)."""
    check.images(name, scores)
    if len(scores.shape) < 2:
        raise ValueError(f"{name}: expected scores (N, K) or (N, K, ...), got {scores.shape}")
