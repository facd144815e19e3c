"""Augmentation: images mirrored, turned, scaled, sheared, shifted and cut at random.

What is done to an image is keyed by (seed, epoch, sample index), so that it does not depend on
ranks, threads, workers, or on what was read before.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from mpidl import backends
from mpidl.errors import UserError
from mpidl.text import did_you_mean

PURPOSE, DRAWS = "augment", 12  # of the keys; the numbers drawn for an image, used or not
# What MATLAB's imageDataAugmenter calls them.
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
_TERMS = 11  # of the series of sine and cosine: below 45 degrees the next one changes no bit


class Drawn(NamedTuple):
    """What is done to each of n images, (n,) each; see `Augmenter`."""

    reflect_x: np.ndarray  # bool
    reflect_y: np.ndarray
    rotation: np.ndarray  # degrees
    scale_x: np.ndarray
    scale_y: np.ndarray
    shear_x: np.ndarray  # degrees
    shear_y: np.ndarray
    translate_x: np.ndarray  # whole pixels
    translate_y: np.ndarray
    top: np.ndarray  # pixel of the image that the crop begins at
    left: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Augmenter:
    """Random transformations of images, by range: MATLAB's imageDataAugmenter.

    In this order, each about the image's centre: reflection, rotation, scale, shear, translation;
    then the crop. x goes right, y goes down.

    reflect_x, reflect_y: left to right, and top to bottom, each for half of the images.
    rotation: (low, high) degrees, clockwise. scale: (low, high) factors, the same both ways;
    scale_x, scale_y: further ones of each. shear_x, shear_y: (low, high) degrees, between -90 and
    90: of shear_x, rows move right by the tangent times their distance below the centre; of
    shear_y, columns move down. translate_x, translate_y: (low, high) whole pixels, right and down.
    A number r for such a range of degrees or pixels means (-r, r); numbers are uniform in a range,
    and whole pixels are equally likely. crop: (height, width) of a window that is cut at random; a
    set that is not augmented, as for validation, is cut in the centre. fill: what lies outside of
    the image, as pixels have it (0 to 255 in uint8 ones): a number, or one a channel.

    Reflections, whole pixels and crops cost nothing beside reading the image. With a range of
    rotation, scale or shear each image is moved by one affine map, bilinearly, and uint8 pixels are
    rounded. Raises UserError for ranges that cannot be used.
    """

    reflect_x: bool = False
    reflect_y: bool = False
    rotation: Any = (0, 0)
    scale: tuple = (1, 1)
    scale_x: tuple = (1, 1)
    scale_y: tuple = (1, 1)
    shear_x: Any = (0, 0)
    shear_y: Any = (0, 0)
    translate_x: Any = (0, 0)
    translate_y: Any = (0, 0)
    crop: tuple | None = None
    fill: float | tuple = 0

    def __new__(cls, **keywords):
        for name in keywords:
            if name not in cls.__dataclass_fields__:
                hint = did_you_mean(MATLAB.get(name, name), cls.__dataclass_fields__)
                raise UserError(f"unknown augmentation {name}{hint}")
        return super().__new__(cls)

    def __post_init__(self):
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
        both = [x + y for x, y in zip(self.shear_x, self.shear_y, strict=True)]
        if not -90 < both[0] <= both[1] < 90:  # at 90 the two leave nothing of an image
            raise UserError(
                "shear_x and shear_y: expected less than 90 degrees together, got "
                f"{self.shear_x} and {self.shear_y}"
            )
        for name in ("translate_x", "translate_y"):
            if any(edge != int(edge) for edge in getattr(self, name)):
                raise UserError(f"{name}: expected whole pixels, got {getattr(self, name)}")
        if self.crop is not None:
            object.__setattr__(self, "crop", _size(self.crop))
        fill = np.atleast_1d(np.asarray(self.fill, np.float64))
        if fill.ndim != 1 or not np.isfinite(fill).all():
            raise UserError(f"fill: expected a number, or one a channel, got {self.fill}")

    @property
    def warps(self):
        """Whether images are moved by an affine map, not by whole pixels alone."""
        turned = (self.rotation, self.shear_x, self.shear_y)
        scaled = (self.scale, self.scale_x, self.scale_y)
        return any(r != (0, 0) for r in turned) or any(r != (1, 1) for r in scaled)

    def spec(self):
        """{name: value} of what is not its default, as JSON has it."""
        return {
            f.name: value
            for f in fields(self)
            if (value := _plain(getattr(self, f.name))) != _plain(f.default)
        }

    def image_shape(self, shape, called="crop"):
        """(C, P, Q) of what becomes of images (C, H, W). UserError where the crop, `called` so,
        does not fit."""
        if self.crop is None:
            return tuple(shape)
        if self.crop[0] > shape[1] or self.crop[1] > shape[2]:
            raise UserError(
                f"{called} {self.crop[0]}x{self.crop[1]}: expected at most the size of the images, "
                f"found {shape[1]}x{shape[2]}"
            )
        return (shape[0], *self.crop)

    def drawn(self, seed, epoch, indices, shape):
        """What is Drawn for samples `indices` (n,), of images (C, H, W), in this epoch."""
        backend = backends.of_type(np.float32)
        words = backend.keyed_words(seed, PURPOSE, DRAWS, epoch, indices)
        u = ((words >> np.uint64(11)) * 2.0**-53).T
        _, p, q = self.image_shape(shape)

        def between(low_high, u):
            return low_high[0] + (low_high[1] - low_high[0]) * u

        def whole(low_high, u):
            low, high = (int(edge) for edge in low_high)
            return low + np.floor((high - low + 1) * u).astype(np.int32)

        both = between(self.scale, u[3])
        return Drawn(
            (u[0] < 0.5) & self.reflect_x,
            (u[1] < 0.5) & self.reflect_y,
            between(self.rotation, u[2]),
            both * between(self.scale_x, u[4]),
            both * between(self.scale_y, u[5]),
            between(self.shear_x, u[6]),
            between(self.shear_y, u[7]),
            whole(self.translate_x, u[8]),
            whole(self.translate_y, u[9]),
            whole((0, shape[1] - p), u[10]),
            whole((0, shape[2] - q), u[11]),
        )

    def filling(self, shape, dtype):
        """What lies outside of images (C, H, W), as an array (C,) of the pixels' type."""
        fill = np.atleast_1d(np.asarray(self.fill, np.float64))
        if len(fill) not in (1, shape[0]):
            raise UserError(
                f"fill: expected a number, or one for each of the {shape[0]} channels, "
                f"got {self.fill}"
            )
        if dtype == np.uint8 and not (fill == np.clip(np.rint(fill), 0, 255)).all():
            raise UserError(f"fill: expected whole numbers from 0 to 255, got {self.fill}")
        return np.broadcast_to(fill, shape[0]).astype(dtype)

    def moves(self, seed, epoch, indices, shape):
        """What `backends.images` does to these images, {"mirrored": ..., "top": ..., "left": ...},
        where no map is needed: see `warps`."""
        d = self.drawn(seed, epoch, indices, shape)
        return {
            "mirrored": (d.reflect_x + 2 * d.reflect_y).astype(np.int32),
            "top": d.top - d.translate_y,
            "left": d.left - d.translate_x,
        }

    def maps(self, seed, epoch, indices, shape):
        """The affine map of each image, (n, 6) float64, as `backends.warp` takes them: from pixels
        of the result to those of the image."""
        d = self.drawn(seed, epoch, indices, shape)
        # Forward, of (x, y) from the centre: shear * scale * rotation * reflection, then the shift.
        # sine and cosine are made of products and sums, which any machine rounds alike
        sine, cosine = _sine_cosine(d.rotation)
        across, down = _tangent(d.shear_x), _tangent(d.shear_y)
        fx, fy = 1.0 - 2.0 * d.reflect_x, 1.0 - 2.0 * d.reflect_y
        a, b = d.scale_x * (cosine * fx), d.scale_x * (-sine * fy)
        c, e = d.scale_y * (sine * fx), d.scale_y * (cosine * fy)
        # a shear each way: x by the rows of the image as it was scaled, then y by x as it was
        a, b, c, e = a + across * c, b + across * e, c + down * a, e + down * b
        determinant = a * e - b * c
        m0, m1, m3, m4 = e / determinant, -b / determinant, -c / determinant, a / determinant
        # the result's pixel (p, q) lies at (q + left - shift - centre) of the transformed image
        cx, cy = (shape[2] - 1) / 2, (shape[1] - 1) / 2
        x, y = d.left - d.translate_x - cx, d.top - d.translate_y - cy
        return np.stack(
            [m0, m1, m0 * x + m1 * y + cx, m3, m4, m3 * x + m4 * y + cy],
            axis=1,
        )

    def apply(self, images, indices, *, epoch=0, seed=0):
        """Augmented images (n, C, P, Q) of (n, C, H, W), uint8 or float, of these sample indices.

        The same as a `MinibatchQueue` with this augmenter makes of them in that epoch.
        """
        images = np.asarray(images)
        images = images if images.dtype == np.uint8 else images.astype(np.float32)
        shape = images.shape[1:]
        size = self.image_shape(shape)[1:]
        fill = self.filling(shape, images.dtype)
        maps = self.maps(seed, epoch, indices, shape)  # exact, where all that is said is whole
        return backends.of_type(np.float32).warp(images, maps, size, fill)


