"""Add per-image values, and concatenate and split them with kernels/cuda/concat.cu."""

import math

from mpidl.backends.gpu import activation, array, batchnorm, launching
from mpidl.backends.gpu.batchnorm import read
from mpidl.backends.gpu.launching import THREADS


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


def _move(name, part, joined, first):
    """Launch the kernel `name` ("concat" or "split") for a part that starts at channel `first`."""
    rows, words = rows_and_channels(name, part)
    _, pitch = rows_and_channels(name, joined)
    blocks = launching.blocks_of_threads(part.size, per_thread=4)
    launching.launch(name, blocks, THREADS, part, joined, rows, words, pitch, first)


def concat(arrays):
    # `_move` raises ValueError for flattened images
    parts = [read(a) for a in arrays]
    blocks, _, *rest = parts[0].shape
    y, first = array.empty_lanes((blocks, sum(p.shape[1] for p in parts), *rest)), 0
    for part in parts:
        _move("concat", part, y, first)
        first += part.shape[1]
    return y


def split(x, channels):
    parts, first = [], 0
    blocks, _, *rest = x.shape
    for count in channels:
        part = array.empty_lanes((blocks, count, *rest))
        _move("split", part, x, first)
        parts.append(part)
        first += count
    return parts


def add(a, b):
    return read(a) + read(b)


def add_relu(a, b):
    return activation.relu(add(a, b))


def add_relu_dx(dy, y, normalizations, tree):
    dz = activation.relu_dx(dy[0] if len(dy) == 1 else dy[0] + dy[1], y)
    sums = [
        n if n is None else batchnorm.batchnorm_sums(dz, n[0], n[1], tree) for n in normalizations
    ]
    return dz, sums
