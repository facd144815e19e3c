"""Two-dimensional convolution ops, with and without a fused ReLU, and their gradients."""

from __future__ import annotations

import functools
from typing import Any

from mpidl import backends
from mpidl.backends.shapes import Geometry, conv2d_shape
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Array, Needs
from mpidl.ops import check

__all__ = ["conv2d"]


def conv2d_geometry(x: Any, weight: Array, bias: Array | None, **options: Any) -> Geometry:
    """Check the arguments of `conv2d`, and return the Geometry for a backend.

    Raises
    ------
    TypeError, ValueError
        If the arguments of `conv2d` are invalid.
    """
    check.images("conv2d", x, 4)
    return geometry_for(x.shape[1:], weight, bias, **options)


def geometry_for(
    image_shape: check.Shape,
    weight: Array,
    bias: Array | None,
    *,
    stride: check.PairArgument = 1,
    padding: check.PaddingArgument = 0,
    dilation: check.PairArgument = 1,
    groups: int = 1,
) -> Geometry:
    """Return the Geometry of a convolution of images (C, H, W); see `conv2d_geometry`."""
    options = (check.fixed(v) for v in (stride, padding, dilation))
    bias_shape = None if bias is None else bias.shape
    return _arguments(image_shape, weight.shape, bias_shape, *options, groups)


@functools.lru_cache(maxsize=256)
def _arguments(
    image_shape: check.Shape,
    weight_shape: check.Shape,
    bias_shape: check.Shape | None,
    stride: check.PairArgument,
    padding: check.PaddingArgument,
    dilation: check.PairArgument,
    groups: int,
) -> Geometry:
    """Check and convert the arguments. The cache avoids repeated checks in later mini-batches."""
    stride = check.pair("conv2d", "stride", stride, 1)
    dilation = check.pair("conv2d", "dilation", dilation, 1)
    channels = image_shape[0]
    if len(weight_shape) != 4 or weight_shape[1] * groups != channels or weight_shape[0] % groups:
        raise ValueError(
            f"conv2d: expected weight (K, {channels}/groups, R, S) with K a multiple of "
            f"groups={groups}, got weight {weight_shape} for images {image_shape}"
        )
    if bias_shape not in (None, weight_shape[:1]):
        raise ValueError(f"conv2d: expected bias ({weight_shape[0]},), got {bias_shape}")
    padding = check.same_or_pads(
        "conv2d", padding, image_shape[1:], weight_shape[2:], stride, dilation
    )
    size = conv2d_shape(image_shape, weight_shape, stride, padding, dilation)
    if min(size[1:]) < 1:
        raise ValueError(f"conv2d: filters {weight_shape} leave no output for images {image_shape}")
    return Geometry(stride, padding, dilation, groups)


@op(blocks=True)
def conv2d_relu(
    x: Blocked,
    /,
    weight: Array,
    bias: Array | None,
    addend: Blocked | None = None,
    **options: Any,
) -> WithVjp[Blocked]:
    """Return relu(conv2d(x, weight, bias) + addend), computed in one pass over the output.

    In float32, the result has the same bytes as the result of separate ops. The backend's attribute
    `fuses_convolutions` must be True.

    Parameters
    ----------
    x, weight, bias
        As in `conv2d`.
    addend
        A value with the shape of the convolution's output, such as the input of a residual block;
        by default nothing is added.
    **options
        The stride, padding, dilation and groups of `conv2d`.

    Returns
    -------
    Blocked
        The result, (N, K, P, Q).
    """
    geometry = conv2d_geometry(x, weight, bias, **options)
    backend, batch = backends.of_value(x), x.batch
    shape = conv2d_shape(x.shape[1:], weight.shape, *geometry[:3])
    if addend is not None and addend.shape[1:] != shape:
        raise ValueError(
            f"conv2d_relu: expected an addend of images {shape}, got {addend.shape[1:]}"
        )
    joined = None if addend is None else addend.raw
    y = backend.conv2d_relu(x.source, weight, bias, geometry, joined)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        dz: Any = dy.raw
        relu: tuple[Any, ...] | None = (y,)
        if addend is not None:  # dz is also the cotangent of the addend
            dz, relu = backend.relu_dx(dz, y), None
        dx, dweight, dbias, _ = backend.conv2d_backward(
            dz,
            x.source,
            weight,
            geometry,
            batch.counts(),
            batch.tree,
            needs[:3],
            activation_after=relu,
        )
        gradients = None if dx is None else x.like(dx), dweight, dbias
        return gradients if addend is None else (*gradients, addend.like(dz))

    return x.like(y), vjp


@op(blocks=True)
def conv2d(
    x: Blocked,
    weight: Array,
    bias: Array | None,
    *,
    stride: check.PairArgument = 1,
    padding: check.PaddingArgument = 0,
    dilation: check.PairArgument = 1,
    groups: int = 1,
) -> WithVjp[Blocked]:
    """Compute a 2-D cross-correlation.

    Parameters
    ----------
    x
        Images, (N, C, H, W).
    weight
        Filters, (K, C/groups, R, S).
    bias
        Biases, (K,), or None for a convolution without bias.
    stride, dilation
        An integer or (down, across).
    padding
        Number of zero pixels to add at each side: an integer, (down, across) or
        ((top, bottom), (left, right)). With "same", P = ceil(H / stride) and Q = ceil(W / stride).
        If "same" needs an odd number of rows or columns, an extra row is at the bottom, and an
        extra column is on the right.
    groups
        Number of groups of channels. Each filter reads the channels of one group.

    Returns
    -------
    Blocked
        The result, (N, K, P, Q), with P = (H + top + bottom - dilation * (R - 1) - 1) // stride + 1
        and the corresponding Q.
    """
    geometry = conv2d_geometry(
        x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    backend = backends.of_value(x)
    y = backend.conv2d(x.source, weight, bias, geometry)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        batch = x.batch
        dx, dweight, dbias, _ = backend.conv2d_backward(
            dy.raw, x.source, weight, geometry, batch.counts(), batch.tree, needs
        )
        return None if dx is None else x.like(dx), dweight, dbias

    return x.like(y), vjp
