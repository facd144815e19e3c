"""Compute optimizer steps and clip gradients with the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas, builds
from mpidl.backends.cpu.arenas import address_of
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.reference.optimizer import CHUNK, METHODS, TRUST_METHODS

COLUMNS = 6  # fields of `struct parameter`: size, weight, gradient, new weight, two state arrays


def step_number(name, value):
    recorder = builds.recorder()
    return value if recorder is None else recorder.scalar(name, value)


def zeros_like(x):
    zeros = arenas.empty(np.shape(x), x.dtype)
    if zeros.dtype == np.float32:
        kernels().zero(zeros, zeros.size)
    else:
        zeros[...] = 0
    return zeros


def optimizer_step(formula, weights, gradients, state, numbers, decays, factors=None):
    if not all(a.flags.writeable and a.flags.c_contiguous for arrays in state for a in arrays):
        raise TypeError(f"{formula}: expected writable C-ordered arrays as state")
    factors = [1.0] * len(weights) if factors is None else factors
    stepped = list(weights) if arenas.may_update(weights) else _results(weights)
    weights, gradients = _contiguous(weights, gradients)
    parameters = np.zeros((len(weights), COLUMNS), np.int64)
    rows = zip(weights, gradients, stepped, *state, strict=True)
    for row, arrays in zip(parameters, rows, strict=True):
        row[0] = arrays[0].size
        row[1 : 1 + len(arrays)] = [address_of(array) for array in arrays]
    state_arrays = [array for arrays in state for array in arrays]
    _addresses(parameters, [*weights, *gradients, *state_arrays], [*stepped, *state_arrays])
    fits = kernels().optimizer_step(
        formula.encode(),
        parameters,
        _numbers(decays),
        _numbers(factors),
        len(parameters),
        _numbers(numbers),
        len(numbers),
        len(state),
    )
    if not fits:
        raise TypeError(
            f"no kernel computes the step {formula} with {len(numbers)} numbers and {len(state)} "
            "arrays"
        )
    return stepped


def _contiguous(weights, gradients):
    """Return C-ordered weights and C-ordered float32 gradients."""
    weights = [np.ascontiguousarray(w) for w in weights]
    return weights, [np.ascontiguousarray(g, np.float32) for g in gradients]


def _results(weights):
    return [arenas.empty(np.shape(w)) for w in weights]


def clip(weights, gradients, decays, method, threshold):
    copies = _contiguous(weights, gradients)
    table, clipped = _scaling_table(weights, *copies)
    kernels().clip(
        table,
        _numbers(decays),
        arenas.empty((_tiles(clipped),), np.float64),
        arenas.empty((len(clipped),), np.float64),
        len(clipped),
        METHODS.index(method),
        threshold,
    )
    return clipped


def trust(weights, updates, decays, coefficients, method):
    copies = _contiguous(weights, updates)
    table, scaled = _scaling_table(weights, *copies)
    kernels().trust(
        table,
        _numbers(decays),
        _numbers(coefficients),
        arenas.empty((2 * _tiles(scaled),), np.float64),
        arenas.empty((len(scaled),), np.float64),
        len(scaled),
        TRUST_METHODS.index(method),
    )
    return scaled


def _scaling_table(learnables, weights, gradients):
    """Return the table of addresses for the kernels in clip.c, and the arrays that they write.

    `weights` are the learnables in C order. The caller must keep these arrays and the gradients
    alive until the kernel has run.
    """
    scaled = _results(learnables)
    parameters = [
        (address_of(w), address_of(g), address_of(new), new.size)
        for w, g, new in zip(weights, gradients, scaled, strict=True)
    ]
    table = np.array(parameters, np.int64).reshape(-1, 4)
    return _addresses(table, [*weights, *gradients], scaled), scaled


def _tiles(arrays):
    return sum(-(-array.size // CHUNK) for array in arrays)


def _numbers(values):
    """Return values, which may differ between replays, as a float32 array for a kernel."""
    array = np.array(values, np.float32)
    if (recorder := builds.recorder()) is not None:
        recorder.numbers(array, values)
    return array


def _addresses(table, reads, writes):
    """Return an int64 table with the addresses of arrays that a kernel reads and writes."""
    if (recorder := builds.recorder()) is not None:
        recorder.table(table, reads, writes)
    return table
