"""Add, concatenate and split per-image values with the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import partial_of_rows, source_of, tree_of


def add(a, b):
    return _sum(a, b, relu=0)


def add_relu(a, b):
    return _sum(a, b, relu=1)


def _sum(a, b, relu):
    a, b = source_of(a), source_of(b)
    y = arenas.empty(a[0].shape, a[0].dtype)
    kernels().add(*a, *b, y, relu, *sizes(y))
    return y


def add_relu_dx(dy, y, normalizations, tree):
    dy, more_dy = (*map(np.ascontiguousarray, dy), None)[:2]
    dz, (blocks, channels, pixels) = arenas.empty(y.shape, y.dtype), sizes(y)
    arguments, all_rows = [], []
    for operand in normalizations:
        rows = None if operand is None else arenas.empty((blocks, 2 * channels), np.float64)
        arguments += (None, None, None) if operand is None else (*source_of(operand)[:2], rows)
        all_rows.append(rows)
    geometry = blocks, channels, pixels, tree_of(tree)
    kernels().add_relu_dx(dy, more_dy, np.ascontiguousarray(y), dz, *arguments, *geometry)
    return dz, [None if rows is None else partial_of_rows(rows, tree) for rows in all_rows]


def concat(arrays):
    sources = [source_of(a) for a in arrays]
    blocks, _, *rest = sources[0][0].shape
    y = arenas.empty((blocks, sum(s[0].shape[1] for s in sources), *rest), sources[0][0].dtype)
    first = 0
    for source in sources:
        blocks, channels, pixels = sizes(source[0])
        kernels().concat(*source, y, blocks, channels, pixels, y.shape[1], first)
        first += channels
    return y


def split(x, channels):
    x = np.ascontiguousarray(x)
    blocks, all_channels, pixels = sizes(x)
    parts, first = [], 0
    for count in channels:
        part = arenas.empty((blocks, count, *x.shape[2:]), x.dtype)
        kernels().split(x, part, blocks, count, pixels, all_channels, first)
        parts.append(part)
        first += count
    return parts
