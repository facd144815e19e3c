"""Change the colours of images: brightness, contrast, saturation and hue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpidl.data.transforms import draws
from mpidl.data.transforms.augmentation import Augmentation, Range
from mpidl.data.transforms.draws import SampleKeys
from mpidl.errors import UserError

PURPOSE = "colour jitter"
GRAY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601, as in Pillow and MATLAB
_UNIT = 65536  # gray values are summed as whole multiples of 1 / _UNIT, so the order is irrelevant


class ColourChange(NamedTuple):
    """Colour changes of n images, as float64 arrays (n,)."""

    brightness: np.ndarray  # factors. A factor of 1 changes nothing
    contrast: np.ndarray
    saturation: np.ndarray
    hue: np.ndarray  # rotation of the colour wheel as a fraction of a turn. 0 changes nothing


@dataclass(frozen=True, kw_only=True, repr=False)
class ColourJitter(Augmentation):
    """The part of an `Augmenter` that changes colours."""

    brightness: Range = (1, 1)
    contrast: Range = (1, 1)
    saturation: Range = (1, 1)
    hue: Range = (0, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("brightness", "contrast", "saturation"):
            value = getattr(self, name)
            if np.ndim(value) == 0 and not isinstance(value, str):
                object.__setattr__(self, name, (max(0.0, 1 - value), 1 + value))
            self._store_ranges(name)
            if getattr(self, name)[0] < 0:
                raise UserError(f"{name}: expected factors of at least 0, got {value}")
        self._store_ranges("hue", symmetric=True)
        hue: Any = self.hue
        if not -0.5 <= hue[0] <= hue[1] <= 0.5:
            raise UserError(f"hue: expected fractions of a turn from -0.5 to 0.5, got {hue}")

    @property
    def _is_used(self):
        factors = (self.brightness, self.contrast, self.saturation)
        return self.hue != (0, 0) or any(r != (1, 1) for r in factors)

    @property
    def only_moves(self) -> bool:
        return super().only_moves and not self._is_used

    def check_images(self, shape: Sequence[int], dtype: np.dtype) -> None:
        super().check_images(shape, dtype)
        if self._is_used and shape[0] not in (1, 3):
            raise UserError(
                "brightness, contrast, saturation and hue: expected images of 1 or 3 channels, "
                f"found {shape[0]}"
            )

    def augmented(self, images: np.ndarray, keys: SampleKeys) -> np.ndarray:
        images = super().augmented(images, keys)
        return jittered(images, draw(self, keys)) if self._is_used else images


def draw(jitter: ColourJitter, keys: SampleKeys) -> ColourChange:
    """Draw the colour changes of some images."""
    ranges: list[Any] = [jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue]
    drawn = zip(ranges, draws.uniforms(keys, PURPOSE, 4), strict=True)
    return ColourChange(*(draws.between(low, high, u) for (low, high), u in drawn))


def jittered(images: np.ndarray, change: ColourChange) -> np.ndarray:
    """Change brightness, contrast, saturation and hue of images (n, 1 or 3, H, W), in this order.

    Brightness multiplies the values. Contrast multiplies the differences from the image's mean gray
    value. Saturation multiplies the differences from the pixel's gray value. Hue rotates the HSV
    colour wheel. After each change, the values are clipped to the range 0 to 255 (uint8) or 0 to 1
    (float32). torchvision's `ColorJitter` makes the same changes, but in a random order.
    """
    is_bytes = images.dtype == np.uint8
    x = images.astype(np.float32)
    if is_bytes:
        x /= np.float32(255)
    brightness, contrast, saturation, hue = (
        np.asarray(values, np.float32).reshape(-1, 1, 1, 1) for values in change
    )
    has_colour = images.shape[1] == 3
    if (brightness != 1).any():
        x = np.clip(x * brightness, 0, 1)
    if (contrast != 1).any():
        mean = _mean(_gray(x)).reshape(-1, 1, 1, 1)
        x = np.clip(mean + (x - mean) * contrast, 0, 1)
    if has_colour and (saturation != 1).any():
        gray = _gray(x)
        x = np.clip(gray + (x - gray) * saturation, 0, 1)
    if has_colour and (hue != 0).any():
        x = _turned(x, hue[:, 0])
    if is_bytes:
        return np.floor(x * np.float32(255) + np.float32(0.5)).astype(np.uint8)
    return x


def _gray(x):
    """Return the gray values (n, 1, H, W) of images."""
    if x.shape[1] == 1:
        return x
    red, green, blue = (x[:, c : c + 1] * GRAY[c] for c in range(3))
    return (red + green) + blue


def _mean(gray):
    """Return the mean of each image, (n,), with bits that do not depend on NumPy's summation."""
    units = np.rint(gray * np.float32(_UNIT)).astype(np.int64)
    pixels = gray[0].size if len(gray) else 1
    return (units.sum(axis=(1, 2, 3)) / (_UNIT * pixels)).astype(np.float32)


def _turned(x, turn):
    """Rotate the hue of images (n, 3, H, W) with values from 0 to 1 by `turn` (n, 1, 1).

    The formulas come from Python's module `colorsys`.
    """
    red, green, blue = x[:, 0], x[:, 1], x[:, 2]
    value, low = x.max(axis=1), x.min(axis=1)
    spread = value - low
    safe = np.where(spread > 0, spread, np.float32(1))
    saturation = spread / np.where(value > 0, value, np.float32(1))
    from_red, from_green, from_blue = ((value - c) / safe for c in (red, green, blue))
    hue = np.where(
        red == value,
        from_blue - from_green,
        np.where(green == value, 2 + from_red - from_blue, 4 + from_green - from_red),
    )
    hue = hue / np.float32(6) + turn
    hue = hue - np.floor(hue)
    sector = np.floor(hue * 6)
    part = hue * 6 - sector
    sector = sector.astype(np.int8) % 6
    p = value * (1 - saturation)
    q = value * (1 - saturation * part)
    t = value * (1 - saturation * (1 - part))
    channels = [
        np.choose(sector, [value, q, p, p, t, value]),
        np.choose(sector, [t, value, value, q, p, p]),
        np.choose(sector, [p, p, t, value, value, q]),
    ]
    return np.stack(channels, axis=1).astype(np.float32, copy=False)
