"""The transposed convolution op and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mpidl import backends
from mpidl.backends.shapes import same_cropping, transposed_conv2d_shape
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Array, Needs
from mpidl.ops import check

__all__ = ["transposed_conv2d"]


def same_or_crops(
    name: str, cropping: check.PaddingArgument, size: Sequence[int], stride: Sequence[int]
) -> check.Sides:
    """Convert `cropping`, which may be "same", to ((top, bottom), (left, right)).

    Parameters
    ----------
    cropping
        A value for `check.pads`, or "same". With "same", the output is `stride` times as high and
        as wide as the images. If the number of cropped rows or columns is odd, an extra row is
        cropped at the bottom, and an extra column on the right.
    size, stride
        Size and stride of the filters, each (down, across).

    Raises
    ------
    ValueError
        If `cropping` is invalid, or if it is "same" and the filters are smaller than the stride.
    """
    if cropping != "same":
        return check.pads(name, cropping, "cropping")
    if any(taps < step for taps, step in zip(size, stride, strict=True)):
        raise ValueError(
            f"{name}: cropping 'same' requires filters at least as large as the stride {stride}, "
            f"got {size}"
        )
    return same_cropping(size, stride)


@functools.lru_cache(maxsize=256)
def _arguments(
    image_shape: check.Shape,
    weight_shape: check.Shape,
    bias_shape: check.Shape | None,
    stride: check.PairArgument,
    cropping: check.PaddingArgument,
) -> tuple[check.Pair, check.Sides]:
    """Check the arguments; return (stride, cropping). The cache avoids repeated checks."""
    name = "transposed_conv2d"
    if len(weight_shape) != 4 or weight_shape[0] != image_shape[0]:
        raise ValueError(
            f"{name}: expected weight ({image_shape[0]}, K, R, S), got weight {weight_shape} for "
            f"images {image_shape}"
        )
    if bias_shape not in (None, weight_shape[1:2]):
        raise ValueError(f"{name}: expected bias ({weight_shape[1]},), got {bias_shape}")
    stride = check.pair(name, "stride", stride, 1)
    cropping = same_or_crops(name, cropping, weight_shape[2:], stride)
    size = transposed_conv2d_shape(image_shape, weight_shape, stride, cropping)
    if min(size) < 1:
        raise ValueError(f"{name}: cropping {cropping} leaves no output for images {image_shape}")
    return stride, cropping


@op(blocks=True)
def transposed_conv2d(
    x: Blocked,
    weight: Array,
    bias: Array | None,
    *,
    stride: check.PairArgument = 1,
    cropping: check.PaddingArgument = 0,
) -> WithVjp[Blocked]:
    """Compute a transposed convolution: the gradient of a convolution with respect to its images.

    Each pixel of x is multiplied by each filter. The product is added to the output at `stride`
    times the position of the pixel. Then `cropping` pixels are removed at each side.

    Parameters
    ----------
    x
        Images (N, C, H, W).
    weight
        Filters (C, K, R, S), as in PyTorch's ConvTranspose2d.
    bias
        Biases (K,), or None for no bias.
    stride
        An integer or (down, across).
    cropping
        Number of pixels to remove: an integer, (down, across) or ((top, bottom), (left, right)).
        With "same", P = stride * H and Q = stride * W, as in MATLAB's transposedConv2dLayer.

    Returns
    -------
    Blocked
        Images (N, K, P, Q) with P = stride * (H - 1) + R - top - bottom and
        Q = stride * (W - 1) + S - left - right.
    """
    check.images("transposed_conv2d", x, 4)
    bias_shape = None if bias is None else bias.shape
    conv_args = _arguments(
        x.image_shape, weight.shape, bias_shape, check.fixed(stride), check.fixed(cropping)
    )
    backend, batch, lanes = backends.of_value(x), x.batch, x.raw
    y = backend.transposed_conv2d(lanes, weight, bias, *conv_args)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        dx, dweight, dbias = backend.transposed_conv2d_backward(
            dy.raw, lanes, weight, *conv_args, batch.counts(), batch.tree, needs
        )
        return None if dx is None else x.like(dx), dweight, dbias

    return x.like(y), vjp
