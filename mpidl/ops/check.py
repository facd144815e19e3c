"""Check and convert the arguments of ops. Error messages show expected and actual values."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from mpidl.backends import shapes
from mpidl.core.blocks import Blocked

Shape: TypeAlias = tuple[int, ...]
Pair: TypeAlias = tuple[int, int]  # (down, across)
PairArgument: TypeAlias = int | Sequence[int]  # one integer for both axes, or (down, across)
Sides: TypeAlias = tuple[Pair, Pair]  # ((top, bottom), (left, right))
PaddingArgument: TypeAlias = (
    int | str | Sequence[int] | Sequence[Sequence[int]]
)  # see `same_or_pads`

BLOCKED = (  # the end of error messages: how to get a Blocked value
    "dl.MinibatchQueue yields such values, dl.from_images(array, dl.share(count, world)) "
    "converts an array"
)


def images(name: str, x: Any, ndim: int | None = None) -> Blocked:
    """Check that x is a Blocked value, and return it.

    Parameters
    ----------
    name
        Name of the op, for error messages.
    ndim
        Required number of axes of x, including the axis of images; None for any number.

    Raises
    ------
    TypeError
        If x is not a Blocked value.
    ValueError
        If x does not have `ndim` axes.
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
    """Convert an option to a hashable value.

    Lists become tuples, and NumPy numbers become Python numbers.
    """
    return tuple(fixed(v) for v in value) if isinstance(value, (list, tuple)) else plain(value)


def plain(value: Any) -> Any:
    """Convert a NumPy number, or all NumPy numbers in a list or tuple, to Python numbers."""
    if isinstance(value, list):
        return [plain(v) for v in value]
    if type(value) is tuple:
        return tuple(plain(v) for v in value)
    return value.item() if isinstance(value, np.generic) else value


def integer(name: str, option: str, value: Any, minimum: int = 1) -> int:
    """Return `value`, or raise ValueError unless it is an integer >= minimum."""
    if not _is_integer(value, minimum):
        raise ValueError(f"{name}: {option} must be an integer >= {minimum}, got {value!r}")
    return value


def _is_integer(value: Any, minimum: int | None) -> TypeGuard[int]:
    return (
        isinstance(value, numbers.Integral)
        and not isinstance(value, bool)
        and (minimum is None or int(value) >= minimum)
    )


def are_numbers(*values: Any) -> bool:
    """Return whether all values are real numbers, of Python or NumPy types."""
    return all(isinstance(value, numbers.Real) for value in values)


def as_pair(value: Any) -> tuple[Any, ...]:
    """Return (down, across), given a pair or one value for both axes."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value, value)


def pair(name: str, option: str, value: Any, minimum: int) -> Pair:
    """Return an option as (down, across), or raise ValueError unless both are ints >= minimum."""
    both = as_pair(value)
    if len(both) != 2 or not all(_is_integer(v, minimum) for v in both):
        raise ValueError(
            f"{name}: {option} must be one or two integers >= {minimum}, got {value!r}"
        )
    return both


def pads(
    name: str,
    value: Any,
    option: str = "padding",
    alternative: str = "",
    minimum: int | None = 0,
) -> Sides:
    """Return padding as ((top, bottom), (left, right)).

    Parameters
    ----------
    value
        An integer, (down, across) or ((top, bottom), (left, right)), in pixels.
    option, alternative
        Name of the option and a further form of the value, for error messages.
    minimum
        The lowest number of pixels, or None if the numbers may be negative.

    Raises
    ------
    ValueError
        If the value has another form or contains a number below the minimum.
    """
    both = tuple(as_pair(v) for v in as_pair(value))
    sides = [v for axis in both for v in axis]
    if len(both) != 2 or len(sides) != 4 or not all(_is_integer(v, minimum) for v in sides):
        bound = "" if minimum is None else f" >= {minimum}"
        raise ValueError(
            f"{name}: {option} must be an integer{bound}, (down, across) or ((top, bottom), (left, "
            f"right)){alternative}, got {value!r}"
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
    """Convert padding, which may be "same", to ((top, bottom), (left, right)).

    Parameters
    ----------
    value
        A value for `pads`, or "same". With "same", the output for an image (H, W) has
        ceil(H / stride) x ceil(W / stride) pixels. If the number of padded rows or columns is odd,
        an extra row is at the bottom, and an extra column is on the right.
    image
        Size of the image, (H, W).
    size, stride, dilation
        Size, stride and dilation of the filters or windows, each (down, across).
    """
    if value != "same":
        return pads(name, value, alternative=" or 'same'")
    return shapes.same_padding(image, size, stride, dilation)
