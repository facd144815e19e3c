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
from mpidl.data.formats.image_files import MAX_BYTES, decode
from mpidl.data.formats.pack_layout import (
    HEADER,
    MAX_SHARDS,
    Rows,
    check_shards,
    shard_paths,
)
from mpidl.data.labels import align_labels, parse_class_names
from mpidl.data.storage.file_set import FileSet
from mpidl.data.storage.paths import stamp_of
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
SHARD_SIZES = "shard_sizes"
IMAGE_DTYPES, TARGET_DTYPES = ("uint8", "float32"), ("float32", "int32")


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
        return text_of(hdf5.attribute(file, "format")) == FORMAT_NAME


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
    if text_of(hdf5.attribute(file, "format")) != FORMAT_NAME:
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
        if SHARD_SIZES in file:
            files, stamps = _shards(file, path)
            count, rows = _sharded_rows(file, part, [stamp.size for stamp in stamps])
        else:
            files, stamps = [path], [now]
            rows = {name: _rows(file, part, name, now) for name in LARGE if name in group}
            count = len(rows["encoded"].ends) if "encoded" in rows else len(group.get("images", ()))
            if "targets" in rows and len(group["targets"]) != count:
                raise UserError(f"{source}: {part}: expected targets of {count} images")
        images = rows.get("images")
        if "encoded" not in rows and (images is None or len(images.shape) != 3):
            raise UserError(f"{source}: {part}: expected images (n, C, H, W)")
        labels = None
        class_names = parse_class_names(text_of(hdf5.attribute(file, "classes")), source)
        if "labels" in group:
            labels = hdf5.dataset(file, f"{part}/labels")[()]
            labels, class_names = align_labels(labels, class_names, classes, source)
        elif labelled and "targets" not in rows:
            raise UserError(f"{source}: {part}: expected labels, found none")
        names = _names(file, part, count, source) if "names" in group else None
        step = int(hdf5.attribute(group, "chunk_images"))
        sums = hdf5.dataset(file, f"{part}/checksums")[()]
        first = next(iter(rows.values())).first
        if step < 1 or sums.shape != (_chunk_count(first, count, step), 32):
            raise UserError(f"{source}: {part}: expected checksums and labels of {count} images")
        if labels is not None and len(labels) != count:
            raise UserError(f"{source}: {part}: expected checksums and labels of {count} images")
        fingerprint, of_files = _fingerprints(group, f"{source}: {part}")
        preprocess = _preprocess(group, f"{source}: {part}")
    image_shape = rows["images"].shape if images is not None else ()
    contents = Contents(
        stamp=now,
        files=files,
        stamps=stamps,
        count=count,
        image_shape=image_shape,
        rows=rows,
        labels=labels,
        classes=class_names,
        names=names,
        fingerprint=fingerprint,
        files_fingerprint=of_files,
        chunk_images=step,
        checksums=sums,
        preprocess=preprocess,
    )
    return contents if image_shape else _with_first_image(contents, source)


def _fingerprints(group, place):
    """Return the fingerprints of the part and, unless it is None, of the files it was made of."""
    fingerprint, of_files = (
        text_of(hdf5.attribute(group, name)) for name in ("fingerprint", "files_fingerprint")
    )
    for digits in (fingerprint, fingerprint if of_files is None else of_files):
        if not isinstance(digits, str) or not re.fullmatch("[0-9a-f]{64}", digits):
            raise UserError(f"{place}: expected a fingerprint of 64 digits")
    return fingerprint, of_files


def _names(file, part, count, source):
    """Check the names of the images, and return (their file offset, the end of each name)."""
    stored = hdf5.dataset(file, f"{part}/names")
    ends = hdf5.dataset(file, f"{part}/name_ends")[()]
    valid = stored.id.get_offset() is not None and ends.shape == (count,)
    if not valid or ends[-1] != stored.nbytes or (np.diff(ends, prepend=0) < 0).any():
        raise UserError(f"{source}: {part}: expected the names of {count} images")
    return int(stored.id.get_offset()), ends


def _with_first_image(contents, source):
    """Decode the first image, and return the Contents with its shape."""
    span = contents.rows["encoded"].spans(np.arange(1))
    (content,) = FileSet(contents.files, contents.stamps).read_ranges(*span)
    pixels, _ = decode(f"{source}: image 0", content=content)
    return contents._replace(image_shape=pixels.shape)


