"""Read packed sets: HDF5 files with contiguous images, which are read without the HDF5 library.

The file has a group `train` and an optional group `test`. Each group contains these datasets:

    images      (n, C, H, W) uint8 or float32, contiguous
    labels      (n,) int64, optional
    targets     (n, ...) float32 or int32, contiguous, optional
    checksums   (chunks, 32) uint8: SHA-256 of each chunk's images followed by its targets
    names       uint8, the concatenated names of the images, optional
    name_ends   (n,) int64, the end of each name in `names`, optional

Each group also has these attributes:

    fingerprint   fingerprint of the set that was packed
    chunk_images  number of images per chunk
    preprocess    the `Preprocess` applied to the images, as JSON, if there is one

The attributes of the root group are format, format_version, classes and sha256. The attribute
sha256 is a digest of everything except the images and targets, which the checksums cover.
`mpidl.data.formats.packing` writes these files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.data.datastore import Datastore, Indices, counted
from mpidl.data.formats import hdf5
from mpidl.data.formats.format import World, format_of_parts
from mpidl.data.labels import align_labels, parse_class_names
from mpidl.data.storage.objects import RemoteFile, open_raw
from mpidl.data.storage.paths import stamp_of
from mpidl.data.transforms.preprocess import Preprocess
from mpidl.errors import UserError
from mpidl.files import Stamp, on_rank_0
from mpidl.text import printable

if TYPE_CHECKING:
    import h5py

FORMAT_NAME, FORMAT_VERSION = "mpidl packed", 1
PARTS = ("train", "test")
SMALL = ("labels", "checksums", "names", "name_ends")  # covered by sha256
LARGE = ("images", "targets")  # covered by the checksums


class Rows(NamedTuple):
    """Contiguous rows in the file: the offset of the first row, and the shape and type of a row."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Size of a row in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Contents(NamedTuple):
    """Description of one part of a packed file, which rank 0 determines and broadcasts.

    Attributes
    ----------
    rows : dict
        The Rows of "images", and of "targets" if there are any.
    names : tuple or None
        File offset of the names, and an array with the end of each name relative to that offset.
    """

    stamp: Stamp
    count: int
    rows: dict[str, Rows]
    labels: np.ndarray | None
    classes: list[str]
    names: tuple[int, np.ndarray] | None
    fingerprint: str
    chunk_images: int
    checksums: np.ndarray
    preprocess: Preprocess | None


