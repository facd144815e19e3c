"""Packed sets: one HDF5 file whose images lie one after the other, read by os.pread.

Of each of the groups `train` and `test`, of which the second may be missing:

    images      (n, C, H, W) uint8 or float32, contiguous
    labels      (n,) int64, or targets (n, ...) float32 or int32, contiguous; or neither
    checksums   (chunks, 32) uint8: SHA-256 of the images, then of the targets, of each chunk
    names       uint8: the names of the images one after the other, and name_ends (n,) int64
                where each ends; or neither
    attributes  fingerprint, that of the set that was packed; chunk_images; preprocess, as JSON,
                where its images came through a `Preprocess`

The root's attributes are format, format_version, classes and sha256: that of all but images and
targets, which the checksums cover. `mpidl.data.formats.packing` writes such files.
"""

import hashlib
import json
import os
import re
from typing import NamedTuple

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.data.datastore import Datastore, counted
from mpidl.data.formats import hdf5
from mpidl.data.formats.format import format_of_parts
from mpidl.data.labels import align_labels, parse_class_names
from mpidl.data.transforms.preprocess import Preprocess
from mpidl.errors import UserError
from mpidl.files import RawFile, Stamp, on_rank_0, stamp
from mpidl.text import printable

FORMAT_NAME, FORMAT_VERSION = "mpidl packed", 1
PARTS = ("train", "test")
SMALL = ("labels", "checksums", "names", "name_ends")  # what sha256 covers
LARGE = ("images", "targets")  # what the checksums cover


class Rows(NamedTuple):
    """Entries that lie one after the other: where the first is, their shape and type."""

    offset: int
    shape: tuple
    dtype: np.dtype

    @property
    def nbytes(self):
        """Bytes of an entry."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Found(NamedTuple):
    """A part of a packed file, as rank 0 found it.

    names: where their bytes begin, and where in them each ends.
    """

    stamp: Stamp
    count: int
    rows: dict  # of "images" and, where there are any, "targets"
    labels: np.ndarray | None
    classes: list
    names: tuple | None
    fingerprint: str
    chunk_images: int
    checksums: np.ndarray
    preprocess: Preprocess | None


class PackedDatastore(Datastore):
    """One part of a file of `python -m mpidl.pack`: the same images, labels and fingerprint as of
    the set that was packed, so that training on it gives the same weights.

    part: "train" or "test". classes: the names that labels are brought to, where another set has
    fixed them. labelled=False: labels may be missing. With a world it is collective: rank 0 looks,
    and checks all but the images; the others are told. Each rank opens the file when it first
    reads, and reads no more than the images it is asked for.
    """

    def __init__(self, path, world=None, part="train", *, classes=None, labelled=True):
        self.path, self.part = os.fspath(path), part
        self.found = on_rank_0(world, lambda: look(self.path, part, classes, labelled))
        self.labels, self.classes = self.found.labels, self.found.classes
        self.preprocess = self.found.preprocess
        images, targets = (self.found.rows.get(name) for name in LARGE)
        self.image_shape, self.dtype = images.shape, images.dtype
        if targets is not None:
            self.targets_shape, self.targets_dtype = targets.shape, targets.dtype
        self._file = RawFile(self.path, self.found.stamp)

    def __len__(self):
        return self.found.count

    def read(self, indices):
        return self._rows("images", indices)

    def targets(self, indices):
        return self._rows("targets", indices)

    def _rows(self, name, indices):
        rows, indices = self.found.rows[name], np.asarray(indices, np.int64)
        found = arenas.to_read((len(indices), *rows.shape), rows.dtype)
        self._file.check()
        if rows.nbytes:
            edges = [0, *(np.nonzero(np.diff(indices) != 1)[0] + 1), len(indices)]
            for first, last in zip(edges[:-1], edges[1:], strict=True):
                if first < last:  # images in a row are read at once
                    place = rows.offset + int(indices[first]) * rows.nbytes
                    self._file.read_into(found[first:last], place)
        return found

    def name(self, i):
        if self.found.names is None:
            return super().name(i)
        start, ends = self.found.names
        first = int(ends[i - 1]) if i else 0
        text = bytearray(int(ends[i]) - first)
        self._file.check()
        self._file.read_into(text, start + first)
        return printable(bytes(text))

    def located(self, i):
        return f"{printable(self.path)}: {self.name(i)}"

    def describe(self):
        part = ", test" if self.part == "test" else ""
        return f"{printable(self.path)}{part}: {counted(self)}"

    def fingerprint(self):
        return self.found.fingerprint

    def verify(self, progress=None):
        """Compare all images and targets with their checksums; UserError where one differs.

        progress(count): called after each chunk with the number of its images.
        """
        step = self.found.chunk_images
        for number, expected in enumerate(self.found.checksums):
            first, last = number * step, min((number + 1) * step, len(self))
            indices = np.arange(first, last)
            if checksum(*(self._rows(name, indices) for name in self.found.rows)) != bytes(
                expected
            ):
                raise UserError(
                    f"{printable(self.path)}: images {first} to {last - 1} of {self.part} are not "
                    "what was packed: their checksum differs; pack them again"
                )
            if progress is not None:
                progress(last - first)


def checksum(*arrays):
    """SHA-256 of the bytes of C-ordered arrays, one after the other."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return total.digest()


def is_packed(path):
    """Whether an HDF5 file is a packed set."""
    with hdf5.opened(path) as file:
        return text_of(hdf5.attribute(file, "format")) == FORMAT_NAME


