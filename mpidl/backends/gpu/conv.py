"""Compute convolutions on tensor cores with kernels/cuda/conv_gemm.cu and conv_dweight.cu.

`conv_depthwise` computes depthwise convolutions. `conv_direct` computes any convolution instead if
the GPU has no TF32 tensor cores, if `settings.direct` is set, or if the images are too large. The
sizes of leaves (partial sums over a few images) and tiles depend on the shape of the layer, the
global mini-batch and the number of multiprocessors. These sizes never depend on this rank's share
of the mini-batch. Only the sizes of leaves and the number of blocks that share a tile change the
bytes of the result.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from mpidl.backends import settings, shapes
from mpidl.backends.deferred import NormalizedInput
from mpidl.backends.gpu import (
    activation,
    array,
    batchnorm,
    conv_depthwise,
    conv_direct,
    fold,
    join,
    launching,
    pad,
)
from mpidl.core.blocks import LANES, DeferredInput
from mpidl.core.values import BF16

# Bytes of a row of a tile in shared memory in conv_gemm, along the axis that a matrix product sums
# over: filter elements (r, s, c). In conv_dweight, a tile has PIXELS rows.
STEP, PIXELS = 128, 32
# Images with this many elements are too large, because offsets in a block of 16 images are ints.
LARGEST = 1 << 27
USUAL = 8  # assumed number of blocks of 16 images in the mini-batch if no reduction tree is given
COLUMNS = {16: 16, 24: 24, 32: 32, 48: 24, 64: 32}  # {columns of a tile: columns of each warp}
HEIGHTS = 64, 96, 128  # rows of a tile of conv_dweight, for filters of more than 32 elements
# Time of a tile of conv_dweight that does not depend on its number of pixels (start, and writing,
# reading and folding a leaf), in units of the time of a pixel.
START = 128
BUSY = 384  # threads with which a multiprocessor hides the latency of memory
LEVELS = 4  # conv_dweight folds ranges of up to 2^4 blocks of 16 images
SHORTEST = 4  # smallest number of steps of a tile that a block of threads computes


class Shape(NamedTuple):
    """The sizes of a convolution: input images (height, width, channels), output and filters."""

    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    filters: int
    taps_down: int
    taps_across: int
    stride_down: int
    stride_across: int
    top: int
    left: int
    dilation_down: int
    dilation_across: int
    groups: int

    @property
    def taps(self):
        return self.taps_down * self.taps_across

    @property
    def width_of_filter(self):
        """Number of weights in a filter."""
        return self.taps * self.channels // self.groups

    @property
    def filters_of_group(self):
        return self.filters // self.groups

    @property
    def sizes(self):
        """The argument `sizes` of the kernels, an int32 Array."""
        return launching.constant(np.array(self, np.int32))

    @property
    def definition(self):
        """Definition of the shape for compiling a kernel, if the device compiles one per layer."""
        is_defined = getattr(launching.device(), "specialize", False)
        return {"CONV_SHAPE": ",".join(map(str, self))} if is_defined else {}

    def turned(self):
        """Return this Shape with input and output exchanged, for the gradient of the input."""
        return self._replace(
            height=self.out_height,
            width=self.out_width,
            channels=self.filters,
            out_height=self.height,
            out_width=self.width,
            filters=self.channels,
        )


@functools.lru_cache(maxsize=256)
def shape_of(image, weight_shape, geometry):
    """Return the Shape of a convolution of (C, H, W) images by (K, C/groups, R, S) filters."""
    stride, padding, dilation, groups = geometry
    c, h, w = image
    k, p, q = shapes.conv2d_shape(image, weight_shape, stride, padding, dilation)
    (top, _), (left, _) = padding
    numbers = *weight_shape[2:], *stride, top, left, *dilation, groups
    return Shape._make((h, w, c, p, q, k, *numbers))


def _operand(x, extra=0):
    """Return `batchnorm.operand` of x, with an Array in the type of the precision.

    With `extra`, x gets a fourth channel of zeros. The Array keeps it for the backward pass.
    """
    if extra:
        x = batchnorm.read(x)
        padded = x.padded
        if padded is None or padded.dtype != stored_type():
            padded = pad.fourth_channel(_stored(x))
            if type(padded.buffer) is type(x.buffer):  # both belong to a recorded step, or neither
                x.padded = padded
        x = padded
    values, *norm = batchnorm.operand(x)
    return values if isinstance(x, DeferredInput) else _stored(values), *norm


def _extra(shape):
    """Return 1 if the convolution reads images with a fourth channel of zeros, else 0.

    Kernels then copy a pixel at once instead of value by value. With three TF32 products for each
    product, there is no gain: the products take longer than the copies.
    """
    is_first = shape.channels == 3 and shape.taps > 1 and shape.groups == 1
    return int(is_first and terms() == 1)


def _period(operand, channels):
    """Return the length of the vectors of a normalization, by default the number of channels."""
    return channels if operand[1] is None else operand[1].size


def stored_type():
    """Return the type of the operands of products in the current precision."""
    return BF16 if settings.precision == "bf16" else np.dtype(np.float32)


def _stored(x):
    return x.astype(stored_type())


def terms():
    """Return the number of products of a tensor core for a product: TERMS in the kernels."""
    return 3 if settings.precision == "fp32" else 1


def conv2d(x, weight, bias, geometry):
    return forward(x, weight, bias, geometry)[0]


def conv2d_relu(x, weight, bias, geometry, addend):
    y = forward(x, weight, bias, geometry)[0]
    return batchnorm.add_operands(y, addend, relu=True)


def conv2d_concat_relu(first, second, weight, bias, geometry):
    return conv2d_relu(join.concat([first, second]), weight, bias, geometry, None)


def conv2d_moments(x, weight, bias, geometry, counts, tree):
    return forward(x, weight, bias, geometry, tree, counts)


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
    like = x.x if isinstance(x, DeferredInput) else x
    shape, backward = _shape(like, weight, geometry, dy), None
    if activation_after is not None and len(activation_after) == 1:
        dy = activation.relu_dx(dy, *activation_after)
    elif activation_after is not None:
        source, a, b, c = activation_after
        if needs[0] and _is_pointwise(shape) and not is_direct(shape):
            backward = _without_activation(source), (a, b, c), counts
        else:
            dy = batchnorm.activation_dx(dy, source, a, b, c, counts, overwrite)
    dx = dweight = dbias = dx_sums = None
    if needs[0]:
        has_classes = shape.stride_down * shape.stride_across > 1
        is_fused = sums and not has_classes and not is_direct(shape)
        statistics = Statistics(counts, _without_activation(x)) if is_fused else None
        dx, dy, dx_sums = dx_of(dy, like, weight, geometry, tree, None, backward, statistics)
        if sums and not is_fused:
            dx_sums = batchnorm.activation_sums(dx, x, tree)
    if needs[1] or needs[2]:
        dweight, dbias = dweight_of(dy, x, weight, shape, tree, needs[2])
    return dx, dweight if needs[1] else None, dbias, dx_sums


def _without_activation(source):
    """Return the operand of a DeferredInput, without scale and beta if it has no limits."""
    x, mean, *rest = batchnorm.operand(source)
    return (
        (x, mean, None, None, 0.0, 0.0) if isinstance(source, NormalizedInput) else (x, mean, *rest)
    )


def is_direct(shape):
    """Return whether kernels without tensor cores compute this convolution."""
    return _direct_kernels(shape) is not None


def _direct_kernels(shape):
    """Return the module that computes this convolution without tensor cores, or None."""
    if conv_depthwise.suits(shape) and not settings.direct:
        return conv_depthwise
    channels = shape.channels + _extra(shape)
    of_input = (shape.height + shape.top) * (shape.width + shape.left) * channels
    of_output = shape.out_height * shape.out_width * shape.filters
    architecture = int("".join(filter(str.isdigit, launching.device().architecture)))
    is_large = max(of_input, of_output) >= LARGEST
    return conv_direct if settings.direct or architecture < 80 or is_large else None


def _input_of(kernels, x):
    """Return x as the module `kernels` reads it; only conv_depthwise reads a DeferredInput."""
    is_read = kernels is conv_depthwise and isinstance(x, DeferredInput)
    return x if is_read else _stored(batchnorm.read(x))


def _is_pointwise(shape):
    """Return whether each output pixel reads one input pixel, and each input pixel is read once."""
    sizes = (shape.height, shape.width), (shape.out_height, shape.out_width)
    strides = shape.stride_down, shape.stride_across  # larger strides can read padding
    return sizes[0] == sizes[1] and {shape.taps, shape.groups, *strides} == {1}


def _shape(x, weight, geometry, dy=None):
    """Return the Shape of the convolution of x with weight.

    Raise ValueError if the kernels cannot read the memory order of an array, or if dy has the wrong
    shape.
    """
    shape = shape_of(x.dims[1:-1], weight.dims, geometry)
    output = shape.filters, shape.out_height, shape.out_width
    if x.order != array.IMAGES or weight.order != array.FILTERS:
        raise ValueError(f"expected images (NHWC) and filters (KRSC), got {x} and {weight}")
    if dy is not None and (dy.dims[1:-1] != output or dy.order != array.IMAGES):
        raise ValueError(f"expected gradients of images {output}, got {dy}")
    return shape


def forward(x, weight, bias, geometry, tree=None, counts=None, dtype=None):
    """Return (y, Partial of the moments of y); the Partial is None unless `counts` is given.

    `dtype` is the type of y, by default that of the products.
    """
    like = x.x if isinstance(x, DeferredInput) else x
    shape = _shape(like, weight, geometry)
    kernels = _direct_kernels(shape)
    if kernels is not None:
        values = _input_of(kernels, x)
        values = values if dtype is None else values.astype(dtype)
        y = kernels.forward(values, weight, bias, shape)
        return y, None if counts is None else batchnorm.moments(y, counts, tree)
    size = shape.filters, shape.out_height, shape.out_width
    source = _operand(x, _extra(shape))
    dtype = source[0].dtype if dtype is None else dtype
    y = array.empty_lanes((len(like), *size, LANES), dtype)
    weight = prepared(weight, shape)
    statistics = None if counts is None else Statistics(counts)
    return y, product(shape, source, weight, bias, y, tree, statistics)


class Statistics(NamedTuple):
    """What to sum over the pixels of the result of a convolution, in the images of `counts`.

    The moments or, if `before` is the operand of a normalization, the sums for its gradient: the
    result is then the cotangent of its activation.
    """

    counts: Any
    before: tuple | None = None


def dx_of(dy, x, weight, geometry, tree, bias=None, backward=None, statistics=None):
    """Return (dx plus `bias` if given, dy, sums). Only the shape and type of x are used.

    `backward` is None, or (operand, (a, b, c), counts) of the normalization after the convolution,
    of which dy is the cotangent. The returned dy is then that of its input. The sums are those of
    `statistics`, or None.
    """
    shape = _shape(x, weight, geometry, dy)
    kernels, dy = _direct_kernels(shape), _stored(dy)
    if kernels is not None:
        return kernels.dx(dy.astype(x.dtype), x, weight, shape, bias), dy, None
    dx = array.empty_like(x)
    weight = prepared(weight, shape, turned=True)
    dz = dy if backward is None else array.empty_like(dy)
    backward = None if backward is None else (*backward, dz)
    arguments = shape.turned(), _operand(dy), weight, bias, dx, tree, statistics
    return dx, dz, product(*arguments, is_backward=True, backward=backward)


def prepared(weight, shape, turned=False):
    """Return filters as conv_gemm reads them: rounded, and turned for backward-data."""
    dtype, copies = stored_type(), 2 if terms() == 3 else 1
    extra = 0 if turned else _extra(shape)
    result = array.empty((copies * (weight.size + shape.filters * shape.taps * extra),), dtype)
    row = [weight, result, shape.filters, shape.channels, shape.taps, shape.groups]
    row += [int(turned), extra]
    group = shape.filters_of_group, shape.channels // shape.groups
    tiles = math.prod(-(-side // 32) for side in group) * shape.groups * shape.taps
    defines = {"TERMS": terms(), **({"BF16": 1} if dtype == BF16 else {})}
    blocks = min(tiles, 4 * launching.device().processors)
    launching.before_step("conv_weights", row, blocks, 256, defines)
    return result


def product(
    shape, source, weight, bias, y, tree, statistics=None, is_backward=False, backward=None
):
    """Launch conv_gemm, which convolves an `_operand` with prepared weights and writes y.

    Return the Partial of `statistics`, if given. `backward` is as in `dx_of`, followed by the array
    for the cotangent of the normalization's input.
    """
    x, *norm = source
    pixels, device = shape.out_height * shape.out_width, launching.device()
    blocks, inputs = USUAL if tree is None else tree.leaves, 1 if backward is None else 2
    extra = 0 if is_backward else _extra(shape)
    limits = device.processors, device.shared
    tile = gemm_tile(shape, blocks * LANES * pixels, *limits, settings.precision, inputs)
    images, period = len(y) * LANES, _period(source, shape.channels + extra)
    kind, leaves, parts, skipped = _leaves(statistics, shape, tile, len(y), tree)
    across = columns_of(shape, tile["BN"]) * shape.groups
    tiles = tiles_of(shape, images, tile["BM"], skipped, is_backward) * across
    splits, partial, tickets = tile["SPLITS"], None, None
    if splits > 1:
        partial = array.empty((tiles * splits * tile["BM"] * tile["BN"],))
        tickets = launching.constant(np.zeros(max(tiles, 1), np.int32))
    defines = {
        **tile,
        **shape.definition,
        "TERMS": terms(),
        "VECTOR": _vector((shape.channels + extra) // shape.groups, period, x, weight),
        "ACROSS": 4 if shape.filters_of_group % 4 == 0 and y.offset % 16 == 0 else 1,
        "BACKWARD": int(is_backward),
        "INPUT": 2 if backward is not None else int(norm[0] is not None),
        "STATISTICS": kind,
        "WIDE": int(y.dtype != x.dtype),
        "EXTRA": extra,
    }
    of_backward, valid = (None,) * 5, statistics.counts if statistics else None
    if backward is not None:
        (inputs_after, *norm), factors, valid, dz = backward
        of_backward = inputs_after, *factors, dz
    before = (statistics and statistics.before) or batchnorm.operand(None)
    launching.launch(
        "conv_gemm",
        tiles * splits,
        threads_of(tile),
        x,
        weight,
        bias,
        y,
        *norm,
        period,
        *of_backward,
        valid,
        *before,
        leaves,
        parts,
        skipped,
        partial,
        tickets,
        images,
        shape.sizes,
        shared=shared_of(tile, inputs, terms()),
        defines=defines,
    )
    if statistics is None:
        return None
    combine = fold.add if kind == 2 else fold.merge_moments
    return fold.partial_of_leaves(leaves, tree, parts, combine)


def _leaves(statistics, shape, tile, blocks, tree):
    """Return (STATISTICS of conv_gemm, its arguments leaves, parts and skipped)."""
    if statistics is None:
        return 0, None, 0, 0
    rows_of_block, height = LANES * shape.out_height * shape.out_width, tile["BM"]
    skipped = tree.run[0] * rows_of_block % height
    parts = _power(-(-rows_of_block // height) + (rows_of_block % height > 0))
    kind = 1 if statistics.before is None else 2
    width = 2 * shape.filters + (1 if kind == 1 else 0)
    return kind, array.empty((blocks * parts, width), np.float64), parts, skipped


def dweight_of(dy, x, weight, shape, tree, with_bias=False):
    """Return the Partials of the gradients of the weights and, if `with_bias`, of the bias.

    Only the shape of `weight` is used. `dy` must be zero in unused lanes.
    """
    kernels = _direct_kernels(shape)
    if kernels is not None:
        x, dy = _input_of(kernels, x), _stored(dy)
        leaves, per_block = kernels.dweight_leaves(dy, x, shape, tree)
        dbias = batchnorm.channel_sums(dy, tree) if with_bias else None
        return fold.partial_of_leaves(leaves, tree, per_block, like=weight), dbias
    extra, dy, device = _extra(shape), _stored(dy), launching.device()
    source, padded = _operand(x, extra), shape._replace(channels=shape.channels + extra)
    period, is_float = _period(source, padded.channels), dy.dtype == np.float32
    tile = dweight_tile(padded, is_float)
    tiles = -(-padded.width_of_filter // tile["BM"]) * columns_of(shape, tile["BN"]) * shape.groups
    pixels = shape.out_height * shape.out_width
    slots = device.processors * tile["MIN_BLOCKS"]
    images = images_per_leaf(tiles, pixels, tree.leaves, slots)

    def cost(ranges, length):
        """Return the time of this many ranges, infinite if their levels do not fit into memory."""
        shared = shared_of_dweight(tile, (length - 1).bit_length(), dy.dtype.itemsize)
        if shared > device.shared:
            return math.inf
        resident = max(1, min(tile["MIN_BLOCKS"], device.shared // shared))
        waves = -(-ranges * tiles // (device.processors * resident))
        speed = min(1, resident * threads_of(tile) / BUSY)
        return waves * resident * (length * images * pixels + START) / speed

    ranges, ends = _ranges(tree, images, cost)
    longest = max((count for _, count in ranges), default=1)
    levels = (longest - 1).bit_length() if not tree.plain else int(longest > 1)
    leaves = array.empty((len(ranges), weight.size))
    of_bias = array.empty((len(ranges), shape.filters)) if with_bias else None
    table = None if longest == 1 else launching.constant(np.array(ranges, np.int32))
    defines = {
        **tile,
        **shape.definition,
        "TERMS": terms(),
        "VECTOR_X": _vector(padded.channels // shape.groups, period, source[0]),
        "VECTOR_Y": _vector(shape.filters_of_group, shape.filters_of_group, dy),
        "INPUT": int(source[1] is not None),
        "LEVELS": levels,
        "EXTRA": extra,
    }
    launching.launch(
        "conv_dweight",
        len(ranges) * tiles,
        threads_of(tile),
        dy,
        source[0],
        table,
        leaves,
        of_bias,
        *source[1:],
        period,
        int(tree.plain),
        images,
        shape.sizes,
        shared=shared_of_dweight(tile, levels, dy.dtype.itemsize),
        defines=defines,
    )
    sums = [
        None
        if values is None
        else fold.partial_of_leaves(values, tree, LANES // images, like=like, ranges=ends)
        for values, like in ((leaves, weight), (of_bias, None))
    ]
    return sums[0], sums[1]


def images_per_leaf(tiles, pixels, blocks, slots):
    """Return the number of images per leaf of the weight gradient: 1, 2, 4, 8 or 16.

    A leaf is the sum of the gradients of consecutive images, whose outputs have `pixels` pixels.
    With fewer images per leaf there are more tiles (`tiles` per leaf), but also more leaves to
    write and fold. The result minimizes the time of all tiles of a mini-batch of `blocks` blocks on
    one GPU, which computes `slots` tiles at a time.
    """

    def cost(images):
        waves = -(-blocks * (LANES // images) * tiles // slots)
        return waves * (images * pixels + START), -images

    return min((1, 2, 4, 8, LANES), key=cost)


def _ranges(tree, images, cost):
    """Divide this rank's leaves into ranges that blocks of threads fold; return (ranges, ends).

    A range is (first leaf, number of leaves), and is itself a node of the tree. `ends` has a pair
    (first range, number of ranges) for each node of this rank. How the leaves are divided does not
    change the bytes, so it may depend on this rank's share. `cost` returns the time for a number
    of ranges and their length, which is minimized. The nodes of a plain sum, whose leaves need one
    level, are not divided if it fits into memory.
    """
    start, per_block = tree.run[0], LANES // images
    nodes = [((a - start) * per_block, (b - start) * per_block) for a, b in tree.nodes[tree.rank]]
    if tree.plain and math.isfinite(cost(1, 2)):
        size = max([b - a for a, b in nodes], default=1)
    elif tree.plain or images < LANES:
        size = 1
    else:

        def cost_of(size):
            return cost(sum(-(-(b - a) // size) for a, b in nodes), size), -size

        size = min((1 << level for level in range(LEVELS + 1)), key=cost_of)
    ranges, ends = [], []
    for first, stop in nodes:
        parts = [(i, min(size, stop - i)) for i in range(first, stop, size)]
        ends.append((len(ranges), len(parts)))
        ranges += parts
    return ranges, ends


def _vector(channels, period, *arrays):
    """Return how many values to copy at once: the most that fit into 16 bytes and are aligned."""
    limit = 16 // arrays[0].dtype.itemsize
    divisible = math.gcd(channels, period)
    return next(
        n
        for n in (limit, limit // 2, limit // 4, 1)
        if n and divisible % n == 0 and all(a.offset % (n * a.dtype.itemsize) == 0 for a in arrays)
    )


def threads_of(tile):
    """Return the number of threads in a thread block."""
    warps = tile["BM"] // tile["WM"] * (tile["BN"] // tile["WN"]) * tile.get("SPLIT", 1)
    return warps * 32


def shared_of(tile, inputs, terms):
    """Return the bytes of shared memory of conv_gemm."""
    rows = tile["BM"] * inputs + tile["BN"] * (2 if terms == 3 else 1)
    return tile["STAGES"] * rows * STEP


def shared_of_dweight(tile, levels, itemsize):
    """Return the bytes of shared memory of conv_dweight: stages, levels, and parts of SPLIT."""
    rows, columns = tile["BM"], tile["BN"]
    pitches = rows + 8 + columns + (0 if columns % 32 == 24 else 8)
    folded = levels * (rows + 1) * columns + (tile["SPLIT"] - 1) * rows * columns
    return tile["STAGES"] * pitches * PIXELS * itemsize + 4 * folded


def columns_of(shape, columns):
    """Return the number of tiles of this many columns that cover the filters of a group."""
    return -(-shape.filters_of_group // columns)


def tiles_of(shape, images, height, skipped=0, is_backward=False):
    """Return the number of tiles of this many rows that cover the output pixels.

    For backward-data, pixels with different remainders modulo the stride are in different tiles.
    """
    if images == 0:
        return 0
    strides = (shape.stride_down, shape.stride_across) if is_backward else (1, 1)
    sizes = zip((shape.out_height, shape.out_width), strides, strict=True)
    down, across = ([-(-(size - i) // step) for i in range(step)] for size, step in sizes)
    return sum(-(-(images * p * q + skipped) // height) for p in down for q in across)


def _columns(filters):
    """Return the number of columns per tile, n, that minimizes the total cost of all tiles.

    The cost of a tile is n + 16. If several n have the same total cost, return the largest n.
    """
    return min(COLUMNS, key=lambda n: (-(-filters // n) * (n + 16), -n))


def _power(n):
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@functools.lru_cache(maxsize=256)
def gemm_tile(shape, rows, processors, shared, precision, inputs=1):
    """Return the macros BM, BN, WM, WN, STAGES, MIN_BLOCKS and SPLITS of conv_gemm, as a dict.

    `rows` is the total number of output pixels. A tile has 128 rows, or 64 if tiles of 128 rows
    would give each multiprocessor fewer than two thread blocks. If there are still few tiles,
    SPLITS thread blocks share the steps of a tile.
    """
    columns = _columns(shape.filters_of_group)
    across = columns_of(shape, columns) * shape.groups
    height = 128 if -(-rows // 128) * across >= 2 * processors else 64
    wide = COLUMNS[columns] < columns  # two warps next to each other
    resident = (2 if wide else 5 if columns < 24 else 4) * (128 // height)
    stages = 3 if wide else 2
    bytes_of_stage = (height * inputs + columns * (2 if precision == "fp32" else 1)) * STEP
    if stages * bytes_of_stage * resident > shared:
        stages = 2
    resident = max(1, min(resident, shared // (stages * bytes_of_stage)))
    depth = shape.width_of_filter // (64 if precision == "bf16" else 32)
    tiles, splits = -(-rows // height) * across, 1
    while 2 * splits * tiles <= processors and depth >= 2 * splits * SHORTEST:
        splits *= 2
    return {
        "BM": height,
        "BN": columns,
        "WM": 32,
        "WN": COLUMNS[columns],
        "STAGES": stages,
        "MIN_BLOCKS": resident,
        "SPLITS": splits,
    }


@functools.lru_cache(maxsize=256)
def dweight_tile(shape, is_float):
    """Return the macros BM, BN, WM, WN, SPLIT, STAGES and MIN_BLOCKS of conv_dweight, as a dict.

    A thread block has at least four warps. If the tile is too small for four warps, SPLIT groups of
    warps divide the pixels in shared memory among themselves.
    """
    columns = _columns(shape.filters_of_group)
    across = columns // COLUMNS[columns]
    width = shape.width_of_filter
    height = min(HEIGHTS, key=lambda n: -(-width // n) * (n + 16)) if width > 32 else 32
    if across == 1:
        height = min(height, 96)
    split = min(max(1, 4 // (height // 32 * across)), 4 if is_float else 2)
    warps = height // 32 * across * split
    return {
        "BM": height,
        "BN": columns,
        "WM": 32,
        "WN": COLUMNS[columns],
        "SPLIT": split,
        "STAGES": 3,
        "MIN_BLOCKS": min(4, 16 // warps),
    }
