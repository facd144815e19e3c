"""Read files by offset, detect changed files, and write files completely or not at all.

`on_rank_0` and `call_together` coordinate file access and its errors among the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from mpidl.errors import LostLock, StorageFault, UserError
from mpidl.text import printable

T = TypeVar("T")
MAX_REASON = 300  # maximum length in characters; a library's error may quote the file


class Stamp(NamedTuple):
    """Size and last write time of a file, for detecting changes to the file.

    For an object in an object store, `written` is a digest of the object's version.
    """

    size: int  # bytes
    written: int  # nanoseconds


def stamp(status: os.stat_result) -> Stamp:
    """Convert the result of os.stat or os.fstat to a Stamp."""
    return Stamp(status.st_size, status.st_mtime_ns)


def changed(path: str, before: Stamp, now: Stamp) -> UserError:
    """Return a UserError for a file that has changed since the run began."""
    difference = (
        f"{before.size} bytes then, {now.size} now" if before.size != now.size else "same size"
    )
    return UserError(
        f"{printable(path)}: the file has changed since the run began ({difference}): data must "
        "not change during a run; start again"
    )


def unreadable(path: str | os.PathLike, error: Exception) -> UserError:
    """Return a UserError for a file that cannot be opened or read."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return UserError(f"{printable(path)}: no such file")
    if isinstance(error, IsADirectoryError):
        return UserError(f"{printable(path)}: expected a file, found a folder")
    text = (
        f"{printable(path)}: the file cannot be read: {reason(error).splitlines()[0]:.{MAX_REASON}}"
    )
    return UserError("".join(c if c.isprintable() else "?" for c in text))


