"""Add, concatenate and split per-image values in NumPy."""

import numpy as np


def add(a, b):
    return a + b


def concat(arrays):
    return np.concatenate(arrays, axis=1)


def split(x, channels):
    return [np.ascontiguousarray(v) for v in np.split(x, np.cumsum(channels)[:-1], axis=1)]