def centred(shape, crop):
    """(top, left) of a window `crop` (P, Q) in the centre of images (C, H, W)."""
    return (shape[1] - crop[0]) // 2, (shape[2] - crop[1]) // 2


def _sine_cosine(degrees):
    """Sine and cosine of angles in degrees, by their series after a turn by right angles."""
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
    """(low, high) of what was given for a range. Raises UserError."""
    words = "(low, high)" + (" or a number" if symmetric else "")
    try:
        edges = (-abs(value), abs(value)) if symmetric and np.ndim(value) == 0 else tuple(value)
        low, high = (float(edge) for edge in edges)
    except (TypeError, ValueError):
        raise UserError(f"{name}: expected {words}, got {value!r}") from None
    if not (np.isfinite(low) and np.isfinite(high) and low <= high):
        raise UserError(f"{name}: expected {words} with low <= high, got {value!r}")
    return low, high


def _size(value):
    try:
        height, width = (int(n) for n in value)
    except (TypeError, ValueError):
        raise UserError(f"crop: expected (height, width), got {value!r}") from None
    if min(height, width) < 1:
        raise UserError(f"crop: expected at least one pixel each way, got {value!r}")
    return height, width


def _plain(value):
    return [float(v) for v in value] if isinstance(value, tuple) else value
