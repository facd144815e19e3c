"""Compute max and average pooling and their gradients with the C kernels."""

import functools

import numpy as np

from mpidl.backends import shapes
from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import partial_of_rows, source_of, tree_of


@functools.lru_cache(maxsize=256)
def geometry(x_shape, windows, count_padding=True):
    """Return an int64 array laid out as `struct windows` in kernels/cpu/pool.h, and (C, P, Q)."""
    size, stride, padding = windows
    output = shapes.pool2d_shape(x_shape, size, stride, padding)
    (top, _), (left, _) = padding
    shape = [*x_shape, *output[1:], *size, *stride, top, left, count_padding]
    return np.array(shape, np.int64), output


def _forward(x, windows, count_padding=True, with_argmax=False):
    source = source_of(x)
    blocks, *image, lanes = source[0].shape
    shape, output = geometry(tuple(image), windows, count_padding)
    y = arenas.empty((blocks, *output, lanes), source[0].dtype)
    argmax = arenas.empty(y.shape, np.uint8) if with_argmax else None
    kernels().pool2d(*source, y, argmax, blocks, shape)
    return y, argmax


def _backward(dy, argmax, x, windows, tree, count_padding=True):
    source = source_of(x)
    blocks, *image, _ = source[0].shape
    shape, _ = geometry(tuple(image), windows, count_padding)
    dx = arenas.empty(source[0].shape, source[0].dtype)
    rows = None if source[1] is None else arenas.empty((blocks, 2 * image[0]), np.float64)
    dy = np.ascontiguousarray(dy)
    kernels().pool2d_dx(dy, argmax, *source, dx, rows, blocks, shape, tree_of(tree))
    return dx, None if rows is None else partial_of_rows(rows, tree)


def max_pool2d(x, windows):
    return _forward(x, windows, with_argmax=True)


def max_pool2d_dx(dy, argmax, x, windows, tree):
    return _backward(dy, argmax, x, windows, tree)


def average_pool2d(x, windows, count_padding):
    return _forward(x, windows, count_padding)[0]


def average_pool2d_dx(dy, x, windows, count_padding, tree):
    return _backward(dy, None, x, windows, tree, count_padding)
