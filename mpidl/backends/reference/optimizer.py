"""Steps of optimizers, and clipping of gradients, in NumPy."""

import numpy as np

CHUNK, SUMS = 1 << 14, 16  # numbers whose squares are added up as one; sums side by side in it
METHODS = ("l2norm", "global-l2norm", "absolute-value")


def step_number(name, value):
    return value


def zeros_like(x):
    return np.zeros(np.shape(x), x.dtype)


def from_numpy(value, like):
    return np.asarray(value, like.dtype)


def sgdm(weights, gradients, velocities, learning_rate, momentum, decays, factors=None):
    stepped = []
    factors = [1.0] * len(weights) if factors is None else factors
    parameters = zip(weights, gradients, velocities, decays, factors, strict=True)
    for w, g, v, decay, factor in parameters:
        number = w.dtype.type
        g = np.asarray(g, w.dtype)
        g = g + number(decay) * w if number(decay) else g
        v *= number(momentum)
        v -= number(learning_rate) * number(factor) * g
        stepped.append(w + v)
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
    stepped = []
    parameters = zip(weights, gradients, means, squares, decays, factors, strict=True)
    for w, g, m, v, decay, factor in parameters:
        number = w.dtype.type
        g = _regularized(w, g, decay)
        m *= number(gradient_decay)
        m += number(1 - gradient_decay) * g
        stepped.append(_step(w, g, m, v, learning_rate, square_decay, epsilon, factor))
    return stepped


def rmsprop(weights, gradients, squares, learning_rate, square_decay, epsilon, decays, factors):
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
    regularized = [
        _regularized(w, g, d) for w, g, d in zip(weights, gradients, decays, strict=True)
    ]
    if method == "absolute-value":
        return [np.clip(g, -g.dtype.type(threshold), g.dtype.type(threshold)) for g in regularized]
    squares = [_squares(np.ascontiguousarray(g).ravel()) for g in regularized]
    if method == "global-l2norm":
        total = 0.0
        for square in squares:
            total += square
        squares = [total] * len(regularized)
    norms = np.sqrt(squares)
    with np.errstate(invalid="ignore", divide="ignore"):
        factors = np.where(norms <= threshold, 1.0, threshold / norms)
        return [g * g.dtype.type(f) for g, f in zip(regularized, factors, strict=True)]


def _squares(flat):
    """Return the sum of squares of an array (n,)."""
    total = 0.0
    for start in range(0, flat.size, CHUNK):
        part = np.zeros(CHUNK)
        part[: min(CHUNK, flat.size - start)] = flat[start : start + CHUNK]
        part = np.add.reduce((part * part).reshape(-1, SUMS), axis=0)
        while part.size > 1:
            part = part[: part.size // 2] + part[part.size // 2 :]
        total += part[0]
    return total
