"""Lanes of images and of their targets, by kernels/cuda/images.cu."""

import math

import numpy as np

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.array import Array
from mpidl.blocks import LANES, blocks_of

THREADS, PER_THREAD = 256, 4  # elements of a thread


def images(
    pixels,
    size=None,
    mirrored=None,
    top=None,
    left=None,
    fill=None,
    centre=None,
    divisor=None,
    out=None,
    *,
    indices=None,
    counts=None,
    blocks=None,
):
    """Besides what `Backend.images` says, gather images of a data set.

    mirrored, top and left are int32 Arrays, one number for each image of the share.

    Parameters
    ----------
    indices : (share,) int32 Array, optional
        The number in `pixels`, then the whole data set, of each image of the share.
    counts : (1,) int32 Array, optional
        How many images there are, of those that `indices` or `pixels` has. Nothing is read of the
        others.
    blocks : int, optional
        B; by default that of as many images.
    """
    if pixels.ndim != 4 or pixels.order != (0, 1, 2, 3):
        raise ValueError(f"expected pixels (n, C, H, W) in that order, got {pixels.shape}")
    images_of_share, *image = pixels.shape
    images_of_share = images_of_share if indices is None else len(indices)
    blocks = blocks_of(images_of_share) if blocks is None else blocks
    p, q = image[1:] if size is None else size
    lanes = array.empty_lanes((blocks, image[0], p, q, LANES)) if out is None else out
    parts = _parts(image[0] * p * q)
    of_pixels = int(centre is not None and len(centre.shape) == 3)
    name = "images_of_bytes" if pixels.dtype == np.uint8 else "images_of_floats"
    moves, numbers = (mirrored, top, left), (*image, p, q, of_pixels, images_of_share, parts)
    arrays = pixels, indices, counts, *moves, fill, centre, divisor, lanes
    launching.launch(name, blocks * LANES * parts, THREADS, *arrays, *numbers)
    return lanes


def targets(table, *, indices=None, counts=None, blocks=None):
    """Return lanes (B, *shape, 16) of what goes with images: labels, numbers, maps or images.

    Parameters
    ----------
    table : (n, *shape) float32 or int32 Array
        Values as files have them.
    indices, counts, blocks : optional
        As in `images`. Unused lanes are zero, and nothing is read for them.
    """
    if table.dtype not in (np.float32, np.int32):
        raise TypeError(f"targets: expected float32 or int32, got {table.dtype}")
    count, *shape = table.shape
    count = count if indices is None else len(indices)
    blocks = blocks_of(count) if blocks is None else blocks
    lanes = array.empty_lanes((blocks, *shape, LANES), table.dtype)
    channels = shape[0] if len(shape) == 3 else 1  # images, which lie as NHWC
    parts = _parts(math.prod(shape))
    arrays = _words(table), indices, counts, _words(lanes)
    numbers = channels, math.prod(shape) // channels, count, parts
    launching.launch("images_targets", blocks * LANES * parts, THREADS, *arrays, *numbers)
    return lanes


def _words(values):
    """Return the same memory as integers: kernels that only move values need no type."""
    return Array(values.buffer, np.int32, values.shape, offset=values.offset)


def _parts(size):
    """Return how many blocks of threads an image of so many elements has."""
    return -(-size // (THREADS * PER_THREAD))
