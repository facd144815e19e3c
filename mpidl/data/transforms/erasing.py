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
    """Draw the rectangle that is erased in each image.

    Parameters
    ----------
    seed, epoch : int
        Seed and epoch.
    indices : ndarray
        Numbers of the samples, (n,).
    shape : (int, int)
        Height and width of the images.
    probability : float
        Probability that an image has a rectangle.
    area, aspect : (float, float)
        Ranges of area and aspect ratio; see `draws.boxes`.

    Returns
    -------
    ndarray
        (top, left, height, width) of each image, (n, 4) int64; zeros if nothing is erased.
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
    """Return images in which the rectangles are replaced by a value or by noise.

    Parameters
    ----------
    images : ndarray
        Images (n, C, H, W), uint8 or float32.
    rectangles : ndarray
        (top, left, height, width) of each image, (n, 4).
    value : ndarray or None
        Values (C,); None for noise, uniform from 0 to 255 for uint8, else in [0, 1).
    seed, epoch, indices
        The keys of the noise, as in `rectangles`.

    Returns
    -------
    ndarray
        Images, a copy.
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
