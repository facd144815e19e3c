"""Gather the images and targets of a mini-batch into blocks, with kernels/cuda/images.cu.

A block holds 16 images. Each image occupies one of the block's 16 slots, its lane.
"""

import math

import numpy as np

from mpidl.backends import settings
from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.array import Array
from mpidl.core.blocks import LANES, blocks_of
from mpidl.core.values import BF16

THREADS, PER_THREAD = 256, 4  # threads per CUDA thread block; elements per thread
BYTES, FLOATS, WORDS = range(3)  # kinds of data sets, as in images.cu


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
    """Return normalized images, as `Backend.images` does, rounded to bfloat16 in that precision.

    `pixels` are the images of this rank or, with `indices` (int32), the whole dataset. `mirrored`,
    `top` and `left` are int32 Arrays with an element for each image of this rank. From image
    counts[0] on, if given, images are not read, and their lanes are zero. The result has `blocks`
    blocks, by default the smallest number that holds the images.
    """
    if pixels.ndim != 4 or pixels.order != (0, 1, 2, 3):
        raise ValueError(f"expected pixels (n, C, H, W) in that order, got {pixels.shape}")
    images_of_share, *image = pixels.shape
    images_of_share = images_of_share if indices is None else len(indices)
    blocks = blocks_of(images_of_share) if blocks is None else blocks
    p, q = image[1:] if size is None else size
    if out is None:
        dtype = BF16 if settings.precision == "bf16" else np.float32
        out = array.empty_lanes((blocks, image[0], p, q, LANES), dtype)
    options = mirrored, top, left, fill, centre, divisor
    of_pixels = int(centre is not None and len(centre.shape) == 3)
    kind = BYTES if pixels.dtype == np.uint8 else FLOATS
    numbers = *image, p, q, of_pixels, images_of_share
    _gather(kind, pixels, indices, counts, options, out, numbers)
    return out


def _gather(kind, source, indices, counts, options, out, numbers):
    """Gather images or targets from the whole data set, in a recorded step all in one launch."""
    kinds = ["i4"] * 5 + [source.dtype, "f4", "f4"]
    expected = {BYTES: "u1", FLOATS: "f4", WORDS: "i4"}[kind]
    arrays = indices, counts, *options
    for values, dtype in zip((source, *arrays), (expected, *kinds), strict=True):
        if values is not None and values.dtype != dtype:
            raise TypeError(f"expected pixels of type {np.dtype(dtype)}, got {values.dtype}")
    lanes, parts = out.dims[0] * LANES, -(-math.prod(out.dims[1:-1]) // (THREADS * PER_THREAD))
    row = [source, *arrays, out, kind, *numbers, lanes, parts]
    defines = {"BF16": 1} if settings.precision == "bf16" else None
    launching.later("images_gather", row, [out], lanes * parts, THREADS, defines)


def mirror(x, turn, total=None, factor=1.0):
    if turn and (x.ndim != 5 or x.order != array.IMAGES):
        raise ValueError(f"mirror: expected images (blocks, C, H, W, 16), got {x}")
    if total is not None and total.order != x.order:
        raise ValueError(f"mirror: expected a total stored as {x}, got {total}")
    height, width = x.dims[2:4] if turn else (1, 1)
    channels = x.size // max(1, x.dims[0] * LANES * height * width)
    y = array.empty_like(x)
    blocks, threads = launching.blocks_of_threads(x.size), launching.THREADS
    numbers = float(factor), turn, channels, height, width, x.size
    launching.launch("images_mirror", blocks, threads, x, total, y, *numbers)
    return y


def targets(table, *, indices=None, counts=None, blocks=None):
    """Return targets, such as labels or label maps, as lanes (B, *shape, 16).

    `table` (n, *shape) has the targets of n images as float32 or int32, in the order of the
    dataset. The other arguments are those of `images`.
    """
    if table.dtype not in (np.float32, np.int32):
        raise TypeError(f"targets: expected float32 or int32, got {table.dtype}")
    count, *shape = table.shape
    count = count if indices is None else len(indices)
    blocks = blocks_of(count) if blocks is None else blocks
    lanes = array.empty_lanes((blocks, *shape, LANES), table.dtype)
    channels = shape[0] if len(shape) == 3 else 1  # targets that are images become NHWC
    numbers = channels, 1, math.prod(shape) // channels, 1, math.prod(shape) // channels, 0, count
    _gather(WORDS, _words(table), indices, counts, 6 * (None,), _words(lanes), numbers)
    return lanes


def _words(values):
    """Return an int32 Array on the same memory, for kernels that only move 4-byte elements."""
    dims = values.dims, values.order
    return Array(values.buffer, np.int32, values.shape, *dims, offset=values.offset)
