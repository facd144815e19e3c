"""Compute convolutions on tensor cores with kernels/cuda/conv_gemm.cu and conv_dweight.cu.

`conv_direct` computes the convolution instead if the GPU has no TF32 tensor cores, if
`settings.direct` is set, or if the images are too large. The sizes of leaves (partial sums over a
few images) and tiles depend on the shape of the layer, the global mini-batch and the number of
multiprocessors. These sizes never depend on this rank's share of the mini-batch. Only the sizes of
leaves change the bytes of the result.
"""

import functools
import math
from typing import NamedTuple

from mpidl.backends import settings, shapes
from mpidl.backends.gpu import activation, array, batchnorm, conv_direct, fold, launching
from mpidl.core.blocks import LANES

# Depth of a tile in shared memory (BK in the kernels), along the axis that a matrix product sums
# over: filter elements (r, s, c) in conv_gemm, pixels in conv_dweight.
STEP = 32
# Images with this many elements are too large, because offsets in a block of 16 images are ints.
LARGEST = 1 << 27
USUAL = 8  # assumed number of blocks of 16 images in the mini-batch if no reduction tree is given
COLUMNS = {16: 16, 24: 24, 32: 32, 48: 24, 64: 32}  # {columns of a tile: columns of each warp}
# Number of TF32 multiplications per float32 multiplication, by `settings.precision`.
PRODUCTS = {"fp32": 3, "tf32": 1}


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


def conv2d(x, weight, bias, geometry):
    return _forward(x, weight, bias, geometry)


def conv2d_relu(x, weight, bias, geometry, addend):
    y = _forward(x, weight, bias, geometry)
    return activation.relu(y if addend is None else y + addend)


def conv2d_moments(x, weight, bias, geometry, counts, tree):
    y = _forward(x, weight, bias, geometry, tree)
    return y, batchnorm.moments(y, counts, tree)


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
    images = batchnorm.read(x)
    if activation_after is not None and len(activation_after) == 1:
        dy = activation.relu_dx(dy, *activation_after)
    elif activation_after is not None:
        source, a, b, c = activation_after
        dy = batchnorm.activation_dx(dy, source, a, b, c, counts, overwrite)
    dx = dweight = dbias = dx_sums = None
    if needs[1]:
        leaves, per_block = leaves_of(dy, images, weight, geometry, tree)
        dweight = fold.partial_of_leaves(leaves, tree, per_block, like=weight)
    if needs[2]:
        dbias = batchnorm.channel_sums(dy, tree)
    if needs[0]:
        dx = dx_of(dy, images, weight, geometry, tree)
        dx_sums = batchnorm.activation_sums(dx, x, tree) if sums else None
    return dx, dweight, dbias, dx_sums


def _direct(shape):
    """Return whether `conv_direct` must compute this convolution."""
    of_input = (shape.height + shape.top) * (shape.width + shape.left) * shape.channels
    of_output = shape.out_height * shape.out_width * shape.filters
    architecture = int("".join(filter(str.isdigit, launching.device().architecture)))
    return settings.direct or architecture < 80 or max(of_input, of_output) >= LARGEST


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


def _forward(x, weight, bias, geometry, tree=None):
    x = batchnorm.read(x)
    shape = _shape(x, weight, geometry)
    if _direct(shape):
        return conv_direct.forward(x, weight, bias, geometry)
    size = shape.filters, shape.out_height, shape.out_width
    y = array.empty_lanes((len(x), *size, LANES))
    _product(shape, x, weight, bias, y, tree)
    return y


