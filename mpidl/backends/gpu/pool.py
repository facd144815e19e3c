"""Compute max and average pooling and their gradients with kernels/cuda/pool.cu."""

import functools
from typing import Any

import numpy as np

from mpidl.backends import shapes
from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.backends.gpu.fold import partial_of_leaves
from mpidl.core.blocks import LANES, DeferredInput

WARP, THREADS = 32, 256  # threads per warp, and maximum number of threads per CTA
FEW = 4  # pixels that a thread computes at once in a backward pass, as in sums.cuh


@functools.lru_cache(maxsize=256)
def _geometry(x_shape, windows):
    """Return the integer arguments that all kernels have, and the output shape (C, P, Q)."""
    size, stride, padding = windows
    output = shapes.pool2d_shape(x_shape, size, stride, padding)
    (top, _), (left, _) = padding
    return (*x_shape, *output[1:], *size, *stride, top, left), output


def _definitions(channels, is_max):
    """Return the definitions of pool.cu: the channels of a thread, and the kind of pooling."""
    return {"POOL_WIDTH": 4 if channels % 4 == 0 else 1, "MAX": int(is_max)}


def _forward(x, windows, is_max, count_padding=1):
    source = batchnorm.operand(x)
    blocks, *image, lanes = source[0].dims
    numbers, (c, p, q) = _geometry(tuple(image), windows)
    y = array.empty_lanes((blocks, c, p, q, lanes), source[0].dtype)
    argmax, defines = array.empty_like(y, np.uint8) if is_max else None, _definitions(c, is_max)
    threads = min(THREADS, -(-q * c // (defines["POOL_WIDTH"] * WARP)) * WARP)
    arguments = *source, y, argmax, *numbers, count_padding
    launching.launch("pool2d", blocks * lanes * p, threads, *arguments, defines=defines)
    return y, argmax


def _backward(dy, argmax, x, windows, tree, count_padding=1):
    """Return (dx, activation sums of dx). The sums are None unless x is a DeferredInput."""
    is_deferred = isinstance(x, DeferredInput)
    like: Any = x.x if is_deferred else x
    images, pixels, c = batchnorm.sizes(like)
    if images * pixels >= 1 << 31:
        raise ValueError(f"pooling: on a GPU, expected fewer than 2^31 pixels, got {like}")
    numbers, _ = _geometry(like.dims[1:-1], windows)
    dx, leaves, source = array.empty_like(like), None, batchnorm.operand(None)
    if is_deferred:
        grid, (per_leaf, _, _, tile) = batchnorm.division(like)
        count, source = per_leaf * pixels, batchnorm.operand(x)
        leaves = array.empty((grid[0], 2 * c), np.float64)
    else:
        tiles, tile = batchnorm.tiles_of(c)
        count = FEW * (THREADS // tile)
        grid = -(-images * pixels // count), tiles
    arguments = dy, argmax, *source, dx, leaves, count, images * pixels, tile, *numbers
    defines = _definitions(c, argmax is not None)
    launching.launch("pool2d_dx", grid, THREADS, *arguments, count_padding, defines=defines)
    if leaves is None:
        return dx, None
    return dx, partial_of_leaves(leaves, tree, LANES // per_leaf)


def max_pool2d(x, windows):
    return _forward(x, windows, is_max=True)


def max_pool2d_dx(dy, argmax, x, windows, tree):
    return _backward(dy, argmax, x, windows, tree)


def average_pool2d(x, windows, count_padding):
    return _forward(x, windows, False, int(count_padding))[0]


def average_pool2d_dx(dy, x, windows, count_padding, tree):
    return _backward(dy, None, x, windows, tree, int(count_padding))
