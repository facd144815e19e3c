"""Steps of optimizers, all parameters in one launch (kernels/cuda/optimizer.cu), and clipping
(clip.cu).

Arrays are float32; those of a parameter have one layout.
"""

import functools
import itertools
import math

import numpy as np

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.array import Array

ALIGNED = 64  # floats: 256 bytes, as memory of the device is aligned
THREADS = 256
SMALL = 1 << 22  # floats in all, up to which a block of threads steps few
CHUNKS = 4 * THREADS, 32 * THREADS  # floats of a block of threads: of few, of many


@functools.lru_cache(maxsize=16)
def places(sizes):
    """Return where arrays of these sizes lie in one array, each aligned.

    Returns
    -------
    starts, total : list of int, int
        The first float of each array, in order, and the floats of all.
    """
    rounded = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    starts = list(itertools.accumulate(rounded, initial=0))
    return starts[:-1], starts[-1]


@functools.lru_cache(maxsize=16)
def _blocks(sizes):
    """Return the chunk, and of each block of threads its parameter and first float."""
    chunk = CHUNKS[sum(sizes) > SMALL]
    blocks = [(i, first) for i, size in enumerate(sizes) for first in range(0, size, chunk)]
    return chunk, np.array(blocks, np.int32).reshape(-1, 2)


def step_number(name, value):
    return launching.scalar(name, value)


def _on_device(value):
    """Return a number that kernels read from memory: of `step_number`, or a constant."""
    return value if isinstance(value, Array) else launching.constant(np.array([value], np.float32))


def zeros_like(x):
    return x.zeros_like()


def from_numpy(value, like):
    return array.placed(value, like)


def optimizer_step(formula, weights, gradients, state, numbers, decays, factors=None):
    """Return the new weights side by side in one array, each at its place of `places`.

    The kernel has the formula's name. If the old weights lie side by side too, the new array can
    take their place: the kernel reads a number before it writes one there.
    """
    factors = [1.0] * len(weights) if factors is None else factors
    _check(formula, weights, gradient=gradients)
    for arrays in state:
        _check(formula, weights, state=arrays)
    sizes = tuple(w.size for w in weights)
    chunk, blocks = _blocks(sizes)
    stepped = _side_by_side(weights)
    if not weights:
        return stepped
    launching.launch(
        formula,
        len(blocks),
        THREADS,
        _table(sizes, weights, gradients, stepped, *state),
        launching.constant(blocks),
        launching.constant(np.array(decays, np.float32)),
        launching.constant(np.array(factors, np.float32)),
        *map(_on_device, numbers),
        chunk,
    )
    return stepped


def clip(weights, gradients, decays, method, threshold):
    # the new gradients lie side by side
    _check("clip", weights, gradient=gradients)
    sizes = tuple(w.size for w in weights)
    chunk, blocks = _blocks(sizes)
    clipped = _side_by_side(weights)
    if not len(blocks):
        return clipped
    norms = method != "absolute-value"
    parameters, places = _table(weights, gradients, clipped, sizes), launching.constant(blocks)
    squares = array.empty((len(blocks),), np.float64)
    launching.launch(
        "clip_numbers",
        len(blocks),
        THREADS,
        parameters,
        places,
        launching.constant(np.array(decays, np.float32)),
        math.inf if norms else threshold,
        chunk,
        squares,
    )
    if norms:
        firsts = np.searchsorted(blocks[:, 0], np.arange(len(sizes) + 1)).astype(np.int32)
        scales = array.empty((len(sizes),))
        together = int(method == "global-l2norm")
        arguments = launching.constant(firsts), len(sizes), together, threshold, scales
        launching.launch("clip_scales", 1, THREADS, squares, *arguments)
        launching.launch("clip_scale", len(blocks), THREADS, parameters, places, scales, chunk)
    return clipped


def _check(name, weights, **arrays_by_kind):
    """Raise ValueError or TypeError unless each parameter's arrays are float32 in one layout."""
    for kind, arrays in arrays_by_kind.items():
        for w, other in zip(weights, arrays, strict=True):
            if _layout(other) != _layout(w):
                raise ValueError(
                    f"{name}: a {kind} array lies in memory as {_layout(other)}, its weight "
                    f"{w.shape} as {_layout(w)}"
                )
            if other.dtype != np.float32 or w.dtype != np.float32:
                raise TypeError(
                    f"{name}: expected float32, got {w.dtype} and a {kind} array of {other.dtype}"
                )


def _side_by_side(weights):
    """Return new arrays like the weights in one array, each at its place of `places`."""
    firsts, total = places(tuple(w.size for w in weights))
    flat = array.empty((total,))
    return [
        Array(flat.buffer, w.dtype, w.shape, w.dims, w.order, flat.offset + 4 * first)
        for w, first in zip(weights, firsts, strict=True)
    ]


def _table(*columns):
    return launching.table([list(row) for row in zip(*columns, strict=True)])


def _layout(value):
    """Return the extents of an Array as memory orders them."""
    return tuple(value.dims[axis] for axis in value.order if value.dims[axis] != 1)
