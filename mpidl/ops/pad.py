"""The padding op and its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpidl import backends
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Needs
from mpidl.ops import check

__all__ = ["pad2d"]


def check_value(name: str, value: Any) -> None:
    """Raise ValueError unless the padding value is a finite number."""
    if not (check.are_numbers(value) and math.isfinite(value)):
        raise ValueError(f"{name}: value must be a finite number, got {value!r}")


def check_sides(name: str, padding: Any, shape: Sequence[int]) -> check.Sides:
    """Return padding of images (C, H, W) as ((top, bottom), (left, right)).

    Raise ValueError if it has another form, or if no pixels are left.
    """
    sides = check.pads(name, padding, minimum=None)
    for pixels, (before, after) in zip(shape[1:], sides, strict=True):
        # A side that removes all pixels would leave only new pixels of the other side.
        if min(before, after, before + after) <= -pixels:
            raise ValueError(f"{name}: padding {padding!r} leaves no pixels of images {shape}")
    return sides


@op(blocks=True)
def pad2d(x: Blocked, padding: check.PaddingArgument, *, value: float = 0.0) -> WithVjp[Blocked]:
    """Surround images with pixels of a constant value, or remove pixels.

    Parameters
    ----------
    x
        Images, (N, C, H, W).
    padding
        Number of pixels to add at each side: an integer, (down, across) or
        ((top, bottom), (left, right)). A negative number removes pixels.
    value
        Value of the new pixels.

    Returns
    -------
    Blocked
        The padded images, (N, C, top + H + bottom, left + W + right).

    Raises
    ------
    ValueError
        If an argument is invalid, or if no pixels are left.
    """
    check.images("pad2d", x, 4)
    sides = check_sides("pad2d", padding, x.image_shape)
    check_value("pad2d", value)
    backend = backends.of_value(x)
    y = backend.pad2d(x.raw, sides, value)
    (top, bottom), (left, right) = sides
    negated = (-top, -bottom), (-left, -right)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        return (x.like(backend.pad2d(dy.raw, negated, 0.0)), None)[: len(needs)]

    return x.like(y), vjp
