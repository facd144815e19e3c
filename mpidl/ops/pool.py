"""Pooling."""

from typing import NamedTuple

from mpidl import backends
from mpidl.autodiff.tape import op, value_of
from mpidl.backends.reference import pool2d_shape
from mpidl.blocks import GradientWithSums
from mpidl.ops import check

PLACES = 256  # what a byte can tell apart


class Windows(NamedTuple):
    """Where the windows lie, (down, across) and ((top, bottom), (left, right)); shape (C, P, Q)."""

    size: tuple
    stride: tuple
    padding: tuple
    shape: tuple


def windows(name, image_shape, size, stride, padding, places=None):
    """The Windows of pooling images of this shape; ValueError where there are none, or where one
    has more than `places` pixels or could lie in the padding alone."""
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
        raise ValueError(f"{name}: windows of {size} leave nothing of images {image_shape}")
    return Windows(size, stride, padding, shape)


def _cotangent(x, dx, sums):
    return x.like(dx) if sums is None else GradientWithSums(dx, x.batch, sums)


@op(blocks=True)
def max_pool2d(x, size, *, stride=None, padding=0):
    """The largest pixel of each window.

    x: (N, C, H, W); size: an integer or (rows, columns), at most 256 pixels in all; returns
    (N, C, P, Q) with P = (H + top + bottom - rows) // stride + 1, Q likewise. stride (the size
    where None) is an integer or (down, across): smaller than the size, windows overlap. padding,
    as in `conv2d` ("same" too) and smaller than the size, is never the largest. The gradient goes
    to the largest pixel, of equal ones to the first, row by row.
    """
    check.images("max_pool2d", x, 4)
    *how, _ = windows("max_pool2d", x.image_shape, size, stride, padding, PLACES)
    backend = backends.of(x)
    y, argmax = backend.max_pool2d(x.source, *how)

    def vjp(dy, needs):
        found = backend.max_pool2d_dx(dy.lanes, argmax, x.source, *how, x.batch.tree)
        return (_cotangent(x, *found), None)[: len(needs)]

    return x.like(y), vjp


def global_average_pool2d(x):
    """The mean of each channel over all of its pixels. x: (N, C, H, W); returns (N, C, 1, 1)."""
    check.images("global_average_pool2d", value_of(x), 4)
    return average_pool2d(x, tuple(x.shape[2:]))


@op(blocks=True)
def average_pool2d(x, size, *, stride=None, padding=0):
    """The mean of each window: its sum over `size`, in which padding counts as zeros.

    x: (N, C, H, W); size: an integer or (rows, columns); returns (N, C, P, Q) with
    P = (H + top + bottom - rows) // stride + 1, Q likewise. stride (the size where None) is an
    integer or (down, across): smaller than the size, windows overlap. padding as in `conv2d`
    ("same" too), smaller than the size; it counts as MATLAB's PaddingValue 0 and PyTorch's
    count_include_pad do.
    """
    check.images("average_pool2d", x, 4)
    *how, _ = windows("average_pool2d", x.image_shape, size, stride, padding)
    backend = backends.of(x)
    y = backend.average_pool2d(x.source, *how)

    def vjp(dy, needs):
        found = backend.average_pool2d_dx(dy.lanes, x.source, *how, x.batch.tree)
        return (_cotangent(x, *found), None)[: len(needs)]

    return x.like(y), vjp
