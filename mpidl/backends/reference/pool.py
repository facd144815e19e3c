"""Compute max and average pooling and their gradients in NumPy."""

import itertools
import math

import numpy as np

from mpidl.backends import shapes


def _places(x_shape, windows):
    """Yield (number, outputs, pixels) for each position in a window, row by row.

    `number` counts the positions from 0. `outputs` indexes an output block (C, P, Q, 16), and
    selects the windows whose pixel at this position is inside the image. `pixels` indexes the input
    block (C, H, W, 16), and selects these pixels.
    """

    def axis(place, pixels, outputs, step, before):
        first = max(0, -(-(before - place) // step))
        stop = min(outputs, (pixels - 1 + before - place) // step + 1)
        start = first * step + place - before
        return slice(first, stop), slice(start, start + (stop - first - 1) * step + 1, step)

    size, stride, padding = windows
    _, p, q = shapes.pool2d_shape(x_shape, size, stride, padding)
    for i in range(size[0]):
        rows = axis(i, x_shape[1], p, stride[0], padding[0][0])
        for j in range(size[1]):
            columns = axis(j, x_shape[2], q, stride[1], padding[1][0])
            inner, pixels = zip(rows, columns, strict=True)
            if all(s.start < s.stop for s in inner):
                yield i * size[1] + j, (slice(None), *inner), (slice(None), *pixels)


def max_pool2d(x, windows):
    size, stride, padding = windows
    shape = shapes.pool2d_shape(x.shape[1:-1], size, stride, padding)
    y = np.empty((len(x), *shape, x.shape[-1]), x.dtype)
    argmax = np.empty(y.shape, np.uint8)
    # position of each window's first pixel that is not padding
    down, across = (
        np.maximum(0, before - np.arange(n) * step)
        for n, step, (before, _) in zip(shape[1:], stride, padding, strict=True)
    )
    first = (down[:, None] * size[1] + across)[..., None]
    for b, block in enumerate(x):
        best, place = y[b], argmax[b]
        best[...], place[...] = -np.inf, first
        for number, outputs, pixels in _places(x.shape[1:-1], windows):
            value = block[pixels]
            larger = (value > best[outputs]) | np.isnan(value)
            np.copyto(best[outputs], value, where=larger)
            np.copyto(place[outputs], number, where=larger)
    return y, argmax


def max_pool2d_dx(dy, argmax, x, windows, tree):
    dx = np.zeros_like(x)
    for grad, place, out in zip(dy, argmax, dx, strict=True):
        for number, outputs, pixels in _places(x.shape[1:-1], windows):
            out[pixels] += np.where(place[outputs] == number, grad[outputs], 0)
    return dx, None


def _counts(x, windows, count_padding):
    """Return the divisor of each window, an array (P, Q, 1) in the dtype of x."""
    _, p, q = shapes.pool2d_shape(x.shape[1:-1], *windows)
    if count_padding:
        return np.full((p, q, 1), math.prod(windows.size), x.dtype)
    counts = np.zeros((1, p, q, 1), x.dtype)
    for _, outputs, _ in _places(x.shape[1:-1], windows):
        counts[outputs] += 1
    return counts[0]


def average_pool2d(x, windows, count_padding):
    shape, (_, across) = shapes.pool2d_shape(x.shape[1:-1], *windows), windows.size
    y = np.zeros((len(x), *shape, x.shape[-1]), x.dtype)
    counts = _counts(x, windows, count_padding)
    for block, out in zip(x, y, strict=True):
        places = _places(x.shape[1:-1], windows)
        for _, row in itertools.groupby(places, lambda place: place[0] // across):
            of_row = np.zeros_like(out)  # one sum over a large window would lose accuracy
            for _, outputs, pixels in row:
                of_row[outputs] += block[pixels]
            out += of_row
        out /= counts
    return y


def average_pool2d_dx(dy, x, windows, count_padding, tree):
    dx = np.zeros_like(x)
    counts = _counts(x, windows, count_padding)
    for grad, out in zip(dy, dx, strict=True):
        part = grad / counts
        for _, outputs, pixels in _places(x.shape[1:-1], windows):
            out[pixels] += part[outputs]
    return dx, None
