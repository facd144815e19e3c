"""Optimizers' steps by moving means, and gradients made no larger than a threshold, in NumPy.

Part of `reference`, where they are found.
"""

import numpy as np

CHUNK, SUMS = 1 << 14, 16  # numbers whose squares are added up as one; sums side by side in it
METHODS = ("l2norm", "global-l2norm", "absolute-value")


def step_number(name, value):
    """A number of a step, as the functions below take it; see `gpu.optimizer.step_number`."""
    return value


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
    """The new weights, after, in place and with g the gradient + decay * w,

        m <- gradient_decay * m + (1 - gradient_decay) * g
        v <- square_decay * v + (1 - square_decay) * g^2
        w - learning_rate * m / (sqrt(v) + epsilon)

    Lists of arrays; decays and factors (of the learning rate) of numbers. The arithmetic has the
    weight's precision.
    """
    stepped = []
    each = zip(weights, gradients, means, squares, decays, factors, strict=True)
    for w, g, m, v, decay, factor in each:
        number = w.dtype.type
        g = _regularized(w, g, decay)
        m *= number(gradient_decay)
        m += number(1 - gradient_decay) * g
        stepped.append(_step(w, g, m, v, learning_rate, square_decay, epsilon, factor))
    return stepped


def rmsprop(weights, gradients, squares, learning_rate, square_decay, epsilon, decays, factors):
    """The new weights, after v <- square_decay * v + (1 - square_decay) * g^2 in place, with g the
    gradient + decay * w: w - learning_rate * g / (sqrt(v) + epsilon). Arguments as for `adam`."""
    stepped = []
    for w, g, v, decay, factor in zip(weights, gradients, squares, decays, factors, strict=True):
        g = _regularized(w, g, decay)
        stepped.append(_step(w, g, g, v, learning_rate, square_decay, epsilon, factor))
    return stepped


def _regularized(w, g, decay):
    number = w.dtype.type
    g = np.asarray(g, w.dtype)
    return g + number(decay) * w if number(decay) else g


def _step(w, g, direction, v, learning_rate, square_decay, epsilon, factor):
    number = w.dtype.type
    v *= number(square_decay)
    v += number(1 - square_decay) * (g * g)
    rate = number(learning_rate) * number(factor)
    return w - rate * (direction / (np.sqrt(v) + number(epsilon)))


def clip(weights, gradients, decays, method, threshold):
    """The gradients + decay * w, made no larger than the threshold: by "l2norm", the norm of each;
    "global-l2norm", that of all of them together; "absolute-value", each number.

    Lists of arrays, decays of numbers. Norms are float64, added up in one order: 16 sums side by
    side over each 16384 numbers, those by a tree, then one after the other.
    """
    found = [_regularized(w, g, d) for w, g, d in zip(weights, gradients, decays, strict=True)]
    if method == "absolute-value":
        return [np.clip(g, -g.dtype.type(threshold), g.dtype.type(threshold)) for g in found]
    squares = [_squares(np.ascontiguousarray(g).ravel()) for g in found]
    if method == "global-l2norm":
        total = 0.0
        for square in squares:
            total += square
        squares = [total] * len(found)
    norms = np.sqrt(squares)
    with np.errstate(invalid="ignore", divide="ignore"):
        factors = np.where(norms <= threshold, 1.0, threshold / norms)
        return [g * g.dtype.type(f) for g, f in zip(found, factors, strict=True)]


def _squares(flat):
    """The sum of the squares of an array (n,)."""
    total = 0.0
    for start in range(0, flat.size, CHUNK):
        part = np.zeros(CHUNK)
        part[: min(CHUNK, flat.size - start)] = flat[start : start + CHUNK]
        part = np.add.reduce((part * part).reshape(-1, SUMS), axis=0)
        while part.size > 1:
            part = part[: part.size // 2] + part[part.size // 2 :]
        total += part[0]
    return total
