"""Compute max and average pooling and their gradients with kernels/cuda/pool.cu."""

import functools
from typing import Any

import numpy as np

from mpidl.backends import shapes
from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.core.blocks import DeferredInput

WARP, MAX_THREADS = 32, 256  # threads per warp, and maximum number of threads per CTA


@functools.lru_cache(maxsize=256)
def _geometry(x_shape, windows):
    """Return the integer arguments that all kernels have, and the output shape (C, P, Q)."""
    size, stride, padding = windows
    output = shapes.pool2d_shape(x_shape, size, stride, padding)
    (top, _), (left, _) = padding
    return (*x_shape, *output[1:], *size, *stride, top, left), output


def _launch(name, rows, row, arrays, numbers):
    """Launch one CTA (block of threads) for each of `rows` rows of `row` elements.

    A thread computes four channels if the number of channels is a multiple of four, else one
    channel.
    """
    width = 4 if numbers[0] % 4 == 0 else 1
    threads = min(MAX_THREADS, -(-row // (width * WARP)) * WARP)
    launching.launch(name, rows, threads, *arrays, *numbers, defines={"POOL_WIDTH": width})


def _forward(name, x, windows, with_argmax, *options):
    source = batchnorm.operand(x)
    blocks, *image, lanes = source[0].dims
    numbers, (c, p, q) = _geometry(tuple(image), windows)
    y = array.empty_lanes((blocks, c, p, q, lanes), source[0].dtype)
    outputs = (y, array.empty_like(y, np.uint8)) if with_argmax else (y,)
    _launch(name, blocks * lanes * p, q * c, (*source, *outputs), (*numbers, *options))
    return outputs


def _backward(name, arrays, x, windows, tree, *options):
    """Launch a backward pass; return (dx, activation sums of dx).

    The sums are None unless x is a DeferredInput. `arrays` is (dy, argmax) for max pooling, and
    (dy,) for average pooling. `options` are the last arguments of the kernel.
    """
    like: Any = x.x if isinstance(x, DeferredInput) else x
    blocks, c, h, w, lanes = like.dims
    numbers, _ = _geometry((c, h, w), windows)
    dx = array.empty_like(like)
    _launch(name, blocks * lanes * h, w * c, (*arrays, dx), (*numbers, *options))
    return dx, batchnorm.activation_sums(dx, x, tree) if isinstance(x, DeferredInput) else None


def max_pool2d(x, windows):
    return _forward("max_pool2d", x, windows, True)


def max_pool2d_dx(dy, argmax, x, windows, tree):
    return _backward("max_pool2d_dx", (dy, argmax), x, windows, tree)


def average_pool2d(x, windows, count_padding):
    return _forward("average_pool2d", x, windows, False, int(count_padding))[0]


def average_pool2d_dx(dy, x, windows, count_padding, tree):
    return _backward("average_pool2d_dx", (dy,), x, windows, tree, int(count_padding))
