"""Random augmentation: reflection, rotation, scale, shear, translation and crop.

The transformation of an image depends only on the seed, the epoch and the sample index. It does
not depend on the number of ranks or threads, or on earlier reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpidl import backends
from mpidl.errors import UserError
from mpidl.text import did_you_mean

PURPOSE = "augment"  # purpose that is part of the keys of the random numbers
DRAWS = 12  # random numbers drawn per image, whether used or not
# Option names of MATLAB's imageDataAugmenter.
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
DEGREE = 0.017453292519943295
_TERMS = 11  # terms of the sine and cosine series; more terms change no bit up to 45 degrees


class TransformParameters(NamedTuple):
    """Parameters of the transformations of n images, as arrays (n,); `Augmenter` describes them."""

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


Range: TypeAlias = float | tuple[float, float]  # stored as (low, high)


@dataclass(frozen=True, kw_only=True)
class Augmenter:
    """Random transformations of images, similar to MATLAB's imageDataAugmenter.

    Reflection, rotation, scaling, shear and translation are applied in this order about the image's
    centre, followed by the crop. x points right and y points down. Each parameter is drawn
    uniformly from its range (low, high); translations are whole numbers. A single number r for a
    range of degrees or pixels means (-r, r).

    Parameters
    ----------
    reflect_x, reflect_y : bool
        Whether to mirror images left to right or top to bottom, each with probability 1/2.
    rotation : (float, float) or float
        Range of the angle in degrees, clockwise.
    scale : (float, float)
        Range of the scale factor that applies to both directions.
    scale_x, scale_y : (float, float)
        Range of an additional scale factor for one direction.
    shear_x, shear_y : (float, float) or float
        Range of the shear angle in degrees, between -90 and 90. shear_x moves each row to the right
        by the tangent of the angle times the row's distance below the centre. shear_y moves columns
        down in the same way.
    translate_x, translate_y : (int, int) or int
        Range of the shift in whole pixels, to the right and down.
    crop : (int, int), optional
        (height, width) of a window cut at a random position. Images that are not augmented, such as
        validation images, are cropped in the centre.
    fill : float or tuple of float
        Value of pixels outside the image (0 to 255 for uint8), a single number or one per channel.
    **keywords
        The parameters above; each is optional.

    Raises
    ------
    UserError
        If a name is unknown or a range is invalid.

    Notes
    -----
    Reflections, translations and crops cost almost nothing compared with reading the image.
    Rotation, scaling and shear are combined into one affine map per image with bilinear
    interpolation, and uint8 results are rounded.
    """

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
        if self.crop is not None:
            object.__setattr__(self, "crop", checked_size("crop", self.crop))
        fill = np.atleast_1d(np.asarray(self.fill, np.float64))
        if fill.ndim != 1 or not np.isfinite(fill).all():
            raise UserError(f"fill: expected a number, or one per channel, got {self.fill}")

    @property
    def warps(self) -> bool:
        """Whether images need an affine map; if not, they only move by whole pixels."""
        angles = (self.rotation, self.shear_x, self.shear_y)
        factors = (self.scale, self.scale_x, self.scale_y)
        return any(r != (0, 0) for r in angles) or any(r != (1, 1) for r in factors)

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
            (C, P, Q): the size of the crop, or that of the images.

        Raises
        ------
        UserError
            If the crop is larger than the images.
        """
        if self.crop is None:
            return tuple(shape)
        if self.crop[0] > shape[1] or self.crop[1] > shape[2]:
            raise UserError(
                f"{label} {self.crop[0]}x{self.crop[1]}: expected at most the size of the images, "
                f"found {shape[1]}x{shape[2]}"
            )
        return (shape[0], *self.crop)

    def draw(
        self, seed: int, epoch: int, indices: np.ndarray, shape: Sequence[int]
    ) -> TransformParameters:
        """Draw the transformations of some samples.

        Parameters
        ----------
        seed : int
            Seed of the run.
        epoch : int
            Epoch, from 1.
        indices : ndarray
            Numbers of the samples, (n,).
        shape : tuple of int
            Shape (C, H, W) of the images.

        Returns
        -------
        TransformParameters
            Arrays (n,) of angles, factors, shifts and reflections.
        """
        backend = backends.of_type(np.float32)
        words = backend.keyed_words(seed, PURPOSE, DRAWS, epoch, indices)
        u = ((words >> np.uint64(11)) * 2.0**-53).T
        _, p, q = self.image_shape(shape)

        def uniform(low_high, u):
            return low_high[0] + (low_high[1] - low_high[0]) * u

        def pixels(low_high, u):
            low, high = (int(edge) for edge in low_high)
            return low + np.floor((high - low + 1) * u).astype(np.int32)

        scale = uniform(self.scale, u[3])
        return TransformParameters(
            (u[0] < 0.5) & self.reflect_x,
            (u[1] < 0.5) & self.reflect_y,
            uniform(self.rotation, u[2]),
            scale * uniform(self.scale_x, u[4]),
            scale * uniform(self.scale_y, u[5]),
            uniform(self.shear_x, u[6]),
            uniform(self.shear_y, u[7]),
            pixels(self.translate_x, u[8]),
            pixels(self.translate_y, u[9]),
            pixels((0, shape[1] - p), u[10]),
            pixels((0, shape[2] - q), u[11]),
        )

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
        fill = np.atleast_1d(np.asarray(self.fill, np.float64))
        if len(fill) not in (1, shape[0]):
            raise UserError(
                f"fill: expected a number, or one for each of the {shape[0]} channels, "
                f"got {self.fill}"
            )
        if dtype == np.uint8 and not (fill == np.clip(np.rint(fill), 0, 255)).all():
            raise UserError(f"fill: expected whole numbers from 0 to 255, got {self.fill}")
        return np.broadcast_to(fill, shape[0]).astype(dtype)

    def moves(
        self, seed: int, epoch: int, indices: np.ndarray, shape: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Return keyword arguments for `Backend.images` that mirror, shift and crop images.

        Call this method only if `warps` is False.

        Parameters
        ----------
        seed : int
            Seed of the run.
        epoch : int
            Epoch, from 1.
        indices : ndarray
            Numbers of the samples, (n,).
        shape : tuple of int
            Shape (C, H, W) of the images.

        Returns
        -------
        dict
            "mirrored", "top" and "left", each int32 (n,). "mirrored" is 1 for left to right, 2 for
            top to bottom, 3 for both and 0 for neither. "top" and "left" are the row and column of
            the image at which the result starts.
        """
        d = self.draw(seed, epoch, indices, shape)
        return {
            "mirrored": (d.reflect_x + 2 * d.reflect_y).astype(np.int32),
            "top": d.top - d.translate_y,
            "left": d.left - d.translate_x,
        }

    def affine_maps(
        self, seed: int, epoch: int, indices: np.ndarray, shape: Sequence[int]
    ) -> np.ndarray:
        """Return an affine map per image, for `Backend.warp`.

        A map converts coordinates in the result to coordinates in the image.

        Parameters
        ----------
        seed : int
            Seed of the run.
        epoch : int
            Epoch, from 1.
        indices : ndarray
            Numbers of the samples, (n,).
        shape : tuple of int
            Shape (C, H, W) of the images.

        Returns
        -------
        ndarray
            Maps (n, 6), float64.
        """
        d = self.draw(seed, epoch, indices, shape)
        # Forward map, with (x, y) measured from the centre: shear * scale * rotation * reflection,
        # then the shift. Sine and cosine use basic arithmetic only, which rounds alike everywhere.
        sine, cosine = _sine_cosine(d.rotation)
        across, down = _tangent(d.shear_x), _tangent(d.shear_y)
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
        return np.stack(
            [m0, m1, m0 * x + m1 * y + cx, m3, m4, m3 * x + m4 * y + cy],
            axis=1,
        )

    def apply(
        self, images: np.ndarray, indices: np.ndarray, *, epoch: int = 0, seed: int = 0
    ) -> np.ndarray:
        """Augment images exactly as a `MinibatchQueue` with this augmenter does.

        Parameters
        ----------
        images : np.ndarray
            (n, C, H, W), uint8 or float.
        indices : np.ndarray
            Sample indices of the images, (n,).
        epoch, seed : int
            Epoch and seed, which determine the transformations together with `indices`.

        Returns
        -------
        np.ndarray
            (n, C, P, Q), uint8 or float32.
        """
        images = np.asarray(images)
        images = images if images.dtype == np.uint8 else images.astype(np.float32)
        shape = images.shape[1:]
        size = self.image_shape(shape)[1:]
        fill = self.fill_values(shape, images.dtype)
        maps = self.affine_maps(seed, epoch, indices, shape)  # exact for shifts by whole pixels
        return backends.of_type(np.float32).warp(images, maps, size, fill)


def centred(shape: Sequence[int], crop: Sequence[int]) -> tuple[int, int]:
    """Return (top, left) of a centred window of size `crop` (P, Q) in images (C, H, W)."""
    return (shape[1] - crop[0]) // 2, (shape[2] - crop[1]) // 2


def _sine_cosine(degrees):
    """Return the sine and cosine of angles in degrees.

    The angles are reduced by multiples of 90 degrees, and then Taylor series are summed.
    """
    quarters = np.rint(degrees / 90.0)
    x = (degrees - 90.0 * quarters) * DEGREE  # at most 45 degrees
    square, sine, cosine = x * x, np.ones_like(x), np.ones_like(x)
    for k in range(_TERMS, 0, -1):
        sine = 1.0 - square * sine / (2 * k * (2 * k + 1))
        cosine = 1.0 - square * cosine / ((2 * k - 1) * 2 * k)
    sine = sine * x
    turn = quarters.astype(np.int64) % 4
    return (
        np.choose(turn, [sine, cosine, -sine, -cosine]),
        np.choose(turn, [cosine, -sine, -cosine, sine]),
    )


def _tangent(degrees):
    sine, cosine = _sine_cosine(degrees)
    return sine / cosine


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


def checked_size(name: str, value: Any) -> tuple[int, int]:
    """Return a size as (height, width) of at least 1.

    Raises
    ------
    UserError
        If the value is not such a size. The message contains the argument's `name`.
    """
    try:
        height, width = (int(n) for n in value)
    except (TypeError, ValueError):
        raise UserError(f"{name}: expected (height, width), got {value!r}") from None
    if min(height, width) < 1:
        raise UserError(f"{name}: expected a height and a width of at least 1, got {value!r}")
    return height, width


def _plain(value):
    """Convert a tuple to a list of floats for JSON, and return any other value unchanged."""
    return [float(v) for v in value] if isinstance(value, tuple) else value
