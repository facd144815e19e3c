"""Random erasing: replace a random rectangle of some images."""

from __future__ import annotations

import numpy as np

from mpidl import backends
from mpidl.data.transforms import draws

PURPOSE, NOISE = "erase", "erase noise"
ATTEMPTS = 10


def rectangles(
    seed: int,
    epoch: int,
    indices: np.ndarray,
    shape: tuple[int, int],
    probability: float,
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> np.ndarray:
    """Draw the rectangle to erase in each image, (top, left, height, width) in int64 (n, 4).

    It is all zero if nothing is erased. Ranges of area and aspect ratio are those of `draws.boxes`.
    """
    u = draws.uniforms(seed, PURPOSE, 1 + 4 * ATTEMPTS, epoch, indices)
    *box, fits = draws.boxes(u[1:], shape, area, aspect)
    return np.stack(box, axis=1) * (fits & (u[0] < probability))[:, None]


def erase(
    images: np.ndarray,
    rectangles: np.ndarray,
    value: np.ndarray | None,
    seed: int,
    epoch: int,
    indices: np.ndarray,
) -> np.ndarray:
    """Return a copy of images (n, C, H, W) with the rectangles (n, 4) replaced by a value (C,) or
    by uniform noise. Noise is 0 to 255 for uint8, and [0, 1) for floats, with the same keys as
    `rectangles`.
    """
    images = images.copy()
    n, channels = images.shape[:2]
    for i in range(n):
        top, left, height, width = map(int, rectangles[i])
        if not height:
            continue
        window = images[i, :, top : top + height, left : left + width]
        if value is not None:
            window[...] = value.reshape(channels, 1, 1)
            continue
        count = -(-window.size // 8)
        words = backends.of_type(np.float32).keyed_words(
            seed, NOISE, count, epoch, np.asarray(indices[i : i + 1])
        )
        noise = words.astype("<u8").view(np.uint8)[0, : window.size].reshape(window.shape)
        is_bytes = images.dtype == np.uint8
        window[...] = noise if is_bytes else noise / np.float32(256)
    return images
