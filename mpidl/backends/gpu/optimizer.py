"""Steps of optimizers by kernels/cuda/optimizer.cu, all parameters in one launch."""

import functools
import itertools

import numpy as np

from mpidl.backends.gpu import array, run
from mpidl.backends.gpu.array import Array

ALIGNED = 64  # floats: 256 bytes, as memory of the device is aligned
THREADS = 256
SMALL = 1 << 22  # floats in all, up to which a block of threads steps few
CHUNKS = 4 * THREADS, 32 * THREADS  # floats of a block of threads: of few, of many


@functools.lru_cache(maxsize=16)
def places(sizes):
    """([first float of each], all floats): where in one array arrays of these sizes lie, in their
    order, each aligned."""
    rounded = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    starts = list(itertools.accumulate(rounded, initial=0))
    return starts[:-1], starts[-1]


@functools.lru_cache(maxsize=16)
def _blocks(sizes):
    """(chunk, of each block of threads its parameter and the first float it steps)."""
    chunk = CHUNKS[sum(sizes) > SMALL]
    blocks = [(i, first) for i, size in enumerate(sizes) for first in range(0, size, chunk)]
    return chunk, np.array(blocks, np.int32).reshape(-1, 2)


def sgdm(weights, gradients, velocities, learning_rate, momentum, decays, factors=None):
    """The new weights, after v <- momentum * v - learning_rate * factor * (g + decay * w) in place.

    Lists of float32 Arrays, those of a parameter in one layout; decays and factors (None: all 1)
    lists of numbers. The new weights lie side by side in one array, each at its place of `places`:
    where the old ones do so too, the new array can be put in the old one's place, as the kernel
    reads a number before it writes one there.
    """
    factors = [1.0] * len(weights) if factors is None else factors
    for w, g, v in zip(weights, gradients, velocities, strict=True):
        for name, other in ("gradient", g), ("velocity", v):
            if _layout(other) != _layout(w):
                raise ValueError(
                    f"sgdm: a {name} lies in memory as {_layout(other)}, its weight {w.shape} as "
                    f"{_layout(w)}"
                )
            if other.dtype != np.float32 or w.dtype != np.float32:
                raise TypeError(f"sgdm: expected float32, got {w.dtype} and a {name} {other.dtype}")
    sizes = tuple(w.size for w in weights)
    firsts, total = places(sizes)
    chunk, blocks = _blocks(sizes)
    flat = array.empty((total,))
    stepped = [
        Array(flat.buffer, w.dtype, w.shape, w.dims, w.order, flat.offset + 4 * first)
        for w, first in zip(weights, firsts, strict=True)
    ]
    if not weights:
        return stepped
    rows = zip(weights, gradients, velocities, stepped, sizes, strict=True)
    run.launch(
        "sgdm",
        len(blocks),
        THREADS,
        run.table([list(row) for row in rows]),
        run.constant(blocks),
        run.constant(np.array(decays, np.float32)),
        run.constant(np.array(factors, np.float32)),
        run.scalar("learning_rate", learning_rate),
        run.scalar("momentum", momentum),
        chunk,
    )
    return stepped


def _layout(value):
    """The extents of an Array, as memory orders them."""
    return tuple(value.dims[axis] for axis in value.order if value.dims[axis] != 1)
