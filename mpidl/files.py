"""Reading and writing files: by one rank, whole or not at all, and never changed unnoticed."""

import contextlib
import hashlib
import os
import threading
from typing import NamedTuple

import numpy as np

from mpidl.errors import UserError
from mpidl.text import printable


MAX_REASON = 300  # characters of a library's error, which may quote the damaged file


class Stamp(NamedTuple):
    """What tells a file from a changed one: its size in bytes, and when it was written last."""

    size: int
    written: int  # nanoseconds


def stamp(status):
    """The Stamp in what os.stat or os.fstat returned."""
    return Stamp(status.st_size, status.st_mtime_ns)


def changed(path, before, now):
    """The UserError of a file that is not what it was when the run began."""
    what = f"{before.size} bytes then, {now.size} now" if before.size != now.size else "same size"
    return UserError(
        f"{printable(path)}: the file has changed since the run began ({what}): expected data that "
        "stay as they are; start again"
    )


def unreadable(path, error):
    """The UserError of a file that cannot be opened or read."""
    if isinstance(error, FileNotFoundError):
        return UserError(f"{printable(path)}: no such file")
    if isinstance(error, IsADirectoryError):
        return UserError(f"{printable(path)}: expected a file, found a folder")
    lines = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()
    text = f"{printable(path)}: the file cannot be read: {lines[0][:MAX_REASON]}"
    return UserError("".join(c if c.isprintable() else "?" for c in text))


class RawFile:
    """A file read by place, through a descriptor that this process opens when it first reads."""

    def __init__(self, path, before):
        self.path, self.before, self.handle = path, before, None
        self.opening = threading.Lock()

    def check(self):
        """A UserError where the file has changed, or cannot be opened."""
        try:
            with self.opening:  # several threads may be the first
                if self.handle is None:
                    self.handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            now = stamp(os.fstat(self.handle))
        except OSError as e:
            raise unreadable(self.path, e) from None
        if now != self.before:
            raise changed(self.path, self.before, now)

    def read_into(self, buffer, offset):
        """Fill a writable buffer from a place in the file; check() has been called before."""
        view = memoryview(buffer).cast("B")
        try:
            while len(view):
                count = os.preadv(self.handle, [view], offset)
                if not count:
                    raise UserError(
                        f"{printable(self.path)}: expected {len(view)} more bytes at {offset}, "
                        "found the end of the file: it is cut short"
                    )
                view, offset = view[count:], offset + count
        except OSError as e:
            raise unreadable(self.path, e) from None

    def close(self):
        handle, self.handle = self.handle, None
        if handle is not None:
            os.close(handle)

    def __del__(self):
        self.close()


def on_rank_0(world, function):
    """function()'s result on all ranks, computed on rank 0 alone; its UserError on all ranks.

    Collective. One rank asks the file system; a thousand would bring it down.
    """
    if world is None:
        return function()
    result = error = None
    if world.rank == 0:
        try:
            result = function()
        except UserError as e:
            error = e
    world.together(error)
    return world.broadcast(result)


def digest(*parts):
    """SHA-256 in hex of texts, numbers, tuples and arrays; each part is told from the next."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            little = part.astype(part.dtype.newbyteorder("<"), copy=False)
            data = f"{little.dtype.str}{part.shape}".encode() + little.tobytes()
        else:
            data = str(part).encode("utf-8", "surrogateescape")
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


def write_whole(path, content, aside=None):
    """Write bytes to `path` at once: afterwards it holds all of them, or is what it was before.

    aside: the path that the file there before is renamed to, if it is to be kept. Raises UserError,
    naming the path, where the disk is full or the folder cannot be written to.
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
            _sync_folder(folder)
        os.replace(part, path)
        _sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def _sync_folder(folder):
    """Make renames in this folder last; some file systems have no such call and need none."""
    handle = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(handle)
    os.close(handle)
