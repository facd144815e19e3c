"""Add, concatenate and split per-image values with the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import source_of


def add(a, b):
    a, b = source_of(a), source_of(b)
    y = arenas.empty(a[0].shape)
    kernels().add(*a, *b, y, *sizes(y))
    return y


def concat(arrays):
    sources = [source_of(a) for a in arrays]
    blocks, _, *rest = sources[0][0].shape
    y = arenas.empty((blocks, sum(s[0].shape[1] for s in sources), *rest))
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
        part = arenas.empty((blocks, count, *x.shape[2:]))
        kernels().split(x, part, blocks, count, pixels, all_channels, first)
        parts.append(part)
        first += count
    return parts
