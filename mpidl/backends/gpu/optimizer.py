"""Compute optimizer steps and clip gradients with kernels/cuda/optimizer.cu and clip.cu.

One launch processes all parameters. Arrays are float32, and all arrays of a parameter have the same
memory layout.
"""

import functools
import math

import numpy as np

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.array import Array
from mpidl.backends.reference.optimizer import FORMULAS, is_formula

THREADS = 256  # threads per block
SMALL = 1 << 22  # maximum total size of the parameters, in floats, for the smaller chunk
MOST_NUMBERS = max(numbers for _, numbers, _ in FORMULAS.values())  # as in formulas.h
CHUNKS = 4 * THREADS, 32 * THREADS  # sizes of the two chunks: floats per block of threads


@functools.lru_cache(maxsize=16)
def _blocks(sizes):
    """Divide parameters among blocks of threads; return (chunk, places, firsts).

    `chunk` is the number of floats per block. `places` has a row (parameter, first float) for each
    block, and `firsts` the first block of each parameter, then the number of blocks, as int32.
    """
    chunk = CHUNKS[sum(sizes) > SMALL]
    blocks = [(i, first) for i, size in enumerate(sizes) for first in range(0, size, chunk)]
    places = np.array(blocks, np.int32).reshape(-1, 2)
    firsts = np.searchsorted(places[:, 0], np.arange(len(sizes) + 1))
    return chunk, places, firsts.astype(np.int32)


def step_number(name, value):
    return launching.scalar(name, value)


def _on_device(value):
    """Return a scalar as an Array (1,), because kernels read the scalar from memory.

    `value` is a Python number or already an Array from `step_number`.
    """
    return value if isinstance(value, Array) else launching.constant(np.array([value], np.float32))


def zeros_like(x):
    return x.zeros_like()


def from_numpy(value, like):
    return array.placed(value, like)


def optimizer_step(formula, weights, gradients, state, numbers, decays, factors=None):
    """Return the new weights, which are stored in one array at the positions from `array.places`.

    If the old weights are stored in the same way, the new array may use their memory: the kernel
    reads each old weight before it writes the new one.
    """
    if not is_formula(formula, len(numbers), len(state)):
        raise TypeError(
            f"no kernel computes the step {formula} with {len(numbers)} numbers and {len(state)} "
            "arrays"
        )
    if not weights:
        return []
    factors = [1.0] * len(weights) if factors is None else factors
    stepped, parameters, places, _, chunk = _parts(formula, weights, gradients, state)
    numbers = [*map(_on_device, numbers), *[None] * (MOST_NUMBERS - len(numbers))]
    launching.launch(
        "optimizer_step",
        len(places),
        THREADS,
        parameters,
        places,
        _constant(decays),
        _constant(factors),
        *numbers,
        chunk,
        defines={"FORMULA": formula},
    )
    return stepped


def clip(weights, gradients, decays, method, threshold):
    if not weights:
        return []
    clipped, parameters, places, firsts, chunk = _parts("clip", weights, gradients)
    norms, blocks = method != "absolute-value", len(places)
    squares = array.empty((blocks,), np.float64)
    launching.launch(
        "clip_numbers",
        blocks,
        THREADS,
        parameters,
        places,
        _constant(decays),
        math.inf if norms else threshold,
        chunk,
        squares,
    )
    if norms:
        scales = array.empty((len(weights),))
        together = int(method == "global-l2norm")
        arguments = firsts, len(weights), together, threshold, scales
        launching.launch("clip_scales", 1, THREADS, squares, *arguments)
        launching.launch("clip_scale", blocks, THREADS, parameters, places, scales, chunk)
    return clipped


def trust(weights, updates, decays, coefficients, method):
    if not weights:
        return []
    scaled, parameters, places, firsts, chunk = _parts("trust", weights, updates)
    blocks, separate, decays = len(places), int(method == "lars"), _constant(decays)
    squares, scales = array.empty((2 * blocks,), np.float64), array.empty((len(weights),))
    arguments = parameters, places, decays, 1 - separate, chunk, squares
    launching.launch("trust_squares", blocks, THREADS, *arguments)
    arguments = squares, firsts, decays, _constant(coefficients), len(weights), separate, scales
    launching.launch("trust_scales", 1, THREADS, *arguments)
    launching.launch("clip_scale", blocks, THREADS, parameters, places, scales, chunk)
    return scaled


def _parts(name, weights, gradients, state=()):
    """Return (results, parameters, places, firsts, chunk): the kernels' arguments and results.

    `results` are uninitialized Arrays, stored in one array as in `optimizer_step`.
    """
    _check(name, weights, gradient=gradients)
    for arrays in state:
        _check(name, weights, state=arrays)
    sizes, results = tuple(w.size for w in weights), _side_by_side(weights)
    chunk, places, firsts = _blocks(sizes)
    rows = zip(sizes, weights, gradients, results, *state, strict=True)
    table = launching.table([list(row) for row in rows])
    return results, table, launching.constant(places), launching.constant(firsts), chunk


def _constant(numbers):
    return launching.constant(np.array(numbers, np.float32))


def _check(name, weights, **arrays_by_kind):
    """Check that all arrays of a parameter are float32 and have the same layout.

    Raise ValueError if layouts differ, and TypeError if an array is not float32.
    """
    for kind, arrays in arrays_by_kind.items():
        for w, other in zip(weights, arrays, strict=True):
            if _layout(other) != _layout(w):
                raise ValueError(
                    f"{name}: a {kind} array has the memory layout {_layout(other)}, its weight "
                    f"{w.shape} has {_layout(w)}"
                )
            if other.dtype != np.float32 or w.dtype != np.float32:
                raise TypeError(
                    f"{name}: expected float32, got {w.dtype} and a {kind} array of {other.dtype}"
                )


def _side_by_side(weights):
    """Return uninitialized Arrays like the weights, stored in one array (see `array.places`)."""
    firsts, total = array.places(tuple(w.size for w in weights))
    flat = array.empty((total,))
    return [
        Array(flat.buffer, w.dtype, w.shape, w.dims, w.order, flat.offset + 4 * first)
        for w, first in zip(weights, firsts, strict=True)
    ]


def _layout(value):
    """Return the extents of an Array in memory order, without extents of 1."""
    return tuple(value.dims[axis] for axis in value.order if value.dims[axis] != 1)
