"""Locate the images and targets of a packed set in the packed file, or in its shards.

An entry is the stored image or target of one sample. A shard is a file with a header of 64 bytes,
followed by the entries of consecutive images of each part. The header consists of `SIGNATURE` (16
bytes), the number of the shard (4 bytes, from 0, little-endian), 12 zero bytes, and the SHA-256
that identifies the packed set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpidl.data.paths import heads, reading, stamp_of
from mpidl.errors import UserError
from mpidl.files import Stamp
from mpidl.text import printable

SIGNATURE = b"mpidl shard 1\n\0\0"
HEADER = 64  # size of a shard's header in bytes
MAX_SHARDS = 99_999


class Rows(NamedTuple):
    """The location of all entries of one kind, such as images or targets."""

    # Shape and type of an entry. An encoded image file has shape () and type uint8.
    shape: tuple[int, ...]
    dtype: np.dtype
    # For encoded image files, the offset in bytes where each file ends if all files are
    # concatenated, int64 (n,). None if all entries have the same size.
    ends: np.ndarray | None
    first: np.ndarray  # for each file, the number of its first image, int64 (files,)
    starts: np.ndarray  # for each file, the offset of the first image's entry, int64 (files,)

    @property
    def nbytes(self) -> int:
        """Size in bytes of an entry, if all entries have the same size."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def begins(self, indices: np.ndarray) -> np.ndarray:
        """Return the offsets in bytes of entries in the concatenation of all entries."""
        if self.ends is None:
            return indices * self.nbytes
        return np.where(indices > 0, self.ends[np.maximum(indices, 1) - 1], 0)

    def spans(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the file, offset and size in bytes of each entry, as int64 (len(indices),)."""
        files = np.searchsorted(self.first, indices, "right") - 1
        begins = self.begins(indices)
        offsets = self.starts[files] + begins - self.begins(self.first[files])
        return files, offsets, self.begins(indices + 1) - begins

    def span(self, first: int, stop: int) -> tuple[int, int, int]:
        """Return the file, offset and size of the entries first..stop-1, which are in one file."""
        files, offsets, sizes = self.spans(np.arange(first, stop))
        return int(files[0]), int(offsets[0]), int(sizes.sum())


def chunks(first: np.ndarray, count: int, chunk_images: int) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) of each chunk, a run of at most `chunk_images` images with one checksum.

    `first` has the number of the first image of each file. A chunk never spans two files.
    """
    edges = [*first.tolist(), count]
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        for chunk in range(start, stop, chunk_images):
            yield chunk, min(chunk + chunk_images, stop)


def shard_paths(index: str, stem: str, count: int) -> list[str]:
    """Return the paths of a packed file's shards, which are in the same folder."""
    folder = os.path.dirname(index)
    names = [f"{stem}-{i + 1:05}-of-{count:05}.bin" for i in range(count)]
    return [os.path.join(folder, name) for name in names]


def shard_header(number: int, identity: bytes) -> bytes:
    """Return the header of the shard with the given number, from 0."""
    return SIGNATURE + number.to_bytes(4, "little") + bytes(12) + identity


def check_shards(paths: Sequence[str], sizes: Sequence[int], identity: bytes) -> list[Stamp]:
    """Return each shard's Stamp. Raise UserError if a shard is missing or from another set."""
    stamps = []
    for path, size in zip(paths, sizes, strict=True):
        try:
            with reading(path):
                now = stamp_of(path)
        except UserError as e:
            raise UserError(f"{e}: expected this shard of the packed set") from None
        if now.size != size:
            raise UserError(
                f"{printable(path)}: expected a shard of {size} bytes, found {now.size}: pack again"
            )
        stamps.append(now)
    for number, (path, header) in enumerate(zip(paths, heads(paths, stamps, HEADER), strict=True)):
        if header != shard_header(number, identity):
            raise UserError(
                f"{printable(path)}: expected shard {number + 1} of this packed set, found "
                f"{describe_header(header)}"
            )
    return stamps


def describe_header(header: bytes) -> str:
    """Describe a file by its first bytes, for a message."""
    if not header.startswith(SIGNATURE):
        return "another file"
    number = int.from_bytes(header[len(SIGNATURE) : len(SIGNATURE) + 4], "little")
    return f"shard {number + 1} of this or another set"
