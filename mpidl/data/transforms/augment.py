"""Random augmentation of images, and of targets that are label maps or images.

The transformation of an image depends only on the seed, the epoch and the sample index. It does
not depend on the number of ranks or threads, or on earlier reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpidl import backends
from mpidl.backends.reference.images import windows as moved_windows
from mpidl.data.transforms import draws, erasing, jitter, resized_crop
from mpidl.data.transforms.image_targets import nearest_warp
from mpidl.errors import UserError
from mpidl.text import did_you_mean

PURPOSE = "augment"  # this string is one of the keys of the random numbers
ALTERNATE, JITTER = "alternating flips", "colour jitter"
DRAWS = 12  # random numbers drawn per image, including unused numbers
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


class TransformParameters(NamedTuple):
    """Transformation parameters of n images, as arrays (n,). `Augmenter` documents them."""

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
    centre, followed by the crop, the colour changes and the erasing. x points right and y points
    down. Each parameter is drawn uniformly from its range (low, high); translations are whole
    numbers. For a range of degrees, pixels or hues, a single number r means (-r, r). For
    brightness, contrast and saturation, it means (max(0, 1 - r), 1 + r).

    Parameters
    ----------
    reflect_x, reflect_y : bool
        Whether to mirror images left to right or top to bottom, each with probability 1/2.
    alternating : bool
        Whether an image is mirrored in every other epoch instead of at random. Its first
        orientation is random. If both reflections are enabled, each image has each of the four
        orientations once in four epochs.
    rotation : (float, float) or float
        Range of the angle in degrees, clockwise.
    scale : (float, float)
        Range of the scale factor for both directions.
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
    resized_crop : (int, int), optional
        (height, width) to which a window of random area and aspect ratio is resized, instead of
        `crop`. Images that are not augmented are cropped to this size in the centre.
    crop_area : (float, float)
        Range of the area of the `resized_crop` window, as a fraction of the image's area.
    crop_aspect : (float, float)
        Range of the window's width divided by its height. The logarithm of the ratio is uniform.
    brightness, contrast, saturation : (float, float) or float
        Range of the factor. `jitter.jittered` documents the order and the formulas.
    hue : (float, float) or float
        Range of the rotation of the hue, as a fraction of a full turn, between -0.5 and 0.5.
    erase : float
        Probability that a random rectangle of an image is erased.
    erase_area, erase_aspect : (float, float)
        Range of the erased rectangle's area, as a fraction of the image's area, and range of the
        rectangle's width divided by its height.
    erase_value : float, sequence of float or "noise"
        Replacement for the erased pixels: a single value, one value per channel, or uniform noise.
    fill : float or tuple of float
        Value of pixels outside the image (0 to 255 for uint8): a single value, or one value per
        channel.
    target_fill : float, optional
        Value of pixels outside targets that are images or label maps. The default for images is
        `fill`. The default for label maps is the ignored label of the loss, or 0 if no label is
        ignored.
    **keywords
        The parameters above. Each parameter is optional.

    Raises
    ------
    UserError
        If a name is unknown or a range is invalid.

    Notes
    -----
    Reflections, translations and crops cost almost nothing compared with reading the image.
    Rotation, scaling and shear are combined into one affine map per image with bilinear
    interpolation, and uint8 results are rounded. Pillow resizes the windows of `resized_crop`. The
    host always computes resized crops, colour changes and erasing. If there is a GPU, the host then
    uploads the results.

    Targets that are images or label maps move with their images (`apply_to_targets`). Colour
    changes and erasing do not affect targets.

    Alternating flips: Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, section 3.6.
    Random erasing: Zhong et al., "Random erasing data augmentation", 2020. Resized crops: Szegedy
    et al., "Going deeper with convolutions", 2015, section 6.
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
        u = draws.uniforms(seed, PURPOSE, DRAWS, epoch, indices)
        # The windows of `resized_crop` are drawn separately.
        _, p, q = shape if self.crop is None else self.image_shape(shape)

        def uniform(low_high, u):
            return draws.between(low_high[0], low_high[1], u)

        def pixels(low_high, u):
            low, high = (int(edge) for edge in low_high)
            return low + np.floor((high - low + 1) * u).astype(np.int32)

        scale = uniform(self.scale, u[3])
        is_mirrored = u[:2] < 0.5
        if self.alternating:
            is_mirrored = draws.uniforms(seed, ALTERNATE, 2, 0, indices) < 0.5
            turns = epoch, epoch // 2 if self.reflect_x else epoch
            is_mirrored ^= np.array([[turns[0] % 2 == 1], [turns[1] % 2 == 1]])
        return TransformParameters(
            is_mirrored[0] & self.reflect_x,
            is_mirrored[1] & self.reflect_y,
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
        return _channel_values("fill", self.fill, shape, dtype)

    def moves(
        self, seed: int, epoch: int, indices: np.ndarray, shape: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Return keyword arguments for `Backend.images` that mirror, shift and crop images.

        Call this method only if `only_moves` is True.

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
            the image where the result starts.
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
            Epoch and seed. Together with `indices`, they determine the transformations.

        Returns
        -------
        np.ndarray
            (n, C, P, Q), uint8 or float32.
        """
        images, indices = np.asarray(images), np.asarray(indices)
        images = images if images.dtype == np.uint8 else images.astype(np.float32)
        shape = images.shape[1:]
        fill = self.fill_values(shape, images.dtype)
        images = self._moved(images, indices, epoch, seed, fill)
        if self.jitters:
            self.check_colours(shape)
            images = jitter.jittered(images, self.colours(seed, epoch, indices))
        if self.erase:
            rectangles = erasing.rectangles(
                *(seed, epoch, indices, images.shape[2:]),
                *(self.erase, self.erase_area, self.erase_aspect),
            )
            value = self.erase_values(shape, images.dtype)
            images = erasing.erase(images, rectangles, value, seed, epoch, indices)
        return images

    def apply_to_targets(
        self,
        targets: np.ndarray,
        indices: np.ndarray,
        *,
        epoch: int = 0,
        seed: int = 0,
        fill: float = 0,
    ) -> np.ndarray:
        """Move targets in the same way as `apply` moves images with the same keys.

        Parameters
        ----------
        targets : ndarray
            Either label maps, int32 (n, H, W) or (n, C, H, W), sampled at the nearest pixel; or
            images, float32 (n, H, W) or (n, C, H, W), interpolated like the input images.
        indices, epoch, seed
            Keys of the transformations, as in `apply`.
        fill : float
            Value of pixels outside the targets. Ignored if the augmenter has a `target_fill`.

        Returns
        -------
        ndarray
            Targets (n, ..., P, Q) of the same type.
        """
        targets, indices = np.asarray(targets), np.asarray(indices)
        planes = targets[:, None] if targets.ndim == 3 else targets
        if targets.dtype.kind in "biu":  # labels, even if they have the type of pixels
            planes = planes.astype(np.int32)
        value = fill if self.target_fill is None else self.target_fill
        values = np.full(planes.shape[1], value, planes.dtype)
        moved = self._moved(planes, indices, epoch, seed, values).astype(targets.dtype, copy=False)
        return moved.reshape(*targets.shape[:-2], *moved.shape[2:])

    def _moved(self, images, indices, epoch, seed, fill):
        """Apply all transformations that move pixels, and return the images."""
        shape, is_labels = images.shape[1:], images.dtype.kind in "iu" and images.dtype != np.uint8
        if self.warps:
            size = self.image_shape(shape)[1:] if self.resized_crop is None else shape[1:]
            maps = self.affine_maps(seed, epoch, indices, shape)
            warp = nearest_warp if is_labels else backends.of_type(np.float32).warp
            images = warp(images, maps, size, fill)
        else:
            size = shape[1:] if self.resized_crop else self.image_shape(shape)[1:]
            moves = self.moves(seed, epoch, indices, shape)
            images = moved_windows(images, size, fill=fill, **moves)
        if self.resized_crop is not None:
            self.image_shape(shape)  # raises UserError
            ranges = self.crop_area, self.crop_aspect
            places = resized_crop.windows(seed, epoch, indices, images.shape[2:], *ranges)
            images = resized_crop.resized(images, places, self.resized_crop, is_labels)
        return images

    def colours(self, seed: int, epoch: int, indices: np.ndarray) -> jitter.ColourChange:
        """Draw the colour changes of some samples.

        Parameters
        ----------
        seed, epoch : int
            Seed and epoch.
        indices : ndarray
            Numbers of the samples, (n,).

        Returns
        -------
        ColourChange
            The colour changes.
        """
        u = draws.uniforms(seed, JITTER, 4, epoch, indices)
        ranges: list[Any] = [self.brightness, self.contrast, self.saturation, self.hue]
        drawn = [draws.between(r[0], r[1], v) for r, v in zip(ranges, u, strict=True)]
        return jitter.ColourChange(*drawn)

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


def centred(shape: Sequence[int], crop: Sequence[int]) -> tuple[int, int]:
    """Return (top, left) of a centred window of size `crop` (P, Q) in images (C, H, W)."""
    return (shape[1] - crop[0]) // 2, (shape[2] - crop[1]) // 2


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