def _chunk_count(first, count, step):
    edges = [*first.tolist(), count]
    return sum(-(-(b - a) // step) for a, b in zip(edges[:-1], edges[1:], strict=True))


def _shards(file, path):
    """Check the shards, and return their paths and Stamps.

    Raises UserError if the description of the shards is invalid, or if a shard is missing or
    belongs to another set.
    """
    source = printable(path)
    sizes = hdf5.dataset(file, SHARD_SIZES)[()]
    stem, identity = (text_of(hdf5.attribute(file, name)) for name in ("shards", "shard_id"))
    is_valid = sizes.ndim == 1 and 1 <= len(sizes) <= MAX_SHARDS and sizes.dtype == np.int64
    is_valid = is_valid and isinstance(stem, str) and isinstance(identity, str)
    # The names of shards must not refer to other folders.
    is_valid = is_valid and bool(stem) and os.path.basename(stem) == stem and "\0" not in stem
    if not is_valid or not re.fullmatch("[0-9a-f]{64}", identity):
        raise UserError(f"{source}: expected a description of shards")
    paths = shard_paths(path, stem, len(sizes))
    return paths, check_shards(paths, sizes.tolist(), bytes.fromhex(identity))


def _sharded_rows(file, part, sizes):
    """Return the number of images of a part of a sharded set, and its Rows.

    Raises UserError if the description is invalid, or entries extend past the end of a shard.
    """
    source, group = f"{printable(file.filename)}: {part}", file[part]
    table = hdf5.dataset(file, f"{part}/shard_rows")[()]
    try:
        entries = json.loads(text_of(hdf5.attribute(group, "entries")))
        count = entries["count"]
        kinds = {name: entries[name] for name in ("images", "targets") if name in entries}
        kinds = {name: (tuple(kind["shape"]), str(kind["dtype"])) for name, kind in kinds.items()}
        is_valid = all(
            type(n) is int and n > 0 for n in (count, *sum((k[0] for k in kinds.values()), ()))
        )
        is_valid = is_valid and all(
            dtype in (IMAGE_DTYPES if name == "images" else TARGET_DTYPES)
            for name, (_, dtype) in kinds.items()
        )
    except (TypeError, ValueError, KeyError, RecursionError):
        is_valid = False
    is_valid = is_valid and table.shape == (len(sizes), 3) and table.dtype == np.int64
    if is_valid:
        first = table[:, 0]
        is_valid = first[0] == 0 and (np.diff(first) >= 0).all() and first[-1] <= count
    if not is_valid or ("images" in kinds) == ("ends" in group):
        raise UserError(f"{source}: expected a description of entries in shards")
    rows = {}
    if "images" not in kinds:
        ends = _ends(file, part)
        if len(ends) != count:
            raise UserError(f"{source}: expected the ends of {count} images")
        rows["encoded"] = Rows((), np.dtype(np.uint8), ends, first, table[:, 1])
    for name, (shape, dtype) in kinds.items():
        starts = table[:, 1 if name == "images" else 2]
        if math.prod(shape) * np.dtype(dtype).itemsize * count > sum(sizes):
            raise UserError(f"{source}: expected shards with {count} {name}: they are truncated")
        rows[name] = Rows(shape, np.dtype(dtype), None, first, starts)
    edges = [*first.tolist(), count]
    for row in rows.values():
        begins = row.begins(np.array(edges)).tolist()
        for k, size in enumerate(sizes):
            stop = int(row.starts[k]) + begins[k + 1] - begins[k]
            if row.starts[k] < HEADER or stop > size:
                raise UserError(
                    f"{source}: expected entries in shard {k + 1} up to {stop}, found {size} bytes"
                )
    return count, rows


def _ends(file, part):
    """Return the end of each image file in `encoded`. Raise UserError if an end is invalid."""
    ends = hdf5.dataset(file, f"{part}/ends")[()]
    is_valid = ends.ndim == 1 and len(ends) > 0 and ends.dtype == np.int64
    # Differences of positive numbers do not overflow.
    is_valid = is_valid and ends.min() > 0 and (sizes := np.diff(ends, prepend=0)).min() > 0
    if not is_valid or sizes.max() > MAX_BYTES:
        raise UserError(f"{printable(file.filename)}: {part}/ends: expected the ends of images")
    return ends


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
    """Return the Rows of "images", "encoded" or "targets" in a packed file without shards.

    Raises UserError if the dataset is not contiguous, has another type, or extends past the end of
    the file.
    """
    stored = hdf5.dataset(file, f"{part}/{name}")
    offset = stored.id.get_offset()
    dtypes = {"images": IMAGE_DTYPES, "encoded": ("uint8",), "targets": TARGET_DTYPES}[name]
    source = f"{printable(file.filename)}: {part}/{name}"
    if offset is None or stored.dtype.name not in dtypes or not stored.dtype.isnative:
        raise UserError(f"{source}: expected {' or '.join(dtypes)} stored contiguously")
    if offset + stored.nbytes > now.size or not len(stored):
        raise UserError(
            f"{source}: expected {stored.nbytes} bytes at {offset}, "
            f"found a file of {now.size}: it is truncated"
        )
    ends = None
    if name == "encoded":
        ends = _ends(file, part)
        if ends[-1] != stored.nbytes:
            raise UserError(f"{source}: expected {ends[-1]} bytes, found {stored.nbytes}")
    shape = tuple(int(n) for n in stored.shape[1:])
    return Rows(shape, stored.dtype, ends, np.zeros(1, np.int64), np.array([offset], np.int64))


def content(file: h5py.File) -> str:
    """Return the SHA-256, in hex, that the attribute `sha256` of a packed file must have."""
    total = hashlib.sha256()
    parts = [part for part in PARTS if part in file]
    facts = [text_of(hdf5.attribute(file, "classes"))]
    if SHARD_SIZES in file:
        facts += [text_of(hdf5.attribute(file, name)) for name in ("shards", "shard_id")]
        facts.append(hdf5.dataset(file, SHARD_SIZES)[()].tolist())
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
        for name in ("preprocess", "entries", "files_fingerprint"):
            if name in group.attrs:
                facts[-1].append(text_of(hdf5.attribute(group, name)))
    total.update(json.dumps(facts).encode())
    return total.hexdigest()


def text_of(value: Any) -> Any:
    """Decode bytes to a string, and return any other value unchanged."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
