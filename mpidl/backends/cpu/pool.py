"""Pooling by the C kernels."""

import functools

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import partial_of_rows, source_of, tree_of
from mpidl.backends.reference import pool2d_shape


@functools.lru_cache(maxsize=256)
def _geometry(x_shape, size, stride, padding):
    """struct windows of kernels/cpu/pool.c, and (C, P, Q)."""
    output = pool2d_shape(x_shape, size, stride, padding)
    (top, _), (left, _) = padding
    shape = [*x_shape, *output[1:], *size, *stride, top, left]
    return np.array(shape, np.int64), output


def _forward(x, how, kept):
    source = source_of(x)
    blocks, *image, lanes = source[0].shape
    shape, output = _geometry(tuple(image), *how)
    y = arenas.empty((blocks, *output, lanes))
    argmax = arenas.empty(y.shape, np.uint8) if kept else None
    kernels().pool2d(*source, y, argmax, blocks, shape)
    return y, argmax


def _backward(dy, argmax, x, how, tree):
    source = source_of(x)
    blocks, *image, _ = source[0].shape
    shape, _ = _geometry(tuple(image), *how)
    dx = arenas.empty(source[0].shape)
    rows = None if source[1] is None else np.empty((blocks, 2 * image[0]))
    dy = np.ascontiguousarray(dy)
    kernels().pool2d_dx(dy, argmax, *source, dx, rows, blocks, shape, tree_of(tree))
    return dx, None if rows is None else partial_of_rows(rows, tree)


def max_pool2d(x, size, stride, padding):
    """(y, argmax): the largest pixel of each window, and its place in the window, counted row by
    row, as uint8. x: an array or a DeferredInput."""
    return _forward(x, (size, stride, padding), True)


def max_pool2d_dx(dy, argmax, x, size, stride, padding, tree):
    """(gradient with respect to x, None), or where x is a DeferredInput, the Partial of its
    `activation_sums` too."""
    return _backward(dy, argmax, x, (size, stride, padding), tree)


def average_pool2d(x, size, stride, padding):
    """The mean of each window, in which padding counts as zeros; x as in `max_pool2d`."""
    return _forward(x, (size, stride, padding), False)[0]


def average_pool2d_dx(dy, x, size, stride, padding, tree):
    """As `max_pool2d_dx`."""
    return _backward(dy, None, x, (size, stride, padding), tree)
