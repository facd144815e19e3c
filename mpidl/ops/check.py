"""Checks of an op's arguments. Each error says what was expected and what was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from mpidl import shapes
from mpidl.blocks import Blocked

Pair: TypeAlias = tuple[int, int]  # (down, across)
PairArgument: TypeAlias = int | Sequence[int]  # both at once, or (down, across)
Sides: TypeAlias = tuple[Pair, Pair]  # ((top, bottom), (left, right))
PaddingArgument: TypeAlias = (
    int | str | Sequence[int] | Sequence[Sequence[int]]
)  # see `same_or_pads`

BLOCKED = (  # the end of an error message: how to get a value per image
    "a dl.MinibatchQueue gives such values, dl.from_images(array, dl.share(count, world)) makes "
    "one of an array"
)


def images(name: str, x: Any, ndim: int | None = None) -> Blocked:
    """Return x, which must be blocked.

    Parameters
    ----------
    name
        The op that the error names.
    ndim
        Number of axes of x including the axis of the images, or None for any number.

    Raises
    ------
    TypeError
        If x is not a Blocked value.
    ValueError
        If x has another number of axes.
    """
    if not isinstance(x, Blocked):
        raise TypeError(
            f"{name}: expected a value per image (Blocked), got {type(x).__name__}; {BLOCKED}"
        )
    if ndim is not None and len(x.shape) != ndim:
        axes = "(N, C, H, W)" if ndim == 4 else f"{ndim} axes"
        raise ValueError(f"{name}: expected x of shape {axes}, got {x.shape}")
    return x


def fixed(value: Any) -> Any:
    """Return an option as an immutable value: lists become tuples."""
    return tuple(fixed(v) for v in value) if isinstance(value, (list, tuple)) else value


def integer(name: str, option: str, value: Any, minimum: int = 1) -> int:
    """Return value; raise a ValueError unless it is an integer >= minimum."""
    if not _is_integer(value, minimum):
        raise ValueError(f"{name}: {option} must be an integer >= {minimum}, got {value!r}")
    return value


def _is_integer(value, minimum):
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def are_numbers(*values: Any) -> bool:
    """Return whether each value is an int or a float."""
    return all(isinstance(value, (int, float)) for value in values)


def as_pair(value: Any) -> tuple:
    """Return (down, across) of a value that was given once or as both."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value, value)


def pair(name: str, option: str, value: Any, minimum: int) -> Pair:
    """Return an option as (down, across); raise a ValueError unless both are >= minimum."""
    both = as_pair(value)
    if len(both) != 2 or not all(_is_integer(v, minimum) for v in both):
        raise ValueError(f"{name}: {option} must be an integer >= {minimum} or two, got {value!r}")
    return both


def pads(name: str, value: Any, option: str = "padding") -> Sides:
    """Return padding as ((top, bottom), (left, right)).

    Parameters
    ----------
    value
        An integer, (down, across) or ((top, bottom), (left, right)), in pixels.
    option
        The option that the error names.

    Raises
    ------
    ValueError
        For any other value, or a negative number.
    """
    both = tuple(as_pair(v) for v in as_pair(value))
    sides = [v for axis in both for v in axis]
    if len(both) != 2 or len(sides) != 4 or not all(_is_integer(v, 0) for v in sides):
        raise ValueError(
            f"{name}: {option} must be an integer >= 0, (down, across) or ((top, bottom), (left, "
            f"right)), got {value!r}"
        )
    return both


def same_or_pads(
    name: str,
    value: PaddingArgument,
    image: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int] = (1, 1),
) -> Sides:
    """Return padding as ((top, bottom), (left, right)), also if it is given as "same".

    Parameters
    ----------
    value
        See `pads`, or "same": an image (H, W) then gives ceil(H / stride) x ceil(W / stride)
        outputs. An odd row goes to the bottom, an odd column to the right.
    image
        (H, W).
    size, stride, dilation
        (down, across) of the filters or windows.
    """
    if value != "same":
        return pads(name, value)
    return shapes.same_padding(image, size, stride, dilation)
