"""Pictures of any size, of which tiles read windows."""

from __future__ import annotations

import abc
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidl import data
from mpidl.data.checks import read_images
from mpidl.data.datastore import Datastore
from mpidl.data.formats import image_files
from mpidl.data.formats.folder import list_images
from mpidl.data.formats.format import World
from mpidl.data.paths import is_file, is_folder, reading, stamp_of
from mpidl.data.urls import is_remote
from mpidl.errors import UserError
from mpidl.files import Stamp, changed, on_rank_0
from mpidl.nn.summary import times
from mpidl.text import printable
from mpidl.tiles import tiff

ARRAY = ".npy"
MAX_PIXELS = 1 << 32  # of a file that is read by windows


class LastPicture:
    """The pixels of the picture that was last decoded as a whole; threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: object = None
        self._pixels: Any = None

    def get(self, key: object, decode: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the pixels (C, H, W) of a picture, and decode them unless they are the last."""
        with self._lock:
            if self._key != key:
                self._key = self._pixels = None  # frees memory for the next picture
                self._pixels, self._key = decode(), key
            pixels: np.ndarray = self._pixels
            return pixels


class Picture(abc.ABC):
    """An image (C, H, W) of uint8 or float32, of which `window` returns parts.

    `name` is its name for messages, and `stem` the relative path of its results without a suffix.
    """

    def __init__(self, name: str, stem: str, shape: Sequence[int], dtype: Any = np.uint8):
        self.name, self.stem = name, stem
        self.shape, self.dtype = tuple(int(n) for n in shape), np.dtype(dtype)

    @abc.abstractmethod
    def window(self, rows: slice, columns: slice) -> np.ndarray:
        """Return the pixels (C, h, w) of a window inside the image."""


class StoredPicture(Picture):
    """An image of a datastore. If the images are not in one array, it is read as a whole."""

    def __init__(self, store: Datastore, i: int, last: LastPicture):
        name, stem = store.name(i), f"{i:06}"
        if os.path.splitext(name)[1]:
            stem += f"-{os.path.splitext(os.path.basename(name))[0]}"
        super().__init__(store.located(i), stem, store.image_shape, store.dtype)
        self.store, self.index, self.last = store, i, last

    def window(self, rows: slice, columns: slice) -> np.ndarray:
        images = self.store.array()
        if images is not None:
            return np.asarray(images[self.index, :, rows, columns])
        pixels = self.last.get(self.index, lambda: read_images(self.store, [self.index])[0])
        return pixels[:, rows, columns]


class ArrayPicture(Picture):
    """An image of a memory-mapped array."""

    def __init__(self, name: str, stem: str, pixels: np.ndarray):
        super().__init__(name, stem, pixels.shape, "u1" if pixels.dtype == np.uint8 else "f4")
        self.pixels = pixels

    def window(self, rows: slice, columns: slice) -> np.ndarray:
        pixels = np.asarray(self.pixels[:, rows, columns], self.dtype)
        if not np.isfinite(pixels).all():
            raise UserError(f"{self.name}: expected finite pixels, found NaN or infinity")
        return pixels


class FileFacts(NamedTuple):
    """What rank 0 knows about an image file. `windows` describes a TIFF file read by windows."""

    path: str
    stem: str
    shape: tuple[int, ...]
    stamp: Stamp
    windows: tiff.Layout | None


class DecodedPicture(Picture):
    """An image file that is decoded as a whole."""

    def __init__(self, facts: FileFacts, last: LastPicture):
        super().__init__(printable(facts.path), facts.stem, facts.shape)
        self.facts, self.last = facts, last

    def window(self, rows: slice, columns: slice) -> np.ndarray:
        return self.last.get(self.facts.path, self._decoded)[:, rows, columns]

    def _decoded(self):
        pixels, now = image_files.decode(self.facts.path, expected=self.shape)
        if isinstance(pixels, tuple) or now != self.facts.stamp:
            raise changed(self.facts.path, self.facts.stamp, stamp_of(self.facts.path))
        return pixels


class TIFFPicture(Picture):
    """A TIFF file, of which only the strips or tiles of a window are decoded."""

    def __init__(self, facts: FileFacts, layout: tiff.Layout):
        super().__init__(printable(facts.path), facts.stem, facts.shape)
        self.facts, self.layout = facts, layout

    def window(self, rows: slice, columns: slice) -> np.ndarray:
        if (now := stamp_of(self.facts.path)) != self.facts.stamp:
            raise changed(self.facts.path, self.facts.stamp, now)
        return tiff.read_window(self.facts.path, self.layout, rows, columns)


