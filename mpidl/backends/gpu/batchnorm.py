"""Compute batch normalization and its gradient with kernels/cuda/batchnorm.cu.

Statistics stay on the device. Vectors are (C,) float32 Arrays unless stated otherwise.
"""

import math

import numpy as np

from mpidl.backends.deferred import NormalizedInput
from mpidl.backends.gpu import array, fold, launching
from mpidl.core.blocks import LANES, DeferredInput
from mpidl.core.fold import add, merge_moments

THREADS = 256  # threads per block, as in batchnorm.cu
CHANNELS = 128  # maximum number of channels per block of threads
PIXELS = 32  # minimum number of pixels per leaf (partial sum); a leaf has at most 16 images


class Read(DeferredInput):
    """A DeferredInput that computes its activation when it is first read, and then stores it."""

    stored = None


def source(y, mean, scale, beta, low=0.0, high=math.inf):
    return Read(y, mean, scale, beta, low, high)


def read(x):
    """Return the value of a DeferredInput or NormalizedInput, or x itself if x is an Array.

    The caller must not write to the result.
    """
    if not isinstance(x, DeferredInput):
        return x
    if not isinstance(x, Read):
        return add_operands(x)
    if x.stored is None:
        x.stored = add_operands(x)
    return x.stored


def activation(source):
    return read(source)


def operand(x):
    """Return the fields of `Source` in batchnorm.cu for an Array or a DeferredInput."""
    return tuple(x) if isinstance(x, DeferredInput) else (x, None, None, None, 0.0, 0.0)


def sizes(x):
    """Return (images, pixels per image, channels). Unused lanes count as images."""
    _check(x)
    blocks, channels, *pixels, lanes = x.dims
    return blocks * lanes, math.prod(pixels), channels


def _check(x):
    if x.dims[-1] != LANES or x.order != array.order_of_lanes(x.dims):
        raise ValueError(f"expected (blocks, C, ..., {LANES}) lanes, got {x}")


