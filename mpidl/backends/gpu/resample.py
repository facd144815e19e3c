"""Resample images, and copy channels, with kernels/cuda/resample.cu."""

import numpy as np

from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.backends.gpu.join import rows_and_channels
from mpidl.backends.gpu.launching import THREADS

WARP = 32  # threads per warp


def resample(x, rows, columns):
    source = batchnorm.operand(x)
    blocks, *image, lanes = source[0].dims
    p, q = len(rows.outputs), len(columns.outputs)
    y = array.empty_lanes((blocks, image[0], p, q, lanes), source[0].dtype)
    width = 4 if image[0] % 4 == 0 else 1
    threads = min(THREADS, -(-q * image[0] // (width * WARP)) * WARP)
    tables = launching.constant(rows.packed), launching.constant(columns.packed)
    arguments = *source, y, *image, p, q, *tables
    defines = {"RESAMPLE_WIDTH": width}
    launching.launch("resample", blocks * lanes * p, threads, *arguments, defines=defines)
    return y


def take_channels(x, channels):
    pixels, all_channels = rows_and_channels("take_channels", x)
    blocks, _, *rest = x.dims
    y = array.empty_lanes((blocks, len(channels), *rest), x.dtype)
    indices = launching.constant(np.array(channels, np.int64))
    grid = launching.blocks_of_threads(y.size, per_thread=4)
    arguments = x, y, indices, pixels, all_channels, len(channels)
    launching.launch("take_channels", grid, THREADS, *arguments)
    return y
