"""Compute convolutions with the C kernels, optionally fused with neighbouring activations."""

import functools
import math

import numpy as np

from mpidl.backends import settings, shapes
from mpidl.backends.cpu import arenas, join
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
from mpidl.core.blocks import LANES, DeferredInput
from mpidl.core.fold import Partial, Term, add, merge_moments
from mpidl.core.values import BF16

NOTHING_AFTER = None, *NO_NORM, None, None, None  # y, its activation, and a, b, c
SAVING = 8  # minimum number of channels for Winograd's algorithm; forward passes may need more
FEW, MANY_5X5 = 16, 32  # minimum numbers of outputs in forward passes in float32 with "auto"
# The tiles of forward passes in float32 with "auto". For each side of the filter at stride 1: the
# minimum number of terms of a sum of products, and a tile that is then accurate enough
ACCURATE = {
    2: ((256, 22), (256, 44)),
    3: ((144, 22), (288, 24), (1152, 44)),
    4: ((144, 22), (3136, 44)),
    5: ((800, 22),),
}
TILES = {2: (22, 44), 3: (22, 24, 44), 4: (22, 44), 5: (22,)}  # of dx, if the stride is not 1
MANY_TERMS = 72  # minimum number of terms of a sum, if the stride is not 1
# Minimum factors by which tiles must reduce the products, if the stride is not 1
WORTH, WORTH_DWEIGHT = 1.4, 1.35  # small outputs of many channels have costly filter transforms


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
    """Return the number of rows (or columns) of the padded gradient of y.

    The padding before the first output extends to the output that the last filter tap reaches from
    the first pixel. The padding after the last output extends to the output that the first filter
    tap reaches from the last pixel. `lay_out_dy` of conv_backward.c computes the same number.
    """
    reach = max(dilation * (taps - 1) - before, 0)
    beyond = (pixels - 1 + before) // stride - (outputs - 1)
    return reach // stride + outputs + max(beyond, 0)


