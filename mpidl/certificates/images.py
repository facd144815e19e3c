"""Digests of the images of a set, their Merkle tree, and the files of the manifest and the salt.

README.md defines the digests. Without the salt, nobody can test whether an image is in the set.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidl.data.checks import read_images, read_targets
from mpidl.data.datastore import Datastore
from mpidl.data.loading.bad_images import BadImages, unreadable
from mpidl.data.loading.workers import Job, prefetch_items
from mpidl.errors import UserError
from mpidl.files import call_together, on_rank_0, open_for_reading, write_whole
from mpidl.files import unreadable as unreadable_file
from mpidl.text import printable

SALT = "certificate-salt.txt"  # in the folder of a run, for its owner and its auditors
SIZE = 32  # bytes of a digest, and of a salt
LINE = 2 * SIZE + 1  # bytes of a line with a digest
CHUNK_BYTES = 2 << 20  # a thread reads images of about this size together
LEAF, NODE = b"\0", b"\1"  # first bytes of what RFC 6962 hashes


class Chunk(NamedTuple):
    """Images that have been read together, with their labels or targets, or None."""

    indices: np.ndarray
    pixels: np.ndarray
    labels: np.ndarray | None


def digests(
    store: Datastore,
    world: Any,
    salt: bytes | None,
    name: str,
    progress: Callable[[int], object] | None = None,
    bad_images: BadImages | None = None,
    workers: int = 1,
) -> np.ndarray:
    """Return the digests (n, 32), uint8, of the images of a set, on every rank. Collective.

    Each rank reads a consecutive part of the set in threads, and hashes the images in other
    threads. The digests do not depend on the number of ranks.

    Parameters
    ----------
    store : Datastore
        The images. A `NodeCache` keeps them for the first epoch.
    world : World or None
        The ranks among which the images are divided. None if there is only this rank.
    salt : bytes or None
        The salt of a private certificate; see `salt_of`.
    name : {"train", "validation", "test"}
        Name of the set. The salt of each image depends on it.
    progress : callable, optional
        Each rank calls ``progress(count)`` whenever it has hashed another `count` images.
    bad_images : BadImages, optional
        Receives the images that cannot be read, whose digests are zero. By default, an unreadable
        image is an error.
    workers : int
        Number of threads per rank that read images.

    Raises
    ------
    UserError, StorageFault
        On all ranks, if any rank cannot read its images.
    """
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    first, stop = (len(store) * r // size for r in (rank, rank + 1))
    reader, digest = _Reader(store, bad_images), ImageDigests(store, salt, name)
    part = np.zeros((stop - first, SIZE), np.uint8)

    def hashing(chunk):
        rows = chunk.indices - first
        return Job([lambda: digest.fill(chunk, part, rows)], lambda: len(rows))

    def hash_part():
        chunks = prefetch_items(reader.jobs(first, stop), 2 * workers, workers)
        counts = prefetch_items(map(hashing, chunks), 2 * workers, workers)
        with contextlib.closing(chunks), contextlib.closing(counts):
            for count in counts:
                if progress is not None:
                    progress(count)

    if world is None:
        hash_part()
        reasons, parts = [reader.reasons], [part]
    else:
        call_together(world, hash_part)
        reasons, parts = world.allgather(reader.reasons), world.allgather(part)
    if bad_images is not None:
        bad_images.merge(reasons)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class _Reader:
    """Reads the images of a set for their digests, and collects those that cannot be read."""

    def __init__(self, store: Datastore, bad_images: BadImages | None):
        self.store, self.bad_images = store, bad_images
        self.reasons: dict[int, str] = {}  # {index of an unreadable image: error message}
        shapes = [(store.image_shape, store.dtype)]
        if store.targets_shape is not None:
            shapes.append((store.targets_shape, store.targets_dtype))
        size = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes)
        self.count = max(1, CHUNK_BYTES // max(size, 1))  # images per chunk

    def jobs(self, first: int, stop: int) -> Iterator[Job]:
        """Yield a job for each chunk of the images first..stop-1."""
        for start in range(first, stop, self.count):
            indices = np.arange(start, min(start + self.count, stop))
            if self.bad_images is not None:
                indices = np.setdiff1d(indices, np.array([*self.bad_images.reasons], np.int64))
            yield self._job(indices)

    def _job(self, indices):
        chunks: list[Chunk] = []
        fetches = [self.store.read_ahead(indices)]

        def read():
            chunks.append(self._chunk(indices))
            fetches.clear()

        return Job([read], chunks.pop)

    def _chunk(self, indices):
        if self.bad_images is not None:
            reasons = unreadable(self._read, indices)
            self.reasons.update(reasons)
            indices = np.setdiff1d(indices, np.array([*reasons], np.int64))
        return self._read(indices)

    def _read(self, indices):
        return read_chunk(self.store, indices)


def read_chunk(store: Datastore, indices: np.ndarray) -> Chunk:
    """Read images of a set with what training reads of their labels and targets."""
    pixels, labels = read_images(store, indices), None
    if store.targets_shape is not None:
        labels = read_targets(store, indices)
    elif store.labels is not None:
        labels = np.asarray(store.labels)[indices].astype(np.int64)
    return Chunk(indices, pixels, labels)


class ImageDigests:
    """Computes the digests of images of a set, which are given by their bytes.

    Parameters
    ----------
    store : Datastore
        The set, whose types and shapes are part of the digests.
    salt : bytes or None
        The salt of a private certificate.
    name : {"train", "validation", "test"}
        Name of the set.
    """

    def __init__(self, store: Datastore, salt: bytes | None, name: str):
        self.name, self.salts = name, None if salt is None else _Hmac(salt)
        self.pixels_head = _head(store.dtype, store.image_shape)
        self.label_head = _head(np.int64, ())
        if store.targets_shape is not None:
            self.label_head = _head(store.targets_dtype, store.targets_shape)

    def fill(self, chunk: Chunk, out: np.ndarray, rows: np.ndarray) -> None:
        """Write the digests of a chunk's images to the given rows of `out`."""
        if len(rows):
            labels = [None] * len(rows) if chunk.labels is None else row_views(chunk.labels)
            images = zip(chunk.indices.tolist(), row_views(chunk.pixels), labels, strict=True)
            joined = b"".join([self.digest(i, pixels, label) for i, pixels, label in images])
            out[rows] = np.frombuffer(joined, np.uint8).reshape(-1, SIZE)

    def digest(self, i: int, pixels: memoryview, label: memoryview | None) -> bytes:
        """Return the digest of image i, given its bytes and those of its label or target."""
        total = hashlib.sha256(self.salt_of_image(i) + self.pixels_head)
        total.update(pixels)
        if label is not None:
            total.update(self.label_head + label)
        return total.digest()

    def salt_of_image(self, i: int) -> bytes:
        """Return the salt of image i, or no bytes in a public certificate."""
        return b"" if self.salts is None else self.salts.digest(f"{self.name} {i}".encode())


