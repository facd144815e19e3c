"""Steps of optimizers, all parameters in one launch (kernels/cuda/optimizer.cu, adaptive.cu), and
clipping (clip.cu)."""

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


def step_number(name, value):
    """A number of a step that replays of a recorded step may change, by its name."""
    return launching.scalar(name, value)


def _on_device(value):
    """A number that kernels read from memory: of `step_number`, or one that never changes."""
    return value if isinstance(value, Array) else launching.constant(np.array([value], np.float32))


def sgdm(weights, gradients, velocities, learning_rate, momentum, decays, factors=None):
    """The new weights, after v <- momentum * v - learning_rate * factor * (g + decay * w) in place.

    Lists of float32 Arrays, those of a parameter in one layout; decays and factors (None: all 1)
    lists of numbers. The new weights lie side by side in one array, each at its place of `places`:
    where the old ones do so too, the new array can be put in the old one's place, as the kernel
    reads a number before it writes one there.
    """
    factors = [1.0] * len(weights) if factors is None else factors
    _check("sgdm", weights, gradient=gradients, velocity=velocities)
    sizes = tuple(w.size for w in weights)
    chunk, blocks = _blocks(sizes)
    stepped = _side_by_side(weights)
    if not weights:
        return stepped
    launching.launch(
        "sgdm",
        len(blocks),
        THREADS,
        _table(weights, gradients, velocities, stepped, sizes),
        launching.constant(blocks),
        launching.constant(np.array(decays, np.float32)),
        launching.constant(np.array(factors, np.float32)),
        _on_device(learning_rate),
        _on_device(momentum),
        chunk,
    )
    return stepped


def adam(
    weights,
    gradients,
    means,
    squares,
    learning_rate,
    gradient_decay,
    square_decay,
    epsilon,
    decays,
    factors,
):
    """See `reference.adam`. Lists of float32 Arrays, those of a parameter in one layout; the new
    weights lie as those of `sgdm` do."""
    _check("adam", weights, gradient=gradients, mean=means, square=squares)
    how = learning_rate, gradient_decay, square_decay, epsilon, decays, factors
    return _adaptive(weights, gradients, means, squares, *how)


def rmsprop(weights, gradients, squares, learning_rate, square_decay, epsilon, decays, factors):
    """See `reference.rmsprop`. Arrays as for `adam`."""
    _check("rmsprop", weights, gradient=gradients, square=squares)
    how = learning_rate, 0.0, square_decay, epsilon, decays, factors
    return _adaptive(weights, gradients, [0] * len(weights), squares, *how)


def _adaptive(
    weights,
    gradients,
    means,
    squares,
    learning_rate,
    gradient_decay,
    square_decay,
    epsilon,
    decays,
    factors,
):
    sizes = tuple(w.size for w in weights)
    chunk, blocks = _blocks(sizes)
    stepped = _side_by_side(weights)
    if not weights:
        return stepped
    launching.launch(
        "adaptive",
        len(blocks),
        THREADS,
        _table(weights, gradients, means, squares, stepped, sizes),
        launching.constant(blocks),
        launching.constant(np.array(decays, np.float32)),
        launching.constant(np.array(factors, np.float32)),
        _on_device(learning_rate),
        gradient_decay,
        1 - gradient_decay,
        square_decay,
        1 - square_decay,
        epsilon,
        chunk,
    )
    return stepped


def clip(weights, gradients, decays, method, threshold):
    """See `reference.clip`; the order of the sums is the device's own. Lists of float32 Arrays,
    those of a parameter in one layout; the new gradients lie side by side."""
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
        how = launching.constant(firsts), len(sizes), together, threshold, scales
        launching.launch("clip_scales", 1, THREADS, squares, *how)
        launching.launch("clip_scale", len(blocks), THREADS, parameters, places, scales, chunk)
    return clipped


def _check(name, weights, **others):
    """Raise ValueError or TypeError unless each parameter's arrays are float32 in one layout."""
    for what, arrays in others.items():
        for w, other in zip(weights, arrays, strict=True):
            if _layout(other) != _layout(w):
                raise ValueError(
                    f"{name}: a {what} lies in memory as {_layout(other)}, its weight {w.shape} as "
                    f"{_layout(w)}"
                )
            if other.dtype != np.float32 or w.dtype != np.float32:
                raise TypeError(
                    f"{name}: expected float32, got {w.dtype} and a {what} {other.dtype}"
                )


def _side_by_side(weights):
    """New arrays like the weights in one piece of memory, each at its place of `places`."""
    firsts, total = places(tuple(w.size for w in weights))
    flat = array.empty((total,))
    return [
        Array(flat.buffer, w.dtype, w.shape, w.dims, w.order, flat.offset + 4 * first)
        for w, first in zip(weights, firsts, strict=True)
    ]


def _table(*columns):
    return launching.table([list(row) for row in zip(*columns, strict=True)])


def _layout(value):
    """The extents of an Array, as memory orders them."""
    return tuple(value.dims[axis] for axis in value.order if value.dims[axis] != 1)
