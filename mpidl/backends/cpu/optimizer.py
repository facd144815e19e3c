"""Steps of optimizers by the C kernels."""

import ctypes

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.reference.optimizer import CHUNK, METHODS


def _address(array):
    if array.size and array.flags.writeable:  # a quarter of the other's time
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    return array.ctypes.data


def zeros_like(x):
    zeros = arenas.empty(np.shape(x), x.dtype)
    zeros[...] = 0
    return zeros


def sgdm(weights, gradients, velocities, learning_rate, momentum, decays, factors=None):
    factors = [1.0] * len(weights) if factors is None else factors
    numbers = learning_rate, momentum
    return _step("sgdm", weights, gradients, None, velocities, decays, factors, numbers)


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
    numbers = learning_rate, gradient_decay, square_decay, epsilon
    return _step("adaptive", weights, gradients, means, squares, decays, factors, numbers)


def rmsprop(weights, gradients, squares, learning_rate, square_decay, epsilon, decays, factors):
    numbers = learning_rate, 0.0, square_decay, epsilon
    return _step("adaptive", weights, gradients, None, squares, decays, factors, numbers)


def _step(kernel, weights, gradients, means, velocities, decays, factors, numbers):
    """Return the new weights by a kernel, which updates means (or None) and velocities in place."""
    if not all(a.flags.writeable and a.flags.c_contiguous for a in (*(means or ()), *velocities)):
        raise TypeError("expected velocities or means that are C-ordered and can be written")
    weights, gradients, stepped = _arrays(weights, gradients)
    means = [0] * len(weights) if means is None else [_address(m) for m in means]
    parameters = [
        (_address(w), _address(g), m, _address(v), _address(new), new.size)
        for w, g, m, v, new in zip(weights, gradients, means, velocities, stepped, strict=True)
    ]
    getattr(kernels(), kernel)(
        np.array(parameters, np.int64),
        np.array(decays, np.float32),
        np.array(factors, np.float32),
        len(parameters),
        *numbers,
    )
    return stepped


def _arrays(weights, gradients):
    """Return (weights, gradients, results) as kernels take them."""
    results = [arenas.empty(np.shape(w)) for w in weights]
    weights = [np.ascontiguousarray(w) for w in weights]
    return weights, [np.ascontiguousarray(g, np.float32) for g in gradients], results


def clip(weights, gradients, decays, method, threshold):
    weights, gradients, clipped = _arrays(weights, gradients)
    parameters = [
        (_address(w), _address(g), _address(new), new.size)
        for w, g, new in zip(weights, gradients, clipped, strict=True)
    ]
    kernels().clip(
        np.array(parameters, np.int64),
        np.array(decays, np.float32),
        np.empty(sum(-(-new.size // CHUNK) for new in clipped)),
        np.empty(len(clipped)),
        len(clipped),
        METHODS.index(method),
        threshold,
    )
    return clipped
