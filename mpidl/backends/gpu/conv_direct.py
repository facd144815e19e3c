"""Compute convolutions in float32 without tensor cores, with kernels/cuda/conv_direct.cu.

These kernels run on any GPU. `conv` uses this module if the GPU has no TF32 tensor cores, if
`settings.direct` is set, or if the images are too large. Tests compare the tensor-core kernels with
these kernels.
"""

import math

from mpidl.backends.gpu import array, launching
from mpidl.core.blocks import LANES

# Rows and columns of a tile, and threads per CTA (thread block), as in conv_direct.cu.
ROWS, COLUMNS, THREADS = 64, 32, 256
LARGEST = 1 << 31  # offsets within an image or the weights are C ints


def _sizes(shape):
    """Return `sizes` of a `conv.Shape`; raise ValueError if the images or weights are too large."""
    images = shape.channels, shape.height, shape.width
    outputs = shape.filters, shape.out_height, shape.out_width
    weights = shape.filters, shape.width_of_filter
    for kind, size in ("images", images), ("images", outputs), ("weights", weights):
        if math.prod(size) >= LARGEST:
            raise ValueError(f"conv2d: {kind} {size} are too large: at most 2^31 - 1 elements fit")
    return shape.sizes


def _tiles(size, tile):
    return -(-size // tile)


def _convolve(name, x, weight, bias, y, shape):
    """Launch the kernel `name`, which computes y from x; return y."""
    _, channels, height, width, _ = y.dims
    images = len(y) * LANES
    tiles = _tiles(images * height * width, ROWS), _tiles(channels // shape.groups, COLUMNS)
    arguments = x, weight, bias, y, images, _sizes(shape)
    launching.launch(name, (*tiles, shape.groups), THREADS, *arguments, defines=shape.definition)
    return y


def forward(x, weight, bias, shape):
    """Return the convolution of x, (blocks, K, P, Q, 16), plus the bias unless it is None."""
    outputs = shape.filters, shape.out_height, shape.out_width
    y = array.empty_lanes((len(x), *outputs, LANES), x.dtype)
    return _convolve("conv_direct_forward", x, weight, bias, y, shape)


def dx(dy, x, weight, shape, bias=None):
    """Return the gradient with respect to x, plus the bias. Only the shape of `x` is used."""
    return _convolve("conv_direct_dx", dy, weight, bias, array.empty_like(x, dy.dtype), shape)


def images_per_leaf(tiles, tree):
    """Return the number of images per leaf of the weight gradient: 1, 2, 4, 8 or 16.

    A leaf is the sum of the gradients of consecutive images. The result is the largest number that
    would give each multiprocessor two CTAs (thread blocks) if all images were on this GPU, with
    `tiles` CTAs per leaf. If no number does, the result is 1.
    """
    images = LANES
    while images > 1 and LANES // images * tree.leaves * tiles < 2 * launching.device().processors:
        images //= 2
    return images


def dweight_leaves(dy, x, shape, tree):
    """Return (leaves of the weight gradient, number of leaves per block of 16 images).

    The leaves are a float32 Array (leaves, number of weights), with the memory order of the
    weights. `dy` must be zero in lanes (image slots) that hold no image.
    """
    width = shape.width_of_filter
    tiles = _tiles(shape.filters_of_group, ROWS) * _tiles(width, COLUMNS)
    images = images_per_leaf(tiles * shape.groups, tree)
    leaves = array.empty((len(x) * (LANES // images), shape.filters * width))
    grid, arguments = (len(leaves) * tiles, 1, shape.groups), (dy, x, leaves, images, _sizes(shape))
    launching.launch("conv_direct_dweight", grid, THREADS, *arguments, defines=shape.definition)
    return leaves, LANES // images
