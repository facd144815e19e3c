"""Describe and check packed files, which `PackedDatastore` reads and `packing` writes.

A packed file is an HDF5 file with a group `train` and an optional group `test`. Each group contains
the following datasets:

    images      (n, C, H, W) uint8 or float32, contiguous
    encoded     uint8, contiguous: concatenated image files, such as JPEG, instead of `images`
    ends        (n,) int64, the end of each image file in `encoded`
    labels      (n,) int64, optional
    targets     (n, ...) float32 or int32, contiguous, optional
    checksums   (chunks, 32) uint8: SHA-256 of each chunk's images followed by its targets
    names       uint8, the concatenated names of the images, optional
    name_ends   (n,) int64, the end of each name in `names`, optional

Each group also has the following attributes:

    fingerprint   fingerprint of the packed set
    chunk_images  maximum number of images per chunk
    preprocess    the `Preprocess` applied to the images, as JSON, optional
    files_fingerprint
                  digest of the packed image files, for conversions such as `--resize`, optional

The attributes of the root group are `format`, `format_version`, `classes` and `sha256`. `sha256` is
a digest of the other datasets and attributes, except `format` and `format_version`. For `images`,
`encoded` and `targets`, it covers only the shapes and types, because `checksums` covers the
contents. Files with encoded images or shards have `format_version` 2.

In a sharded set, images, encoded images and targets are in separate files, the shards (see
`pack_layout`). The root group then has three more entries:

    shards       attribute: the prefix of the shards' file names
    shard_id     attribute: the SHA-256 in the header of every shard, in hex
    shard_sizes  (shards,) int64: size of each shard in bytes

Each group also has:

    entries     attribute: number of images, and shape and dtype of images and targets, as JSON
    shard_rows  (shards, 3) int64: for each shard, the number of its first image, the offset of
                that image, and the offset of its target
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidl.data.formats import hdf5
from mpidl.data.formats.file_set import FileSet
from mpidl.data.formats.format import check_part
from mpidl.data.formats.image_files import MAX_BYTES, decode
from mpidl.data.formats.pack_layout import (
    HEADER,
    MAX_SHARDS,
    Rows,
    check_shards,
    shard_paths,
)
from mpidl.data.labels import align_labels, parse_class_names
from mpidl.data.paths import stamp_of
from mpidl.data.transforms.preprocess import Preprocess
from mpidl.errors import UserError
from mpidl.files import Stamp
from mpidl.text import printable

if TYPE_CHECKING:
    import h5py

FORMAT_NAME, FORMAT_VERSIONS = "mpidl packed", (1, 2)
PARTS = ("train", "test")
SMALL = ("labels", "checksums", "names", "name_ends", "ends", "shard_rows")  # covered by sha256
LARGE = ("images", "encoded", "targets")  # covered by the checksums
DTYPES = {"images": ("uint8", "float32"), "encoded": ("uint8",), "targets": ("float32", "int32")}
SHARD_SIZES = "shard_sizes"


class Contents(NamedTuple):
    """Description of one part of a packed file. Rank 0 determines and broadcasts it."""

    stamp: Stamp
    files: list[str]  # paths and Stamps of the files that hold the rows
    stamps: list[Stamp]
    count: int
    # Shape (C, H, W) of the images, or of the first image if the images are encoded.
    image_shape: tuple[int, ...]
    # The Rows of "images" or "encoded". If there are targets, also the Rows of "targets".
    rows: dict[str, Rows]
    labels: np.ndarray | None
    classes: list[str]
    # File offset of the names, and an array with the end of each name relative to the offset.
    # None if the file has no names.
    names: tuple[int, np.ndarray] | None
    fingerprint: str
    files_fingerprint: str | None
    chunk_images: int
    checksums: np.ndarray
    preprocess: Preprocess | None


def checksum(*parts: np.ndarray | bytes) -> bytes:
    """Return the SHA-256 of the concatenation of byte strings and arrays in C order."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            part = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        total.update(part)
    return total.digest()


def is_packed(path: str) -> bool:
    """Return whether an HDF5 file is a packed set."""
    with hdf5.opened(path) as file:
        return text_of(file, "format") == FORMAT_NAME


def parts_of(path: str) -> list[str]:
    """List the parts of a packed file: "train", "test" or both."""
    with hdf5.opened(path) as file:
        check_format(file)
        return [part for part in PARTS if part in file]


def files_of(path: str) -> list[str]:
    """Return the paths of all files of a packed set: the packed file and its shards."""
    with hdf5.opened(path) as file:
        return [path, *(_shards(file, path)[0] if SHARD_SIZES in file else [])]