def parts_of(path):
    """Which of "train" and "test" a packed file has."""
    with hdf5.opened(path) as file:
        check_format(file)
        return [part for part in PARTS if part in file]


def check_format(file):
    """A UserError where an open HDF5 file is no packed one, or not the one that was written."""
    where = printable(file.filename)
    if text_of(hdf5.attribute(file, "format")) != FORMAT_NAME:
        raise UserError(f"{where}: expected a file of python -m mpidl.pack, found another")
    version = hdf5.attribute(file, "format_version")
    if version != FORMAT_VERSION:
        text = printable(str(version)[:40])
        raise UserError(f"{where}: its format_version is {text}, this mpidl reads {FORMAT_VERSION}")
    if text_of(hdf5.attribute(file, "sha256")) != content(file):
        raise UserError(
            f"{where}: expected what was packed, found another content: its checksum differs"
        )


def look(path, part, classes, labelled):
    """Found, of a part of a packed file."""
    where = printable(path)
    if part not in PARTS:
        raise UserError(f'{where}: which part must be "train" or "test", got {part!r}')
    with hdf5.opened(path) as file:
        check_format(file)
        if part not in file:
            raise UserError(f"{where}: expected a part {part}; found {hdf5.listed(file)}")
        now = stamp(os.stat(path))
        group = file[part]
        rows = {name: _rows(file, part, name, now) for name in LARGE if name in group}
        if "images" not in rows or len(rows["images"].shape) != 3:
            raise UserError(f"{where}: {part}: expected images (n, C, H, W)")
        count = len(group["images"])
        labels = names = None
        known = parse_class_names(text_of(hdf5.attribute(file, "classes")), where)
        if "labels" in group:
            labels = hdf5.dataset(file, f"{part}/labels")[()]
            labels, known = align_labels(labels, known, classes, where)
        elif labelled and "targets" not in rows:
            raise UserError(f"{where}: {part}: expected labels, found none")
        if "names" in group:
            held = hdf5.dataset(file, f"{part}/names")
            ends = hdf5.dataset(file, f"{part}/name_ends")[()]
            right = held.id.get_offset() is not None and ends.shape == (count,)
            if not right or ends[-1] != held.nbytes or (np.diff(ends, prepend=0) < 0).any():
                raise UserError(f"{where}: {part}: expected the names of {count} images")
            names = int(held.id.get_offset()), ends
        step = int(hdf5.attribute(group, "chunk_images"))
        sums = hdf5.dataset(file, f"{part}/checksums")[()]
        if sums.shape != (-(-count // step), 32) or (labels is not None and len(labels) != count):
            raise UserError(f"{where}: {part}: expected checksums and labels of {count} images")
        fingerprint = text_of(hdf5.attribute(group, "fingerprint"))
        if not isinstance(fingerprint, str) or not re.fullmatch("[0-9a-f]{64}", fingerprint):
            raise UserError(f"{where}: {part}: expected a fingerprint of 64 digits")
        how = _preprocess(group, f"{where}: {part}")
        return Found(now, count, rows, labels, known, names, fingerprint, step, sums, how)


def _preprocess(group, where):
    text = text_of(hdf5.attribute(group, "preprocess"))
    if text is None:
        return None
    try:
        return Preprocess(**json.loads(text))
    except (TypeError, ValueError, UserError):
        raise UserError(f"{where}: expected a description of preprocessing as JSON") from None


def _rows(file, part, name, now):
    held = hdf5.dataset(file, f"{part}/{name}")
    offset = held.id.get_offset()
    known = ("uint8", "float32") if name == "images" else ("float32", "int32")
    if offset is None or held.dtype.name not in known or not held.dtype.isnative:
        raise UserError(
            f"{printable(file.filename)}: {part}/{name}: expected {' or '.join(known)} in one piece"
        )
    if offset + held.nbytes > now.size or not len(held):
        raise UserError(
            f"{printable(file.filename)}: {part}/{name}: expected {held.nbytes} bytes at {offset}, "
            f"found a file of {now.size}: it is cut short"
        )
    return Rows(int(offset), tuple(int(n) for n in held.shape[1:]), held.dtype)


def content(file):
    """SHA-256, in hex, of all that an open packed file holds but images and targets."""
    total = hashlib.sha256()
    parts = [part for part in PARTS if part in file]
    facts = [text_of(hdf5.attribute(file, "classes"))]
    for part in parts:
        held = {name: [] for name in (*SMALL, *LARGE) if name in file[part]}
        for name in held:
            rows = hdf5.dataset(file, f"{part}/{name}")
            held[name] = [rows.dtype.str, *rows.shape]
            if name in SMALL:
                total.update(np.ascontiguousarray(rows[()]).reshape(-1).view(np.uint8))
        group = file[part]
        fingerprint = text_of(hdf5.attribute(group, "fingerprint"))
        facts.append([part, fingerprint, int(hdf5.attribute(group, "chunk_images")), held])
        if "preprocess" in group.attrs:
            facts[-1].append(text_of(hdf5.attribute(group, "preprocess")))
    total.update(json.dumps(facts).encode())
    return total.hexdigest()


def text_of(value):
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


FORMAT = format_of_parts(
    "packed",
    recognizes=lambda path, head, option: head == hdf5.SIGNATURE and is_packed(path),
    open_part=lambda path, part, world, options: PackedDatastore(
        path, world, part, classes=options.classes, labelled=options.labelled
    ),
    parts=parts_of,
)
