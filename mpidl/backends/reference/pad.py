"""Pad images in NumPy."""

import numpy as np


def pad2d(x, padding, value):
    (top, bottom), (left, right) = padding
    blocks, channels, height, width, lanes = x.shape
    shape = (blocks, channels, height + top + bottom, width + left + right, lanes)
    y = np.full(shape, value, x.dtype)
    inside: list[slice] = []
    pixels: list[slice] = []
    for n, (before, after) in zip((height, width), padding, strict=True):
        inside.append(slice(max(0, before), before + n + min(0, after)))
        pixels.append(slice(max(0, -before), n + min(0, after)))
    y[:, :, inside[0], inside[1]] = x[:, :, pixels[0], pixels[1]]
    return y
