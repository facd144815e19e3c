"""Resample images, and copy channels, in NumPy."""

import numpy as np


def resample(x, rows, columns):
    return _along(_along(x, rows, axis=2), columns, axis=3)


def _along(x, taps, axis):
    """Return the weighted sums of pixels along an axis, with the taps in their order."""
    x = np.moveaxis(x, axis, 0)
    y = np.zeros((len(taps.outputs), *x.shape[1:]), x.dtype)
    for n, (outputs, pixels, weights) in enumerate(taps.places()):
        terms = weights.astype(x.dtype).reshape(-1, 1, 1, 1, 1) * x[pixels]
        y[outputs] = terms if n == 0 else y[outputs] + terms
    return np.ascontiguousarray(np.moveaxis(y, 0, axis))


def take_channels(x, channels):
    channels = np.array(channels, np.int64)
    y = np.zeros((len(x), len(channels), *x.shape[2:]), x.dtype)
    y[:, channels >= 0] = x[:, channels[channels >= 0]]
    return y
