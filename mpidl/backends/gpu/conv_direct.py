"""Convolution in plain float32, for any GPU, by kernels/cuda/conv_direct.cu.

GPUs without TF32 tensor cores use these kernels; on other GPUs they are the reference.
`conv_args` is (stride, padding, dilation, groups).
"""

import functools
import math

import numpy as np

from mpidl import shapes
from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.blocks import LANES

ROWS, COLUMNS, THREADS = 64, 32, 256  # tile size and threads per block, as in conv_direct.cu
LARGEST = 1 << 31  # offsets within an image and within the weights are int


@functools.lru_cache(maxsize=256)
def _geometry(x_shape, weight_shape, stride, padding, dilation, groups):
    """Return the numbers that are arguments of all three kernels, and (K, P, Q).

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
    """Return the convolution of x with the weights, plus bias if given: (blocks, K, P, Q, 16)."""
    blocks, *image, lanes = x.dims
    numbers, (k, p, q) = _geometry(tuple(image), weight.dims, *conv_args)
    y = array.empty_lanes((blocks, k, p, q, lanes))
    images, groups = blocks * lanes, conv_args[-1]
    grid = _tiles(images * p * q, ROWS), _tiles(k // groups, COLUMNS), groups
    launching.launch("conv_direct_forward", grid, THREADS, x, weight, bias, y, images, *numbers)
    return y


def dx(dy, x, weight, conv_args):
    """Return the gradient with respect to x. Of x, only the shape is used."""
    blocks, c, h, w, lanes = x.dims
    numbers, _ = _geometry((c, h, w), weight.dims, *conv_args)
    gradient = array.empty_like(x)
    images, groups = blocks * lanes, conv_args[-1]
    grid = _tiles(images * h * w, ROWS), _tiles(c // groups, COLUMNS), groups
    launching.launch("conv_direct_dx", grid, THREADS, dy, weight, gradient, images, *numbers)
    return gradient


def with_bias(y, bias):
    """Add a bias to each channel of y, by batch normalization with mean 0 and scale 1."""
    zeros = np.zeros(bias.size, np.float32)
    return batchnorm.batchnorm(y, launching.constant(zeros), launching.constant(zeros + 1), bias)


def images_per_leaf(tiles, tree):
    """Return the number of images per leaf of the gradient of the weights: 1, 2, 4, 8 or 16.

    Fewer images give more CTAs, but more leaves to write and to fold. The result is the largest
    number that would give each multiprocessor two CTAs if all images were on this GPU, or else 1.

    Parameters
    ----------
    tiles : int
        Number of CTAs per leaf.
    tree : Tree
        The tree over the global mini-batch.
    """
    images = LANES
    while images > 1 and LANES // images * tree.leaves * tiles < 2 * launching.device().processors:
        images //= 2
    return images


def dweight_leaves(dy, x, weight, conv_args, tree):
    """Return the leaves of the gradient of the weights, and the number of leaves per block.

    Leaves are (leaves, weight.size) float32, in the memory order of the weights. A leaf sums 1, 2,
    4, 8 or 16 consecutive images. Only the shape of `weight` is used. `dy` must be zero in unused
    images.
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
