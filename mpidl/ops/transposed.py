"""Transposed convolution."""

import functools

from mpidl import backends
from mpidl.autodiff.tape import op
from mpidl.ops import check
from mpidl.shapes import Pads, Pair, same_cropping, transposed_conv2d_shape


def crops(name, cropping, size, stride):
    """Cropping given as `check.pads` takes it, or "same", as ((top, bottom), (left, right)).

    "same": so that the output is stride times as large as the images; what is odd goes at the
    bottom and at the right.
    """
    if cropping != "same":
        return check.pads(name, cropping, "cropping")
    if any(taps < step for taps, step in zip(size, stride, strict=True)):
        raise ValueError(
            f"{name}: cropping 'same' asks for filters at least as large as the stride {stride}, "
            f"got {size}"
        )
    return same_cropping(size, stride)


@functools.lru_cache(maxsize=256)
def _arguments(image_shape, weight_shape, bias_shape, stride, cropping) -> tuple[Pair, Pads]:
    name = "transposed_conv2d"
    if len(weight_shape) != 4 or weight_shape[0] != image_shape[0]:
        raise ValueError(
            f"{name}: expected weight ({image_shape[0]}, K, R, S), got weight {weight_shape} for "
            f"images {image_shape}"
        )
    if bias_shape != weight_shape[1:2]:
        raise ValueError(f"{name}: expected bias ({weight_shape[1]},), got {bias_shape}")
    stride = check.pair(name, "stride", stride, 1)
    cropping = crops(name, cropping, weight_shape[2:], stride)
    size = transposed_conv2d_shape(image_shape, weight_shape, stride, cropping)
    if min(size) < 1:
        raise ValueError(f"{name}: cropping {cropping} leaves nothing of images {image_shape}")
    return stride, cropping


@op(blocks=True)
def transposed_conv2d(x, weight, bias, *, stride=1, cropping=0):
    """Transposed convolution: the gradient of a convolution with respect to its images, forwards.

    x: (N, C, H, W); weight: (C, K, R, S), as PyTorch's ConvTranspose2d has it; bias: (K,); returns
    (N, K, P, Q) with P = stride * (H - 1) + R - top - bottom, Q likewise: each pixel of x times a
    filter is added to the output at `stride` times its place, of which `cropping` pixels are then
    cut off. stride is an integer or (down, across); cropping is an integer, (down, across),
    ((top, bottom), (left, right)), or "same", for P = stride * H (MATLAB's transposedConv2dLayer).
    """
    check.images("transposed_conv2d", x, 4)
    how = _arguments(
        x.image_shape, weight.shape, bias.shape, check.fixed(stride), check.fixed(cropping)
    )
    backend, batch, lanes = backends.of(x), x.batch, x.lanes
    y = backend.transposed_conv2d(lanes, weight, bias, *how)

    def vjp(dy, needs):
        dx, dweight, dbias = backend.transposed_conv2d_backward(
            dy.lanes, lanes, weight, *how, batch.counts(), batch.tree, needs
        )
        return None if dx is None else x.like(dx), dweight, dbias

    return x.like(y), vjp
