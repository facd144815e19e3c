"""Define and check the options of `Augmenter`, and derive properties from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np

from mpidl.data.transforms.sizes import checked_size
from mpidl.errors import UserError
from mpidl.text import did_you_mean

# Option names of MATLAB's imageDataAugmenter, and the parameters that correspond to them.
MATLAB = {
    "FillValue": "fill",
    "RandRotation": "rotation",
    "RandScale": "scale",
    "RandXReflection": "reflect_x",
    "RandXScale": "scale_x",
    "RandXShear": "shear_x",
    "RandXTranslation": "translate_x",
    "RandYReflection": "reflect_y",
    "RandYScale": "scale_y",
    "RandYShear": "shear_y",
    "RandYTranslation": "translate_y",
}

Range: TypeAlias = float | tuple[float, float]  # stored as (low, high)


@dataclass(frozen=True, kw_only=True)
class AugmenterOptions:
    """The options of an `Augmenter`. The docstring of `Augmenter` describes them."""

    reflect_x: bool = False
    reflect_y: bool = False
    # Ranges may be given as numbers; __post_init__ stores all of them as (low, high).
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
    brightness: Range = (1, 1)
    contrast: Range = (1, 1)
    saturation: Range = (1, 1)
    hue: Range = (0, 0)
    erase: float = 0
    erase_area: tuple[float, float] = (0.02, 0.4)
    erase_aspect: tuple[float, float] = (0.3, 10 / 3)
    erase_value: float | Sequence[float] | str = "noise"
    target_fill: float | None = None

    def __new__(cls, **keywords):
        for name in keywords:
            if name not in cls.__dataclass_fields__:
                hint = did_you_mean(MATLAB.get(name, name), cls.__dataclass_fields__)
                raise UserError(f"unknown augmentation {name}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("rotation", "shear_x", "shear_y", "translate_x", "translate_y"):
            object.__setattr__(self, name, _range(name, getattr(self, name), symmetric=True))
        for name in ("scale", "scale_x", "scale_y"):
            object.__setattr__(self, name, _range(name, getattr(self, name)))
            if getattr(self, name)[0] <= 0:
                raise UserError(f"{name}: expected positive factors, got {getattr(self, name)}")
        for name in ("shear_x", "shear_y"):
            low, high = getattr(self, name)
            if not -90 < low <= high < 90:
                raise UserError(f"{name}: expected degrees between -90 and 90, got {(low, high)}")
        shears: list[Any] = [self.shear_x, self.shear_y]
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
        self._check_windows()
        self._check_colours()
        fill = np.atleast_1d(np.asarray(self.fill, np.float64))
        if fill.ndim != 1 or not np.isfinite(fill).all():
            raise UserError(f"fill: expected a number, or one per channel, got {self.fill}")

    def _check_windows(self):
        """Check the options of resized crops and of erasing."""
        if self.crop is not None and self.resized_crop is not None:
            raise UserError(
                f"crop {self.crop} and resized_crop {self.resized_crop}: expected at most one of "
                "them"
            )
        for name in ("crop_area", "erase_area", "crop_aspect", "erase_aspect"):
            low, high = _range(name, getattr(self, name))
            object.__setattr__(self, name, (low, high))
            if low <= 0 or (name.endswith("area") and high > 1):
                words = (
                    "fractions above 0, at most 1" if name.endswith("area") else "numbers above 0"
                )
                raise UserError(f"{name}: expected {words}, got {(low, high)}")
        if not 0 <= self.erase <= 1:
            raise UserError(f"erase: expected a probability from 0 to 1, got {self.erase}")
        if isinstance(self.erase_value, str):
            if self.erase_value != "noise":
                raise UserError(
                    f"erase_value: expected numbers or 'noise', got {self.erase_value!r}"
                )
        elif not np.isfinite(np.asarray(self.erase_value, np.float64)).all():
            raise UserError(f"erase_value: expected finite numbers, got {self.erase_value}")

    def _check_colours(self):
        """Check the ranges of the colour changes, and store them as (low, high)."""
        for name in ("brightness", "contrast", "saturation"):
            value = getattr(self, name)
            if np.ndim(value) == 0 and not isinstance(value, str):
                value = max(0.0, 1 - value), 1 + value
            object.__setattr__(self, name, _range(name, value))
            if getattr(self, name)[0] < 0:
                raise UserError(f"{name}: expected factors of at least 0, got {value}")
        object.__setattr__(self, "hue", _range("hue", self.hue, symmetric=True))
        low, high = _range("hue", self.hue)
        if not -0.5 <= low <= high <= 0.5:
            raise UserError(f"hue: expected fractions of a turn from -0.5 to 0.5, got {self.hue}")

    @property
    def window(self) -> tuple[int, int] | None:
        """Size (P, Q) of the crop or resized crop, or None if images are not cropped."""
        return self.resized_crop if self.crop is None else self.crop

    @property
    def jitters(self) -> bool:
        """Whether augmentation changes colours."""
        factors = (self.brightness, self.contrast, self.saturation)
        return self.hue != (0, 0) or any(r != (1, 1) for r in factors)

    @property
    def only_moves(self) -> bool:
        """Whether all transformations are reflections, crops and shifts by whole pixels."""
        return not (self.warps or self.resized_crop or self.jitters or self.erase)

    @property
    def warps(self) -> bool:
        """Whether any transformation needs an affine map."""
        angles = (self.rotation, self.shear_x, self.shear_y)
        factors = (self.scale, self.scale_x, self.scale_y)
        return any(r != (0, 0) for r in angles) or any(r != (1, 1) for r in factors)

    def __repr__(self) -> str:
        """Show the options that differ from their defaults."""
        changed = (f"{name}={getattr(self, name)!r}" for name in self.spec())
        return f"Augmenter({', '.join(changed)})"

    def spec(self) -> dict[str, Any]:
        """Return the options that differ from their defaults as {name: value}, ready for JSON.

        Returns
        -------
        dict
            {name: value}
        """
        return {
            f.name: value
            for f in fields(self)
            if (value := _plain(getattr(self, f.name))) != _plain(f.default)
        }

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

    def fill_values(self, shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
        """Return `fill` as one value per channel.

        Parameters
        ----------
        shape : tuple of int
            Shape (C, H, W) of the images.
        dtype : dtype
            Type of the pixels.

        Returns
        -------
        ndarray
            Values (C,) of type `dtype`.

        Raises
        ------
        UserError
            If the number of values is not 1 or C, or the pixels are uint8 and a value is not a
            whole number from 0 to 255.
        """
        return _channel_values("fill", self.fill, shape, dtype)

    def check_colours(self, shape: Sequence[int]) -> None:
        """Check that images are gray or RGB if augmentation changes colours.

        Parameters
        ----------
        shape : tuple of int
            Shape (C, H, W) of the images.

        Raises
        ------
        UserError
            If the images have neither 1 nor 3 channels.
        """
        if self.jitters and shape[0] not in (1, 3):
            raise UserError(
                "brightness, contrast, saturation and hue: expected images of 1 or 3 channels, "
                f"found {shape[0]}"
            )

    def erase_values(self, shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray | None:
        """Return `erase_value` as one value per channel, or None for noise.

        Parameters
        ----------
        shape : tuple of int
            Shape (C, H, W) of the images.
        dtype : dtype
            Type of the pixels.

        Returns
        -------
        ndarray or None
            Values (C,) of type `dtype`.

        Raises
        ------
        UserError
            If the values are invalid (see `fill_values`).
        """
        if isinstance(self.erase_value, str):
            return None
        return _channel_values("erase_value", self.erase_value, shape, dtype)


def _channel_values(name, value, shape, dtype):
    """Convert one number, or one number per channel of images (C, H, W), to `dtype` (C,)."""
    values = np.atleast_1d(np.asarray(value, np.float64))
    if len(values) not in (1, shape[0]):
        raise UserError(
            f"{name}: expected a number, or one for each of the {shape[0]} channels, got {value}"
        )
    if dtype == np.uint8 and not (values == np.clip(np.rint(values), 0, 255)).all():
        raise UserError(f"{name}: expected whole numbers from 0 to 255, got {value}")
    return np.broadcast_to(values, shape[0]).astype(dtype)


def _range(name, value, symmetric=False):
    """Return a range as (low, high); raise UserError if it is invalid.

    If `symmetric`, a single number r means (-r, r).
    """
    words = "(low, high)" + (" or a number" if symmetric else "")
    try:
        edges = (-abs(value), abs(value)) if symmetric and np.ndim(value) == 0 else tuple(value)
        low, high = (float(edge) for edge in edges)
    except (TypeError, ValueError):
        raise UserError(f"{name}: expected {words}, got {value!r}") from None
    if not (np.isfinite(low) and np.isfinite(high) and low <= high):
        raise UserError(f"{name}: expected {words} with low <= high, got {value!r}")
    return low, high


def _plain(value):
    """Convert a tuple to a list of floats for JSON, and return any other value unchanged."""
    return [float(v) for v in value] if isinstance(value, tuple) else value
