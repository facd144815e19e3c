"""Move the pixels of images: reflection, affine maps, shifts and crops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpidl import backends
from mpidl.backends.reference.images import windows as moved_windows
from mpidl.data.transforms import draws, resized_crop
from mpidl.data.transforms.augmentation import Augmentation, Range, channel_values
from mpidl.data.transforms.draws import SampleKeys
from mpidl.data.transforms.image_targets import nearest_warp
from mpidl.data.transforms.sizes import checked_size
from mpidl.errors import UserError

PURPOSE, ALTERNATE = "augment", "alternating flips"  # keys of the random numbers
DRAWS = 12  # random numbers drawn per image, including unused numbers


class TransformParameters(NamedTuple):
    """Transformation parameters of n images, as arrays (n,). See `Augmenter` for their meaning."""

    reflect_x: np.ndarray  # bool
    reflect_y: np.ndarray
    rotation: np.ndarray  # degrees
    scale_x: np.ndarray
    scale_y: np.ndarray
    shear_x: np.ndarray  # degrees
    shear_y: np.ndarray
    translate_x: np.ndarray  # whole pixels
    translate_y: np.ndarray
    top: np.ndarray  # first row and column of the crop, whole pixels
    left: np.ndarray


@dataclass(frozen=True, kw_only=True, repr=False)
class Movement(Augmentation):
    """The part of an `Augmenter` that moves pixels, and targets with them."""

    reflect_x: bool = False
    reflect_y: bool = False
    rotation: Range = (0, 0)
    scale: tuple[float, float] = (1, 1)
    scale_x: tuple[float, float] = (1, 1)
    scale_y: tuple[float, float] = (1, 1)
    shear_x: Range = (0, 0)
    shear_y: Range = (0, 0)
    translate_x: Range = (0, 0)
    translate_y: Range = (0, 0)
    crop: tuple[int, int] | None = None
    fill: float | Sequence[float] = 0
    alternating: bool = False
    resized_crop: tuple[int, int] | None = None
    crop_area: tuple[float, float] = (0.08, 1)
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    target_fill: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("rotation", "shear_x", "shear_y", "translate_x", "translate_y")
        self._store_ranges(*names, symmetric=True)
        self._store_ranges("scale", "scale_x", "scale_y")
        self._store_box_ranges("crop")
        for name in ("scale", "scale_x", "scale_y"):
            if getattr(self, name)[0] <= 0:
                raise UserError(f"{name}: expected positive factors, got {getattr(self, name)}")
        shears: list[Any] = [self.shear_x, self.shear_y]
        for name, (low, high) in zip(("shear_x", "shear_y"), shears, strict=True):
            if not -90 < low <= high < 90:
                raise UserError(f"{name}: expected degrees between -90 and 90, got {(low, high)}")
        sums = [x + y for x, y in zip(*shears, strict=True)]
        if not -90 < sums[0] <= sums[1] < 90:  # at 90 degrees the image collapses to a line
            raise UserError(
                "shear_x and shear_y: expected less than 90 degrees together, got "
                f"{self.shear_x} and {self.shear_y}"
            )
        for name in ("translate_x", "translate_y"):
            if any(edge != int(edge) for edge in getattr(self, name)):
                raise UserError(f"{name}: expected whole pixels, got {getattr(self, name)}")
        for name in ("crop", "resized_crop"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checked_size(name, getattr(self, name)))
        if self.crop is not None and self.resized_crop is not None:
            raise UserError(
                f"crop {self.crop} and resized_crop {self.resized_crop}: expected at most one of "
                "them"
            )
        fill = np.atleast_1d(np.asarray(self.fill, np.float64))
        if fill.ndim != 1 or not np.isfinite(fill).all():
            raise UserError(f"fill: expected a number, or one per channel, got {self.fill}")

    @property
    def window(self) -> tuple[int, int] | None:
        """Size (P, Q) of the crop or resized crop, or None if images are not cropped."""
        return self.resized_crop if self.crop is None else self.crop

    @property
    def warps(self) -> bool:
        """Whether any transformation needs an affine map."""
        angles = (self.rotation, self.shear_x, self.shear_y)
        factors = (self.scale, self.scale_x, self.scale_y)
        return any(r != (0, 0) for r in angles) or any(r != (1, 1) for r in factors)

    @property
    def only_moves(self) -> bool:
        return super().only_moves and not (self.warps or self.resized_crop)

    def image_shape(self, shape: Sequence[int], label: str = "crop") -> tuple[int, ...]:
        """Return the shape (C, P, Q) of augmented images.

        Parameters
        ----------
        shape : tuple of int
            (C, H, W) of the images.
        label : str
            Name of the crop in the error message.

        Returns
        -------
        tuple of int
            (C, P, Q), where (P, Q) is the size of the crop, or of the images if they are not
            cropped.

        Raises
        ------
        UserError
            If the crop is larger than the images.
        """
        window = self.window
        if window is None:
            return tuple(shape)
        if window[0] > shape[1] or window[1] > shape[2]:
            raise UserError(
                f"{label} {window[0]}x{window[1]}: expected at most the size of the images, "
                f"found {shape[1]}x{shape[2]}"
            )
        return (shape[0], *window)

    def check_images(self, shape: Sequence[int], dtype: np.dtype) -> None:
        super().check_images(shape, dtype)
        self.image_shape(shape)
        channel_values("fill", self.fill, shape, dtype)

    def moves(self, keys: SampleKeys, shape: Sequence[int], dtype: np.dtype) -> dict[str, object]:
        """Return keyword arguments for `Backend.images` that mirror, shift and crop images.

        Parameters
        ----------
        keys : SampleKeys
            Keys of the random numbers.
        shape, dtype
            Shape (C, H, W) and type of the images.

        Returns
        -------
        dict
            "size", "mirrored", "top", "left" and "fill". Only valid if `only_moves` is True.
        """
        fill = channel_values("fill", self.fill, shape, dtype)
        moves: dict[str, object] = {
            "size": self.image_shape(shape)[1:],
            **_moves(self, keys, shape),
        }
        return {**moves, "fill": fill if fill.any() else None}

    def augmented(self, images: np.ndarray, keys: SampleKeys) -> np.ndarray:
        images = super().augmented(images, keys)
        fill = channel_values("fill", self.fill, images.shape[1:], images.dtype)
        return self._moved(images, keys, fill)

    def _moved(self, images, keys, fill):
        """Move the pixels of images, or of label maps (n, C, H, W) if they are int32."""
        shape, is_labels = images.shape[1:], images.dtype == np.int32
        size = shape[1:] if self.resized_crop else self.image_shape(shape)[1:]
        if self.warps:
            warp = nearest_warp if is_labels else backends.of_type(np.float32).warp
            images = warp(images, affine_maps(self, keys, shape), size, fill)
        else:
            images = moved_windows(images, size, fill=fill, **_moves(self, keys, shape))
        if self.resized_crop is not None:
            self.image_shape(shape)  # raises UserError
            places = resized_crop.windows(keys, size, self.crop_area, self.crop_aspect)
            images = resized_crop.resized(images, places, self.resized_crop, is_labels)
        return images


def draw(movement: Movement, keys: SampleKeys, shape: Sequence[int]) -> TransformParameters:
    """Draw the transformations of some images of `shape` (C, H, W)."""
    u = draws.uniforms(keys, PURPOSE, DRAWS)
    # The windows of `resized_crop` are drawn separately.
    _, p, q = shape if movement.crop is None else movement.image_shape(shape)

    def uniform(low_high, u):
        return draws.between(low_high[0], low_high[1], u)

    def pixels(low_high, u):
        low, high = (int(edge) for edge in low_high)
        return low + np.floor((high - low + 1) * u).astype(np.int32)

    scale = uniform(movement.scale, u[3])
    is_mirrored = u[:2] < 0.5
    if movement.alternating:
        is_mirrored = draws.uniforms(keys._replace(epoch=0), ALTERNATE, 2) < 0.5
        turns = keys.epoch, keys.epoch // 2 if movement.reflect_x else keys.epoch
        is_mirrored ^= np.array([[turns[0] % 2 == 1], [turns[1] % 2 == 1]])
    return TransformParameters(
        is_mirrored[0] & movement.reflect_x,
        is_mirrored[1] & movement.reflect_y,
        uniform(movement.rotation, u[2]),
        scale * uniform(movement.scale_x, u[4]),
        scale * uniform(movement.scale_y, u[5]),
        uniform(movement.shear_x, u[6]),
        uniform(movement.shear_y, u[7]),
        pixels(movement.translate_x, u[8]),
        pixels(movement.translate_y, u[9]),
        pixels((0, shape[1] - p), u[10]),
        pixels((0, shape[2] - q), u[11]),
    )


def _moves(movement, keys, shape):
    """Return how images are mirrored, shifted and cropped, int32 (n,) each. "mirrored" is 1 for
    left to right, 2 for top to bottom, 3 for both and 0 for neither. "top" and "left" are where the
    result starts.
    """
    d = draw(movement, keys, shape)
    return {
        "mirrored": (d.reflect_x + 2 * d.reflect_y).astype(np.int32),
        "top": d.top - d.translate_y,
        "left": d.left - d.translate_x,
    }


def affine_maps(movement: Movement, keys: SampleKeys, shape: Sequence[int]) -> np.ndarray:
    """Return the maps (n, 6) for `Backend.warp`, float64, from coordinates in the result to
    coordinates in the image.
    """
    d = draw(movement, keys, shape)
    # Forward map, with (x, y) measured from the centre: shear * scale * rotation * reflection,
    # then the shift. `draws` computes sine and cosine with the same bits on all processors.
    sine, cosine = draws.sine_cosine(d.rotation)
    across, down = draws.tangent(d.shear_x), draws.tangent(d.shear_y)
    fx, fy = 1.0 - 2.0 * d.reflect_x, 1.0 - 2.0 * d.reflect_y
    a, b = d.scale_x * (cosine * fx), d.scale_x * (-sine * fy)
    c, e = d.scale_y * (sine * fx), d.scale_y * (cosine * fy)
    # Both shears use the scaled coordinates: x moves in proportion to y, and y to x.
    a, b, c, e = a + across * c, b + across * e, c + down * a, e + down * b
    determinant = a * e - b * c
    m0, m1, m3, m4 = e / determinant, -b / determinant, -c / determinant, a / determinant
    # Column q of the result has x = q + left - shift - centre in the transformed image.
    cx, cy = (shape[2] - 1) / 2, (shape[1] - 1) / 2
    x, y = d.left - d.translate_x - cx, d.top - d.translate_y - cy
    return np.stack([m0, m1, m0 * x + m1 * y + cx, m3, m4, m3 * x + m4 * y + cy], axis=1)
