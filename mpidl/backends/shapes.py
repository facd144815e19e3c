"""Compute output shapes of convolution and pooling, "same" padding, and windows over channels.

A pair is `(down, across)`. Padding and cropping are `((top, bottom), (left, right))`. All shapes
are for one image. The functions do not check their arguments, because callers have checked them
with `ops.check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Pair = tuple[int, int]
Pads = tuple[tuple[int, int], tuple[int, int]]


class Geometry(NamedTuple):
    """How the filters of a convolution move over the images."""

    stride: Pair
    padding: Pads
    dilation: Pair = (1, 1)
    groups: int = 1


POINT = Geometry((1, 1), ((0, 0), (0, 0)))  # of filters that read one pixel


class Windows(NamedTuple):
    """Where the windows of a pooling function are in the images."""

    size: Pair
    stride: Pair
    padding: Pads


class ChannelNorm(NamedTuple):
    """The numbers of a cross-channel normalization."""

    window: int
    alpha: float
    beta: float
    k: float


def conv2d_shape(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: Pair,
    padding: Pads,
    dilation: Pair,
) -> tuple[int, int, int]:
    """Return (K, P, Q) of a convolution of one (C, H, W) image by (K, C/groups, R, S) filters."""
    p, q = (
        (pixels + sum(pads) - step_in * (taps - 1) - 1) // step + 1
        for pixels, pads, step_in, taps, step in zip(
            x_shape[1:], padding, dilation, weight_shape[2:], stride, strict=True
        )
    )
    return weight_shape[0], p, q


def pool2d_shape(
    x_shape: Sequence[int], size: Pair, stride: Pair, padding: Pads
) -> tuple[int, int, int]:
    """Return (C, P, Q) of pooling one (C, H, W) image over windows of `size`."""
    return conv2d_shape(x_shape, (x_shape[0], 1, *size), stride, padding, (1, 1))


def transposed_conv2d_shape(
    x_shape: Sequence[int], weight_shape: Sequence[int], stride: Pair, cropping: Pads
) -> tuple[int, int, int]:
    """Return (K, P, Q) of a transposed convolution of a (C, H, W) image by (C, K, R, S) filters."""
    p, q = (
        step * (pixels - 1) + taps - sum(crop)
        for pixels, taps, step, crop in zip(
            x_shape[1:], weight_shape[2:], stride, cropping, strict=True
        )
    )
    return weight_shape[1], p, q


def same_padding(
    image_size: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Pads:
    """Return the padding that makes the output size ceil(H / stride) x ceil(W / stride).

    `image_size` is (H, W). If an axis needs an odd number of padded pixels, the extra one is at the
    bottom or on the right.
    """
    totals = (
        max(0, (-(-pixels // step) - 1) * step + step_in * (taps - 1) + 1 - pixels)
        for pixels, taps, step, step_in in zip(image_size, size, stride, dilation, strict=True)
    )
    down, across = ((total // 2, total - total // 2) for total in totals)
    return down, across


def same_cropping(size: Sequence[int], stride: Sequence[int]) -> Pads:
    """Return the cropping that makes a transposed convolution enlarge images `stride` times.

    `size` must be at least the stride. If an axis needs an odd number of cropped pixels, the extra
    one is cropped at the bottom or on the right.
    """
    down, across = (
        ((taps - step) // 2, taps - step - (taps - step) // 2)
        for taps, step in zip(size, stride, strict=True)
    )
    return down, across


def channel_window(size: int) -> Pair:
    """Return (channels before, channels after) a channel in its window of `size` channels.

    If `size` is even, there is one more channel after than before, as in MATLAB.
    """
    return (size - 1) // 2, size // 2


Axes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def product_axes(y: Sequence[int], a: Sequence[int], b: Sequence[int]) -> Axes:
    """Return the sizes of three axes of a product, and the steps of both operands along them.

    `y` is the shape of the product. `a` and `b` have equally many axes, of the size in `y` or 1.
    All shapes list the axes as they are in memory, the fastest last. Neighbouring axes are merged
    if each operand has both or neither of them. The step of an operand is the distance of
    neighbours in memory, and 0 along an axis that the operand lacks.
    """
    merged: list[tuple[int, tuple[bool, bool]]] = [(1, (True, True))] * 3
    for size, *parts in zip(y, a, b, strict=True):
        has = parts[0] == size, parts[1] == size
        if size > 1 and merged[-1][0] > 1 and merged[-1][1] == has:
            merged[-1] = merged[-1][0] * size, has
        elif size > 1:
            merged.append((size, has))
    if any(size > 1 for size, _ in merged[:-3]):
        raise ValueError(f"expected at most three axes of different broadcasting, got {a} and {b}")
    axes, steps = merged[-3:], [1, 1]
    all_steps: list[tuple[int, int]] = []
    for size, has in reversed(axes):
        all_steps.insert(0, (steps[0] * has[0] * (size > 1), steps[1] * has[1] * (size > 1)))
        steps = [step * size if part else step for step, part in zip(steps, has, strict=True)]
    of_a, of_b = zip(*all_steps, strict=True)
    return tuple(size for size, _ in axes), of_a, of_b
