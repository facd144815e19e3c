"""Compute the steps of recurrent layers with kernels/cuda/recurrent.cu, a launch for each step."""

import numpy as np

from mpidl.backends.gpu import array, conv, launching
from mpidl.backends.gpu.batchnorm import cotangent_like
from mpidl.backends.gpu.launching import THREADS
from mpidl.backends.shapes import POINT
from mpidl.core.blocks import LANES

IMAGES, UNITS, BACK = 32, 16, 32  # of a block of threads, as in recurrent.cu


def _rows(steps, is_reversed):
    """Return the rows of the steps in their order, between two rows that do not exist."""
    rows = range(steps)
    return [-1, *(reversed(rows) if is_reversed else rows), -1]


def _defines(weight):
    return {"GATES": weight.dims[0] // weight.dims[1]}


def _grid(images, units, of_units):
    return -(-images // IMAGES), -(-units // of_units)


def _state_of(state):
    """Return the Arrays (h, c) of a state as the kernels read them; None for what is missing."""
    return (*(value.astype(np.float32) for value in state), None, None)[:2]


def recurrence(kind, x, weight, bias, state, is_reversed):
    blocks, units, steps = len(x), weight.dims[1], x.dims[2]
    y, record = (
        array.empty_lanes((blocks, n, steps, 1, LANES), x.dtype) for n in (units, 4 * units)
    )
    cells = array.empty_lanes((blocks, units, steps, 1, LANES)) if kind == "lstm" else None
    last = [array.empty_lanes((blocks, units, LANES)) for _ in range(2 if kind == "lstm" else 1)]
    arrays = x, weight, bias, *_state_of(state), record, cells, y, *(*last, None)[:2]
    grid, rows = _grid(blocks * LANES, units, UNITS), _rows(steps, is_reversed)
    for step in range(steps):
        numbers = blocks * LANES, units, steps, step, rows[step + 1], rows[step]
        launching.launch(
            "recurrence_step", grid, THREADS, *arrays, *numbers, defines=_defines(weight)
        )
    return y, (y, record, cells), last


def recurrence_backward(
    kind, dy, record, weight, bias, state, is_reversed, truncate, counts, tree, needs
):
    y, values, cells = record
    blocks, units, steps = len(y), weight.dims[1], y.dims[2]
    shape = blocks, weight.dims[0], steps, 1, LANES
    dx = array.empty_lanes(shape, y.dtype)
    dproducts = dx if kind == "lstm" else array.empty_lanes(shape, y.dtype)
    previous = array.empty_like(y)
    dstate = [array.empty_lanes((blocks, units, LANES)) for _ in range(2)]
    arrays = cotangent_like(dy, y), values, cells, y, weight, *_state_of(state), dx, dproducts
    arrays = *arrays, previous, *dstate
    grid, rows = _grid(blocks * LANES, units, BACK), _rows(steps, is_reversed)
    for step in range(steps - 1, -2 if any(needs[3:]) else -1, -1):
        is_cut = step >= 0 and (step + 1) % truncate == 0
        next_row = -1 if is_cut else rows[step + 2]
        numbers = blocks * LANES, units, steps, step, rows[step + 1], rows[max(step, 0)], next_row
        arguments = *arrays, *numbers
        launching.launch(
            "recurrence_back_step", grid, THREADS, *arguments, defines=_defines(weight)
        )
    needs_products = False, *needs[1:3]
    arguments = dproducts, previous, weight, POINT, counts, tree, needs_products
    _, dweight, dbias, _ = conv.conv2d_backward(*arguments)
    parts = zip((dx, dweight, dbias, *dstate), needs, strict=False)
    return tuple(part if is_needed else None for part, is_needed in parts)