def dx_of(dy, x, weight, geometry, tree, bias=None):
    """Return the gradient with respect to x, plus `bias` if given. Only the shape of x is used."""
    shape = _shape(x, weight, geometry, dy)
    if _direct(shape):
        dx = conv_direct.dx(dy, x, weight, geometry)
        return dx if bias is None else conv_direct.with_bias(dx, bias)
    turned = array.empty((weight.size,))
    group = shape.filters_of_group, shape.channels // shape.groups
    tiles = math.prod(-(-side // 32) for side in group) * shape.groups * shape.taps
    numbers = shape.filters, shape.channels, shape.taps, shape.groups
    launching.launch("conv_weights", tiles, 256, weight, turned, *numbers)
    dx = array.empty_like(x)
    _product(shape.turned(), dy, turned, bias, dx, tree, backward=True)
    return dx


def _product(shape, x, weight, bias, y, tree, backward=False):
    """Launch conv_gemm, which convolves x with the weights, adds the bias and writes y."""
    pixels = shape.out_height * shape.out_width
    blocks = USUAL if tree is None else tree.leaves
    device = launching.device()
    tile = gemm_tile(shape, blocks * LANES * pixels, device.processors)
    vector = _vector(shape.channels // shape.groups, x, weight)
    rows = len(y) * LANES * pixels
    grid = -(-rows // tile["BM"]) * columns_of(shape, tile["BN"]) * shape.groups
    arguments = x, weight, bias, y, rows, *shape
    shared = tile["STAGES"] * (tile["BM"] + tile["BN"]) * STEP * 4
    defines = definitions(tile, shape, device, VECTOR=vector, BACKWARD=int(backward))
    threads = threads_of(tile)
    launching.launch("conv_gemm", grid, threads, *arguments, shared=shared, defines=defines)


def leaves_of(dy, x, weight, geometry, tree):
    """Return (leaves of the weight gradient, number of leaves per block of 16 images).

    The leaves are a float32 Array (leaves, weight.size), with the memory order of the weights. Only
    the shape of `weight` is used. `dy` must be zero in unused lanes.
    """
    shape = _shape(x, weight, geometry, dy)
    if _direct(shape):
        return conv_direct.dweight_leaves(dy, x, weight, geometry, tree)
    device = launching.device()
    tile = dweight_tile(shape)
    rows = -(-shape.width_of_filter // tile["BM"])
    tiles = rows * columns_of(shape, tile["BN"]) * shape.groups
    images = conv_direct.images_per_leaf(tiles, tree)
    leaves = array.empty((len(x) * (LANES // images), weight.size))
    pitches = tile["BM"] + 8, tile["BN"] + (0 if tile["BN"] % 32 == 24 else 8)
    arguments = dy, x, leaves, images, *shape
    shared = tile["STAGES"] * sum(pitches) * STEP * 4
    x_vector = _vector(shape.channels // shape.groups, x)
    dy_vector = _vector(shape.filters_of_group, dy)
    defines = definitions(tile, shape, device, VECTOR_X=x_vector, VECTOR_Y=dy_vector)
    grid, threads = len(leaves) * tiles, threads_of(tile)
    launching.launch("conv_dweight", grid, threads, *arguments, shared=shared, defines=defines)
    return leaves, LANES // images


def _vector(channels, *arrays):
    """Return the number of floats to copy at once: 4 if channels and addresses permit, else 1."""
    return 4 if channels % 4 == 0 and all(a.offset % 16 == 0 for a in arrays) else 1


def definitions(tile, shape, device, **values):
    """Return the preprocessor definitions {name: value} for compiling a convolution kernel.

    If the device compiles a kernel for each layer (`specialize`), the definitions contain the
    shape. Otherwise the shape occupies registers, and the kernel is compiled for fewer resident
    thread blocks per multiprocessor.
    """
    defines = {**tile, **values, "PRECISION": PRODUCTS[settings.precision]}
    if getattr(device, "specialize", False):
        defines["CONV_SHAPE"] = ",".join(map(str, shape))
    else:
        defines["MIN_BLOCKS"] = tile["MIN_BLOCKS"] // 2
    return defines


def threads_of(tile):
    """Return the number of threads in a thread block."""
    warps = tile["BM"] // tile["WM"] * (tile["BN"] // tile["WN"]) * tile.get("SPLIT", 1)
    return warps * 32


def columns_of(shape, columns):
    """Return the number of tiles of this many columns that cover the filters of a group."""
    return -(-shape.filters_of_group // columns)


def _columns(filters):
    """Return the number of columns per tile, n, that minimizes the total cost of all tiles.

    The cost of a tile is n + 16. If several n have the same total cost, return the largest n.
    """
    return min(COLUMNS, key=lambda n: (-(-filters // n) * (n + 16), -n))


@functools.lru_cache(maxsize=256)
def gemm_tile(shape, rows, processors):
    """Return the macros BM, BN, WM, WN, STAGES and MIN_BLOCKS of conv_gemm, as a dict.

    `rows` is the total number of output pixels. A tile has 128 rows, or 64 if tiles of 128 rows
    would give each multiprocessor fewer than two thread blocks.
    """
    columns = _columns(shape.filters_of_group)
    blocks = -(-rows // 128) * columns_of(shape, columns) * shape.groups
    height = 128 if blocks >= 2 * processors else 64
    wide = COLUMNS[columns] < columns  # two warps next to each other
    resident = (2 if wide else 5 if columns < 32 else 4) * (128 // height)
    return {
        "BM": height,
        "BN": columns,
        "WM": 32,
        "WN": COLUMNS[columns],
        "STAGES": 3 if wide else 2,
        "MIN_BLOCKS": resident,
    }


@functools.lru_cache(maxsize=256)
def dweight_tile(shape):
    """Return the macros BM, BN, WM, WN, SPLIT, STAGES and MIN_BLOCKS of conv_dweight, as a dict.

    A thread block has at least four warps. If the tile is too small for four warps, SPLIT groups of
    warps divide the pixels in shared memory among themselves.
    """
    columns = _columns(shape.filters_of_group)
    across = columns // COLUMNS[columns]
    width = shape.width_of_filter
    height = min((64, 128), key=lambda n: -(-width // n) * (n + 16)) if width > 32 else 32
    if across == 1:
        height = min(height, 64)
    split = max(1, 4 // (height // 32 * across))
    return {
        "BM": height,
        "BN": columns,
        "WM": 32,
        "WN": COLUMNS[columns],
        "SPLIT": split,
        "STAGES": 3,
        "MIN_BLOCKS": 2 if height == 128 else 4,
    }
