"""The end of a training step in NumPy: the optimizer's step.

Part of `reference`, where they are found.
"""

import numpy as np


def sgdm(weights, gradients, velocities, learning_rate, momentum, decays, factors=None):
    """The new weights, after v <- momentum * v - learning_rate * factor * (g + decay * w) in place.

    Lists of arrays, decays and factors (None: all 1) of numbers. The arithmetic has the weight's
    precision.
    """
    stepped = []
    factors = [1.0] * len(weights) if factors is None else factors
    each = zip(weights, gradients, velocities, decays, factors, strict=True)
    for w, g, v, decay, factor in each:
        number = w.dtype.type
        g = np.asarray(g, w.dtype)
        g = g + number(decay) * w if number(decay) else g
        v *= number(momentum)
        v -= number(learning_rate) * number(factor) * g
        stepped.append(w + v)
    return stepped
