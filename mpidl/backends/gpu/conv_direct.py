"""Compute convolutions in float32 without tensor cores, with kernels/cuda/conv_direct.cu.

These kernels run on any GPU. `conv` uses this module if the GPU has no TF32 tensor cores, if
`settings.direct` is set, or if the images are too large. Tests compare the tensor-core kernels with
these kernels.
"""

import functools
import math

import numpy as np

from mpidl.backends import shapes
from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.core.blocks import LANES

# Rows and columns of a tile, and threads per CTA (thread block), as in conv_direct.cu.
ROWS, COLUMNS, THREADS = 64, 32, 256
LARGEST = 1 << 31  # offsets within an image or the weights are C ints


@functools.lru_cache(maxsize=256)
def _sizes(x_shape, weight_shape, geometry):
    """Return the integer arguments that all three kernels have, and the output shape (K, P, Q).

    Raise ValueError if the images or weights are too large.
    """
    stride, padding, dilation, groups = geometry
    k, _, r, s = weight_shape
    _, p, q = shapes.conv2d_shape(x_shape, weight_shape, stride, padding, dilation)
    for kind, shape in ("images", x_shape), ("images", (k, p, q)), ("weights", weight_shape):
        if math.prod(shape) >= LARGEST:
            raise ValueError(f"conv2d: {kind} {shape} are too large: at most 2^31 - 1 elements fit")
    (top, _), (left, _) = padding
    return (*x_shape, k, p, q, r, s, *stride, top, left, *dilation, groups), (k, p, q)


def _tiles(size, tile):
    return -(-size // tile)


def forward(x, weight, bias, geometry):
    """Return the convolution of x, (blocks, K, P, Q, 16), plus the bias unless it is None."""
    blocks, *image, lanes = x.dims
    numbers, (k, p, q) = _sizes(tuple(image), weight.dims, geometry)
    y = array.empty_lanes((blocks, k, p, q, lanes))
    images, groups = blocks * lanes, geometry.groups
    grid = _tiles(images * p * q, ROWS), _tiles(k // groups, COLUMNS), groups
    launching.launch("conv_direct_forward", grid, THREADS, x, weight, bias, y, images, *numbers)
    return y


def dx(dy, x, weight, geometry):
    """Return the gradient with respect to x. Only the shape of `x` is used."""
    blocks, c, h, w, lanes = x.dims
    numbers, _ = _sizes((c, h, w), weight.dims, geometry)
    gradient = array.empty_like(x)
    images, groups = blocks * lanes, geometry.groups
    grid = _tiles(images * h * w, ROWS), _tiles(c // groups, COLUMNS), groups
    launching.launch("conv_direct_dx", grid, THREADS, dy, weight, gradient, images, *numbers)
    return gradient


def with_bias(y, bias):
    """Return y plus a bias per channel, computed by a batch normalization of mean 0 and scale 1."""
    zeros = np.zeros(bias.size, np.float32)
    return batchnorm.batchnorm(y, launching.constant(zeros), launching.constant(zeros + 1), bias)


def images_per_leaf(tiles, tree):
    """Return the number of images per leaf of the weight gradient: 1, 2, 4, 8 or 16.

    A leaf is the sum of the gradients of consecutive images. With fewer images per leaf there are
    more CTAs (thread blocks), but also more leaves to write and fold. The result is the largest
    number that would give each multiprocessor two CTAs if all images were on this GPU. If no number
    does, the result is 1.

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


def dweight_leaves(dy, x, weight, geometry, tree):
    """Return (leaves of the weight gradient, number of leaves per block of 16 images).

    The leaves are a float32 Array (leaves, weight.size), with the memory order of the weights. A
    leaf is the sum of the gradients of 1, 2, 4, 8 or 16 consecutive images. Only the shape of
    `weight` is used. `dy` must be zero in lanes (image slots) that hold no image.
    """
    blocks, *image, lanes = x.dims
    numbers, (k, _, _) = _sizes(tuple(image), weight.dims, geometry)
    groups = geometry.groups
    width = math.prod(weight.dims[1:])
    tiles = _tiles(k // groups, ROWS) * _tiles(width, COLUMNS)
    images = images_per_leaf(tiles * groups, tree)
    leaves = array.empty((blocks * (lanes // images), weight.size))
    grid = len(leaves) * tiles, 1, groups
    launching.launch("conv_direct_dweight", grid, THREADS, dy, x, leaves, images, *numbers)
    return leaves, lanes // images
