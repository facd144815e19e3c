"""The two ends of a training step in NumPy: pixels to blocks, and the optimizer's step.

Part of `reference`, where they are found.
"""

import numpy as np

from mpidl.blocks import LANES, blocks_of


def images(pixels, size=None, mirrored=None, top=None, left=None):
    """Lanes (B, C, P, Q, 16) float32 of uint8 pixels (n, C, H, W), divided by 255.

    Of each image, mirrored left to right where `mirrored` (n,) says so, the window of size (P, Q)
    that begins at its pixel (top, left) (n,), which may be negative; zeros where the window leaves
    the image, and in unused lanes. Without these the whole image.
    """
    n, c, h, w = pixels.shape
    p, q = (h, w) if size is None else size
    if any(option is not None for option in (size, mirrored, top, left)):
        windows = np.zeros((n, c, p, q), np.uint8)
        for i, image in enumerate(pixels):
            image = image[..., ::-1] if mirrored is not None and mirrored[i] else image
            (to_rows, rows), (to_columns, columns) = (
                _overlap(0 if first is None else int(first[i]), extent, window)
                for first, extent, window in ((top, h, p), (left, w, q))
            )
            windows[i, :, to_rows, to_columns] = image[:, rows, columns]
        pixels = windows
    lanes = np.zeros((blocks_of(n), c, p, q, LANES), np.float32)
    for b in range(len(lanes)):
        # Transposed as bytes first, so that the division runs along memory.
        block = np.moveaxis(pixels[b * LANES : (b + 1) * LANES], 0, -1)
        np.divide(
            np.ascontiguousarray(block), np.float32(255), out=lanes[b, ..., : block.shape[-1]]
        )
    return lanes


def _overlap(first, extent, window):
    """Along an axis, where a window that begins at pixel `first` holds pixels, and which."""
    start, stop = max(0, -first), max(0, min(window, extent - first))
    return slice(start, stop), slice(first + start, max(first + stop, first + start))


def sgdm(weights, gradients, velocities, learning_rate, momentum, decays):
    """The new weights, after v <- momentum * v - learning_rate * (g + decay * w) in place.

    Lists of arrays, decays of numbers. The arithmetic has the weight's precision.
    """
    stepped = []
    for w, g, v, decay in zip(weights, gradients, velocities, decays, strict=True):
        number = w.dtype.type
        g = np.asarray(g, w.dtype)
        g = g + number(decay) * w if number(decay) else g
        v *= number(momentum)
        v -= number(learning_rate) * g
        stepped.append(w + v)
    return stepped