class _Hmac:
    """The HMAC-SHA-256 of many short texts with one key of at most 64 bytes.

    Copies of hashes that have seen the padded key take half the time of `hmac.digest`.
    """

    def __init__(self, key):
        padded = np.frombuffer(key.ljust(64, b"\0"), np.uint8)
        self.inner, self.outer = (hashlib.sha256(padded ^ byte) for byte in (0x36, 0x5C))

    def digest(self, text):
        inner, outer = self.inner.copy(), self.outer.copy()
        inner.update(text)
        outer.update(inner.digest())
        return outer.digest()


def _head(dtype, shape):
    """Return the JSON text of a type and a shape, such as b'["|u1", [3, 32, 32]]'."""
    little = np.dtype(dtype).newbyteorder("<")
    return json.dumps([little.str, [int(size) for size in shape]]).encode()


def row_views(arrays: np.ndarray) -> list[memoryview]:
    """Return the little-endian bytes of each of some arrays, as views of memory."""
    little = np.ascontiguousarray(arrays.astype(arrays.dtype.newbyteorder("<"), copy=False))
    view, size = memoryview(little.reshape(-1).view(np.uint8)), little.nbytes // len(arrays)
    return [view[size * row : size * (row + 1)] for row in range(len(arrays))]


def root(digests: np.ndarray) -> str:
    """Return the Merkle tree hash of digests (n, 32) in hexadecimal, as RFC 6962 defines it."""
    *_, top = _levels(digests)
    return top.tobytes().hex() if len(top) else hashlib.sha256().hexdigest()


def _levels(digests):
    """Yield the nodes of each level of the Merkle tree, from the leaves to the root."""
    level = _hash_rows(LEAF, digests)
    yield level
    while len(level) > 1:  # a last node without a sibling moves up
        paired = len(level) // 2 * 2
        parents = _hash_rows(NODE, level[:paired].reshape(-1, 2 * SIZE))
        level = np.concatenate([parents, level[paired:]])
        yield level


def _hash_rows(first, rows):
    """Return the SHA-256 of the byte `first` and each row (n, width), uint8, as (n, 32)."""
    data, sha256 = np.insert(rows, 0, first[0], axis=1).tobytes(), hashlib.sha256
    width = rows.shape[1] + 1
    hashed = [sha256(data[i : i + width]).digest() for i in range(0, len(data), width)]
    return np.frombuffer(b"".join(hashed), np.uint8).reshape(-1, SIZE)


def proof(digests: np.ndarray, i: int) -> list[str]:
    """Return the audit path of RFC 6962 for image i of a set.

    With the digest of the image, it shows that the image was in the set with this root, and says
    nothing about the other images. `check_proof` or any implementation of RFC 6962 checks it.
    """
    path = []
    for level in _levels(digests):
        sibling = i ^ 1
        if sibling < len(level):
            path.append(level[sibling].tobytes().hex())
        i //= 2
    return path


