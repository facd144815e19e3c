"""Pixels of images to blocks, by the C kernels."""

import numpy as np

from mpidl.backends import memory
from mpidl.backends.native import kernels
from mpidl.blocks import LANES, blocks_of


def images(pixels, size=None, mirrored=None, top=None, left=None):
    """Lanes (B, C, P, Q, 16) float32 of uint8 pixels (n, C, H, W), divided by 255.

    See `reference.images`. Runs on the calling thread alone, which may be any.
    """
    pixels = np.ascontiguousarray(pixels)
    count, *image = pixels.shape
    p, q = image[1:] if size is None else size
    lanes = memory.empty((blocks_of(count), image[0], p, q, LANES))
    moves = (
        None if m is None else np.ascontiguousarray(m, np.int32) for m in (mirrored, top, left)
    )
    kernels().images(pixels, count, np.array([*image, p, q], np.int64), *moves, lanes)
    return lanes
