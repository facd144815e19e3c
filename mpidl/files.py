"""Read and write files: on one rank, complete or not at all, and with changes noticed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpidl.errors import UserError
from mpidl.text import printable

T = TypeVar("T")
MAX_REASON = 300  # characters of a library's error, which may quote the damaged file


class Stamp(NamedTuple):
    """Size and time of the last write of a file; they differ if the file has changed."""

    size: int  # bytes
    written: int  # nanoseconds


def stamp(status: os.stat_result) -> Stamp:
    """Return the Stamp of a result of os.stat or os.fstat."""
    return Stamp(status.st_size, status.st_mtime_ns)


def changed(path: str, before: Stamp, now: Stamp) -> UserError:
    """Return the UserError for a file that has changed since the run began."""
    difference = (
        f"{before.size} bytes then, {now.size} now" if before.size != now.size else "same size"
    )
    return UserError(
        f"{printable(path)}: the file has changed since the run began ({difference}): expected "
        "data that stay as they are; start again"
    )


def unreadable(path: str | os.PathLike, error: Exception) -> UserError:
    """Return the UserError for a file that cannot be opened or read."""
    if isinstance(error, FileNotFoundError):
        return UserError(f"{printable(path)}: no such file")
    if isinstance(error, IsADirectoryError):
        return UserError(f"{printable(path)}: expected a file, found a folder")
    text = (
        f"{printable(path)}: the file cannot be read: {reason(error).splitlines()[0]:.{MAX_REASON}}"
    )
    return UserError("".join(c if c.isprintable() else "?" for c in text))


class RawFile:
    """A file whose bytes are read by offset; the process opens it when it first reads.

    Parameters
    ----------
    path : str
        The file.
    expected : Stamp
        Size and time that the file must still have.
    """

    def __init__(self, path: str, expected: Stamp):
        self.path, self.expected = path, expected
        self.descriptor: int | None = None
        self.lock = threading.Lock()

    def check(self) -> None:
        """Open the file if it is not open yet; raise UserError if it fails or has changed."""
        try:
            with self.lock:  # several threads may read first
                if self.descriptor is None:
                    self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            now = stamp(os.fstat(self.descriptor))
        except OSError as e:
            raise unreadable(self.path, e) from None
        if now != self.expected:
            raise changed(self.path, self.expected, now)

    def read_into(self, buffer: Any, offset: int) -> None:
        """Fill a writable buffer with the bytes from `offset` on; call check() first.

        Raises
        ------
        UserError
            The file ends early or cannot be read.
        """
        view = memoryview(buffer).cast("B")
        try:
            while len(view):
                count = os.preadv(self.descriptor, [view], offset)
                if not count:
                    raise UserError(
                        f"{printable(self.path)}: expected {len(view)} more bytes at {offset}, "
                        "found the end of the file: it is cut short"
                    )
                view, offset = view[count:], offset + count
        except OSError as e:
            raise unreadable(self.path, e) from None

    def close(self) -> None:
        """Close the file if it is open."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self):
        self.close()


def on_rank_0(world: Any, function: Callable[[], T]) -> T:
    """Call a function on rank 0 only and return its result on all ranks. Collective.

    One rank asks the file system, because the requests of a thousand would overload it. Without a
    world, this process calls the function.

    Raises
    ------
    UserError
        On all ranks, if the function raises it.
    """
    if world is None:
        return function()
    return world.broadcast(call_together(world, function if world.rank == 0 else lambda: None))


def call_together(world: Any, function: Callable[[], T]) -> T:
    """Return what a function returns on this rank. Collective.

    Raises
    ------
    UserError
        On all ranks, if the function raises it on any.
    """
    result: Any = None
    error = None
    try:
        result = function()
    except UserError as e:
        error = e
    world.raise_if_any(error)
    return result


def reason(error: Exception) -> str:
    """Return what went wrong, without the path and number in the text of an OSError."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def digest(*parts: object) -> str:
    """Return the SHA-256, in hex, of texts, numbers, tuples and arrays.

    The length of each part is hashed too, so that no two lists of parts run into one another.
    """
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            little = part.astype(part.dtype.newbyteorder("<"), copy=False)
            data = f"{little.dtype.str}{part.shape}".encode() + little.tobytes()
        else:
            data = str(part).encode("utf-8", "surrogateescape")
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


def write_whole(
    path: str | os.PathLike, content: bytes | memoryview, aside: str | os.PathLike | None = None
) -> None:
    """Write a file so that it holds all the bytes afterwards, or is as it was before.

    Parameters
    ----------
    path : str
        The file.
    content : bytes
        What to write.
    aside : str, optional
        Name to keep the previous file under.

    Raises
    ------
    UserError
        The disk is full, or the folder cannot be written to.
    """
    folder, name = os.path.split(os.path.abspath(path))
    part = os.path.join(folder, f".{name}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if aside is not None:
            os.replace(path, aside)
            sync_folder(folder)
        os.replace(part, path)
        sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def sync_folder(folder: str) -> None:
    """Flush renames in a folder to disk; some file systems refuse the call and need none."""
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)
