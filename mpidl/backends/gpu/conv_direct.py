"""Convolution in float32 without tensor cores, by kernels/cuda/conv_direct.cu.

These kernels run on any GPU. `conv` uses them if the GPU has no TF32 tensor cores, if
`settings.direct` is set, or if the images are too large. They are the reference for the kernels on
tensor cores. `conv_args` is (stride, padding, dilation, groups).
"""

import functools
import math

import numpy as np

from mpidl import shapes
from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.blocks import LANES

# Tile size and threads per CTA (thread block), as in conv_direct.cu.
ROWS, COLUMNS, THREADS = 64, 32, 256
LARGEST = 1 << 31  # offsets within an image or the weights are C ints


@functools.lru_cache(maxsize=256)
def _geometry(x_shape, weight_shape, stride, padding, dilation, groups):
    """Return the integer arguments that all three kernels share, and (K, P, Q).

    Raises ValueError if the images or weights are too large.
    """
    k, _, r, s = weight_shape
    _, p, q = shapes.conv2d_shape(x_shape, weight_shape, stride, padding, dilation)
    for kind, shape in ("images", x_shape), ("images", (k, p, q)), ("weights", weight_shape):
        if math.prod(shape) >= LARGEST:
            raise ValueError(f"conv2d: {kind} of {shape} are too large: at most 2^31 - 1 numbers")
    (top, _), (left, _) = padding
    return (*x_shape, k, p, q, r, s, *stride, top, left, *dilation, groups), (k, p, q)


def _tiles(size, tile):
    return -(-size // tile)


def forward(x, weight, bias, conv_args):
    """Return the convolution of x, plus the bias if it is not None, (blocks, K, P, Q, 16)."""
    blocks, *image, lanes = x.dims
    numbers, (k, p, q) = _geometry(tuple(image), weight.dims, *conv_args)
    y = array.empty_lanes((blocks, k, p, q, lanes))
    images, groups = blocks * lanes, conv_args[-1]
    grid = _tiles(images * p * q, ROWS), _tiles(k // groups, COLUMNS), groups
    launching.launch("conv_direct_forward", grid, THREADS, x, weight, bias, y, images, *numbers)
    return y


def dx(dy, x, weight, conv_args):
    """Return the gradient with respect to x. Only the shape of `x` is used."""
    blocks, c, h, w, lanes = x.dims
    numbers, _ = _geometry((c, h, w), weight.dims, *conv_args)
    gradient = array.empty_like(x)
    images, groups = blocks * lanes, conv_args[-1]
    grid = _tiles(images * h * w, ROWS), _tiles(c // groups, COLUMNS), groups
    launching.launch("conv_direct_dx", grid, THREADS, dy, weight, gradient, images, *numbers)
    return gradient


def with_bias(y, bias):
    """Add a bias to each channel of y by a batch normalization with mean 0 and scale 1."""
    zeros = np.zeros(bias.size, np.float32)
    return batchnorm.batchnorm(y, launching.constant(zeros), launching.constant(zeros + 1), bias)


def images_per_leaf(tiles, tree):
    """Return the number of images per leaf of the weight gradient: 1, 2, 4, 8 or 16.

    A leaf is the sum of the gradients of consecutive images. Fewer images per leaf give more CTAs
    (thread blocks), but more leaves to write and to fold. The result is the largest number that
    would give each multiprocessor two CTAs if all images were on this GPU, or 1 if none does.

    Parameters
    ----------
    tiles : int
        Number of CTAs per leaf.
    tree : Tree
        The reduction tree over the global mini-batch, in blocks of 16 images.
    """
    images = LANES
    while images > 1 and LANES // images * tree.leaves * tiles < 2 * launching.device().processors:
        images //= 2
    return images


def dweight_leaves(dy, x, weight, conv_args, tree):
    """Return the leaves of the weight gradient, and the number of leaves per block of 16 images.

    The leaves are float32 (leaves, weight.size), in the memory order of the weights. A leaf is the
    sum of the gradients of 1, 2, 4, 8 or 16 consecutive images. Only the shape of `weight` is used.
    `dy` must be zero in the unused lanes (image slots) of a block.
    """
    blocks, *image, lanes = x.dims
    numbers, (k, _, _) = _geometry(tuple(image), weight.dims, *conv_args)
    groups = conv_args[-1]
    width = math.prod(weight.dims[1:])
    tiles = _tiles(k // groups, ROWS) * _tiles(width, COLUMNS)
    images = images_per_leaf(tiles * groups, tree)
    leaves = array.empty((blocks * (lanes // images), weight.size))
    grid = len(leaves) * tiles, 1, groups
    launching.launch("conv_direct_dweight", grid, THREADS, dy, x, leaves, images, *numbers)
    return leaves, lanes // images
