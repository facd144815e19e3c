"""Compute the steps of recurrent layers with the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas, conv
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import as_type, per_channel
from mpidl.backends.shapes import POINT
from mpidl.core.values import BF16


def _state_of(state):
    """Return the arrays (h, c) of a state in float32, as kernels read them; None for a missing one.

    A state may also be bfloat16, or float64 if a caller has created it with NumPy.
    """
    float32 = np.dtype(np.float32)
    arrays = [as_type(v, float32) if v.dtype == BF16 else v for v in state]
    return (*(np.ascontiguousarray(v, float32) for v in arrays), None, None)[:2]


def recurrence(kind, x, weight, bias, state, is_reversed):
    blocks, _, steps, _, lanes = x.shape
    units, gates = weight.shape[1], len(weight) // weight.shape[1]
    y = arenas.empty((blocks, units, steps, 1, lanes), x.dtype)
    record = arenas.empty((blocks, 4 * units, steps, lanes), x.dtype)
    cells = arenas.empty((blocks, units, steps, lanes)) if kind == "lstm" else None
    last = [arenas.empty((blocks, units, lanes)) for _ in range(2 if kind == "lstm" else 1)]
    hidden, cell = _state_of(state)
    last_hidden, last_cell = (*last, None)[:2]
    kernels().recurrence(
        np.ascontiguousarray(x),
        per_channel(weight),
        per_channel(bias),
        hidden,
        cell,
        record,
        cells,
        y,
        last_hidden,
        last_cell,
        blocks,
        units,
        steps,
        gates,
        int(is_reversed),
    )
    return y, (y, record, cells), last


def recurrence_backward(
    kind, dy, record, weight, bias, state, is_reversed, truncate, counts, tree, needs
):
    y, values, cells = record
    units, gates = weight.shape[1], len(weight) // weight.shape[1]
    blocks, _, steps, _, lanes = y.shape
    dx = arenas.empty((blocks, gates * units, steps, 1, lanes), y.dtype)
    dproducts = dx if kind == "lstm" else arenas.empty(dx.shape, dx.dtype)
    previous = arenas.empty(y.shape, y.dtype)
    dstate = [arenas.empty((blocks, units, lanes)) if need else None for need in needs[3:]]
    hidden, cell = _state_of(state)
    dhidden, dcell = (*dstate, None, None)[:2]
    kernels().recurrence_backward(
        np.ascontiguousarray(as_type(dy, y.dtype)),
        values,
        cells,
        y,
        per_channel(weight),
        hidden,
        cell,
        dx,
        dproducts,
        previous,
        dhidden,
        dcell,
        blocks,
        units,
        steps,
        gates,
        int(is_reversed),
        truncate,
    )
    needs_products = False, *needs[1:3]
    arguments = dproducts, previous, weight, POINT, counts, tree, needs_products
    _, dweight, dbias, _ = conv.conv2d_backward(*arguments)
    return (dx if needs[0] else None, dweight, dbias, *dstate)[: len(needs)]
