"""Ops for max and average pooling, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidl import backends
from mpidl.backends.deferred import GradientWithSums
from mpidl.backends.shapes import Windows, pool2d_shape
from mpidl.backends.taps import Taps
from mpidl.core.blocks import Blocked
from mpidl.core.fold import Partial
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Needs, value_of
from mpidl.ops import check
from mpidl.ops.composed import composed
from mpidl.ops.resize import resample

__all__ = ["adaptive_average_pool2d", "average_pool2d", "global_average_pool2d", "max_pool2d"]

PLACES = 256  # maximum number of pixels in a max pooling window: one byte stores a position


def windows(
    name: str,
    image_shape: Sequence[int],
    size: check.PairArgument,
    stride: check.PairArgument | None,
    padding: check.PaddingArgument,
    places: int | None = None,
) -> tuple[Windows, tuple[int, ...]]:
    """Check the arguments of a pooling op; return them as Windows, and the shape of an output.

    Parameters
    ----------
    name
        Name of the op or layer, for error messages.
    image_shape
        Shape of an image, (C, H, W).
    size, stride, padding
        As in `max_pool2d`.
    places
        Maximum number of pixels in a window; None for no limit.

    Raises
    ------
    ValueError
        If no window fits the image, if a window has too many pixels, or if a window could contain
        only padding.
    """
    if len(image_shape) != 3:
        raise ValueError(f"{name}: expected images (C, H, W), got {image_shape}")
    size = check.pair(name, "size", size, 1)
    stride = check.pair(name, "stride", size if stride is None else stride, 1)
    padding = check.same_or_pads(name, padding, image_shape[1:], size, stride)
    if any(side >= n for n, sides in zip(size, padding, strict=True) for side in sides):
        raise ValueError(f"{name}: padding must be smaller than size {size}, got {padding}")
    if places and size[0] * size[1] > places:
        raise ValueError(f"{name}: a window has at most {places} pixels, got size {size}")
    shape = pool2d_shape(image_shape, size, stride, padding)
    if min(shape) < 1:
        raise ValueError(f"{name}: windows of {size} leave no output for images {image_shape}")
    return Windows(size, stride, padding), shape


def _cotangent(x: Blocked, dx: Any, sums: Partial | None) -> Blocked:
    """Return the cotangent of x. `sums` is None or the backend's `activation_sums` of dx."""
    return x.like(dx) if sums is None else GradientWithSums(dx, x.batch, sums)


@op(blocks=True)
def max_pool2d(
    x: Blocked,
    size: check.PairArgument,
    *,
    stride: check.PairArgument | None = None,
    padding: check.PaddingArgument = 0,
) -> WithVjp[Blocked]:
    """Return the largest pixel of each window.

    Parameters
    ----------
    x
        Images, (N, C, H, W).
    size
        Size of a window, an integer or (rows, columns). A window may have at most 256 pixels.
    stride
        An integer or (down, across); by default the size. If the stride is smaller than the size,
        windows overlap.
    padding
        As in `conv2d`, including "same". The padding must be smaller than the size. Padding is
        never the largest pixel.

    Returns
    -------
    Blocked
        The result, (N, C, P, Q), with P = (H + top + bottom - rows) // stride + 1 and the
        corresponding Q.

    Notes
    -----
    The gradient of a window goes to its largest pixel. If several pixels are equally large, the
    gradient goes to the first of these pixels in row-major order.
    """
    check.images("max_pool2d", x, 4)
    places, _ = windows("max_pool2d", x.image_shape, size, stride, padding, PLACES)
    backend = backends.of_value(x)
    y, argmax = backend.max_pool2d(x.source, places)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        dx, sums = backend.max_pool2d_dx(dy.raw, argmax, x.source, places, x.batch.tree)
        return (_cotangent(x, dx, sums), None)[: len(needs)]

    return x.like(y), vjp


