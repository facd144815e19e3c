"""Prepare images in NumPy: crop, mirror, normalize, and apply affine maps."""

import numpy as np

from mpidl.core import keyed
from mpidl.core.blocks import LANES, blocks_of


def images(
    pixels,
    size=None,
    mirrored=None,
    top=None,
    left=None,
    fill=None,
    centre=None,
    divisor=None,
    out=None,
):
    if any(option is not None for option in (size, mirrored, top, left)):
        pixels = windows(pixels, size, mirrored, top, left, fill)
    n, c, p, q = pixels.shape
    lanes = np.empty((blocks_of(n), c, p, q, LANES), np.float32) if out is None else out
    lanes[...] = 0
    if centre is None:
        centre, divisor = np.float32(0), np.float32(255 if pixels.dtype == np.uint8 else 1)
    else:
        centre, divisor = (v.reshape(c, *v.shape[1:] or (1, 1), 1) for v in (centre, divisor))
    for b in range(len(lanes)):
        # Transpose before the conversion to float, so that the division reads contiguous memory.
        block = np.ascontiguousarray(np.moveaxis(pixels[b * LANES : (b + 1) * LANES], 0, -1))
        block = block.astype(np.float32)
        np.divide(block - centre, divisor, out=lanes[b, ..., : block.shape[-1]])
    return lanes


def windows(pixels, size=None, mirrored=None, top=None, left=None, fill=None):
    """Cut a window from each image; return windows (n, C, P, Q) in the dtype of the pixels."""
    n, c, h, w = pixels.shape
    p, q = (h, w) if size is None else size
    out = np.empty((n, c, p, q), pixels.dtype)
    out[...] = 0 if fill is None else np.reshape(fill, (c, 1, 1))
    for i, image in enumerate(pixels):
        turned = 0 if mirrored is None else int(mirrored[i])
        image = image[..., ::-1] if turned & 1 else image
        image = image[:, ::-1] if turned & 2 else image
        (to_rows, rows), (to_columns, columns) = (
            _overlap(0 if first is None else int(first[i]), extent, window)
            for first, extent, window in ((top, h, p), (left, w, q))
        )
        out[i, :, to_rows, to_columns] = image[:, rows, columns]
    return out


def _overlap(first, extent, window):
    """Return the overlap of window and image along one axis, as a slice of each.

    The window starts at pixel `first` of the image and has `window` pixels. The image has `extent`
    pixels.
    """
    start, stop = max(0, -first), max(0, min(window, extent - first))
    return slice(start, stop), slice(first + start, max(first + stop, first + start))


def warp(pixels, maps, size, fill):
    (n, c, h, w), (p, q) = pixels.shape, size
    out = np.empty((n, c, p, q), pixels.dtype)
    rows, columns = np.mgrid[:p, :q].astype(np.float64)
    for image, m, result in zip(pixels, np.asarray(maps, np.float64), out, strict=True):
        padded = np.empty((c, h + 6, w + 6), np.float32)  # 3 pixels of border
        padded[...] = np.reshape(fill, (c, 1, 1))
        padded[:, 3:-3, 3:-3] = image
        x = np.clip(m[0] * columns + (m[1] * rows + m[2]), -2, w + 1)
        y = np.clip(m[3] * columns + (m[4] * rows + m[5]), -2, h + 1)
        left, above = np.floor(x), np.floor(y)
        across, down = (x - left).astype(np.float32), (y - above).astype(np.float32)
        i, j = above.astype(int) + 3, left.astype(int) + 3
        a, b = padded[:, i, j], padded[:, i, j + 1]
        c0, d = padded[:, i + 1, j], padded[:, i + 1, j + 1]
        upper, lower = a + across * (b - a), c0 + across * (d - c0)
        value = upper + down * (lower - upper)
        result[...] = np.floor(value + np.float32(0.5)) if out.dtype == np.uint8 else value
    return out


def mirror(x, turn, total=None, factor=1.0):
    if turn & 1:
        x = x[..., ::-1, :]
    if turn & 2:
        x = x[..., ::-1, :, :]
    y = np.ascontiguousarray(x) if total is None else x + total
    return y * x.dtype.type(factor)


def planes(pixels, out=None):
    channels = 1 if pixels.shape[-1] == 1 else 3
    out = np.empty((channels, *pixels.shape[:2]), np.uint8) if out is None else out
    out[...] = pixels[..., :channels].transpose(2, 0, 1)
    return out


def keyed_words(seed, purpose, count, epoch, samples):
    words = np.empty((len(samples), count), np.uint64)
    for row, sample in zip(words, samples, strict=True):
        row[:] = keyed.words(seed, purpose, count, epoch=epoch, sample=int(sample))
    return words
