"""Steps of optimizers by the C kernels."""

import ctypes
import functools

import numpy as np

from mpidl.backends import memory
from mpidl.backends.native import kernels
from mpidl.backends.reference_optimizer import CHUNK, METHODS

ALIGNED = 16  # floats: a cache line


@functools.lru_cache(maxsize=16)
def _places(sizes):
    """Where in one array to put arrays of these sizes, each on lines of its own; all together."""
    ends = np.cumsum([-(-size // ALIGNED) * ALIGNED for size in sizes]).tolist()
    return [0, *ends[:-1]], ends[-1]


def _address(array):
    if array.size and array.flags.writeable:  # a quarter of the other's time
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    return array.ctypes.data


def zeros_like(x):
    """Zeros of the same shape and type, C-ordered and aligned, for what steps keep."""
    found = memory.empty(np.shape(x), x.dtype)
    found[...] = 0
    return found


def sgdm(weights, gradients, velocities, learning_rate, momentum, decays, factors=None):
    """The new weights, after v <- momentum * v - learning_rate * factor * (g + decay * w) in place.

    Lists of float32 arrays, the velocities C-ordered; decays and factors (None: all 1) lists of
    numbers. The new weights lie side by side in one array.
    """
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
    """See `reference.adam`. Lists of float32 arrays, means and squares C-ordered; the new weights
    lie side by side in one array."""
    how = learning_rate, gradient_decay, square_decay, epsilon
    return _stepped("adaptive", weights, gradients, (means, squares), decays, factors, *how)


def rmsprop(weights, gradients, squares, learning_rate, square_decay, epsilon, decays, factors):
    """See `reference.rmsprop`. Arrays as for `adam`."""
    how = learning_rate, 0.0, square_decay, epsilon
    return _stepped("adaptive", weights, gradients, (None, squares), decays, factors, *how)


def _stepped(kernel, weights, gradients, kept, decays, factors, *how):
    """The new weights by a kernel; kept: means or None, and what else is changed in place."""
    shapes = [np.shape(w) for w in weights]  # a number too: what is C-ordered has an axis at least
    weights = [np.ascontiguousarray(w) for w in weights]
    gradients = [np.ascontiguousarray(g, np.float32) for g in gradients]
    means, others = kept
    if not all(a.flags.writeable and a.flags.c_contiguous for a in (*(means or ()), *others)):
        raise TypeError("expected velocities or means that are C-ordered and can be written")
    sizes = tuple(w.size for w in weights)
    places, total = _places(sizes)
    stepped = memory.empty((total,))
    start = _address(stepped)
    means = [0] * len(weights) if means is None else [_address(m) for m in means]
    parameters = [
        (_address(w), _address(g), m, _address(v), start + 4 * place, size)
        for w, g, m, v, place, size in zip(
            weights, gradients, means, others, places, sizes, strict=True
        )
    ]
    getattr(kernels(), kernel)(
        np.array(parameters, np.int64),
        np.array(decays, np.float32),
        np.array(factors, np.float32),
        len(parameters),
        *how,
    )
    return _parts(stepped, places, sizes, shapes)


def _parts(flat, places, sizes, shapes):
    return [
        flat[place : place + size].reshape(shape)
        for shape, size, place in zip(shapes, sizes, places, strict=True)
    ]


def clip(weights, gradients, decays, method, threshold):
    """See `reference.clip`. Lists of float32 arrays; the new gradients lie side by side."""
    shapes = [np.shape(w) for w in weights]
    weights = [np.ascontiguousarray(w) for w in weights]
    gradients = [np.ascontiguousarray(g, np.float32) for g in gradients]
    sizes = tuple(w.size for w in weights)
    places, total = _places(sizes)
    clipped = memory.empty((total,))
    start = _address(clipped)
    parameters = [
        (_address(w), _address(g), start + 4 * place, size)
        for w, g, place, size in zip(weights, gradients, places, sizes, strict=True)
    ]
    kernels().clip(
        np.array(parameters, np.int64),
        np.array(decays, np.float32),
        np.empty(sum(-(-size // CHUNK) for size in sizes)),
        np.empty(len(sizes)),
        len(sizes),
        METHODS.index(method),
        threshold,
    )
    return _parts(clipped, places, sizes, shapes)
