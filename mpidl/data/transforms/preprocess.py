"""Preprocess images: convert them to the colour and size that a network expects.

Images from files and from arrays are both resized by Pillow's bilinear filter. When an image
shrinks, the filter becomes wide enough to cover all pixels that are merged into one. Pillow uses
integer arithmetic for uint8 images and float32 arithmetic for float32 images.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import backends
from mpidl.backends.cpu import builds
from mpidl.backends.cpu.images import planes_of_arrow
from mpidl.data.checks import read_images
from mpidl.data.datastore import Datastore, Derived, Indices, describe_derived
from mpidl.data.transforms.jitter import GRAY
from mpidl.data.transforms.resized_crop import resize_planes
from mpidl.data.transforms.sizes import centred, checked_size
from mpidl.errors import UserError
from mpidl.files import digest
from mpidl.options.declaration import SIZE, numbers_of

if TYPE_CHECKING:
    from PIL import Image as Pillow

COLOURS = {"gray": 1, "rgb": 3}


@dataclass(frozen=True)
class Preprocess:
    """A conversion that changes the colour of images, resizes the images and then crops them.

    Parameters
    ----------
    size : (int, int), optional
        (height, width) of the resized images. The aspect ratio changes unless `cover` is True.
    colour : {"gray", "rgb"}, optional
        Colour of the result. RGB is converted to gray as 0.299 R + 0.587 G + 0.114 B, and gray to
        RGB by repeating the channel. None keeps the channels.
    cover : bool
        Whether to keep the aspect ratio of each image. If so, the image is resized to the smallest
        size that covers `size`.
    crop : (int, int), optional
        (height, width) of a window cut from the centre. The window must not be larger than the
        resized images.

    Raises
    ------
    UserError
        If an argument is invalid.
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

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Preprocess:
        """Return the preprocessing that the options of a command describe.

        Parameters
        ----------
        options : mapping
            {name: value} of the options in `PreprocessOptions`; each may be missing.

        Returns
        -------
        Preprocess
            The preprocessing.

        Raises
        ------
        UserError
            If both resize and cover have a value.
        """
        names = ("resize", "cover", "centre_crop")
        resize, cover, crop = (numbers_of(SIZE, options.get(name)) for name in names)
        if resize and cover:
            raise UserError("--resize and --cover: expected at most one of them")
        return cls(resize or cover, options.get("colour"), cover=cover is not None, crop=crop)

    def __bool__(self) -> bool:
        return any((self.colour, self.size, self.crop))

    def image_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape (C, P, Q) of the result for an image of shape (C, H, W).

        Parameters
        ----------
        shape : tuple of int
            Shape (C, H, W) of an image.

        Returns
        -------
        tuple of int
            (C, P, Q)

        Raises
        ------
        UserError
            If the resized image is smaller than the crop, or its colour cannot be converted.
        """
        channels = shape[0] if self.colour is None else COLOURS[self.colour]
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
                    f"expected images at least that large, found {_times(size)}"
                )
            size = self.crop
        return (channels, *size)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of an image after resizing and before the crop.

        Parameters
        ----------
        height, width : int
            Size of the image in pixels.

        Returns
        -------
        tuple of int
            (height, width)
        """
        if self.size is None:
            return height, width
        if not self.cover:
            return self.size
        down, across = self.size
        if down * width >= across * height:  # the height determines the scale
            return down, max(across, (width * down + height // 2) // height)
        return max(down, (height * across + width // 2) // width), across

    def of_picture(self, picture: Pillow.Image, out: np.ndarray | None = None) -> np.ndarray:
        """Preprocess a Pillow image.

        Parameters
        ----------
        picture : PIL.Image.Image
            Image of mode "L" or "RGB".
        out : ndarray, optional
            Array (C, P, Q) to write to.

        Returns
        -------
        ndarray
            Pixels (C, P, Q), uint8. This is `out` if `out` is given.
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
        channels = bands if self.colour is None else COLOURS[self.colour]
        if channels == bands:
            return planes_of(picture, out)
        out = np.empty((channels, picture.height, picture.width), np.uint8) if out is None else out
        out[...] = planes_of(picture)
        return out

    def of_arrays(self, images: np.ndarray) -> np.ndarray:
        """Preprocess arrays in the same way as `of_picture`.

        Parameters
        ----------
        images : ndarray
            Images (n, C, H, W), uint8 or float32.

        Returns
        -------
        ndarray
            Images (n, C, P, Q) of the same type.
        """
        images = np.asarray(images)
        shape = self.image_shape(images.shape[1:])
        size = self.resized(*images.shape[2:])
        channels = min(shape[0], images.shape[1])  # resize as few channels as possible
        if channels < images.shape[1]:
            images = _gray(images)
        if size != images.shape[2:]:
            resized = np.empty((*images.shape[:2], *size), images.dtype)
            for image, out in zip(images, resized, strict=True):
                resize_planes(image, out)
            images = resized
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
    """A datastore that preprocesses the images of another datastore."""

    preprocess: Preprocess

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

    Image files are preprocessed when they are decoded, so their sizes may differ. Other images are
    preprocessed when they are read. A datastore that already has the same Preprocess is returned
    unchanged.

    Parameters
    ----------
    datastore : Datastore
        The images. If the datastore has a method ``preprocessed(preprocess)``, this function
        returns the result of the method.
    preprocess : Preprocess
        The conversion to apply.

    Returns
    -------
    Datastore
        The preprocessed images.

    Raises
    ------
    UserError
        If the images are smaller than the crop, or their colour cannot be converted.
    """
    if not preprocess or datastore.preprocess == preprocess:
        return datastore
    method = getattr(datastore, "preprocessed", None)
    try:
        return Preprocessed(datastore, preprocess) if method is None else method(preprocess)
    except UserError as error:
        raise UserError(f"{datastore.describe()}: {error}") from None


def planes_of(picture: Pillow.Image, out: np.ndarray | None = None) -> np.ndarray:
    """Convert a Pillow image of mode "L" (C = 1) or "RGB" (C = 3) to uint8 (C, H, W).

    If `out` is given, the result is written to it. If Pillow exposes the memory of the picture, the
    pixels are copied only once.
    """
    if builds.kernels() is not None:
        picture.load()
        try:
            capsule = picture.im.__arrow_c_array__()  # the capsule owns the memory
        except (AttributeError, ValueError):  # an older Pillow, or an image in several pieces
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
    """Convert RGB images (n, 3, H, W) to gray (n, 1, H, W); uint8 is rounded as in Pillow."""
    if images.dtype != np.uint8:
        return np.tensordot(images, GRAY, axes=([1], [0]))[:, None]
    red, green, blue = (images[:, c].astype(np.uint32) for c in range(3))
    # Pillow's weights in 16.16 fixed point; 0x8000 is one half, for rounding.
    gray = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return gray.astype(np.uint8)[:, None]


def _box(size, crop):
    """Return (left, top, right, bottom) of a centred window."""
    top, left = centred((1, *size), crop)
    return left, top, left + crop[1], top + crop[0]


def _times(size):
    return "x".join(map(str, size))