def check_format(file: h5py.File) -> None:
    """Raise UserError if an open HDF5 file is not a packed set, or if its checksum is wrong."""
    source = printable(file.filename)
    if text_of(file, "format") != FORMAT_NAME:
        raise UserError(
            f"{source}: expected a file written by python -m mpidl.pack, found another HDF5 file"
        )
    version = hdf5.attribute(file, "format_version")
    if version not in FORMAT_VERSIONS:
        text = printable(str(version)[:40])
        raise UserError(
            f"{source}: its format_version is {text}, but this version of mpidl reads "
            f"{' and '.join(map(str, FORMAT_VERSIONS))}"
        )
    if text_of(file, "sha256") != content(file):
        raise UserError(f"{source}: the content does not match its checksum")


def inspect_part(path: str, part: str, classes: Sequence[str] | None, labelled: bool) -> Contents:
    """Inspect one part of a packed file and return its Contents, including all labels."""
    source = printable(path)
    check_part(part, path, PARTS)
    with hdf5.opened(path) as file:
        check_format(file)
        if part not in file:
            raise UserError(f"{source}: expected a part {part}; found {hdf5.listed(file)}")
        now, group, source = stamp_of(path), file[part], f"{source}: {part}"
        files, stamps = _shards(file, path) if SHARD_SIZES in file else ([path], [now])
        count, rows = _rows(file, part, [stamp.size for stamp in stamps])
        labels, class_names = None, parse_class_names(text_of(file, "classes"), source)
        if "labels" in group:
            labels = hdf5.dataset(file, f"{part}/labels")[()]
            labels, class_names = align_labels(labels, class_names, classes, source)
        elif labelled and "targets" not in rows:
            raise UserError(f"{source}: expected labels, found none")
        step = int(hdf5.attribute(group, "chunk_images"))
        sums = hdf5.dataset(file, f"{part}/checksums")[()]
        first = next(iter(rows.values())).first
        chunk_count = sum(-(-n // max(step, 1)) for n in np.diff(first, append=count).tolist())
        is_valid = step >= 1 and sums.shape == (chunk_count, 32)
        is_valid = is_valid and (labels is None or len(labels) == count)
        _expect(is_valid, file, part, f"checksums and labels of {count} images")
        fingerprint, of_files = (text_of(group, n) for n in ("fingerprint", "files_fingerprint"))
        is_valid = _is_sha256(fingerprint) and (of_files is None or _is_sha256(of_files))
        _expect(is_valid, file, part, "a fingerprint of 64 digits")
        contents = Contents(
            stamp=now,
            files=files,
            stamps=stamps,
            count=count,
            image_shape=rows["images"].shape if "images" in rows else (),
            rows=rows,
            labels=labels,
            classes=class_names,
            names=_names(file, part, count) if "names" in group else None,
            fingerprint=fingerprint,
            files_fingerprint=of_files,
            chunk_images=step,
            checksums=sums,
            preprocess=_preprocess(group, source),
        )
    if "images" in rows:
        return contents
    (encoded,) = FileSet(files, stamps).read_ranges(*rows["encoded"].spans(np.arange(1)))
    pixels, _ = decode(f"{printable(path)}: image 0", content=encoded)
    return contents._replace(image_shape=pixels.shape)


def _expect(is_valid: object, file: h5py.File, part: str, noun: str) -> None:
    """Raise UserError unless a part of a description is valid."""
    if not is_valid:
        raise UserError(f"{printable(file.filename)}: {part}: expected {noun}")


def text_of(holder: h5py.Group, name: str) -> Any:
    """Return the value of an attribute, decoded if it is a text, or None."""
    value = hdf5.attribute(holder, name)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _is_sha256(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text) is not None


def _names(file, part, count):
    """Check the names of the images, and return (their file offset, the end of each name)."""
    stored = hdf5.dataset(file, f"{part}/names")
    ends, offset = hdf5.dataset(file, f"{part}/name_ends")[()], stored.id.get_offset()
    is_valid = offset is not None and ends.shape == (count,) and ends[-1] == stored.nbytes
    is_valid = is_valid and (np.diff(ends, prepend=0) >= 0).all()
    _expect(is_valid, file, part, f"the names of {count} images")
    return int(offset), ends


def _shards(file, path):
    """Check the shards, and return their paths and Stamps.

    Raises UserError if the description of the shards is invalid, or if a shard is missing or
    belongs to another set.
    """
    sizes = hdf5.dataset(file, SHARD_SIZES)[()]
    stem, identity = text_of(file, "shards"), text_of(file, "shard_id")
    is_valid = sizes.ndim == 1 and 1 <= len(sizes) <= MAX_SHARDS and sizes.dtype == np.int64
    # The names of shards must not refer to other folders.
    is_name = bool(stem) and os.path.basename(stem) == stem and "\0" not in stem
    _expect(is_valid and is_name and _is_sha256(identity), file, SHARD_SIZES, "shards")
    paths = shard_paths(path, stem, len(sizes))
    return paths, check_shards(paths, sizes.tolist(), bytes.fromhex(identity))


def _rows(file, part, sizes):
    """Return the number of images of a part, and {name: Rows} of its images and targets.

    Raises UserError if the description is invalid, or if an entry is outside the files, whose sizes
    are given. Other exceptions that an invalid description causes become a UserError in `opened`.
    """

    def expect(is_valid):
        _expect(is_valid, file, part, "images and targets as mpidl.pack describes them")

    group = file[part]
    ends = hdf5.dataset(file, f"{part}/ends")[()] if "ends" in group else None
    if SHARD_SIZES in file:
        entries = json.loads(text_of(group, "entries"))
        count, table = entries.pop("count"), hdf5.dataset(file, f"{part}/shard_rows")[()]
        expect(type(count) is int and table.shape == (len(sizes), 3) and table.dtype == np.int64)
        first, starts = table[:, 0], dict(zip(LARGE, table.T[[1, 1, 2]], strict=True))
        kinds = {name: (kind["shape"], np.dtype(kind["dtype"])) for name, kind in entries.items()}
        if ends is not None:
            kinds["encoded"] = ((), np.dtype(np.uint8))
    else:
        stored = {name: hdf5.dataset(file, f"{part}/{name}") for name in LARGE if name in group}
        first, count = np.zeros(1, np.int64), len(group.get("images", ()) if ends is None else ends)
        starts, kinds = {}, {}
        for name, rows in stored.items():
            offset = rows.id.get_offset()  # None if the dataset is not contiguous
            length = count if ends is None or name != "encoded" else ends[-1]
            expect(offset is not None and len(rows) == length)
            starts[name], kinds[name] = np.array([offset]), (rows.shape[1:], rows.dtype)
    edges = np.append(first, count)
    expect(count > 0 and ("images" in kinds) != ("encoded" in kinds))
    expect(first[0] == 0 and (np.diff(edges) >= 0).all())
    if ends is not None:
        expect(ends.shape == (count,) and ends.dtype == np.int64 and ends.min() > 0)
        steps = np.diff(ends, prepend=0)  # differences of positive numbers do not overflow
        expect(steps.min() > 0 and steps.max() <= MAX_BYTES)
    result = {}
    for name, (shape, dtype) in kinds.items():
        shape = tuple(int(n) for n in shape)
        expect(dtype.name in DTYPES[name] and dtype.isnative and min(shape, default=0) >= 0)
        expect(name != "images" or len(shape) == 3)
        if name != "encoded":
            expect(math.prod(shape) * dtype.itemsize * count <= sum(sizes))
        own_ends = ends if name == "encoded" else None
        rows = result[name] = Rows(shape, dtype, own_ends, first, starts[name])
        latest = np.array(sizes) - np.diff(rows.begins(edges))
        expect(((rows.starts >= HEADER) & (rows.starts <= latest)).all())
    return count, result


def _preprocess(group, source):
    """Return the Preprocess that was applied to the images before packing, or None."""
    text = text_of(group, "preprocess")
    try:
        return None if text is None else Preprocess(**json.loads(text))
    except (TypeError, ValueError, UserError):
        raise UserError(f"{source}: expected a description of preprocessing as JSON") from None


def content(file: h5py.File) -> str:
    """Return the SHA-256, in hex, that the attribute `sha256` of a packed file must have."""
    total = hashlib.sha256()
    parts = [part for part in PARTS if part in file]
    facts = [text_of(file, "classes")]
    if SHARD_SIZES in file:
        facts += [text_of(file, name) for name in ("shards", "shard_id")]
        facts.append(hdf5.dataset(file, SHARD_SIZES)[()].tolist())
    for part in parts:
        headers = {name: [] for name in (*SMALL, *LARGE) if name in file[part]}
        for name in headers:
            rows = hdf5.dataset(file, f"{part}/{name}")
            headers[name] = [rows.dtype.str, *rows.shape]
            if name in SMALL:
                total.update(np.ascontiguousarray(rows[()]).reshape(-1).view(np.uint8))
        group = file[part]
        fingerprint = text_of(group, "fingerprint")
        facts.append([part, fingerprint, int(hdf5.attribute(group, "chunk_images")), headers])
        for name in ("preprocess", "entries", "files_fingerprint"):
            if name in group.attrs:
                facts[-1].append(text_of(group, name))
    total.update(json.dumps(facts).encode())
    return total.hexdigest()
