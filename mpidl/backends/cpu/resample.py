"""Resample images, and copy channels, with the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import source_of


def resample(x, rows, columns):
    source = source_of(x)
    blocks, *image, lanes = source[0].shape
    outputs = len(rows.outputs), len(columns.outputs)
    y = arenas.empty((blocks, image[0], *outputs, lanes), source[0].dtype)
    shape = np.array([*image, *outputs], np.int64)
    kernels().resample(*source, y, blocks, shape, rows.packed, columns.packed)
    return y


def take_channels(x, channels):
    x = np.ascontiguousarray(x)
    blocks, all_channels, pixels = sizes(x)
    y = arenas.empty((blocks, len(channels), *x.shape[2:]), x.dtype)
    indices = np.array(channels, np.int64)
    kernels().take_channels(x, y, blocks, all_channels, pixels, len(channels), indices)
    return y