@composed
def global_average_pool2d(x: Blocked) -> Blocked:
    """Return the mean of each channel over the pixels of an image.

    Parameters
    ----------
    x : Blocked or Var
        Images (N, C, H, W).

    Returns
    -------
    Blocked or Var
        The means, (N, C, 1, 1).
    """
    check.images("global_average_pool2d", value_of(x), 4)
    return average_pool2d(x, tuple(x.shape[2:]))


@composed
def adaptive_average_pool2d(x: Blocked, size: check.PairArgument) -> Blocked:
    """Return the means of windows that divide images into rows and columns of windows.

    Row i of P rows of windows has the pixels from floor(i * H / P) to before ceil((i + 1) * H / P),
    as in PyTorch. If P does not divide H, the windows have different sizes, and may share pixels.

    Parameters
    ----------
    x : Blocked or Var
        Images (N, C, H, W).
    size : int or (int, int)
        Size of the result in pixels, an integer or (rows, columns).

    Returns
    -------
    Blocked or Var
        The means, (N, C, P, Q).
    """
    check.images("adaptive_average_pool2d", value_of(x), 4)
    outputs = check.pair("adaptive_average_pool2d", "size", size, 1)
    if all(n % m == 0 for n, m in zip(x.shape[2:], outputs, strict=True)):
        return average_pool2d(x, (x.shape[2] // outputs[0], x.shape[3] // outputs[1]))
    return _adaptive_average_pool2d(x, outputs)


@op(blocks=True)
def _adaptive_average_pool2d(x: Blocked, outputs: check.Pair) -> WithVjp[Blocked]:
    rows, columns = map(adaptive_taps, x.image_shape[1:], outputs)
    return resample(x, rows, columns)


@functools.lru_cache(maxsize=256)
def adaptive_taps(pixels: int, outputs: int) -> Taps:
    """Return the weights of the windows of adaptive average pooling along one axis."""
    windows = [
        range(i * pixels // outputs, -(-(i + 1) * pixels // outputs)) for i in range(outputs)
    ]
    return Taps(pixels, [[(pixel, 1 / len(window)) for pixel in window] for window in windows])


def pooling_matrix(pixels: int, outputs: int) -> np.ndarray:
    """Return the weights of `adaptive_taps` as a matrix (outputs, pixels) of float32 numbers."""
    matrix = np.zeros((outputs, pixels), np.float32)
    for row, taps in zip(matrix, adaptive_taps(pixels, outputs).outputs, strict=True):
        for pixel, weight in taps:
            row[pixel] = weight
    return matrix


@op(blocks=True)
def average_pool2d(
    x: Blocked,
    size: check.PairArgument,
    *,
    stride: check.PairArgument | None = None,
    padding: check.PaddingArgument = 0,
    count_padding: bool = True,
) -> WithVjp[Blocked]:
    """Return the mean of each window.

    Parameters
    ----------
    x
        Images, (N, C, H, W).
    size
        Size of a window, an integer or (rows, columns).
    stride
        An integer or (down, across); by default the size. If the stride is smaller than the size,
        windows overlap.
    padding
        As in `conv2d`, including "same". The padding must be smaller than the size.
    count_padding
        Whether padding counts as zeros. If True, the sum of a window is divided by the full size of
        the window, as with MATLAB's PaddingValue 0 and PyTorch's count_include_pad. If False, the
        sum is divided by the number of image pixels in the window, as with MATLAB's PaddingValue
        "mean".

    Returns
    -------
    Blocked
        The result, (N, C, P, Q), with P = (H + top + bottom - rows) // stride + 1 and the
        corresponding Q.
    """
    check.images("average_pool2d", x, 4)
    places, _ = windows("average_pool2d", x.image_shape, size, stride, padding)
    backend = backends.of_value(x)
    y = backend.average_pool2d(x.source, places, count_padding)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        dx, sums = backend.average_pool2d_dx(dy.raw, x.source, places, count_padding, x.batch.tree)
        return (_cotangent(x, dx, sums), None)[: len(needs)]

    return x.like(y), vjp