class PackedDatastore(Datastore):
    """A datastore that reads one part of a file written by `python -m mpidl.pack`.

    The images, labels and fingerprint equal those of the set that was packed, so training on either
    set gives the same weights. With a world, construction is collective: rank 0 checks everything
    except images and targets, and broadcasts the contents.

    Parameters
    ----------
    path : path-like
        The file.
    world : World, optional
        The ranks that open the file. Each rank opens the file when it first reads images, and reads
        only the images that it needs.
    part : {"train", "test"}
        Part of the file to open.
    classes : sequence of str, optional
        Class names of the training set, to which the labels are mapped.
    labelled : bool
        Whether labels or targets are required.

    Raises
    ------
    UserError
        If the file is damaged or does not have the part. `read` also raises UserError if the file
        has changed since it was opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        world: World = None,
        part: str = "train",
        *,
        classes: Sequence[str] | None = None,
        labelled: bool = True,
    ):
        self.path, self.part = os.fspath(path), part
        self.contents = on_rank_0(world, lambda: inspect_part(self.path, part, classes, labelled))
        self.labels, self.classes = self.contents.labels, self.contents.classes
        self.preprocess = self.contents.preprocess
        images, targets = (self.contents.rows.get(name) for name in LARGE)
        self.image_shape, self.dtype = images.shape, images.dtype
        if targets is not None:
            self.targets_shape, self.targets_dtype = targets.shape, targets.dtype
        self._file = open_raw(self.path, self.contents.stamp)

    def __len__(self) -> int:
        return self.contents.count

    def read(self, indices: Indices) -> np.ndarray:
        return self._rows("images", indices)

    def targets(self, indices: Indices) -> np.ndarray:
        return self._rows("targets", indices)

    def _rows(self, name, indices):
        rows, indices = self.contents.rows[name], np.asarray(indices, np.int64)
        result = arenas.to_read((len(indices), *rows.shape), rows.dtype)
        self._file.check()
        self._file.read_rows(result, rows.offset + indices * rows.nbytes)
        return result

    def read_ahead(self, indices: Indices) -> object:
        if not isinstance(self._file, RemoteFile):
            return None
        indices = np.asarray(indices, np.int64)
        tables = self.contents.rows.values()
        return [self._file.read_ahead(t.offset + indices * t.nbytes, t.nbytes) for t in tables]

    def name(self, i: int) -> str:
        if self.contents.names is None:
            return super().name(i)
        start, ends = self.contents.names
        first = int(ends[i - 1]) if i else 0
        text = bytearray(int(ends[i]) - first)
        self._file.check()
        self._file.read_into(text, start + first)
        return printable(bytes(text))

    def located(self, i: int) -> str:
        return f"{printable(self.path)}: {self.name(i)}"

    def describe(self) -> str:
        part = ", test" if self.part == "test" else ""
        return f"{printable(self.path)}{part}: {counted(self)}"

    def fingerprint(self) -> str:
        return self.contents.fingerprint

    def verify(self, progress: Callable[[int], object] | None = None) -> None:
        """Compare all images and targets with their checksums.

        Parameters
        ----------
        progress : callable, optional
            Function that is called after each chunk with the number of its images.

        Raises
        ------
        UserError
            If a checksum differs.
        """
        step = self.contents.chunk_images
        for number, expected in enumerate(self.contents.checksums):
            first, last = number * step, min((number + 1) * step, len(self))
            indices = np.arange(first, last)
            arrays = [self._rows(name, indices) for name in self.contents.rows]
            if checksum(*arrays) != bytes(expected):
                raise UserError(
                    f"{printable(self.path)}: images {first} to {last - 1} of {self.part} do not "
                    "match their checksum: pack them again"
                )
            if progress is not None:
                progress(last - first)


def checksum(*arrays: np.ndarray) -> bytes:
    """Return the SHA-256 of the concatenated bytes of C-ordered arrays."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return total.digest()


def is_packed(path: str) -> bool:
    """Return whether an HDF5 file is a packed set."""
    with hdf5.opened(path) as file:
        return text_of(hdf5.attribute(file, "format")) == FORMAT_NAME


def parts_of(path: str) -> list[str]:
    """List the parts of a packed file: "train", "test" or both."""
    with hdf5.opened(path) as file:
        check_format(file)
        return [part for part in PARTS if part in file]


def check_format(file: h5py.File) -> None:
    """Raise UserError if an open HDF5 file is not a packed set, or if its checksum differs."""
    source = printable(file.filename)
    if text_of(hdf5.attribute(file, "format")) != FORMAT_NAME:
        raise UserError(
            f"{source}: expected a file written by python -m mpidl.pack, found another HDF5 file"
        )
    version = hdf5.attribute(file, "format_version")
    if version != FORMAT_VERSION:
        text = printable(str(version)[:40])
        raise UserError(
            f"{source}: its format_version is {text}, but this version of mpidl reads "
            f"{FORMAT_VERSION}"
        )
    if text_of(hdf5.attribute(file, "sha256")) != content(file):
        raise UserError(f"{source}: the content does not match its checksum")


