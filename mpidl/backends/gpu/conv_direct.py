"""Compute convolutions in float32 without tensor cores, with kernels/cuda/conv_direct.cu.

These kernels run on any GPU. `conv` uses this module if the GPU has no TF32 tensor cores, if
`settings.direct` is set, or if the images are too large. Tests compare the tensor-core kernels with
these kernels.
"""

import math

import numpy as np

from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.core.blocks import LANES

# Rows and columns of a tile, and threads per CTA (thread block), as in conv_direct.cu.
ROWS, COLUMNS, THREADS = 64, 32, 256
LARGEST = 1 << 31  # offsets within an image or the weights are C ints


def _numbers(shape):
    """Return the integer arguments that all three kernels have, for a `conv.Shape`.

    Raise ValueError if the images or weights are too large.
    """
    images = shape.channels, shape.height, shape.width
    outputs = shape.filters, shape.out_height, shape.out_width
    weights = shape.filters, shape.width_of_filter
    for kind, size in ("images", images), ("images", outputs), ("weights", weights):
        if math.prod(size) >= LARGEST:
            raise ValueError(f"conv2d: {kind} {size} are too large: at most 2^31 - 1 elements fit")
    return *images, *outputs, *shape[6:]


def _tiles(size, tile):
    return -(-size // tile)


def forward(x, weight, bias, shape):
    """Return the convolution of x, (blocks, K, P, Q, 16), plus the bias unless it is None."""
    blocks, outputs = len(x), (shape.filters, shape.out_height, shape.out_width)
    y, images = array.empty_lanes((blocks, *outputs, LANES), x.dtype), blocks * LANES
    pixels = images * shape.out_height * shape.out_width
    grid = _tiles(pixels, ROWS), _tiles(shape.filters_of_group, COLUMNS), shape.groups
    arrays, numbers = (x, weight, bias, y), _numbers(shape)
    launching.launch("conv_direct_forward", grid, THREADS, *arrays, images, *numbers)
    return y


def dx(dy, x, weight, shape):
    """Return the gradient with respect to x. Only the shape of `x` is used."""
    gradient, images = array.empty_like(x, dy.dtype), len(x) * LANES
    channels = shape.channels // shape.groups
    pixels = images * shape.height * shape.width
    grid = _tiles(pixels, ROWS), _tiles(channels, COLUMNS), shape.groups
    arrays, numbers = (dy, weight, gradient), _numbers(shape)
    launching.launch("conv_direct_dx", grid, THREADS, *arrays, images, *numbers)
    return gradient


def with_bias(y, bias):
    """Return y plus a bias per channel, computed by a batch normalization of mean 0 and scale 1."""
    zeros = np.zeros(bias.size, np.float32)
    return batchnorm.batchnorm(y, launching.constant(zeros), launching.constant(zeros + 1), bias)


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
    grid, arrays = (len(leaves) * tiles, 1, shape.groups), (dy, x, leaves)
    launching.launch("conv_direct_dweight", grid, THREADS, *arrays, images, *_numbers(shape))
    return leaves, LANES // images
