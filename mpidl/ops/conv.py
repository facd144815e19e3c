"""Convolution."""

import functools

from mpidl import backends
from mpidl.autodiff.tape import op
from mpidl.ops import check
from mpidl.shapes import Pads, Pair, conv2d_shape


def conv2d_arguments(
    x, weight, bias, stride, padding, dilation, groups
) -> tuple[Pair, Pads, Pair, int]:
    """(stride, padding, dilation, groups) as backends take them, of arguments that fit together."""
    check.images("conv2d", x, 4)
    how = (check.fixed(v) for v in (stride, padding, dilation))
    return _arguments(x.shape[1:], weight.shape, bias.shape, *how, groups)


@functools.lru_cache(maxsize=256)
def _arguments(image_shape, weight_shape, bias_shape, stride, padding, dilation, groups):
    stride = check.pair("conv2d", "stride", stride, 1)
    dilation = check.pair("conv2d", "dilation", dilation, 1)
    channels = image_shape[0]
    if len(weight_shape) != 4 or weight_shape[1] * groups != channels or weight_shape[0] % groups:
        raise ValueError(
            f"conv2d: expected weight (K, {channels}/groups, R, S) with K a multiple of "
            f"groups={groups}, got weight {weight_shape} for images {image_shape}"
        )
    if bias_shape != weight_shape[:1]:
        raise ValueError(f"conv2d: expected bias ({weight_shape[0]},), got {bias_shape}")
    padding = check.same_or_pads(
        "conv2d", padding, image_shape[1:], weight_shape[2:], stride, dilation
    )
    size = conv2d_shape(image_shape, weight_shape, stride, padding, dilation)
    if min(size[1:]) < 1:
        raise ValueError(f"conv2d: filters {weight_shape} leave nothing of images {image_shape}")
    return stride, padding, dilation, groups


@op(blocks=True)
def conv2d(x, weight, bias, *, stride=1, padding=0, dilation=1, groups=1):
    """2-D cross-correlation.

    x: (N, C, H, W); weight: (K, C/groups, R, S); bias: (K,); returns (N, K, P, Q) with
    P = (H + top + bottom - dilation * (R - 1) - 1) // stride + 1, Q likewise. stride and dilation
    are integers or (down, across); padding is an integer, (down, across) or
    ((top, bottom), (left, right)) pixels of zero, or "same", for P = ceil(H / stride), where of an
    odd number of rows the one more is at the bottom, of columns at the right.
    """
    how = conv2d_arguments(x, weight, bias, stride, padding, dilation, groups)
    backend = backends.of(x)
    y = backend.conv2d(x.source, weight, bias, *how)

    def vjp(dy, needs):
        batch = x.batch
        dx, dweight, dbias, _ = backend.conv2d_backward(
            dy.lanes, x.source, weight, *how, batch.counts(), batch.tree, needs
        )
        return None if dx is None else x.like(dx), dweight, dbias

    return x.like(y), vjp
