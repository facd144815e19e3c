"""Select the images for each part of a split and for each cross-validation fold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal

import numpy as np

from mpidl.core import keyed
from mpidl.errors import UserError
from mpidl.text import class_names

SLACK = 1e-9  # allowed rounding error of a sum of fractions


def select(
    labels: np.ndarray,
    parts: Sequence[float],
    seed: int,
    classes: Sequence[str] | None,
    owner: str,
) -> list[np.ndarray]:
    """Return sorted indices of the images of each part of a split.

    `parts` are the sizes of all parts except the last, as fractions or as numbers of images per
    label; the last part has the remaining images. Raises UserError if the sizes are invalid, or if
    a label has too few images.
    """
    sizes = check_sizes(parts)
    part_of_image = np.full(len(labels), len(sizes))
    for label in np.unique(labels):
        (members,) = np.nonzero(labels == label)
        ends = [sum(sizes[:i], type(sizes[0])(0)) for i in range(len(sizes) + 1)]
        if isinstance(sizes[0], Decimal):
            ends = [_rounded(min(end, Decimal(1)) * len(members)) for end in ends]
        elif ends[-1] > len(members):
            images = "images"
            if classes is not None:
                images += f" of class {class_names(classes, int(label) + 1)[-1]}"
            raise UserError(
                f"{owner}: split: expected at least {ends[-1]} {images}, found {len(members)}"
            )
        order = keyed.permutation(len(members), seed, f"split {label}")
        for i in range(len(sizes)):
            part_of_image[members[order[ends[i] : ends[i + 1]]]] = i
    return [np.nonzero(part_of_image == i)[0] for i in range(len(sizes) + 1)]


def fold_numbers(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Assign each image to one of `count` folds from 0, stratified by label.

    The images are shuffled within each label and then assigned to the folds in round-robin order.
    Each label starts at the fold after the previous label's last image. For each label, the numbers
    of images in any two folds therefore differ by at most 1. The sizes of any two folds also differ
    by at most 1.
    """
    numbers = np.empty(len(labels), np.int64)
    start = 0
    for label in np.unique(labels):
        (members,) = np.nonzero(labels == label)
        order = keyed.permutation(len(members), seed, f"fold {label}")
        numbers[members[order]] = (start + np.arange(len(members))) % count
        start += len(members)
    return numbers


def check_sizes(parts: Sequence[float]) -> list[Decimal] | list[int]:
    """Return fractions as exact decimals, or counts as integers; raise UserError if invalid.

    Decimals avoid rounding errors: 0.29 * 50 is 14.5, but 14.499999999999998 with binary floats.
    """
    shown_parts = ", ".join(map(repr, parts)) or "none"
    if parts and all(isinstance(part, float | np.floating) for part in parts):
        numbers = [float(part) for part in parts]
        if not all(map(math.isfinite, numbers)) or min(numbers) < 0 or sum(numbers) > 1 + SLACK:
            raise UserError(
                "split: expected fractions between 0 and 1, which add up to at most 1, found "
                f"{shown_parts}"
            )
        return [Decimal(str(number)) for number in numbers]
    is_count = [isinstance(p, int | np.integer) and not isinstance(p, bool) for p in parts]
    if parts and all(is_count):
        counts = [int(part) for part in parts]
        if min(counts) < 0:
            raise UserError(f"split: expected counts of at least 0, found {shown_parts}")
        return counts
    raise UserError(
        "split: expected fractions such as 0.8, 0.1, or images per label such as 100, 20, found "
        f"{shown_parts}; the images are always selected at random (see seed=)"
    )


def _rounded(exact):
    return int(exact.to_integral_value(ROUND_HALF_UP))