def tiles_of(channels):
    """Return (number of tiles that cover the channels, number of threads across a tile).

    A thread computes 4 channels if the number of channels is a multiple of 4, else 1 channel.
    """
    columns = channels // 4 if channels % 4 == 0 else channels
    tiles = -(-channels // CHANNELS)
    tile = -(-columns // tiles)
    return -(-columns // tile), tile


def _leaf(pixels):
    """Return the number of images per leaf, which depends only on the pixels per image."""
    images = 1
    while images < LANES and images * pixels < PIXELS:
        images *= 2
    return images


def _leaves(name, x, width, dtype, tree, *arguments, combine=add):
    """Launch a kernel that computes the leaves of a sum, and return the sum as a Partial.

    A leaf has `width` elements of type `dtype`. The kernel's arguments are `arguments`, followed by
    (leaves, images per leaf, pixels, channels, threads across a tile).
    """
    (count, tiles), numbers = division(x)
    leaves = launching.empty((count, width), dtype)
    launching.launch(name, (count, tiles), THREADS, *arguments, leaves, *numbers)
    return fold.partial_of_leaves(leaves, tree, LANES // numbers[0], combine)


def division(x):
    """Return how a kernel that sums over x divides its rows and channels.

    The result is its grid (leaves, tiles), and its last arguments (images per leaf, pixels,
    channels, threads across a tile).
    """
    images, pixels, channels = sizes(x)
    per_leaf, (tiles, tile) = _leaf(pixels), tiles_of(channels)
    return (images // per_leaf, tiles), (per_leaf, pixels, channels, tile)


def channel_sums(x, tree):
    return _leaves("channel_sums", x, x.dims[1], "f4", tree, x)


def moments(x, counts, tree):
    width = 1 + 2 * x.dims[1]
    return _leaves("moments", x, width, "f8", tree, x, counts, combine=merge_moments)


def batchnorm_sums(dy, x, mean, tree):
    return _products(dy, (x, mean, None, None, 0.0, 0.0), tree)


def activation_sums(dy, source, tree):
    return _products(dy, tuple(source), tree)


def _products(dy, source, tree):
    x = source[0]
    dy, width = cotangent_like(dy, x), 2 * x.dims[1]
    return _leaves("batchnorm_sums", x, width, "f8", tree, dy, *source)


def cotangent_like(dy, x):
    """Return dy, or raise ValueError unless dy has the size, channels and memory order of x."""
    if dy.size != x.size or dy.dims[1] != x.dims[1]:
        raise ValueError(f"expected a cotangent of {x}, got {dy}")
    _check(dy)
    return dy


def grid_of(rows, channels):
    """Return (grid, number of threads across a tile) for a kernel over all rows (pixels)."""
    tiles, tile = tiles_of(channels)
    blocks = -(-rows // (4 * (THREADS // tile)))
    return (min(blocks, 16 * launching.device().processors), tiles), tile


def add_operands(a, b=None, relu=False):
    """Return a + b, or a if b is None, or the ReLU of this. A DeferredInput is normalized.

    With `relu`, the result has the bits that its gradient reads, if the kernel writes them.
    """
    (x, *_), (other, *_) = a, b = operand(a), operand(b)
    if other is not None and (x.dims, x.order) != (other.dims, other.order):
        raise ValueError(f"cannot add {other} to {x}: they differ in shape or order in memory")
    y, (images, pixels, channels) = array.empty_like(x), sizes(x)
    if relu and channels % 4 == 0:
        y.positive = array.empty((y.size // 4,), np.uint8)
    rows = images * pixels
    grid, tile = grid_of(rows, channels)
    numbers = int(relu), rows, channels, tile
    launching.launch("add_operands", grid, THREADS, *a, *b, y, y.positive, *numbers)
    return y


def batchnorm(x, mean, scale, beta):
    return add_operands(NormalizedInput(x, mean, scale, beta))


def batchnorm_dx(dy, x, mean, a, b, c, counts):
    source = x, mean, None, None, 0.0, 0.0
    return _back(dy, source, a, b, c, counts, array.empty_like(x))


def activation_dx(dy, source, a, b, c, counts, overwrite=False):
    """Return a * dz + b * (x - mean) + c, with dz = dy within the limits of source, else 0.

    For a NormalizedInput, which has no limits, dz is dy. If `overwrite` is True, the result
    overwrites dy.
    """
    dx = dy if overwrite else array.empty_like(source.x)
    if isinstance(source, NormalizedInput):
        return _back(dy, (*source[:2], None, None, 0.0, 0.0), a, b, c, counts, dx)
    return _back(dy, source, a, b, c, counts, dx)


def _back(dy, source, a, b, c, counts, dx):
    images, pixels, channels = sizes(source[0])
    rows, dy = images * pixels, cotangent_like(dy, source[0])
    grid, tile = grid_of(rows, channels)
    last = counts, dx, pixels, rows, channels, tile
    launching.launch("batchnorm_dx", grid, THREADS, dy, *source, a, b, c, *last)
    return dx


def _vectors(channels, *kinds):
    return [launching.empty((channels,), kind) for kind in kinds]


def statistics(moments, gamma, epsilon):
    # count (1,), mean, rstd and variance are float64; shift and scale are float32
    count, vectors = launching.empty((1,), "f8"), _vectors(gamma.size, *"f8 f8 f8 f4 f4".split())
    _of_fold("statistics", moments, merge_moments, gamma, epsilon, count, *vectors)
    return (count, *vectors)


def batchnorm_factors(sums, gamma, statistics):
    # the kernel computes in float64 and writes float32
    count, _, rstd, *_ = statistics
    vectors = _vectors(gamma.size, *5 * ("f4",))
    _of_fold("batchnorm_factors", sums, add, gamma, count, rstd, *vectors)
    return tuple(vectors)


def _of_fold(name, root, combine, gamma, *arguments):
    """Launch a kernel that computes vectors of channels from a sum, and its fold if that waits."""
    leaves, count, root = fold.leaves_of(root, combine)
    channels, (columns, _) = gamma.size, fold.spread(gamma.size, count, "moments")
    grid, threads = -(-channels // columns), fold.threads_of(count, columns)
    numbers = count, channels, columns
    launching.launch(name, grid, threads, leaves, root, gamma, *arguments, *numbers)


def running(olds, values, decay):
    # olds are (C,) float32, values are (C,) float64
    news = [array.empty_like(old) for old in olds]
    bits = int(np.float64(decay).view(np.int64))
    for old, value, new in zip(olds, values, news, strict=True):
        if (old.dtype, value.dtype, old.size) != ("f4", "f8", value.size):
            raise TypeError(
                f"expected float32 and float64 arrays of equal size, got {old} and {value}"
            )
        row, blocks = [old, value, new, old.size, bits], -(-old.size // 128)
        launching.later("running", row, [new], blocks, 128)
    return news


def predict_scale(gamma, variance, epsilon):
    scale, channels = launching.empty((gamma.size,)), gamma.size
    launching.launch(
        "predict_scale", -(-channels // 128), 128, gamma, variance, epsilon, scale, channels
    )
    return scale
