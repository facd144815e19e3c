"""Read images with labels or targets from NumPy's .npz files, once per node.

Arrays of Python objects are pickled, and are therefore never read. An array is loaded only if its
header agrees with the sizes in the archive, so a damaged file cannot cause a large allocation.
"""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Iterator, Sequence

import numpy as np

from mpidl.data.array_datastore import (
    ArrayDatastore,
    check_channels_first,
    checked_targets,
    label_names,
    label_numbers,
)
from mpidl.data.formats.format import World, check_images, check_part, opened_by
from mpidl.data.labels import align_labels, integer_labels, parse_class_names
from mpidl.data.loading.node_memory import once_per_node
from mpidl.data.paths import open_binary, reading, stamp_of
from mpidl.errors import UserError
from mpidl.text import name_list, printable, sorted_classes

ARRAYS = {
    "train": ("images", "labels", "targets"),
    "test": ("images_test", "labels_test", "targets_test"),
}
CLASSES = "classes"
ZIP_SIGNATURES = (b"PK\x03\x04", b"PK\x05\x06")  # first bytes of an archive and of an empty archive
DEFLATE_RATIO = 1032  # maximum compression ratio of deflate
HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def npz_file(
    path: str | os.PathLike[str],
    world: World = None,
    part: str = "train",
    *,
    classes: Sequence[str] | None = None,
    labelled: bool = True,
) -> ArrayDatastore:
    """Open the images of an .npz file.

    With a world, the call is collective. The file holds the following arrays:

    - `images`: uint8 or floats, (n, C, H, W) or (n, H, W).
    - `labels`: n whole numbers of at least 0, or n class names.
    - `targets`: (n, ...), used if there are no labels. An example is 0 or 1 for each of K labels.
    - `images_test`, `labels_test`, `targets_test`: the same for the test set, optional.
    - `classes`: class names in the order of the labels, by default "0", "1", ..., or the sorted
      names in `labels`.

    Parameters
    ----------
    path : path-like
        A file written by `numpy.savez` or `numpy.savez_compressed`.
    world : World, optional
        The ranks that open the file together. The ranks of a node share one copy of the pixels.
    part : {"train", "test"}
        Part to open.
    classes : sequence of str, optional
        Class names of the training set, to which the labels are mapped.
    labelled : bool
        Whether labels are required.

    Returns
    -------
    ArrayDatastore
        The images.

    Raises
    ------
    UserError
        If the file is damaged, an array is missing, or an array has an unsuitable type or shape.
    """
    path = os.fspath(path)
    check_part(part, path, tuple(ARRAYS))
    images_name, labels_name, targets_name = ARRAYS[part]

    def load():
        with _opened(path) as archive:
            images = archive.images(images_name)
            names, targets, source = None, None, archive.place(labels_name)
            if CLASSES in archive:
                texts = archive.load(CLASSES, "US", "strings")
                names = parse_class_names(texts, printable(path))
            if labels_name in archive:
                shape, _ = archive.header(labels_name)
                if math.prod(shape) != len(images):
                    raise UserError(
                        f"{source}: expected one label per image, shape ({len(images)},), found "
                        f"shape {shape}"
                    )
                values = archive.load(labels_name, "biufSU", "whole numbers or class names")
                if (words := label_names(values)) is not None:
                    names = names or list(classes or sorted_classes(words))
                    labels = label_numbers(words, names, source)
                else:
                    labels = integer_labels(values, len(images), source)
                return images, (*align_labels(labels, names, classes, source), None)
            if targets_name in archive:
                targets = archive.load(targets_name, "biuf", "numbers")
                targets = checked_targets(targets, len(images), archive.place(targets_name))
            elif labelled:
                raise archive.missing(labels_name)
            return images, (None, list(classes or names or []), targets)

    images, (labels, class_names, targets) = once_per_node(world, load, path)
    source, names = printable(path) + (", test" if part == "test" else ""), class_names or None
    return ArrayDatastore(images, labels, names, source, targets=targets, layout="NCHW")


def parts_of(path: str) -> list[str]:
    """List the parts of an .npz file: "train", "test" or both."""
    with _opened(path) as archive:
        return [part for part, (images, *_) in ARRAYS.items() if images in archive]


@contextlib.contextmanager
def _opened(path: str) -> Iterator[_Archive]:
    """Open an archive of arrays, and convert exceptions caused by damage to a UserError."""
    with reading(path), open_binary(path) as file:
        if file.read(4) not in ZIP_SIGNATURES:
            raise UserError(
                f"{printable(path)}: expected an .npz file (a zip archive of arrays), found "
                "another kind of file"
            )
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            yield _Archive(path, arrays)


class _Archive:
    """An open archive, which loads an array only if its header agrees with the archive's sizes."""

    def __init__(self, path: str, arrays: np.lib.npyio.NpzFile):
        assert arrays.zip is not None  # until it is closed
        self.path, self.arrays, self.zip = path, arrays, arrays.zip

    def place(self, name: str) -> str:
        """Return the beginning of a message about an array."""
        return f"{printable(self.path)}: {name}"

    def __contains__(self, name: str) -> bool:
        return f"{name}.npy" in self.zip.namelist()

    def missing(self, name: str) -> UserError:
        """Return the error that an array is missing."""
        names = name_list(self.arrays.files) or "nothing"
        return UserError(f"{printable(self.path)}: expected an array {name}; found {names}")

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return the shape and dtype of an array, after comparing them with the archive's sizes."""
        if name not in self:
            raise self.missing(name)
        source, info = self.place(name), self.zip.getinfo(f"{name}.npy")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(
                f"{source}: expected an array that is stored or deflated, found another "
                "compression method"
            )
        with self.zip.open(info) as member:
            version = np.lib.format.read_magic(member)
            if version not in HEADER_READERS:
                raise UserError(f"{source}: expected numbers or strings, found another type")
            shape, _, dtype = HEADER_READERS[version](member)
            header_bytes = member.tell()
        if dtype.hasobject:
            raise UserError(
                f"{source}: expected numbers or strings, found Python objects, whose pickles are "
                "never read because they can run arbitrary code"
            )
        expected = header_bytes + math.prod(shape) * dtype.itemsize
        stored = min(info.compress_size, stamp_of(self.path).size)
        if min(shape, default=0) < 0 or expected != info.file_size:
            raise UserError(
                f"{source}: expected {expected} bytes for its shape {shape}, found {info.file_size}"
            )
        if expected > DEFLATE_RATIO * stored + 4096:
            raise UserError(
                f"{source}: its shape {shape} needs {expected} bytes, but the file holds only "
                f"{stored} bytes of data: it is truncated"
            )
        return shape, dtype

    def load(self, name: str, kinds: str, noun: str) -> np.ndarray:
        """Load an array, whose `dtype.kind` must be one of `kinds`; `noun` describes them."""
        _, dtype = self.header(name)
        if dtype.kind not in kinds:
            raise UserError(f"{self.place(name)}: expected {noun}, found {dtype}")
        return self.arrays[name]

    def images(self, name: str) -> np.ndarray:
        """Load images of uint8 or floats as (n, C, H, W)."""
        (shape, dtype), source = self.header(name), self.place(name)
        check_images(shape, dtype, source)
        check_channels_first(shape, source)
        images = self.arrays[name]
        return images[:, None] if images.ndim == 3 else images


FORMAT = opened_by(
    npz_file,
    "npz",
    recognizes=lambda path, head, option: path.lower().endswith(".npz"),
    parts=parts_of,
    noun="an .npz file",
    suffixes=(".npz",),
)
