"""Posterize images: keep only the highest bits of each channel."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpidl.data.transforms import draws
from mpidl.data.transforms.augmentation import Augmentation
from mpidl.data.transforms.draws import SampleKeys
from mpidl.errors import UserError

PURPOSE = "posterize"


@dataclass(frozen=True, kw_only=True, repr=False)
class Posterizing(Augmentation):
    """The part of an `Augmenter` that reduces the number of colours."""

    posterize: float = 0
    posterize_bits: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.posterize <= 1:
            raise UserError(f"posterize: expected a probability from 0 to 1, got {self.posterize}")
        try:
            is_valid = 1 <= operator.index(self.posterize_bits) <= 8
        except TypeError:
            is_valid = False
        if not is_valid:
            raise UserError(
                f"posterize_bits: expected a number of bits from 1 to 8, got {self.posterize_bits}"
            )

    @property
    def only_moves(self) -> bool:
        return super().only_moves and not self.posterize

    def check_images(self, shape: Sequence[int], dtype: np.dtype) -> None:
        super().check_images(shape, dtype)
        if self.posterize and dtype != np.uint8:
            raise UserError(f"posterize: expected 8-bit images, found {dtype}")

    def augmented(self, images: np.ndarray, keys: SampleKeys) -> np.ndarray:
        images = super().augmented(images, keys)
        if not self.posterize:
            return images
        is_posterized = draws.uniforms(keys, PURPOSE, 1)[0] < self.posterize
        highest_bits = 256 - (1 << 8 - int(self.posterize_bits))
        masks = np.where(is_posterized, highest_bits, 255).astype(np.uint8)
        return images & masks[:, None, None, None]
