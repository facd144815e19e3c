"""Multiply values with broadcasting, and scale channels, with the C kernels."""

import functools

import numpy as np

from mpidl.backends import shapes
from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import nodes_of, partial_of_rows, per_channel, tree_of
from mpidl.backends.reference.gates import aligned


@functools.lru_cache(maxsize=256)
def _axes(y, a, b):
    """Return `shapes.product_axes` as an array laid out as `struct axes` in gates.c."""
    return np.array(shapes.product_axes(y, a, b), np.int64)


def multiply(a, b):
    a, b = aligned(np.ascontiguousarray(a), np.ascontiguousarray(b))
    shape = np.broadcast_shapes(a.shape, b.shape)
    y = arenas.empty(shape, a.dtype)
    kernels().multiply(a, b, y, len(a), _axes(shape[1:-1], a.shape[1:-1], b.shape[1:-1]))
    return y


def multiply_dx(dy, other, x):
    dx = arenas.empty(x.shape, dy.dtype)
    dy, other, result = aligned(np.ascontiguousarray(dy), np.ascontiguousarray(other), dx)
    of_dy, of_other, of_dx = (value.shape[1:-1] for value in (dy, other, result))
    if of_dy == of_dx:
        kernels().multiply(dy, other, result, len(dy), _axes(of_dy, of_dy, of_other))
    else:
        kernels().multiply_dx(dy, other, result, len(dy), _axes(of_dy, of_other, of_dx))
    return dx


def scale_channels(x, factor):
    y = arenas.empty(x.shape, x.dtype)
    kernels().scale_channels(np.ascontiguousarray(x), per_channel(factor), y, *sizes(x))
    return y


def scale_channels_dfactor(dy, x, tree):
    _, channels, pixels = sizes(x)
    nodes = arenas.empty((nodes_of(tree), channels))
    dy, x = np.ascontiguousarray(dy), np.ascontiguousarray(x)
    geometry = len(nodes), tree_of(tree), channels, pixels
    kernels().scale_channels_dfactor(dy, x, nodes, *geometry)
    return partial_of_rows(nodes, tree)
