"""Preprocessing: fixed changes of colour and size that fit images to a network.

Files and arrays are resized alike, by Pillow's bilinear filter. When shrinking, its triangle is
as wide as the pixels that become one. uint8 uses Pillow's integer arithmetic, floats float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpidl import backends
from mpidl.backends.cpu import builds
from mpidl.backends.cpu.images import planes_of_arrow
from mpidl.data.checks import read_images
from mpidl.data.datastore import Datastore, Derived, Indices, describe_derived
from mpidl.data.transforms.augment import centred, checked_size
from mpidl.errors import UserError
from mpidl.files import digest

if TYPE_CHECKING:
    from PIL import Image as Pillow

COLOURS = {"gray": 1, "rgb": 3}
GRAY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601, as in Pillow and MATLAB


@dataclass(frozen=True)
class Preprocess:
    """Convert the colour of images, then resize, then crop them.

    Parameters
    ----------
    size : (int, int), optional
        (height, width) of the resized images, whatever their proportions.
    colour : {"gray", "rgb"}, optional
        Gray is 0.299 R + 0.587 G + 0.114 B; RGB repeats gray. None keeps the channels.
    cover : bool
        Keep the proportions: resize to the least size that covers `size`.
    crop : (int, int), optional
        (height, width) of a window cut from the centre. It must fit in the resized images.

    Raises
    ------
    UserError
        If a value is unusable.
    """

    size: tuple[int, int] | None = None
    colour: str | None = None
    cover: bool = False
    crop: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.colour not in (None, *COLOURS):
            raise UserError(f"colour must be {' or '.join(COLOURS)}, got {self.colour}")
        for name in ("size", "crop"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, checked_size(name, value))

    def __bool__(self) -> bool:
        return any((self.colour, self.size, self.crop))

    def image_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape (C, P, Q) of preprocessed images, from (C, H, W).

        Raises
        ------
        UserError
            If the image is smaller than the crop, or its colour cannot be converted.
        """
        channels = COLOURS.get(self.colour, shape[0])
        if channels != shape[0] and {channels, shape[0]} != {1, 3}:
            raise UserError(
                f"colour {self.colour} (--colour, or colour= in Python): expected images of 1 or 3 "
                f"channels, found {shape[0]}"
            )
        size = self.resized(*shape[1:])
        if self.crop is not None:
            if any(cut > n for cut, n in zip(self.crop, size, strict=True)):
                raise UserError(
                    f"centre crop {_times(self.crop)} (--centre-crop, or crop= in Python): "
                    f"expected images as large as that at least, found {_times(size)}"
                )
            size = self.crop
        return (channels, *size)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of an image after resizing, before the crop."""
        if self.size is None:
            return height, width
        if not self.cover:
            return self.size
        down, across = self.size
        if down * width >= across * height:  # the height limits
            return down, max(across, (width * down + height // 2) // height)
        return max(down, (height * across + width // 2) // width), across

    def of_picture(self, picture: Pillow.Image, out: np.ndarray | None = None) -> np.ndarray:
        """Return a Pillow image of mode "L" or "RGB" as preprocessed uint8 (C, P, Q).

        Writes to `out` if given.
        """
        from PIL import Image

        if not self:
            return planes_of(picture, out)
        channels = len(picture.getbands())
        self.image_shape((channels, picture.height, picture.width))  # raises UserError
        if self.colour is not None and COLOURS[self.colour] < channels:
            picture = picture.convert("L")
        size = self.resized(picture.height, picture.width)
        if size != (picture.height, picture.width):
            picture = picture.resize(size[::-1], Image.Resampling.BILINEAR)
        if self.crop is not None:
            picture = picture.crop(_box(size, self.crop))
        bands = len(picture.getbands())
        channels = COLOURS.get(self.colour, bands)
        if channels == bands:
            return planes_of(picture, out)
        out = np.empty((channels, picture.height, picture.width), np.uint8) if out is None else out
        out[...] = planes_of(picture)
        return out

    def of_arrays(self, images: np.ndarray) -> np.ndarray:
        """Return images (n, C, H, W), uint8 or float32, preprocessed as `of_picture` does.

        The result is (n, C, P, Q) of the same type.
        """
        images = np.asarray(images)
        shape = self.image_shape(images.shape[1:])
        size = self.resized(*images.shape[2:])
        channels = min(shape[0], images.shape[1])  # resize as few as possible
        if channels < images.shape[1]:
            images = _gray(images)
        if size != images.shape[2:]:
            images = _resize(images, size)
        if self.crop is not None:
            left, top, right, bottom = _box(size, self.crop)
            images = images[:, :, top:bottom, left:right]
        if channels < shape[0]:
            images = np.repeat(images, shape[0], axis=1)
        return np.ascontiguousarray(images)

    def __str__(self) -> str:
        words = [self.colour] if self.colour else []
        if self.size is not None:
            words.append(f"{'covering' if self.cover else 'resized to'} {_times(self.size)}")
        if self.crop is not None:
            words.append(f"centre {_times(self.crop)}")
        return ", ".join(words) or "as they are"


AS_IT_IS = Preprocess()


class Preprocessed(Derived):
    """Another datastore with preprocessed images; labels and targets are unchanged."""

    def __init__(self, datastore: Datastore, preprocess: Preprocess):
        super().__init__(datastore)
        self.preprocess = preprocess
        self.image_shape = preprocess.image_shape(datastore.image_shape)

    def read(self, indices: Indices) -> np.ndarray:
        return self.preprocess.of_arrays(read_images(self.parent, indices))

    def describe(self) -> str:
        return describe_derived(self.parent, self.preprocess, self)

    def fingerprint(self) -> str:
        return digest(self.parent.fingerprint(), self.preprocess)


def preprocessed(datastore: Datastore, preprocess: Preprocess) -> Datastore:
    """Return a datastore with preprocessed images.

    Files are preprocessed as they are decoded, so their sizes may differ; arrays as they are read.
    Images with this Preprocess already are returned unchanged.

    Parameters
    ----------
    datastore : Datastore
        The images. It may define a method ``preprocessed(preprocess)`` to do this itself.
    preprocess : Preprocess
        The changes.

    Raises
    ------
    UserError
        If the images are too small or of an unsuitable colour.
    """
    if not preprocess or datastore.preprocess == preprocess:
        return datastore
    method = getattr(datastore, "preprocessed", None)
    try:
        return Preprocessed(datastore, preprocess) if method is None else method(preprocess)
    except UserError as error:
        raise UserError(f"{datastore.describe()}: {error}") from None


def planes_of(picture: Pillow.Image, out: np.ndarray | None = None) -> np.ndarray:
    """Return a Pillow image of mode "L" (C = 1) or "RGB" (C = 3) as uint8 (C, H, W).

    Writes to `out` if given. Avoids a further copy if Pillow exposes its memory.
    """
    if builds.kernels() is not None:
        picture.load()
        try:
            capsule = picture.im.__arrow_c_array__()  # owns the memory
        except (AttributeError, ValueError):  # an older Pillow; an image in several pieces
            pass
        else:
            stride = 4 if picture.mode == "RGB" else 1  # bytes per pixel
            address = _address(capsule, b"arrow_array")
            return planes_of_arrow(address, picture.height, picture.width, stride, out)
    rows = np.asarray(picture)
    rows = rows.reshape(picture.height, picture.width, -1)
    return backends.of_type(np.float32).planes(rows, out)


_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _gray(images):
    """Return RGB images as gray ones (n, 1, H, W); uint8 is rounded as in Pillow."""
    if images.dtype != np.uint8:
        return np.tensordot(images, GRAY, axes=([1], [0]))[:, None]
    red, green, blue = (images[:, c].astype(np.uint32) for c in range(3))
    # Pillow's weights in 16.16 fixed point, plus a half to round
    gray = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return gray.astype(np.uint8)[:, None]


def _resize(images, size):
    """Return images (n, C, H, W) resized to (height, width)."""
    from PIL import Image

    out = np.empty((*images.shape[:2], *size), images.dtype)
    for image, out_image in zip(images, out, strict=True):
        for plane, out_plane in zip(image, out_image, strict=True):
            picture = Image.fromarray(np.ascontiguousarray(plane))  # mode "L" or "F"
            out_plane[...] = np.asarray(picture.resize(size[::-1], Image.Resampling.BILINEAR))
    return out


def _box(size, crop):
    """Return (left, top, right, bottom) of a centred window."""
    top, left = centred((1, *size), crop)
    return left, top, left + crop[1], top + crop[0]


def _times(size):
    return "x".join(map(str, size))
