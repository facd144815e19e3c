"""What the parts of an `Augmenter` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np

from mpidl.data.transforms.draws import SampleKeys
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
class Augmentation:
    """Base class of the parts of an `Augmenter`, which change images one after another.

    Each part is a dataclass of its parameters. Each method of a part first calls, through `super`,
    the method of the parts that change images before it.
    """

    def __new__(cls, **keywords):
        for name in keywords:
            if name not in cls.__dataclass_fields__:
                hint = did_you_mean(MATLAB.get(name, name), cls.__dataclass_fields__)
                raise UserError(f"unknown augmentation {name}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check the parameters, and store ranges as (low, high)."""

    @property
    def only_moves(self) -> bool:
        """Whether all transformations are reflections, crops and shifts by whole pixels."""
        return True

    def check_images(self, shape: Sequence[int], dtype: np.dtype) -> None:
        """Check that images can be augmented.

        Parameters
        ----------
        shape, dtype
            Shape (C, H, W) and type of the images.

        Raises
        ------
        UserError
            If they cannot.
        """

    def augmented(self, images: np.ndarray, keys: SampleKeys) -> np.ndarray:
        """Augment images; see `Augmenter.apply`.

        Parameters
        ----------
        images : ndarray
            (n, C, H, W), uint8 or float32.
        keys : SampleKeys
            Keys of the random numbers.

        Returns
        -------
        ndarray
            (n, C, P, Q) of the same type.
        """
        return images

    def __repr__(self) -> str:
        """Show the parameters that differ from their defaults."""
        changed = (f"{name}={getattr(self, name)!r}" for name in self.spec())
        return f"{type(self).__name__}({', '.join(changed)})"

    def spec(self) -> dict[str, Any]:
        """Return the parameters that differ from their defaults as {name: value}, ready for JSON.

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

    def _store_ranges(self, *names: str, symmetric: bool = False) -> None:
        """Store ranges as (low, high). If `symmetric`, a single number r means (-r, r)."""
        for name in names:
            object.__setattr__(self, name, _range(name, getattr(self, name), symmetric))

    def _store_box_ranges(self, prefix: str) -> None:
        """Store the ranges of area and aspect that `draws.boxes` takes."""
        area, aspect = f"{prefix}_area", f"{prefix}_aspect"
        self._store_ranges(area, aspect)
        for name, expected, limit in (
            (area, "fractions above 0, at most 1", 1),
            (aspect, "numbers above 0", np.inf),
        ):
            low, high = getattr(self, name)
            if low <= 0 or high > limit:
                raise UserError(f"{name}: expected {expected}, got {(low, high)}")


def channel_values(
    name: str, value: object, shape: Sequence[int], dtype: np.dtype | type
) -> np.ndarray:
    """Convert one number, or one number per channel of images (C, H, W), to `dtype` (C,).

    Raises UserError if the number of values is not 1 or C, or the pixels are uint8 and a value is
    not a whole number from 0 to 255.
    """
    values = np.atleast_1d(np.asarray(value, np.float64))
    if len(values) not in (1, shape[0]):
        raise UserError(
            f"{name}: expected a number, or one for each of the {shape[0]} channels, got {value}"
        )
    if dtype == np.uint8 and not (values == np.clip(np.rint(values), 0, 255)).all():
        raise UserError(f"{name}: expected whole numbers from 0 to 255, got {value}")
    return np.broadcast_to(values, shape[0]).astype(dtype)


def _range(name, value, symmetric):
    """Return a range as (low, high); raise UserError if it is invalid."""
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
