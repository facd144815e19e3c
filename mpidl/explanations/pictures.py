"""Lay maps over images, as PNG files."""

from __future__ import annotations

import io

import numpy as np

SIDE = 192  # smaller images are enlarged to at least this size, in pixels
OUTLIERS = 2.0  # percentage of the entries that differ from 0 that may exceed the largest colour
# Colours of values from 0 to 1, as in matplotlib's inferno: their lightness grows evenly.
RISING = (
    *((0, 0, 4), (31, 12, 72), (85, 15, 109), (136, 34, 106), (186, 54, 85), (227, 89, 51)),
    *((249, 140, 10), (249, 201, 50), (252, 255, 164)),
)
# Colours of values from -1 to 1: blue for pixels against the class, and red for pixels in favor.
DIVERGING = (
    *((5, 48, 97), (33, 102, 172), (146, 197, 222), (247, 247, 247)),
    *((244, 165, 130), (178, 24, 43), (103, 0, 31)),
)


def plain(image: np.ndarray) -> np.ndarray:
    """Return an image (C, H, W) as RGB pixels (H, W, 3), uint8.

    Floats are scaled to the range from black to white. If there are neither 1 nor 3 channels, their
    mean is shown.
    """
    pixels = image.astype(np.float64)
    if image.dtype != np.uint8:
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) * (255 / (high - low) if high > low else 0)
    if len(pixels) not in (1, 3):
        pixels = pixels.mean(axis=0, keepdims=True)
    return np.moveaxis(np.broadcast_to(pixels, (3, *pixels.shape[1:])), 0, -1).round().astype("u1")


def overlay(image: np.ndarray, values: np.ndarray, is_signed: bool) -> np.ndarray:
    """Return a map (H, W) in colours over the gray image, as RGB pixels (H, W, 3), uint8.

    The largest entries have the last colour of the ramp. The stronger an entry is, the less of the
    image shows through. NaN is drawn as 0.
    """
    strength = np.nan_to_num(values / scale_of(values))
    gray = plain(image).astype(np.float64) @ (0.299, 0.587, 0.114)
    if is_signed:
        colours, opacity = coloured((strength + 1) / 2, DIVERGING), np.clip(np.abs(strength), 0, 1)
        gray, opacity = 100 + 0.6 * gray, np.sqrt(opacity)
    else:
        colours, opacity = coloured(strength, RISING), np.full(values.shape, 0.6)
    mixed = colours * opacity[..., None] + (gray * (1 - opacity))[..., None]
    return mixed.clip(0, 255).round().astype(np.uint8)


def scale_of(values: np.ndarray) -> float:
    """Return the magnitude that gets the last colour; 1 if all entries are 0 or NaN."""
    magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
    return float(np.percentile(magnitudes, 100 - OUTLIERS)) if len(magnitudes) else 1.0


def coloured(values: np.ndarray, ramp: tuple[tuple[int, int, int], ...]) -> np.ndarray:
    """Return the colours (H, W, 3) of values from 0 to 1, by linear interpolation in the ramp."""
    places = np.linspace(0, 1, len(ramp))
    return np.stack([np.interp(values, places, channel) for channel in zip(*ramp, strict=True)], -1)


def png(pixels: np.ndarray) -> bytes:
    """Return RGB pixels (H, W, 3) as a PNG file; small images are enlarged."""
    from PIL import Image

    factor = -(-SIDE // max(pixels.shape[:2]))
    content = io.BytesIO()
    Image.fromarray(pixels.repeat(factor, 0).repeat(factor, 1)).save(content, "PNG")
    return content.getvalue()
