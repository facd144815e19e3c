"""Compute optimizer steps and clip gradients in NumPy."""

from collections.abc import Callable

import numpy as np

CHUNK, SUMS = 1 << 14, 16  # numbers per chunk, and partial sums per chunk, in `_squares`
METHODS = ("l2norm", "global-l2norm", "absolute-value")
TRUST_METHODS = ("lars", "lamb")


def step_number(name, value):
    return value


def zeros_like(x):
    return np.zeros(np.shape(x), x.dtype)


def from_numpy(value, like):
    return np.asarray(value, like.dtype)


def optimizer_step(formula, weights, gradients, state, numbers, decays, factors=None):
    step, stepped = FORMULAS[formula][0], []
    factors = [1.0] * len(weights) if factors is None else factors
    parameters = zip(weights, gradients, decays, factors, *state, strict=True)
    for w, g, decay, factor, *arrays in parameters:
        number = w.dtype.type
        learning_rate, *constants = (number(value) for value in numbers)
        rate = learning_rate * number(factor)
        stepped.append(step(w, np.asarray(g, w.dtype), number(decay), rate, constants, arrays))
    return stepped


FORMULAS: dict[str, tuple[Callable, int, int]] = {}  # {name: (step, numbers, state arrays)}


def formula(numbers: int, arrays: int) -> Callable[[Callable], Callable]:
    """Return a decorator that declares a formula, as a line of EACH_STEP in formulas.h does.

    The arguments of a formula are a weight array, its gradient, the weight decay, the learning rate
    times the parameter's factor, the other numbers, and the state arrays. A formula updates the
    state arrays in place and returns the new weight. `numbers` includes the learning rate.
    """

    def declare(step):
        FORMULAS[step.__name__] = step, numbers, arrays
        return step

    return declare


def is_formula(name, numbers, arrays):
    """Return whether a formula has this name and takes this many numbers and state arrays."""
    return name in FORMULAS and FORMULAS[name][1:] == (numbers, arrays)


@formula(2, 1)
def sgdm(w, g, decay, rate, numbers, state):
    """Set v = momentum * v - rate * g, where g = gradient + decay * w, and return w + v."""
    (momentum,), (v,) = numbers, state
    g = _regularized(w, g, decay)
    v *= momentum
    v -= rate * g
    return w + v


@formula(2, 1)
def nesterov(w, g, decay, rate, numbers, state):
    """Return w + momentum * v - rate * g, with g and the new v as in `sgdm`."""
    (momentum,), (v,) = numbers, state
    change = rate * _regularized(w, g, decay)
    v *= momentum
    v -= change
    return w + (momentum * v - change)


@formula(6, 2)
def adam(w, g, decay, rate, numbers, state):
    """Return w - rate * m / (sqrt(v) + epsilon) for the new m and v, with g as in `sgdm`.

    The bias correction is part of `rate`. For `CorrectedAdamMoments`, the correction is part of
    `epsilon` too.
    """
    return w - rate * _adam_direction(_regularized(w, g, decay), *numbers, *state)


@formula(7, 2)
def adamw(w, g, decay, rate, numbers, state):
    """Return w - rate * (correction * m / (sqrt(v) + epsilon) + decay * w).

    The weight decay is decoupled: g is the gradient without the decay. `correction` is the bias
    correction sqrt(1 - square_decay^t) / (1 - mean_decay^t) of step t. `epsilon` is the optimizer's
    option epsilon times sqrt(1 - square_decay^t).
    """
    *moments, correction = numbers
    direction = correction * _adam_direction(g, *moments, *state)
    return w - rate * _regularized(w, direction, decay)


def _adam_direction(g, mean_decay, mean_share, square_decay, square_share, epsilon, m, v):
    """Set m to mean_decay * m + mean_share * g, and v likewise for g^2; return m / (sqrt(v) + e).

    Callers pass 1 - mean_decay as mean_share, and 1 - square_decay as square_share.
    """
    m *= mean_decay
    m += mean_share * g
    return m / _root_mean_square(g, square_decay, square_share, epsilon, v)


@formula(4, 1)
def rmsprop(w, g, decay, rate, numbers, state):
    """Return w - rate * g / (sqrt(v) + epsilon), with g and the new v as in `adam`."""
    g = _regularized(w, g, decay)
    return w - rate * (g / _root_mean_square(g, *numbers, *state))


def _root_mean_square(g, square_decay, square_share, epsilon, v):
    v *= square_decay
    v += square_share * (g * g)
    return np.sqrt(v) + epsilon


@formula(1, 1)
def average(w, g, decay, rate, numbers, state):
    """Update the average of the weights, a = a + rate * (w - a), and return w. g is not used."""
    (a,) = state
    a += rate * (w - a)
    return w


def _regularized(w, g, decay):
    return g + decay * w if decay else g


def clip(weights, gradients, decays, method, threshold):
    regularized = [
        _regularized(w, np.asarray(g, w.dtype), w.dtype.type(decay))
        for w, g, decay in zip(weights, gradients, decays, strict=True)
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


def trust(weights, updates, decays, coefficients, method):
    scaled = []
    for w, update, decay, coefficient in zip(weights, updates, decays, coefficients, strict=True):
        number = w.dtype.type
        update, decay = np.asarray(update, w.dtype), number(decay)
        direction = _regularized(w, update, decay)
        norm = _norm(w)
        divisor = _norm(update) + float(decay) * norm if method == "lars" else _norm(direction)
        if coefficient and norm > 0 and divisor > 0:
            direction = direction * number(float(number(coefficient)) * norm / divisor)
        scaled.append(direction)
    return scaled


def _norm(array):
    return float(np.sqrt(_squares(np.ascontiguousarray(array).ravel())))


def _squares(flat):
    """Return the sum of the squares of an array (n,), computed chunk by chunk in a fixed order."""
    total = 0.0
    for start in range(0, flat.size, CHUNK):
        part = np.zeros(CHUNK)
        part[: min(CHUNK, flat.size - start)] = flat[start : start + CHUNK]
        part = np.add.reduce((part * part).reshape(-1, SUMS), axis=0)
        while part.size > 1:
            part = part[: part.size // 2] + part[part.size // 2 :]
        total += part[0]
    return total
