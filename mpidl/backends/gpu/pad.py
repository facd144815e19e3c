"""Pad images with kernels/cuda/pad.cu."""

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.launching import THREADS


def pad2d(x, padding, value):
    (top, bottom), (left, right) = padding
    blocks, channels, height, width, lanes = x.dims
    p, q = height + top + bottom, width + left + right
    y = array.empty_lanes((blocks, channels, p, q, lanes), x.dtype)
    geometry = channels, height, width, p, q, top, left
    grid = launching.blocks_of_threads(y.size, per_thread=4)
    launching.launch("pad2d", grid, THREADS, x, y, value, *geometry, blocks * lanes)
    return y


def fourth_channel(x):
    """Return images of 3 channels with a fourth channel of zeros."""
    blocks, _, *size, lanes = x.dims
    y = array.empty_lanes((blocks, 4, *size, lanes), x.dtype)
    pixels = y.size // 4
    launching.launch("pad_channel", launching.blocks_of_threads(pixels), THREADS, x, y, pixels)
    return y
