"""Preprocessing: images of any size and kind become what a network takes.

Nothing here is random. Sizes are changed by Pillow's
bilinear filter, which averages over all the pixels that shrink into one (a triangle as wide as
that), for files and arrays alike: of bytes in its whole-number arithmetic, of floats in float32.
"""

import ctypes
from dataclasses import dataclass

import numpy as np

from mpidl import backends
from mpidl.backends.cpu import builds
from mpidl.backends.cpu.images import planes_of_arrow
from mpidl.data.datastore import Datastore, made_of, read_images
from mpidl.errors import UserError
from mpidl.files import digest

COLOURS = {"gray": 1, "rgb": 3}
GRAY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601, which Pillow and MATLAB take too


@dataclass(frozen=True)
class Preprocess:
    """What is done to each image: colour, then size, then crop.

    size: (height, width) that images are resized to, whatever their own proportions; with
    cover=True to the least size of their own proportions that holds it. colour: "gray" or "rgb",
    None to keep what is there; gray is 0.299 R + 0.587 G + 0.114 B, RGB repeats it. crop: (height,
    width) from the centre of images that are at least as large then.
    """

    size: tuple | None = None
    colour: str | None = None
    cover: bool = False
    crop: tuple | None = None

    def __post_init__(self):
        if self.colour not in (None, *COLOURS):
            raise UserError(f"colour must be {' or '.join(COLOURS)}, got {self.colour}")
        for name in ("size", "crop"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _size(name, value))

    def __bool__(self):
        return any((self.colour, self.size, self.crop))

    def image_shape(self, shape):
        """(C, P, Q) of what becomes of an image (C, H, W). UserError where it is too small."""
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

    def resized(self, height, width):
        """(height, width) that an image of this size is brought to before the crop."""
        if self.size is None:
            return height, width
        if not self.cover:
            return self.size
        down, across = self.size
        if down * width >= across * height:  # the height decides
            return down, max(across, (width * down + height // 2) // height)
        return max(down, (height * across + width // 2) // width), across

    def of_picture(self, picture, out=None):
        """(C, P, Q) uint8 of a Pillow image of mode "L" or "RGB"; in `out` where that is given."""
        from PIL import Image

        if not self:
            return planes_of(picture, out)
        channels = len(picture.getbands())
        self.image_shape((channels, picture.height, picture.width))  # or an error
        if self.colour is not None and COLOURS[self.colour] < channels:
            picture = picture.convert("L")
        size = self.resized(picture.height, picture.width)
        if size != (picture.height, picture.width):
            picture = picture.resize(size[::-1], Image.Resampling.BILINEAR)
        if self.crop is not None:
            picture = picture.crop(_box(size, self.crop))
        fewest = len(picture.getbands())
        wanted = COLOURS.get(self.colour, fewest)
        if wanted == fewest:
            return planes_of(picture, out)
        out = np.empty((wanted, picture.height, picture.width), np.uint8) if out is None else out
        out[...] = planes_of(picture)
        return out

    def of_arrays(self, images):
        """(n, C, P, Q) of images (n, C, H, W), uint8 or float32: as `of_picture` treats each."""
        images = np.asarray(images)
        shape = self.image_shape(images.shape[1:])
        size = self.resized(*images.shape[2:])
        channels = min(shape[0], images.shape[1])  # fewest while the size is changed
        if channels < images.shape[1]:
            images = _gray(images)
        if size != images.shape[2:]:
            images = _resized(images, size)
        if self.crop is not None:
            left, top, right, bottom = _box(size, self.crop)
            images = images[:, :, top:bottom, left:right]
        if channels < shape[0]:
            images = np.repeat(images, shape[0], axis=1)
        return np.ascontiguousarray(images)

    def __str__(self):
        words = [self.colour] if self.colour else []
        if self.size is not None:
            words.append(f"{'covering' if self.cover else 'resized to'} {_times(self.size)}")
        if self.crop is not None:
            words.append(f"centre {_times(self.crop)}")
        return ", ".join(words) or "as they are"


AS_IT_IS = Preprocess()


class Preprocessed(Datastore):
    """Another datastore's images after a Preprocess; labels and targets are unchanged."""

    def __init__(self, datastore, preprocess):
        self.datastore, self.preprocess = datastore, preprocess
        self.image_shape = preprocess.image_shape(datastore.image_shape)
        self.dtype, self.in_memory = datastore.dtype, False
        self.classes, self.labels = datastore.classes, datastore.labels
        self.targets_shape, self.targets_dtype = datastore.targets_shape, datastore.targets_dtype

    def __len__(self):
        return len(self.datastore)

    def read(self, indices):
        return self.preprocess.of_arrays(read_images(self.datastore, indices))

    def targets(self, indices):
        return self.datastore.targets(indices)

    def name(self, i):
        return self.datastore.name(i)

    def located(self, i):
        return self.datastore.located(i)

    def describe(self):
        return made_of(self.datastore, self.preprocess, self)

    def fingerprint(self):
        return digest(self.datastore.fingerprint(), self.preprocess)


def preprocessed(datastore, preprocess):
    """A datastore of these images after a Preprocess: files are treated as they are decoded, so
    that they may be of any sizes; arrays as they are read. Images that came through it already stay
    as they are."""
    if not preprocess or datastore.preprocess == preprocess:
        return datastore
    own = getattr(datastore, "preprocessed", None)
    try:
        return Preprocessed(datastore, preprocess) if own is None else own(preprocess)
    except UserError as error:
        raise UserError(f"{datastore.describe()}: {error}") from None


def planes_of(picture, out=None):
    """(C, H, W) uint8 of a Pillow image of mode "L" (C = 1) or "RGB" (C = 3), in `out` if given.

    Without a copy between where Pillow shows its memory, whose RGB pixels have 4 bytes.
    """
    if builds.kernels() is not None:
        picture.load()
        try:
            capsule = picture.im.__arrow_c_array__()  # which keeps the memory
        except (AttributeError, ValueError):  # an older Pillow; an image in several pieces
            pass
        else:
            stride = 4 if picture.mode == "RGB" else 1
            address = _address(capsule, b"arrow_array")
            return planes_of_arrow(address, picture.height, picture.width, stride, out)
    rows = np.asarray(picture)
    rows = rows.reshape(picture.height, picture.width, -1)
    return backends.of_type(np.float32).planes(rows, out)


_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _gray(images):
    """(n, 1, H, W) of RGB images, rounded as Pillow does where they are bytes."""
    if images.dtype != np.uint8:
        return np.tensordot(images, GRAY, axes=([1], [0]))[:, None]
    red, green, blue = (images[:, c].astype(np.uint32) for c in range(3))
    # Pillow's weights: 16 bits behind the point, half a step added
    found = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return found.astype(np.uint8)[:, None]


def _resized(images, size):
    from PIL import Image

    out = np.empty((*images.shape[:2], *size), images.dtype)
    for image, result in zip(images, out, strict=True):
        for plane, to in zip(image, result, strict=True):
            picture = Image.fromarray(np.ascontiguousarray(plane))  # mode "L" or "F"
            to[...] = np.asarray(picture.resize(size[::-1], Image.Resampling.BILINEAR))
    return out


def _box(size, crop):
    """(left, top, right, bottom) of a window in the centre."""
    top, left = ((n - m) // 2 for n, m in zip(size, crop, strict=True))
    return left, top, left + crop[1], top + crop[0]


def _size(name, value):
    try:
        height, width = (int(n) for n in value)
    except (TypeError, ValueError):
        raise UserError(f"{name}: expected (height, width), got {value!r}") from None
    if min(height, width) < 1:
        raise UserError(f"{name}: expected at least one pixel each way, got {value!r}")
    return height, width


def _times(size):
    return "x".join(map(str, size))
