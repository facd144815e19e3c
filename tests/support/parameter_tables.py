"""Draw small tables of parameters and gradients for tests of optimizers."""

import numpy as np

SHAPES = {"conv1.weight": (3, 1, 2, 2), "conv1.bias": (3,), "batchnorm1.gamma": (3,)}


def tables(seed, dtype=np.float32):
    """Draw an array for each parameter."""
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(s).astype(dtype) for name, s in SHAPES.items()}


def distance(table, expected):
    """Return the largest difference between two tables."""
    return max(np.abs(table[name] - expected[name]).max() for name in SHAPES)


def same_bytes(table, expected):
    return all(table[name].tobytes() == expected[name].tobytes() for name in SHAPES)