class Pictures(list[Picture]):
    """The pictures that a command line names by `text`."""

    def __init__(self, text: str, pictures: Sequence[Picture]):
        super().__init__(pictures)
        self.text = text

    def describe(self) -> str:
        """Describe the pictures in one line for the console."""
        sizes = sorted({picture.shape for picture in self})
        shape = times(sizes[0]) if len(sizes) == 1 else f"{len(sizes)} sizes"
        noun = "image" if len(self) == 1 else "images"
        return f"{printable(self.text)}: {len(self)} {noun} of {shape}"


def pictures_of(store: Datastore) -> list[Picture]:
    """Return the images of a datastore."""
    last = LastPicture()
    return [StoredPicture(store, i, last) for i in range(len(store))]


def open_pictures(text: str, world: World, classes: Sequence[str] | None, option: str) -> Pictures:
    """Open the images that a command line names. Collective.

    They are an image file, a folder that contains image files, whose sizes may differ, or a .npy
    file with images (C, H, W) or (n, C, H, W), which is mapped to memory. Anything else is opened
    as a data set. Raises UserError if it cannot be read.
    """
    kind = on_rank_0(world, lambda: _kind(text))
    if kind == "array":
        return Pictures(text, _array_pictures(text, world))
    if kind == "data":
        store = data.open_test_data(text, world, classes=classes, labelled=False, option=option)
        return Pictures(text, pictures_of(store))
    facts = on_rank_0(world, lambda: _facts_of_files(text, kind))
    last = LastPicture()
    pictures = [
        DecodedPicture(f, last) if f.windows is None else TIFFPicture(f, f.windows) for f in facts
    ]
    return Pictures(text, pictures)


def _kind(text):
    """Return "file", "folder", "array" or "data"."""
    suffix = os.path.splitext(text)[1].lower()
    if is_remote(text) or not (is_file(text) or is_folder(text)):
        return "data"
    if is_file(text):
        return {**dict.fromkeys(image_files.SUFFIXES, "file"), ARRAY: "array"}.get(suffix, "data")
    with os.scandir(text) as entries:
        names = [entry.name.lower() for entry in entries if entry.is_file()]
    return "folder" if any(name.endswith(image_files.SUFFIXES) for name in names) else "data"


def _facts_of_files(text, kind):
    if kind == "file":
        return [_facts(text, os.path.splitext(os.path.basename(text))[0])]
    files = list_images(text, labelled=False).files
    return [_facts(os.path.join(text, file), os.path.splitext(file)[0]) for file in files]


def _facts(path, stem):
    """Read the header of an image file. Raises UserError if it is too large or damaged."""
    layout = tiff.layout_of(path)
    if layout is not None:
        shape, limit = layout.shape, MAX_PIXELS
    else:
        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # an error below
            # nothing is decoded, because no image has this shape
            shape = image_files.decode(path, expected=(0, 0, 0))[0]
        limit = Image.MAX_IMAGE_PIXELS or MAX_PIXELS
    if shape[1] * shape[2] > limit:
        raise UserError(
            f"{printable(path)}: expected at most {limit} pixels, found {shape[1]}x{shape[2]}: "
            "only gray and RGB TIFF files are read by windows (pip install 'mpidl[tiff]')"
        )
    return FileFacts(path, stem, shape, stamp_of(path), layout)


def _array_pictures(path, world):
    """Map a .npy file to memory on each rank."""

    def check():
        array = _mapped(path)
        if array.ndim not in (3, 4) or not (array.dtype == np.uint8 or array.dtype.kind == "f"):
            raise UserError(
                f"{printable(path)}: expected uint8 or float images (C, H, W) or (n, C, H, W), "
                f"found {array.dtype} of shape {array.shape}"
            )
        if not array.size:
            raise UserError(f"{printable(path)}: expected images, found none")

    on_rank_0(world, check)
    array = _mapped(path)
    images = array if array.ndim == 4 else array[None]
    name, stem = printable(path), os.path.splitext(os.path.basename(path))[0]
    if len(images) == 1:
        return [ArrayPicture(name, stem, images[0])]
    return [
        ArrayPicture(f"{name}: image {i}", f"{stem}-{i:06}", image)
        for i, image in enumerate(images)
    ]


def _mapped(path):
    with reading(path):
        return np.load(path, mmap_mode="r", allow_pickle=False)