def check_proof(digest: bytes, i: int, count: int, path: Sequence[str], root: str) -> bool:
    """Return whether a path shows that image i of `count` images with this root has the digest."""
    try:
        siblings = [bytes.fromhex(step) for step in path]
    except ValueError:
        return False
    node, last = hashlib.sha256(LEAF + digest).digest(), count - 1
    if not 0 <= i < count:
        return False
    while last and siblings:
        if i ^ 1 <= last:
            sibling = siblings.pop(0)
            pair = sibling + node if i % 2 else node + sibling
            node = hashlib.sha256(NODE + pair).digest()
        i, last = i // 2, last // 2
    return node.hex() == root and not siblings and last == 0


def describe(store: Datastore, digests: np.ndarray) -> dict[str, Any]:
    """Return the entries of a set in the start of a certificate."""
    shape = store.targets_shape
    return {
        "images": len(store),
        "image_shape": [int(size) for size in store.image_shape],
        "dtype": np.dtype(store.dtype).newbyteorder("<").str,
        "targets_shape": None if shape is None else [int(size) for size in shape],
        "classes": [str(name) for name in store.classes],
        "root": root(digests),
    }


def write_manifest(path: str | os.PathLike[str], sets: Mapping[str, np.ndarray]) -> str:
    """Write the digests of each set, {name: digests}, and return the SHA-256 of the file."""
    content = b"".join(part for name, rows in sets.items() for part in _manifest_parts(name, rows))
    write_whole(path, content)
    return hashlib.sha256(content).hexdigest()


def _manifest_parts(name, rows):
    lines = np.full((len(rows), LINE), ord("\n"), np.uint8)
    lines[:, :-1] = np.frombuffer(rows.tobytes().hex().encode(), np.uint8).reshape(-1, 2 * SIZE)
    return _heading(name, len(rows)), lines.tobytes()


def _heading(name, count):
    return f"# {name} {count}\n".encode()


def read_manifest(path: str | os.PathLike[str], counts: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Read the digests of each set from a manifest.

    Parameters
    ----------
    path : path
        The file, which may be damaged.
    counts : mapping
        {name of a set: number of images}, in the order of the file. A file of another size is not
        read.

    Raises
    ------
    UserError
        If the file is not a manifest of these sets.
    """
    expected = sum(len(_heading(name, count)) + count * LINE for name, count in counts.items())
    try:
        with open_for_reading(path) as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(expected + 1) if size == expected else b""
    except OSError as error:
        raise unreadable_file(path, error) from None
    if len(content) != expected:
        text = ", ".join(f"{count} of {name}" for name, count in counts.items()) or "none"
        raise UserError(
            f"{printable(path)}: expected the digests of {sum(counts.values())} images ({text}) in "
            f"{expected} bytes, found {size} bytes"
        )
    sets, start, line = {}, 0, 1
    for name, count in counts.items():
        heading = _heading(name, count)
        if not content.startswith(heading, start):
            raise _unexpected(path, line, heading.decode().strip(), content[start:])
        start, line = start + len(heading), line + 1
        sets[name] = _parsed(path, line, content[start : start + count * LINE])
        start, line = start + count * LINE, line + count
    return sets


def _parsed(path, first_line, content):
    """Return the digests in lines of a manifest."""
    values = np.full(256, 255, np.uint8)
    values[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
    lines = np.frombuffer(content, np.uint8).reshape(-1, LINE)
    nibbles = values[lines[:, :-1]]
    is_valid = (nibbles < 16).all(1) & (lines[:, -1] == ord("\n"))
    if not is_valid.all():
        i = int(np.argmin(is_valid))
        raise _unexpected(path, first_line + i, "64 digits 0-9 and a-f", lines[i].tobytes())
    return nibbles[:, ::2] << 4 | nibbles[:, 1::2]


def _unexpected(path, line, expected, content):
    text = printable(content[:LINE].split(b"\n")[0]) or "nothing"
    return UserError(f"{printable(path)}, line {line}: expected {expected}, found {text}")


def salt_of(folder: str | os.PathLike[str], world: Any) -> bytes:
    """Return the salt of a run, which is created if the folder has none. Collective.

    The caller holds the lock of the folder, so no other run creates a salt at the same time.
    """
    path = os.path.join(folder, SALT)

    def salt():
        if not os.path.lexists(path):
            write_whole(path, f"{secrets.token_hex(SIZE)}\n".encode(), mode=0o600)
        return read_salt(path)

    return on_rank_0(world, salt)


def read_salt(path: str | os.PathLike[str]) -> bytes:
    """Return the salt in a file. Raise UserError if the file has none."""
    try:
        with open_for_reading(path) as file:
            text = file.read(2 * SIZE + 2)
    except OSError as error:
        raise unreadable_file(path, error) from None
    digits = text.strip().lower()
    if len(digits) != 2 * SIZE or not set(digits) <= set(b"0123456789abcdef"):
        size = "other" if len(digits) == 2 * SIZE else len(text)
        raise UserError(
            f"{printable(path)}: expected {2 * SIZE} hexadecimal digits, found {size} characters"
        )
    return bytes.fromhex(digits.decode())


def salt_digest(salt: bytes | None) -> str | None:
    """Return the SHA-256 of a salt, which a certificate names, or None without a salt."""
    return None if salt is None else hashlib.sha256(salt).hexdigest()
