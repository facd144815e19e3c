"""Images and their targets to the lanes of a mini-batch, by kernels/cuda/images.cu."""

import math

import numpy as np

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.array import Array
from mpidl.blocks import LANES, blocks_of

THREADS, EACH = 256, 4  # elements of a thread


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
    """Lanes (B, C, P, Q, 16) float32 of uint8 pixels (n, C, H, W), normalized.

    See `reference.images`; mirrored, top and left are int32 Arrays, one number an image of the
    share, fill an Array of the pixels' type, centre and divisor float32 ones. indices: int32, of
    each image of the share its number in `pixels`, which is then the whole data set. counts: (1,)
    int32, how many images there are, of those that indices or pixels has; blocks: B, where it is
    not that of as many images. Unused images are zero, and nothing is read of them.
    """
    numbers = fill, centre, divisor
    said = mirrored, top, left
    return _gathered("images_of_bytes", pixels, size, said, numbers, out, indices, counts, blocks)


def floats(
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
    """The same of float32 pixels, which are left as they are where no centre is given."""
    numbers = fill, centre, divisor
    said = mirrored, top, left
    return _gathered("images_of_floats", pixels, size, said, numbers, out, indices, counts, blocks)


def _gathered(kernel, pixels, size, said, numbers, out, indices, counts, blocks):
    if pixels.ndim != 4 or pixels.order != (0, 1, 2, 3):
        raise ValueError(f"expected pixels (n, C, H, W) in that order, got {pixels.shape}")
    count, *image = pixels.shape
    count = count if indices is None else len(indices)
    blocks = blocks_of(count) if blocks is None else blocks
    p, q = image[1:] if size is None else size
    lanes = array.empty_lanes((blocks, image[0], p, q, LANES)) if out is None else out
    centre = numbers[1]
    parts = _parts(image[0] * p * q)
    launching.launch(
        kernel,
        blocks * LANES * parts,
        THREADS,
        pixels,
        indices,
        counts,
        *said,
        *numbers,
        lanes,
        *image,
        p,
        q,
        int(centre is not None and len(centre.shape) == 3),
        count,
        parts,
    )
    return lanes


def targets(table, *, indices=None, counts=None, blocks=None):
    """Lanes (B, *shape, 16) of what goes with images, unchanged: labels, numbers, maps or images.

    table: (n, *shape) float32 or int32, as files have them. indices, counts, blocks: see `images`.
    Unused ones are zero, and nothing is read of them.
    """
    if table.dtype not in (np.float32, np.int32):
        raise TypeError(f"targets: expected float32 or int32, got {table.dtype}")
    count, *shape = table.shape
    count = count if indices is None else len(indices)
    blocks = blocks_of(count) if blocks is None else blocks
    lanes = array.empty_lanes((blocks, *shape, LANES), table.dtype)
    channels = shape[0] if len(shape) == 3 else 1  # images, which lie as NHWC
    parts = _parts(math.prod(shape))
    launching.launch(
        "images_targets",
        blocks * LANES * parts,
        THREADS,
        _words(table),
        indices,
        counts,
        _words(lanes),
        channels,
        math.prod(shape) // channels,
        count,
        parts,
    )
    return lanes


def _words(values):
    """The same memory as whole numbers: a kernel that only moves them asks for no type."""
    return Array(values.buffer, np.int32, values.shape, offset=values.offset)


def _parts(size):
    """How many blocks of threads an image of so many elements has."""
    return -(-size // (THREADS * EACH))
