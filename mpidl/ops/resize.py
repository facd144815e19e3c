"""The ops that resize images, and their gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from mpidl import backends
from mpidl.backends.deferred import readable
from mpidl.backends.taps import Taps
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Needs
from mpidl.ops import check
from mpidl.text import did_you_mean

__all__ = ["resize2d"]

Mode: TypeAlias = Literal["nearest", "bilinear"]
Coordinates: TypeAlias = Literal["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
Rounding: TypeAlias = Literal["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]
ScaleArgument: TypeAlias = float | Sequence[float]  # one number for both axes, or (down, across)

DEFAULTS: dict[str, Coordinates] = {"nearest": "asymmetric", "bilinear": "half_pixel"}
MOST_DIGITS = 10**6  # a scale is the nearest fraction whose denominator is at most this number


class Rule(NamedTuple):
    """How pixels are resized: checked arguments of `resize2d`."""

    mode: Mode
    coordinates: Coordinates
    rounding: Rounding


def resample(x: Blocked, rows: Taps, columns: Taps) -> WithVjp[Blocked]:
    """Return the weighted sums of pixels that two tables list, and the vjp."""
    backend = backends.of_value(x)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        dx = backend.resample(dy.raw, rows.transposed, columns.transposed)
        return (x.like(dx), None)[: len(needs)]

    return x.like(backend.resample(readable(x), rows, columns)), vjp


@op(blocks=True)
def resize2d(
    x: Blocked,
    size: check.PairArgument | None = None,
    *,
    scale: ScaleArgument | None = None,
    mode: Mode = "nearest",
    coordinates: Coordinates | None = None,
    rounding: Rounding = "floor",
) -> WithVjp[Blocked]:
    """Resize images to a size, or by a scale.

    Parameters
    ----------
    x
        Images, (N, C, H, W).
    size
        Size of the result in pixels, an integer or (rows, columns).
    scale
        Factor of the size, a number or (down, across), instead of `size`. The result has
        floor(scale * H) rows. A number such as 0.333333 stands for the nearest fraction with a
        denominator of at most 10^6. All positions are computed exactly.
    mode
        "nearest" copies one pixel. "bilinear" interpolates between two rows and two columns. Both
        read no more pixels when they reduce images: there is no antialiasing.
    coordinates
        Position in x of the pixel i of the result. For n pixels of x, m pixels of the result and
        the scale s, which is m / n unless `scale` is given:

        - "half_pixel": (i + 0.5) / s - 0.5. PyTorch's align_corners=False; the default of
          "bilinear".
        - "pytorch_half_pixel": the same, but 0 if m is 1.
        - "align_corners": i * (n - 1) / (m - 1), or 0 if m is 1.
        - "asymmetric": i / s. PyTorch's "nearest"; the default of "nearest".

        Positions outside of x become the nearest position in x.
    rounding
        With "nearest", how a position becomes a pixel: "floor" as in PyTorch, "ceil",
        "round_prefer_floor" or "round_prefer_ceil". PyTorch's "nearest-exact" has "half_pixel" and
        "round_prefer_ceil". ONNX's default is "half_pixel" and "round_prefer_floor".

    Returns
    -------
    Blocked
        The resized images, (N, C, P, Q).

    Raises
    ------
    ValueError
        If an argument is invalid, if not exactly one of `size` and `scale` is given, or if the
        result has no pixels.
    """
    check.images("resize2d", x, 4)
    rule = checked_rule("resize2d", mode, coordinates, rounding)
    outputs, steps = output_size("resize2d", x.image_shape, size, scale)
    rows, columns = map(functools.partial(_taps, rule), x.image_shape[1:], outputs, steps)
    return resample(x, rows, columns)


def checked_rule(name: str, mode: Any, coordinates: Any, rounding: Any) -> Rule:
    """Check arguments of `resize2d`; `name` is the name of the op or layer, for error messages."""
    values = {"mode": mode, "coordinates": coordinates, "rounding": rounding}
    valid = {"mode": Mode, "coordinates": Coordinates, "rounding": Rounding}
    for option, value in values.items():
        names = get_args(valid[option])
        if value not in names and not (option == "coordinates" and value is None):
            raise ValueError(
                f"{name}: {option}: expected {', '.join(names[:-1])} or {names[-1]}, got "
                f"{value!r}{did_you_mean(str(value), names)}"
            )
    return Rule(mode, DEFAULTS[mode] if coordinates is None else coordinates, rounding)


def output_size(
    name: str,
    image_shape: Sequence[int],
    size: check.PairArgument | None,
    scale: ScaleArgument | None,
) -> tuple[list[int], list[Fraction]]:
    """Return the size of the result in pixels, and the distances of its pixels in pixels of x.

    The arguments are those of `resize2d`, which documents the errors. `name` is the name of the op
    or layer, for error messages.
    """
    if len(image_shape) != 3:
        raise ValueError(f"{name}: expected images (C, H, W), got {tuple(image_shape)}")
    if (size is None) == (scale is None):
        raise ValueError(f"{name}: expected either size or scale, got {size} and {scale}")
    _, *pixels = image_shape
    if size is not None:
        outputs: list[int] = list(check.pair(name, "size", size, 1))
        return outputs, [Fraction(n, m) for n, m in zip(pixels, outputs, strict=True)]
    scales = _fractions(name, scale)
    outputs = [math.floor(n * s) for n, s in zip(pixels, scales, strict=True)]
    if min(outputs) < 1:
        raise ValueError(f"{name}: scale {scale} leaves no pixels of images {tuple(image_shape)}")
    return outputs, [1 / s for s in scales]


def _fractions(name: str, scale: Any) -> list[Fraction]:
    both = check.as_pair(scale)
    if len(both) != 2 or not all(check.are_numbers(s) and math.isfinite(s) and s > 0 for s in both):
        raise ValueError(f"{name}: scale must be one or two numbers > 0, got {scale!r}")
    fractions = [Fraction(s).limit_denominator(MOST_DIGITS) for s in both]
    if min(fractions) == 0:
        raise ValueError(f"{name}: scale must be at least 1 / {MOST_DIGITS}, got {scale!r}")
    return fractions


@functools.lru_cache(maxsize=256)
def _taps(rule: Rule, pixels: int, outputs: int, step: Fraction) -> Taps:
    """Return the table of one axis. `step` is the distance of two outputs, in pixels of x."""
    positions = (_position(rule.coordinates, i, pixels, outputs, step) for i in range(outputs))
    inside = (min(max(position, Fraction(0)), Fraction(pixels - 1)) for position in positions)
    if rule.mode == "nearest":
        return Taps(pixels, [[(_rounded(rule.rounding, position), 1.0)] for position in inside])
    return Taps(pixels, [_between(position) for position in inside])


def _position(
    coordinates: Coordinates, i: int, pixels: int, outputs: int, step: Fraction
) -> Fraction:
    if outputs == 1 and coordinates in ("align_corners", "pytorch_half_pixel"):
        return Fraction(0)
    if coordinates == "align_corners":
        return Fraction(i * (pixels - 1), outputs - 1)
    if coordinates == "asymmetric":
        return i * step
    half = Fraction(1, 2)
    return (i + half) * step - half


def _rounded(rounding: Rounding, position: Fraction) -> int:
    half = Fraction(1, 2)
    if rounding == "floor":
        return math.floor(position)
    if rounding == "ceil":
        return math.ceil(position)
    if rounding == "round_prefer_floor":
        return math.ceil(position - half)
    return math.floor(position + half)


def _between(position: Fraction) -> list[tuple[int, float]]:
    """Return the two pixels next to a position, or the pixel at the position."""
    first = math.floor(position)
    after = position - first
    taps = [(first, float(1 - after)), (first + 1, float(after))]
    return taps if after else taps[:1]
