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
    found = arenas.empty(np.shape(x), x.dtype)
    found[...] = 0
    return found


def sgdm(weights, gradients, velocities, learning_rate, momentum, decays, factors=None):
    factors = [1.0] * len(weights) if factors is None else factors
    kept, how = (None, velocities), (learning_rate, momentum)
    return _stepped("sgdm", weights, gradients, kept, decays, factors, *how)


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
    how = learning_rate, gradient_decay, square_decay, epsilon
    return _stepped("adaptive", weights, gradients, (means, squares), decays, factors, *how)


def rmsprop(weights, gradients, squares, learning_rate, square_decay, epsilon, decays, factors):
    how = learning_rate, 0.0, square_decay, epsilon
    return _stepped("adaptive", weights, gradients, (None, squares), decays, factors, *how)


def _stepped(kernel, weights, gradients, kept, decays, factors, *how):
    """The new weights by a kernel; kept: means or None, and what else is changed in place."""
    means, others = kept
    if not all(a.flags.writeable and a.flags.c_contiguous for a in (*(means or ()), *others)):
        raise TypeError("expected velocities or means that are C-ordered and can be written")
    weights, gradients, stepped = _arrays(weights, gradients)
    means = [0] * len(weights) if means is None else [_address(m) for m in means]
    parameters = [
        (_address(w), _address(g), m, _address(v), _address(new), new.size)
        for w, g, m, v, new in zip(weights, gradients, means, others, stepped, strict=True)
    ]
    getattr(kernels(), kernel)(
        np.array(parameters, np.int64),
        np.array(decays, np.float32),
        np.array(factors, np.float32),
        len(parameters),
        *how,
    )
    return stepped


def _arrays(weights, gradients):
    """(weights, gradients, results) as kernels take them; each result lies where there is room."""
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