def winograd_side(taps, step, before=0):
    """Return the side of the filters that compute a convolution of stride `step` at stride 1.

    `before` is the padding if the convolution computes dx, or else 0.
    """
    return -(-before // step) - (before - taps) // step


def winograd_products(taps, step, side, tile, outputs, before=None, partial=False):
    """Return the number of products per pair of channels along one dimension of a convolution.

    Parameters
    ----------
    taps, step : int
        Sizes of the filter and of its step.
    side, tile : int
        Sizes of the filter at stride 1 and of a tile.
    outputs : int
        Pixels of y, or of a phase of dx.
    before : int, optional
        The padding, if the convolution computes dx.
    partial : bool
        Whether a partial tile has no products at the point infinity, as in forward and dx.
    """
    points, first = tile + side - 1, -(before or 0) // step
    count, at_infinity = step * points, step
    for phase in range(step):  # a zero tap at an end saves a product, see kernels/cpu/winograd.h
        places = {(i - (before or 0)) // step - first for i in range(phase, taps, step)}
        at_infinity -= (side - 1 if before is None else 0) not in places
        count -= before is not None and points % 2 == 0 and side - 1 not in places
    count -= step - at_infinity
    return -(-outputs // tile) * count - at_infinity * (partial and outputs % tile > 0)


@functools.lru_cache(maxsize=256)
def winograd_tiles(weight_shape, stride, padding, dilation, output, policy, narrow=False):
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
    narrow : bool
        Whether activations are stored in bfloat16.

    Notes
    -----
    The choice depends only on the policy and the arguments of the layer. At stride 1, the kernels
    support 3x3 and 5x5 filters. They compute an R x R filter at stride s as an r x r filter at
    stride 1, r = ceil(R / s), on s * s times as many channels, or for dx, with s * s times as many
    outputs. r may be 2, 3, 4 or 5.

    Backward passes use tiles of 4x4 outputs, whose error is at most a few times the error of a
    direct sum. With 5x5 filters the error is larger, and dx would pass the error on to all earlier
    layers. Therefore "auto" uses tiles of 2x2 for dx with 5x5 filters. In bfloat16, where backward
    passes round the transformed numbers, dweight uses such tiles with 5x5 filters, too.

    In forward passes, an error can change the sign of a ReLU's input. Therefore "auto" uses the
    largest tile whose root mean square error is at most about 1.4 times the error of a direct sum
    in float32. The error of a direct sum grows with the number of terms, and the error of a tile
    hardly does, so more terms permit larger tiles. Only "fast" always uses tiles of 4x4, and so do
    forward passes in bfloat16, which compute in float32: their error is far below the rounding of
    the result.

    At other strides, the tile with the fewest products is used if it is accurate enough, because a
    large tile may extend beyond a small output. Direct sums in bfloat16 are faster than 2x2 and 4x4
    filters at stride 1, and than dx by phases.

    Filters from one channel to one channel, gradients with fewer than SAVING channels, and outputs
    smaller than a tile use direct sums. So do strided convolutions of sums with fewer than
    MANY_TERMS terms, or with more than 1 / WORTH of the products of direct sums. In these cases,
    the transforms would cost more than they save. In float32 with "auto", forward passes with fewer
    than FEW outputs, or MANY_5X5 outputs with 5x5 filters, use direct sums, too. In bfloat16,
    forward passes need FEW channels, or SAVING with 5x5 filters, for either policy.

    References
    ----------
    Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016.
    """
    k, c, r, s = weight_shape
    step = stride[0]
    side = winograd_side(r, step)
    fits = r == s and stride == (step, step) and dilation == (1, 1)
    fits = fits and side in ((3, 5) if step == 1 or narrow else ACCURATE)
    sides = [v for pair in padding for v in pair]
    if policy == "off" or not fits or max(sides) >= r or min(output[1:]) < 4 or c == k == 1:
        return 0, 0, 0
    fast, enough = policy == "fast", min(c * step**2, k) >= SAVING
    enough = enough and (step == 1 or c * r * r >= MANY_TERMS)
    outputs = MANY_5X5 if side == 5 else FEW
    forward = [tile for terms, tile in ACCURATE[side] if c * r * r >= terms and k >= outputs]
    if narrow:
        forward = [44] if min(c * step**2, k) >= (FEW if side == 3 else SAVING) else []
    elif fast:
        forward = [44] if side == 3 or enough else []
    large = 22 if narrow and side == 5 else 44
    if step == 1:
        if side == 3:
            return max(forward, default=0), 44 if k >= SAVING else 0, 44 if c >= SAVING else 0
        return max(forward, default=0), (large if fast else 22) * enough, large * enough
    befores = padding[0][0], padding[1][0]
    dx_side = max(winograd_side(r, step, before) for before in befores)
    backward = TILES.get(dx_side, ()) if enough and not narrow else ()
    shared = r, step, output[1:]
    return (
        _fastest(forward, side, *shared),
        _fastest(backward, dx_side, *shared, befores),
        _fastest([large] if enough else [], side, *shared, worth=WORTH_DWEIGHT),
    )


def _fastest(tiles, side, taps, step, output, befores=(None, None), worth=WORTH):
    """Return the tile with the fewest products, or 0 if direct sums are faster."""

    def products(tile):
        lines = zip(divmod(tile, 10), output, befores, strict=True)
        return math.prod(winograd_products(taps, step, side, *line) for line in lines)

    tile = min(tiles, key=products, default=0)
    return tile if tile and products(tile) * worth <= taps**2 * math.prod(output) else 0


def plan(x, weight, geometry):
    """Return (`struct conv`, output shape (K, P, Q), Winograd tile sizes) of a convolution."""
    return _plan(x.shape[1:-1], x.dtype, weight, geometry)


def _plan(image_shape, dtype, weight, geometry):
    shape, output = _sizes(image_shape, weight.shape, geometry)
    per_group = (len(weight) // geometry.groups, *weight.shape[1:])
    narrow = dtype == BF16
    tiles = winograd_tiles(per_group, *geometry[:3], output, settings.winograd, narrow)
    return shape, output, tiles


def conv2d(x, weight, bias, geometry):
    return _forward(x, weight, bias, geometry)[0]


def conv2d_relu(x, weight, bias, geometry, addend):
    if addend is not None:
        addend = np.ascontiguousarray(operand(addend))
    return _forward(x, weight, bias, geometry, addend=addend, relu=True)[0]


def conv2d_concat_relu(first, second, weight, bias, geometry):
    parts = operand(first), operand(second)
    copies = geometry.groups == 1 and weight.shape[2:] != (1, 1)  # the kernel copies x in parts
    copies = copies and not any(isinstance(part, DeferredInput) for part in parts)
    if not copies or (parts[0].dtype == BF16 and parts[0].shape[1] % 2):
        return conv2d_relu(join.concat(parts), weight, bias, geometry, None)
    second = np.ascontiguousarray(parts[1])
    return _forward(parts[0], weight, bias, geometry, relu=True, second=second)[0]


def conv2d_moments(x, weight, bias, geometry, counts, tree):
    y, rows = _forward(x, weight, bias, geometry, counts, tree)
    return y, partial_of_rows(rows, tree, merge_moments)


def _forward(
    x, weight, bias, geometry, counts=None, tree=None, addend=None, relu=False, second=None
):
    """Return the convolution and its moments; the array `second` has further channels of x."""
    source = source_of(operand(x))
    blocks, channels, *size, _ = source[0].shape
    all_channels = channels + (0 if second is None else second.shape[1])
    image_shape = all_channels, *size
    shape, output, (tile, _, _) = _plan(image_shape, source[0].dtype, weight, geometry)
    y = arenas.empty((blocks, *output, source[0].shape[-1]), source[0].dtype)
    rows = None if tree is None else arenas.empty((blocks, 1 + 2 * len(weight)), np.float64)
    weight, bias = per_channel(weight), per_channel(bias)
    numbers = counts, blocks, shape, tree and tree_of(tree), tile
    parts = addend, int(relu), second, channels
    kernels().conv2d(*source, weight, bias, y, rows, *numbers, *parts)
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
        after = (*after, *map(per_channel, factors or (None,) * 3))
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
