"""Random erasing: replace a random rectangle of some images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpidl.data.transforms import draws
from mpidl.data.transforms.augmentation import Augmentation, channel_values
from mpidl.data.transforms.draws import SampleKeys
from mpidl.errors import UserError

PURPOSE, NOISE = "erase", "erase noise"
ATTEMPTS = 10


@dataclass(frozen=True, kw_only=True, repr=False)
class Erasing(Augmentation):
    """The part of an `Augmenter` that erases rectangles."""

    erase: float = 0
    erase_area: tuple[float, float] = (0.02, 0.4)
    erase_aspect: tuple[float, float] = (0.3, 10 / 3)
    erase_value: float | Sequence[float] | str = "noise"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._store_box_ranges("erase")
        if not 0 <= self.erase <= 1:
            raise UserError(f"erase: expected a probability from 0 to 1, got {self.erase}")
        if isinstance(self.erase_value, str):
            if self.erase_value != "noise":
                raise UserError(
                    f"erase_value: expected numbers or 'noise', got {self.erase_value!r}"
                )
        elif not np.isfinite(np.asarray(self.erase_value, np.float64)).all():
            raise UserError(f"erase_value: expected finite numbers, got {self.erase_value}")

    @property
    def only_moves(self) -> bool:
        return super().only_moves and not self.erase

    def check_images(self, shape: Sequence[int], dtype: np.dtype) -> None:
        super().check_images(shape, dtype)
        self._values(shape, dtype)

    def augmented(self, images: np.ndarray, keys: SampleKeys) -> np.ndarray:
        images = super().augmented(images, keys)
        if not self.erase:
            return images
        boxes = rectangles(self, keys, images.shape[2:])
        value, images = self._values(images.shape[1:], images.dtype), images.copy()
        for i in np.flatnonzero(boxes[:, 2]):
            top, left, height, width = boxes[i].tolist()
            window = images[i, :, top : top + height, left : left + width]
            if value is not None:
                window[...] = value[:, None, None]
                continue
            key = keys._replace(indices=keys.indices[i : i + 1])
            words = key.words(NOISE, -(-window.size // 8)).astype("<u8")
            noise = words.view(np.uint8)[0, : window.size].reshape(window.shape)
            window[...] = noise if images.dtype == np.uint8 else noise / np.float32(256)
        return images

    def _values(self, shape, dtype):
        """Return `erase_value` as one value per channel (C,), or None for noise."""
        if isinstance(self.erase_value, str):
            return None
        return channel_values("erase_value", self.erase_value, shape, dtype)


def rectangles(erasing: Erasing, keys: SampleKeys, shape: Sequence[int]) -> np.ndarray:
    """Draw the rectangle to erase in each image of height and width `shape`, (top, left, height,
    width) in int64 (n, 4). It is all zero if nothing is erased.
    """
    u = draws.uniforms(keys, PURPOSE, 1 + 4 * ATTEMPTS)
    *box, fits = draws.boxes(u[1:], shape, erasing.erase_area, erasing.erase_aspect)
    return np.stack(box, axis=1) * (fits & (u[0] < erasing.erase))[:, None]
