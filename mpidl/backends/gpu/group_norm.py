"""Compute normalization within an image, and its gradient, with kernels/cuda/group_norm.cu."""

from typing import Any

import numpy as np

from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.backends.gpu.batchnorm import cotangent_like
from mpidl.backends.gpu.fold import partial_of_leaves
from mpidl.backends.gpu.join import rows_and_channels
from mpidl.backends.gpu.launching import THREADS
from mpidl.core.blocks import LANES

WARPS = 8  # of a block of threads, as in group_norm.cu


def _blocks_of_warps(count):
    return -(-count // WARPS)


def _of_rows(rows):
    """Return the grid of a kernel whose warps compute rows."""
    return min(_blocks_of_warps(rows), 32 * launching.device().processors)


def _sets(x, groups):
    """Return (number of sets, rows of a set, channels of a set)."""
    images, pixels, channels = batchnorm.sizes(x)
    if groups is None:
        return images * pixels, 1, channels
    return images * groups, pixels, channels // groups


def _pixels_of(gamma, pixels):
    """Return the number of pixels if gamma is per element of an image, else 0."""
    return pixels if gamma is not None and len(gamma.shape) > 1 else 0


def _grid_of_elements(x, channels):
    return launching.blocks_of_threads(x.size, per_thread=4 if channels % 4 == 0 else 1)


def group_norm(x, gamma, beta, groups, epsilon):
    rows, channels = rows_and_channels("group_norm", x)
    images, pixels, _ = batchnorm.sizes(x)
    (count, height, width), y = _sets(x, groups), array.empty_like(x)
    statistics = launching.empty((2, count), np.float32)
    if groups is None:
        arguments = x, gamma, beta, epsilon, y, statistics, rows, channels
        launching.launch("pixel_norm", _of_rows(rows), THREADS, *arguments)
        return y, statistics
    tiles, tile = batchnorm.tiles_of(channels)
    moments = launching.empty((images, 1 + 2 * channels), np.float64)
    launching.launch(
        *("image_moments", (images, tiles), THREADS, x, moments, pixels, channels, tile)
    )
    numbers = count, groups, channels
    blocks = _blocks_of_warps(count)
    launching.launch("group_statistics", blocks, THREADS, moments, epsilon, statistics, *numbers)
    numbers = _pixels_of(gamma, pixels), rows, height, width, channels
    grid = _grid_of_elements(x, channels)
    launching.launch("group_norm", grid, THREADS, x, gamma, beta, statistics, y, *numbers)
    return y, statistics


def group_norm_backward(dy, x, gamma, statistics, groups, tree, needs):
    rows, channels = rows_and_channels("group_norm", x)
    dy, of_image = cotangent_like(dy, x), batchnorm.sizes(x)[1]
    of_elements = _pixels_of(gamma, of_image)
    dx = array.empty_like(x) if needs[0] else None
    leaves: tuple[Any, ...] = None, None
    if of_elements and any(needs[1:]):
        leaves = _element_sums(dy, x, statistics, groups)
    elif groups is not None or any(needs[1:]):
        leaves = _sums(dy, x, None, statistics, groups)
    if needs[0] and groups is None:
        arguments = dy, x, gamma, statistics, dx, rows, channels
        launching.launch("pixel_norm_dx", _of_rows(rows), THREADS, *arguments)
    elif needs[0]:
        sums = _sums(dy, x, gamma, statistics, groups) if of_elements else leaves
        means = _means(x, sums, None if of_elements else gamma, groups)
        numbers = of_elements, rows, *_sets(x, groups)[1:], channels
        arguments = dy, x, gamma, statistics, means, dx, *numbers
        launching.launch("group_norm_dx", _grid_of_elements(x, channels), THREADS, *arguments)
    shape = (channels,) if gamma is None else gamma.shape
    sums = zip(leaves, needs[1:], strict=True)
    return dx, *(_partial(v, x, shape, tree) if is_needed else None for v, is_needed in sums)


def _partial(leaves, x, shape, tree):
    per_block = len(leaves) // len(x) if len(x) else 1
    return partial_of_leaves(leaves, tree, per_block, shape=shape)


def _sums(dy, x, gamma, statistics, groups):
    """Return the sums of dz * (x - mean) * rstd and of dz, (leaves, C) each.

    The sums of groups have one leaf per image. dz is dy, or gamma * dy with gamma per element.
    """
    (count, tiles), (per_leaf, of_image, channels, tile) = batchnorm.division(x)
    if groups is not None:
        count, per_leaf = count * per_leaf, 1
    products, sums = (launching.empty((count, channels), np.float32) for _ in range(2))
    _, height, width = _sets(x, groups)
    numbers = height, width, count * per_leaf * of_image, _pixels_of(gamma, of_image)
    numbers = *numbers, per_leaf, of_image, channels, tile
    arguments = dy, x, gamma, statistics, products, sums, *numbers
    launching.launch("group_norm_sums", (count, tiles), THREADS, *arguments)
    return products, sums


def _means(x, sums, gamma, groups):
    """Return the means of dz and of dz * (x - mean) * rstd over each group, (2, sets)."""
    (count, height, _), channels = _sets(x, groups), x.dims[1]
    means = launching.empty((2, count), np.float32)
    arguments = *sums, gamma, means, count, groups, height, channels
    launching.launch("group_means", _blocks_of_warps(count), THREADS, *arguments)
    return means


def _element_sums(dy, x, statistics, groups):
    """Return the sums of dy * (x - mean) * rstd and of dy over the images of each block."""
    _, pixels, channels = batchnorm.sizes(x)
    elements = x.size // LANES
    products, sums = (launching.empty((len(x), channels * pixels), np.float32) for _ in range(2))
    numbers = elements, pixels, channels // groups, channels
    arguments = dy, x, statistics, products, sums, *numbers
    launching.launch("element_sums", launching.blocks_of_threads(elements), THREADS, *arguments)
    return products, sums