def sha256_of_file(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file. Raise UserError if the file cannot be read."""
    total = hashlib.sha256()
    try:
        with open_for_reading(path) as file:
            while chunk := file.read(1 << 20):
                total.update(chunk)
    except OSError as error:
        raise unreadable(path, error) from None
    return total.hexdigest()


def check_regular(status: os.stat_result) -> None:
    """Raise OSError if the status is not that of a regular file, but of a folder or a pipe."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "expected a file, found a device or a pipe")


def open_regular(path: str | os.PathLike) -> tuple[int, os.stat_result]:
    """Open a regular file for reading, and return its descriptor and its status.

    Opening a pipe does not wait for a writer, but raises OSError, as for a folder or a device.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except BlockingIOError:  # another process or host has a lease of the file, and gives it back
        check_regular(os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        check_regular(status)
        os.set_blocking(descriptor, True)  # reads wait for locks of the file system
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, status


def open_for_reading(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file as `open(path, "rb")` does; see `open_regular`."""
    return os.fdopen(open_regular(path)[0], "rb")


class RawFile:
    """A file that is read by byte offset, and opened on first use.

    Parameters
    ----------
    path : str
        Path of the file.
    expected : Stamp
        Size and write time that the file must have when it is checked.
    """

    def __init__(self, path: str, expected: Stamp):
        self.path, self.expected = path, expected
        self.descriptor: Any = None  # an int once the file is open
        self.lock = threading.Lock()

    def check(self) -> None:
        """Open the file if needed. Raise UserError if it cannot be opened or has changed."""
        try:
            with self.lock:  # several threads may make the first call at the same time
                if self.descriptor is None:
                    self.descriptor, _ = open_regular(self.path)
            now = stamp(os.fstat(self.descriptor))
        except OSError as e:
            raise unreadable(self.path, e) from None
        if now != self.expected:
            raise changed(self.path, self.expected, now)

    def read_into(self, buffer: Any, offset: int) -> None:
        """Fill a writable buffer with the bytes from `offset` on.

        `check` must have been called before.

        Raises
        ------
        UserError
            If the file ends early or cannot be read.
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

    def read_range(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on; see `read_into`."""
        try:
            content = os.pread(self.descriptor, size, offset)
        except OSError as e:
            raise unreadable(self.path, e) from None
        if len(content) == size:
            return content
        buffer = bytearray(size)  # a signal interrupted the call, or the file ends early
        self.read_into(buffer, offset)
        return bytes(buffer)

    def read_rows(self, rows: np.ndarray, offsets: np.ndarray) -> None:
        """Fill each row of a C-ordered array with the bytes that start at the row's offset.

        `check` must have been called before. Rows that are consecutive in the file are read
        together.

        Raises
        ------
        UserError
            If the file ends early or cannot be read.
        """
        nbytes = rows.nbytes // max(len(rows), 1)
        edges = [0, *(np.nonzero(np.diff(offsets) != nbytes)[0] + 1), len(rows)]
        for first, last in zip(edges[:-1], edges[1:], strict=True):
            if first < last and nbytes:
                self.read_into(rows[first:last], int(offsets[first]))

    def close(self) -> None:
        """Close the file if it is open."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self):
        self.close()


def on_rank_0(world: Any, function: Callable[[], T]) -> T:
    """Call a function only on rank 0, and return its result on all ranks. Collective.

    Only one rank accesses the file system, because requests from a thousand ranks would overload
    the file system. If `world` is None, this process calls the function.

    Raises
    ------
    UserError, StorageFault, LostLock
        On all ranks, if the function raises one of these errors.
    """
    if world is None:
        return function()
    return world.broadcast(call_together(world, function if world.rank == 0 else lambda: None))


def call_together(world: Any, function: Callable[[], T]) -> T:
    """Call a function on every rank, and return this rank's result. Collective.

    Raises
    ------
    UserError, StorageFault, LostLock
        On all ranks, if the function raises one of these errors on any rank.
    """
    result: Any = None
    error = None
    try:
        result = function()
    except (UserError, StorageFault, LostLock) as e:
        error = e
    world.raise_if_any(error)
    return result


def reason(error: Exception) -> str:
    """Return the message of an error. For an OSError, leave out the error number and the path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def json_object(content: str | bytes | None) -> dict[str, Any] | None:
    """Parse JSON. Return None if the content is missing, damaged or not an object."""
    try:
        value = json.loads(content or b"")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def digest(*parts: object) -> str:
    """Return the SHA-256 of strings, numbers, tuples and arrays as a hexadecimal string.

    The length of each part is hashed too. Different parts therefore have different hashes, even if
    they are equal when joined.
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
    path: str | os.PathLike,
    content: bytes | memoryview,
    aside: str | os.PathLike | None = None,
    confirm: Callable[[], object] = lambda: None,
    mode: int = 0o666,
    also: str | os.PathLike | None = None,
) -> None:
    """Write a file completely, or leave the previous file unchanged if the write fails.

    Parameters
    ----------
    path : str
        Path of the file.
    content : bytes
        The bytes to write.
    aside : str, optional
        Path to which the previous file is renamed; by default, the previous file is replaced.
    confirm : callable, optional
        Function that is called before the write and before the renames. If it raises an exception,
        nothing more is written or renamed.
    mode : int
        Permissions of the file, without those that the process's umask denies.
    also : str, optional
        A second path for the file, which `link_or_copy` makes before the file gets its own path.

    Raises
    ------
    UserError
        If the disk is full, if the folder cannot be written to, or if the path names a device.
    """
    if _is_special(path):  # for root, a rename would replace a device such as /dev/null
        raise UserError(f"{path}: expected the path of a file, found a device or a pipe")
    folder, name = os.path.split(os.path.abspath(path))
    part = os.path.join(folder, f".{name}.part")
    try:
        confirm()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)  # a suspended process may still have this file open for writing
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        confirm()
        if also is not None:
            link_or_copy(part, also)
        if aside is not None:
            os.replace(path, aside)
            sync_folder(folder)
        os.replace(part, path)
        sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def link_or_copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give a file that never changes a second path, which replaces a file of an earlier time.

    The second path is a hard link, or names a copy if the file system has no hard links. Its folder
    is created if it is missing. Raises OSError if this fails; `target` is then unchanged.
    """
    folder, name = os.path.split(os.path.abspath(target))
    os.makedirs(folder, exist_ok=True)
    part = os.path.join(folder, f".{name}.part")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part)
    try:
        try:
            os.link(source, part)
        except OSError:
            shutil.copyfile(source, part)
            with open(part, "rb") as file:
                os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        with contextlib.suppress(FileNotFoundError):  # a link to the file that `target` names stays
            os.unlink(part)
    sync_folder(folder)


def _is_special(path):
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def read_toml(path: str | os.PathLike[str], spelled: str) -> dict[str, Any]:
    """Read a TOML file. Raise UserError if that fails; the message begins with `spelled`."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10 has no tomllib
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UserError(f"{spelled}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{spelled}: not a TOML file: {error}") from error


def sync_folder(folder: str) -> None:
    """Flush renames in a folder to disk.

    Errors of fsync are ignored, because file systems that do not support fsync do not need it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)
