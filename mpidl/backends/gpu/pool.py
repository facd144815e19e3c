"""Pooling by kernels/cuda/pool.cu."""

import functools
from typing import Any

import numpy as np

from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.backends.reference import pool2d_shape
from mpidl.blocks import DeferredInput

WARP, MOST = 32, 256  # threads of a CTA: as many as a row needs, up to MOST


@functools.lru_cache(maxsize=256)
def _geometry(x_shape, size, stride, padding):
    """The numbers that all kernels take, and (C, P, Q)."""
    output = pool2d_shape(x_shape, size, stride, padding)
    (top, _), (left, _) = padding
    return (*x_shape, *output[1:], *size, *stride, top, left), output


def _launch(name, rows, row, arrays, numbers):
    """One CTA a row; row: numbers in one. Four channels a thread where that goes evenly."""
    width = 4 if numbers[0] % 4 == 0 else 1
    threads = min(MOST, -(-row // (width * WARP)) * WARP)
    launching.launch(name, rows, threads, *arrays, *numbers, defines={"POOL_WIDTH": width})


def _forward(name, x, how, kept):
    x = batchnorm.read(x)
    blocks, *image, lanes = x.dims
    numbers, (c, p, q) = _geometry(tuple(image), *how)
    y = array.empty_lanes((blocks, c, p, q, lanes))
    made = (y, array.empty_like(y, np.uint8)) if kept else (y,)
    _launch(name, blocks * lanes * p, q * c, (x, *made), numbers)
    return made


def _backward(name, kept, x, how, tree):
    """kept: dy, and of the maximum argmax."""
    like: Any = x.x if isinstance(x, DeferredInput) else x
    blocks, c, h, w, lanes = like.dims
    numbers, _ = _geometry((c, h, w), *how)
    dx = array.empty_like(like)
    _launch(name, blocks * lanes * h, w * c, (*kept, dx), numbers)
    return dx, batchnorm.activation_sums(dx, x, tree) if isinstance(x, DeferredInput) else None


def max_pool2d(x, size, stride, padding):
    """(y, argmax): the largest pixel of each window, and its place in the window, counted row by
    row, as uint8. Of equal pixels the first; padding never; NaN where a pixel is NaN. x: an Array
    (blocks, C, H, W, 16) or a DeferredInput."""
    return _forward("max_pool2d", x, (size, stride, padding), True)


def max_pool2d_dx(dy, argmax, x, size, stride, padding, tree):
    """(gradient with respect to x, None), or where x is a DeferredInput, the Partial of its
    `activation_sums` too."""
    return _backward("max_pool2d_dx", (dy, argmax), x, (size, stride, padding), tree)


def average_pool2d(x, size, stride, padding):
    """The mean of each window, in which padding counts as zeros; x as in `max_pool2d`."""
    return _forward("average_pool2d", x, (size, stride, padding), False)[0]


def average_pool2d_dx(dy, x, size, stride, padding, tree):
    """As `max_pool2d_dx`."""
    return _backward("average_pool2d_dx", (dy,), x, (size, stride, padding), tree)
