"""Padding of images in NumPy."""

import numpy as np


def pad2d(x, padding, value):
    (top, bottom), (left, right) = padding
    blocks, channels, height, width, lanes = x.shape
    shape = (blocks, channels, height + top + bottom, width + left + right, lanes)
    y = np.full(shape, value, x.dtype)
    rows, columns = (
        (
            slice(max(0, before), n + before + min(0, after)),
            slice(max(0, -before), n + min(0, after)),
        )
        for n, (before, after) in zip((height, width), padding, strict=True)
    )
    y[:, :, rows[0], columns[0]] = x[:, :, rows[1], columns[1]]
    return y