def inspect_part(path: str, part: str, classes: Sequence[str] | None, labelled: bool) -> Contents:
    """Inspect one part of a packed file and return its Contents, including all labels."""
    source = printable(path)
    if part not in PARTS:
        raise UserError(f'{source}: part must be "train" or "test", got {part!r}')
    with hdf5.opened(path) as file:
        check_format(file)
        if part not in file:
            raise UserError(f"{source}: expected a part {part}; found {hdf5.listed(file)}")
        now = stamp_of(path)
        group = file[part]
        rows = {name: _rows(file, part, name, now) for name in LARGE if name in group}
        if "images" not in rows or len(rows["images"].shape) != 3:
            raise UserError(f"{source}: {part}: expected images (n, C, H, W)")
        count = len(group["images"])
        labels = names = None
        class_names = parse_class_names(text_of(hdf5.attribute(file, "classes")), source)
        if "labels" in group:
            labels = hdf5.dataset(file, f"{part}/labels")[()]
            labels, class_names = align_labels(labels, class_names, classes, source)
        elif labelled and "targets" not in rows:
            raise UserError(f"{source}: {part}: expected labels, found none")
        if "names" in group:
            stored = hdf5.dataset(file, f"{part}/names")
            ends = hdf5.dataset(file, f"{part}/name_ends")[()]
            valid = stored.id.get_offset() is not None and ends.shape == (count,)
            if not valid or ends[-1] != stored.nbytes or (np.diff(ends, prepend=0) < 0).any():
                raise UserError(f"{source}: {part}: expected the names of {count} images")
            names = int(stored.id.get_offset()), ends
        step = int(hdf5.attribute(group, "chunk_images"))
        sums = hdf5.dataset(file, f"{part}/checksums")[()]
        if sums.shape != (-(-count // step), 32) or (labels is not None and len(labels) != count):
            raise UserError(f"{source}: {part}: expected checksums and labels of {count} images")
        fingerprint = text_of(hdf5.attribute(group, "fingerprint"))
        if not isinstance(fingerprint, str) or not re.fullmatch("[0-9a-f]{64}", fingerprint):
            raise UserError(f"{source}: {part}: expected a fingerprint of 64 digits")
        preprocess = _preprocess(group, f"{source}: {part}")
        return Contents(
            now, count, rows, labels, class_names, names, fingerprint, step, sums, preprocess
        )


def _preprocess(group, source):
    """Return the Preprocess that was applied to the images before packing, or None."""
    text = text_of(hdf5.attribute(group, "preprocess"))
    if text is None:
        return None
    try:
        return Preprocess(**json.loads(text))
    except (TypeError, ValueError, UserError):
        raise UserError(f"{source}: expected a description of preprocessing as JSON") from None


def _rows(file, part, name, now):
    """Return the Rows of "images" or "targets".

    Raises
    ------
    UserError
        If the dataset is not contiguous, has another type, or extends past the end of the file.
    """
    stored = hdf5.dataset(file, f"{part}/{name}")
    offset = stored.id.get_offset()
    dtypes = ("uint8", "float32") if name == "images" else ("float32", "int32")
    source = f"{printable(file.filename)}: {part}/{name}"
    if offset is None or stored.dtype.name not in dtypes or not stored.dtype.isnative:
        raise UserError(f"{source}: expected {' or '.join(dtypes)} stored contiguously")
    if offset + stored.nbytes > now.size or not len(stored):
        raise UserError(
            f"{source}: expected {stored.nbytes} bytes at {offset}, "
            f"found a file of {now.size}: it is cut short"
        )
    return Rows(int(offset), tuple(int(n) for n in stored.shape[1:]), stored.dtype)


def content(file: h5py.File) -> str:
    """Return the SHA-256, in hex, of everything in a packed file except images and targets."""
    total = hashlib.sha256()
    parts = [part for part in PARTS if part in file]
    facts = [text_of(hdf5.attribute(file, "classes"))]
    for part in parts:
        headers = {name: [] for name in (*SMALL, *LARGE) if name in file[part]}
        for name in headers:
            rows = hdf5.dataset(file, f"{part}/{name}")
            headers[name] = [rows.dtype.str, *rows.shape]
            if name in SMALL:
                total.update(np.ascontiguousarray(rows[()]).reshape(-1).view(np.uint8))
        group = file[part]
        fingerprint = text_of(hdf5.attribute(group, "fingerprint"))
        facts.append([part, fingerprint, int(hdf5.attribute(group, "chunk_images")), headers])
        if "preprocess" in group.attrs:
            facts[-1].append(text_of(hdf5.attribute(group, "preprocess")))
    total.update(json.dumps(facts).encode())
    return total.hexdigest()


def text_of(value: Any) -> Any:
    """Decode bytes to a string, and return any other value unchanged."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


FORMAT = format_of_parts(
    "packed",
    recognizes=lambda path, head, option: head == hdf5.SIGNATURE and is_packed(path),
    open_part=lambda path, part, world, options: PackedDatastore(
        path, world, part, classes=options.classes, labelled=options.labelled
    ),
    parts=parts_of,
)
