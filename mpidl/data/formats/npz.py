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
from mpidl.data.formats.format import World, format_of_parts
from mpidl.data.labels import align_labels, integer_labels, parse_class_names
from mpidl.data.loading.node_memory import once_per_node
from mpidl.data.storage.paths import open_binary, stamp_of
from mpidl.errors import StorageFault, UserError
from mpidl.files import unreadable
from mpidl.text import printable, sorted_classes

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
    if part not in ARRAYS:
        raise UserError(f'{printable(path)}: part must be "train" or "test", got {part!r}')
    images_name, labels_name, targets_name = ARRAYS[part]

    def load():
        with _opened(path) as archive:
            images = _load_images(archive, path, images_name)
            names = None
            if _has(archive, CLASSES):
                names = parse_class_names(
                    _load(archive, path, CLASSES, "US", "strings"), printable(path)
                )
            if not _has(archive, labels_name):
                targets = None
                if _has(archive, targets_name):
                    targets = _load(archive, path, targets_name, "biuf", "numbers")
                    source = f"{printable(path)}: {targets_name}"
                    targets = checked_targets(targets, len(images), source)
                elif labelled:
                    raise _missing(archive, path, labels_name)
                return images, (None, list(classes or names or []), targets)
            source = f"{printable(path)}: {labels_name}"
            shape, _ = _header(archive, path, labels_name)
            if math.prod(shape) != len(images):
                raise UserError(
                    f"{source}: expected one label per image, shape ({len(images)},), found shape "
                    f"{shape}"
                )
            values = _load(archive, path, labels_name, "biufSU", "whole numbers or class names")
            if (texts := label_names(values)) is not None:
                names = names or list(classes or sorted_classes(texts))
                labels = label_numbers(texts, names, source)
            else:
                labels = integer_labels(values, len(images), source)
            return images, (*align_labels(labels, names, classes, source), None)

    images, (labels, class_names, targets) = once_per_node(world, load, path)
    source, names = printable(path) + (", test" if part == "test" else ""), class_names or None
    return ArrayDatastore(images, labels, names, source, targets=targets, layout="NCHW")


def parts_of(path: str) -> list[str]:
    """List the parts of an .npz file: "train", "test" or both."""
    with _opened(path) as archive:
        return [part for part, (images, *_) in ARRAYS.items() if _has(archive, images)]


@contextlib.contextmanager
def _opened(path: str) -> Iterator[np.lib.npyio.NpzFile]:
    """Open an archive of arrays, and convert exceptions caused by damage to a UserError."""
    try:
        with open_binary(path) as file:
            if file.read(4) not in ZIP_SIGNATURES:
                raise UserError(
                    f"{printable(path)}: expected an .npz file (a zip archive of arrays), found "
                    "another kind of file"
                )
        with open_binary(path) as file, np.load(file, allow_pickle=False) as archive:
            yield archive
    except (UserError, StorageFault):
        raise
    except Exception as e:  # OSError, BadZipFile, zlib.error, ValueError, MemoryError, ...
        raise unreadable(path, e) from None


def _has(archive: np.lib.npyio.NpzFile, name: str) -> bool:
    return f"{name}.npy" in archive.zip.namelist()


def _missing(archive: np.lib.npyio.NpzFile, path: str, name: str) -> UserError:
    names = [printable(file) for file in archive.files[:9]]
    ellipsis = ", ..." if len(archive.files) > len(names) else ""
    listing = ", ".join(names) + ellipsis if names else "nothing"
    return UserError(f"{printable(path)}: expected an array {name}; found {listing}")


def _header(
    archive: np.lib.npyio.NpzFile, path: str, name: str
) -> tuple[tuple[int, ...], np.dtype]:
    """Read the shape and dtype of an array, and check them against the sizes in the archive."""
    source = f"{printable(path)}: {name}"
    if not _has(archive, name):
        raise _missing(archive, path, name)
    info = archive.zip.getinfo(f"{name}.npy")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(
            f"{source}: expected an array that is stored or deflated, found another compression "
            "method"
        )
    with archive.zip.open(info) as member:
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
    stored = min(info.compress_size, stamp_of(path).size)
    if min(shape, default=0) < 0 or expected != info.file_size:
        raise UserError(
            f"{source}: expected {expected} bytes for its shape {shape}, found {info.file_size}"
        )
    if expected > DEFLATE_RATIO * stored + 4096:
        raise UserError(
            f"{source}: its shape {shape} needs {expected} bytes, but the file holds only {stored} "
            "bytes of data: it is truncated"
        )
    return shape, dtype


def _load(archive: np.lib.npyio.NpzFile, path: str, name: str, kinds: str, noun: str) -> np.ndarray:
    """Read an array and check its dtype.

    `kinds` contains the valid values of `dtype.kind`, and `noun` describes them in the message.
    """
    _, dtype = _header(archive, path, name)
    if dtype.kind not in kinds:
        raise UserError(f"{printable(path)}: {name}: expected {noun}, found {dtype}")
    return archive[name]


def _load_images(archive: np.lib.npyio.NpzFile, path: str, name: str) -> np.ndarray:
    """Read the images as (n, C, H, W) of uint8 or floats, and check their shape and type."""
    source = f"{printable(path)}: {name}"
    shape, dtype = _header(archive, path, name)
    if dtype != np.uint8 and dtype.kind != "f":
        raise UserError(f"{source}: expected uint8 (pixels 0 to 255) or floats, found {dtype}")
    if len(shape) not in (3, 4):
        raise UserError(f"{source}: expected (n, C, H, W) or (n, H, W), found {shape}")
    check_channels_first(shape, source)
    if not math.prod(shape):
        raise UserError(f"{source}: expected images, found none (shape {shape})")
    images = archive[name]
    return images[:, None] if images.ndim == 3 else images


FORMAT = format_of_parts(
    "npz",
    recognizes=lambda path, head, option: path.lower().endswith(".npz"),
    open_part=lambda path, part, world, options: npz_file(
        path, world, part, classes=options.classes, labelled=options.labelled
    ),
    parts=parts_of,
    noun="an .npz file",
    suffixes=(".npz",),
)
