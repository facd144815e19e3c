"""Random resized crops: cut a window of random area and aspect ratio, and resize it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidl.data.transforms import draws
from mpidl.data.transforms.draws import SampleKeys

PURPOSE = "resized crop"
ATTEMPTS = 10


def windows(
    keys: SampleKeys,
    shape: Sequence[int],
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> np.ndarray:
    """Draw a random window for each image, (top, left, height, width) in int64 (n, 4).

    Each image has several attempts, with the ranges of area and aspect ratio of `draws.boxes`. If
    no attempt fits into the image, the window is the largest centred window with an aspect ratio in
    the range.
    """
    rows, columns = shape
    u = draws.uniforms(keys, PURPOSE, 4 * ATTEMPTS)
    *box, fits = draws.boxes(u, shape, area, aspect)
    ratio = min(max(columns / rows, aspect[0]), aspect[1])
    height = max(1, min(rows, int(columns / ratio + 0.5)))
    width = max(1, min(columns, int(rows * ratio + 0.5)))
    central = [(rows - height) // 2, (columns - width) // 2, height, width]
    return np.where(fits[:, None], np.stack(box, axis=1), np.array(central, np.int64))


def resized(
    images: np.ndarray, windows: np.ndarray, size: tuple[int, int], nearest: bool = False
) -> np.ndarray:
    """Cut a window from each image (n, C, H, W) and resize it to (n, C, *size).

    With `nearest`, each pixel of the result is the nearest pixel of the window, as labels require.
    Otherwise, Pillow's bilinear filter averages all window pixels that a result pixel covers.
    """
    out = np.empty((*images.shape[:2], *size), images.dtype)
    for image, box, result in zip(images, windows.tolist(), out, strict=True):
        top, left, height, width = box
        window = image[:, top : top + height, left : left + width]
        if nearest:
            rows, columns = _nearest(height, size[0]), _nearest(width, size[1])
            result[...] = window[:, rows[:, None], columns]
        else:
            resize_planes(window, result)
    return out


def resize_planes(planes: np.ndarray, out: np.ndarray) -> None:
    """Resize planes (C, H, W) to `out` (C, P, Q) by Pillow's bilinear filter."""
    from PIL import Image

    for plane, out_plane in zip(planes, out, strict=True):
        picture = Image.fromarray(np.ascontiguousarray(plane))  # mode "L" or "F"
        size = out_plane.shape[::-1]
        out_plane[...] = np.asarray(picture.resize(size, Image.Resampling.BILINEAR))


def _nearest(extent, size):
    """Divide `extent` pixels into `size` equal cells; return the pixel at each cell's centre."""
    return (2 * np.arange(size) + 1) * extent // (2 * size)
