"""Compute the steps of recurrent layers in NumPy.

In bfloat16, hidden states are rounded after each step, and the module `direct` computes the
products with the recurrent weights. All else is in float32.
"""

import numpy as np

from mpidl.backends.reference import conv, direct
from mpidl.backends.reference.activation import sigmoid, sigmoid_dx, tanh_dx
from mpidl.backends.reference.bf16 import narrowed, rounded, widened
from mpidl.backends.shapes import POINT
from mpidl.core.values import BF16


def _products(weight, state, is_narrow):
    """Return weight @ state, (B, K, 16), with a weight (K, U)."""
    return direct.dense(state, weight, None) if is_narrow else np.matmul(weight, state)


def _lstm_step(x, weight, bias, state, is_narrow):
    """Return the gates i, f, g, o, (B, 4, U, 16), and the new state (h, c)."""
    hidden, cell = state
    sums = (x + _products(weight, hidden, is_narrow)).reshape(len(x), 4, *hidden.shape[1:])
    gates = sigmoid(sums)
    gates[:, 2] = np.tanh(sums[:, 2])
    cell = gates[:, 1] * cell + gates[:, 0] * gates[:, 2]
    return gates, (gates[:, 3] * np.tanh(cell), cell)


def _gru_step(x, weight, bias, state, is_narrow):
    """Return r, z, n and the products q with the weights of n, (B, 4, U, 16), and the new state."""
    (hidden,) = state
    products = _products(weight, hidden, is_narrow)
    if bias is not None:
        products = products + bias.astype(products.dtype)[:, None]
    x, products = (v.reshape(len(x), 3, *hidden.shape[1:]) for v in (x, products))
    r, z = (sigmoid(x[:, gate] + products[:, gate]) for gate in range(2))
    n = np.tanh(x[:, 2] + r * products[:, 2])
    return np.stack([r, z, n, products[:, 2]], axis=1), (n + z * (hidden - n),)


STEPS = {"lstm": _lstm_step, "gru": _gru_step}


def _numbers(x):
    return widened(x) if x.dtype == BF16 else x


def _order(steps, is_reversed):
    """Return the rows of the steps, in their order."""
    return range(steps)[::-1] if is_reversed else range(steps)


def _first(state, kind, like, units, is_narrow):
    """Return the state before the first step, in the type of the lanes `like`."""
    if not state:
        zeros = np.zeros((len(like), units, like.shape[-1]), like.dtype)
        return (zeros, zeros) if kind == "lstm" else (zeros,)
    hidden, *cell = (numbers.astype(like.dtype) for numbers in map(_numbers, state))
    return rounded(hidden) if is_narrow else hidden, *cell


def recurrence(kind, x, weight, bias, state, is_reversed):
    is_narrow = x.dtype == BF16
    x = _numbers(x)
    weight, units, steps = weight[:, :, 0, 0], weight.shape[1], x.shape[2]
    current = _first(state, kind, x, units, is_narrow)
    y = np.empty((len(x), units, steps, 1, x.shape[-1]), x.dtype)
    record: list = [None] * steps
    for row in _order(steps, is_reversed):
        before = current
        gates, current = STEPS[kind](x[:, :, row, 0], weight, bias, before, is_narrow)
        if is_narrow:
            gates, current = rounded(gates), (rounded(current[0]), *current[1:])
        record[row] = gates, before, current
        y[:, :, row, 0] = current[0]
    return (narrowed(y) if is_narrow else y), record, current


def _lstm_back(gates, before, after, dstate):
    """Return the gradients of x and of the products, and those of the state except through them."""
    i, f, g, o = np.moveaxis(gates, 1, 0)
    (dh, dc), bounded = dstate, np.tanh(after[1])
    dc = tanh_dx(dh * o, bounded) + dc
    dx = sigmoid_dx(dc * g, i), sigmoid_dx(dc * before[1], f), tanh_dx(dc * i, g)
    dx = np.concatenate([*dx, sigmoid_dx(dh * bounded, o)], axis=1)
    return dx, dx, (np.zeros_like(dh), dc * f)


def _gru_back(gates, before, after, dstate):
    r, z, n, product = np.moveaxis(gates, 1, 0)
    dn = tanh_dx(dstate[0] * (1 - z), n)
    dz = sigmoid_dx(dstate[0] * (before[0] - n), z)
    dr = sigmoid_dx(dn * product, r)
    dx, dproducts = (np.concatenate([dr, dz, last], axis=1) for last in (dn, dn * r))
    return dx, dproducts, (dstate[0] * z,)


STEPS_BACK = {"lstm": _lstm_back, "gru": _gru_back}


def recurrence_backward(
    kind, dy, record, weight, bias, state, is_reversed, truncate, counts, tree, needs
):
    is_narrow = dy.dtype == BF16
    dy = _numbers(dy)
    steps = dy.shape[2]
    shape = len(dy), len(weight), steps, 1, dy.shape[-1]
    dx, dproducts, previous = (
        np.empty(shape, dy.dtype),
        np.empty(shape, dy.dtype),
        np.empty_like(dy),
    )
    dstate = tuple(np.zeros_like(dy[:, :, 0, 0]) for _ in range(2 if kind == "lstm" else 1))
    for step, row in reversed(list(enumerate(_order(steps, is_reversed)))):
        gates, before, after = record[row]
        dstate = dy[:, :, row, 0] + dstate[0], *dstate[1:]
        of_x, of_products, dstate = STEPS_BACK[kind](gates, before, after, dstate)
        dx[:, :, row, 0], dproducts[:, :, row, 0] = of_x, of_products
        previous[:, :, row, 0] = before[0]
        if step and step % truncate == 0:
            dstate = tuple(map(np.zeros_like, dstate))
        else:
            through = _products(weight[:, :, 0, 0].T, of_products, is_narrow)
            dstate = dstate[0] + through, *dstate[1:]
    if is_narrow:
        dx, dproducts, previous = map(narrowed, (dx, dproducts, previous))
    arguments = dproducts, previous, weight, POINT, counts, tree, (False, *needs[1:3])
    _, dweight, dbias, _ = conv.conv2d_backward(*arguments)
    parts = zip((dx, dweight, dbias, *dstate), needs, strict=False)
    return tuple(part if is_needed else None for part, is_needed in parts)
