"""Sizes of images, and windows at their centre."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidl.errors import UserError


def checked_size(name: str, value: Any) -> tuple[int, int]:
    """Return a size as (height, width) of at least 1.

    Raises UserError if the value is not such a size. The message contains the argument's `name`.
    """
    try:
        height, width = (int(n) for n in value)
    except (TypeError, ValueError):
        raise UserError(f"{name}: expected (height, width), got {value!r}") from None
    if min(height, width) < 1:
        raise UserError(f"{name}: expected a height and a width of at least 1, got {value!r}")
    return height, width


def centred(shape: Sequence[int], crop: Sequence[int]) -> tuple[int, int]:
    """Return (top, left) of a centred window of size `crop` (P, Q) in images (C, H, W)."""
    return (shape[1] - crop[0]) // 2, (shape[2] - crop[1]) // 2
