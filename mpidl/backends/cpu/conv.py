"""Compute convolutions with the C kernels, optionally fused with neighbouring activations."""

import functools
import math

import numpy as np

from mpidl.backends import settings, shapes
from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import (
    NO_NORM,
    as_type,
    nodes_of,
    operand,
    partial_of_rows,
    per_channel,
    source_of,
    tree_of,
)
from mpidl.backends.deferred import NormalizedInput
from mpidl.core.blocks import LANES
from mpidl.core.fold import Partial, Term, add, merge_moments

NOTHING_AFTER = None, *NO_NORM, None, None, None  # y, its activation, and a, b, c
# Minimum numbers of channels for Winograd's algorithm:
SAVING = 8  # in gradients and, with "fast" and filters larger than 3x3, in forward passes
FEW = 16  # in forward passes with "auto" and 3x3 filters
MANY_5X5 = 32  # in forward passes with "auto" and 5x5 filters
# Minimum numbers of inputs for larger tiles in forward passes with "auto" and 3x3 filters:
WIDE = 32  # for tiles of 2x4 outputs
LARGE = 128  # for tiles of 4x4 outputs


@functools.lru_cache(maxsize=256)
def _sizes(x_shape, weight_shape, geometry):
    """Return `struct conv` of kernels/cpu/conv.h as an int64 array, and the output shape."""
    stride, padding, dilation, groups = geometry
    k, _, r, s = weight_shape
    _, p, q = shapes.conv2d_shape(x_shape, weight_shape, stride, padding, dilation)
    (top, bottom), (left, right) = padding
    c, h, w = x_shape
    padded_x = (h + top + bottom) * (w + left + right)
    padded_dy = math.prod(
        _padded_gradient(*sizes)
        for sizes in zip((h, w), (p, q), (r, s), (top, left), stride, dilation, strict=True)
    )
    for channels, pixels in ((c // groups, padded_x), (k // groups, padded_dy)):
        if channels * (pixels + 64 * (h + w)) * LANES >= 1 << 31:  # the C kernels use int32 offsets
            raise ValueError(
                f"conv2d: images {x_shape} or {(k, p, q)} with padding are too large: expected "
                f"at most 2^27 pixels over all channels of a group, found {channels * pixels}"
            )
    shape = [*x_shape, k, p, q, r, s, *stride, top, bottom, left, right, *dilation, groups]
    return np.array(shape, np.int64), (k, p, q)


def _padded_gradient(pixels, outputs, taps, before, stride, dilation):
    """Return the number of rows (or columns) of the padded gradient, as in `lay_out_dy` of conv.c.

    The padding before the first output extends to the output that the last filter tap reaches from
    the first pixel. The padding after the last output extends to the output that the first filter
    tap reaches from the last pixel.
    """
    reach = max(dilation * (taps - 1) - before, 0)
    beyond = (pixels - 1 + before) // stride - (outputs - 1)
    return -(-reach // stride) + outputs + max(beyond, 0)


@functools.lru_cache(maxsize=256)
def winograd_tiles(weight_shape, stride, padding, dilation, output, policy):
    """Return the Winograd tile sizes of the forward, dx and dweight passes.

    A tile size is 10 * rows + columns of a tile's outputs; 0 means direct sums.

    Parameters
    ----------
    weight_shape : (K, C, R, S)
        Shape of the weights of one group.
    output : (K, P, Q)
        Shape of the output.
    policy : {"auto", "off", "fast"}
        See `backends.configure`.

    Notes
    -----
    The choice depends only on the policy and the arguments of the layer. The kernels support 3x3
    and 5x5 filters at stride 1. In forward and dweight passes, the kernels compute a larger filter
    at stride s as a 3x3 or 5x5 filter at stride 1 on s * s times as many channels.

    Backward passes use tiles of 4x4 outputs, whose error is at most a few times the error of a
    direct sum. With 5x5 filters the error is larger, and dx would pass the error on to all earlier
    layers. Therefore "auto" uses tiles of 2x2 for dx with 5x5 filters.

    In forward passes, an error can change the sign of a ReLU's input. Therefore "auto" uses the
    largest tile whose root mean square error is at most about 1.4 times the error of a direct sum
    in float32. The error of a direct sum grows with the number of inputs, and the error of a tile
    hardly does, so more inputs permit larger tiles. Only "fast" always uses tiles of 4x4, except
    for filters from one channel to one channel.

    Gradients with fewer than SAVING channels, and outputs smaller than a tile, use direct sums. So
    do filters that fill less than two thirds of the equivalent filter at stride 1. In these cases,
    the transforms would cost more than they save. With "auto", forward passes with fewer than FEW
    channels, or MANY_5X5 channels with 5x5 filters, use direct sums, too.

    References
    ----------
    Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016.
    """
    k, c, r, s = weight_shape
    step = stride[0]
    side = -(-r // step)  # size of the equivalent filter at stride 1
    fits = r == s and stride == (step, step) and dilation == (1, 1) and side in (3, 5)
    fits = fits and 3 * r**2 >= 2 * (side * step) ** 2
    sides = [v for pair in padding for v in pair]
    if policy == "off" or not fits or max(sides) >= r or min(output[1:]) < 4:
        return 0, 0, 0
    fast = policy == "fast" and c * k > 1
    c *= step**2
    channels = min(c, k)
    enough = channels >= SAVING
    if side == 3:
        auto = 0 if channels < FEW else 44 if c >= LARGE else 24 if c >= WIDE else 22
        dx = 44 if step == 1 and k >= SAVING else 0
        return 44 if fast else auto, dx, 44 if c >= SAVING else 0
    auto = 22 if channels >= MANY_5X5 else 0
    dx = 0 if step > 1 or not enough else 44 if fast else 22
    return 44 if fast and enough else auto, dx, 44 if enough else 0


def plan(x, weight, geometry):
    """Return (`struct conv`, output shape (K, P, Q), Winograd tile sizes) of a convolution."""
    shape, output = _sizes(x.shape[1:-1], weight.shape, geometry)
    per_group = (len(weight) // geometry.groups, *weight.shape[1:])
    tiles = winograd_tiles(per_group, *geometry[:3], output, settings.winograd)
    return shape, output, tiles


def conv2d(x, weight, bias, geometry):
    return _forward(x, weight, bias, geometry)[0]


def conv2d_relu(x, weight, bias, geometry, addend):
    if addend is not None:
        addend = np.ascontiguousarray(operand(addend))
    return _forward(x, weight, bias, geometry, addend=addend, relu=True)[0]


def conv2d_moments(x, weight, bias, geometry, counts, tree):
    y, rows = _forward(x, weight, bias, geometry, counts, tree)
    return y, partial_of_rows(rows, tree, merge_moments)


def _forward(x, weight, bias, geometry, counts=None, tree=None, addend=None, relu=False):
    source = source_of(operand(x))
    blocks = len(source[0])
    shape, output, (tile, _, _) = plan(source[0], weight, geometry)
    y = arenas.empty((blocks, *output, source[0].shape[-1]), source[0].dtype)
    rows = None if tree is None else arenas.empty((blocks, 1 + 2 * len(weight)), np.float64)
    weight, bias = per_channel(weight), per_channel(bias)
    numbers = counts, blocks, shape, tree and tree_of(tree), tile
    kernels().conv2d(*source, weight, bias, y, rows, *numbers, addend, int(relu))
    return y, rows


def conv2d_backward(
    dy,
    x,
    weight,
    geometry,
    counts,
    tree,
    needs,
    activation_after=None,
    sums=False,
    overwrite=False,
):
    source = source_of(operand(x))
    blocks = len(source[0])
    shape, _, (_, tile, dweight_tile) = plan(source[0], weight, geometry)
    after = NOTHING_AFTER
    if activation_after is not None:
        source_after, *factors = activation_after
        after = source_of(source_after)
        if isinstance(source_after, NormalizedInput):
            after = (*after[:2], *NO_NORM[1:])
        after = (*after, *map(per_channel, factors))
    dy = np.ascontiguousarray(as_type(dy, source[0].dtype))
    dx = None
    if needs[0]:
        is_free = overwrite and dy.shape == source[0].shape
        dx = dy if is_free else arenas.empty(source[0].shape, dy.dtype)
    rows = arenas.empty((blocks, 2 * source[0].shape[1]), np.float64) if sums else None
    nodes = None
    if needs[1] or needs[2]:
        nodes = arenas.empty((nodes_of(tree), weight.size + len(weight)))
    outputs = dy if overwrite else None, dx, rows, nodes, 0 if nodes is None else len(nodes)
    numbers = counts, blocks, shape, tree_of(tree), tile, dweight_tile
    kernels().conv2d_backward(dy, *after, *source, per_channel(weight), None, *outputs, *numbers)
    dweight = dbias = None
    if nodes is not None:
        split = [(row[: weight.size].reshape(weight.shape), row[weight.size :]) for row in nodes]
        dweight, dbias = (
            Partial([Term(tree, [pair[i] for pair in split], add, nodes.dtype)], None, size, "f4")
            if needs[1 + i]
            else None
            for i, size in enumerate((weight.shape, weight.shape[:1]))
        )
    return dx, dweight, dbias, partial_of_rows(rows, tree) if sums else None
