"""Add per-image values (batchnorm.cu), and concatenate and split them (elementwise.cu)."""

import math

import numpy as np

from mpidl.backends.gpu import array, batchnorm, elementwise, launching
from mpidl.backends.gpu.batchnorm import cotangent_like, read
from mpidl.backends.gpu.fold import partial_of_leaves
from mpidl.backends.gpu.launching import THREADS
from mpidl.core.blocks import LANES


def rows_and_channels(name, x):
    """Return (number of pixels in all images, number of channels).

    Raise ValueError for flattened images, because their order in memory is not the feature order.
    """
    blocks, channels, *pixels, lanes = x.dims
    if len(x.shape) < len(x.dims) and math.prod(pixels) > 1:
        raise ValueError(
            f"{name}: on a GPU, expected images or features, got flattened images {x.dims}: apply "
            f"{name} before flattening"
        )
    return blocks * lanes * math.prod(pixels), channels


def _pieces(name, parts, joined):
    """Yield (part, its place in `joined`, rows, channels of the part, channels of `joined`)."""
    first, (rows, all_channels) = 0, rows_and_channels(name, joined)
    for part in parts:
        _, channels = rows_and_channels(name, part)
        yield part, joined.part(first, part.shape), rows, channels, all_channels
        first += channels


def concat(arrays):
    parts = [read(a) for a in arrays]
    blocks, _, *rest = parts[0].shape
    y = array.empty_lanes((blocks, sum(p.shape[1] for p in parts), *rest), parts[0].dtype)
    elementwise.copy(
        (part, place, rows, width, width, pitch)
        for part, place, rows, width, pitch in _pieces("concat", parts, y)
    )
    return y


def split(x, channels):
    blocks, _, *rest = x.shape
    parts = [array.empty_lanes((blocks, count, *rest), x.dtype) for count in channels]
    elementwise.copy(
        (place, part, rows, width, pitch, width)
        for part, place, rows, width, pitch in _pieces("split", parts, x)
    )
    return parts


def add(a, b):
    return batchnorm.add_operands(a, b)


def add_relu(a, b):
    return batchnorm.add_operands(a, b, relu=True)


def add_relu_dx(dy, y, normalizations, tree):
    dy, more_dy = (*(cotangent_like(part, y) for part in dy), None)[:2]
    (count, tiles), numbers = batchnorm.division(y)
    dz, width = array.empty_like(y), 2 * numbers[2]
    signs = (y, None) if y.positive is None else (None, y.positive)
    operands, all_leaves = [], []
    for source in normalizations:
        leaves = None if source is None else array.empty((count, width), np.float64)
        operands += (None, None, None) if source is None else (*source[:2], leaves)
        all_leaves.append(leaves)
    arguments = dy, more_dy, *signs, dz, *operands, *numbers
    launching.launch("add_relu_dx", (count, tiles), THREADS, *arguments)
    return dz, [
        None if leaves is None else partial_of_leaves(leaves, tree, LANES // numbers[0])
        for leaves in all_leaves
    ]
