"""Files that a run reads as it goes: opened late, by each rank, and never let change unnoticed."""

import os
import threading
from typing import NamedTuple

from mpidl.data.datastore import shown
from mpidl.errors import UserError


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
        f"{shown(path)}: the file has changed since the run began ({what}): expected data that "
        "stay as they are; start again"
    )


def unreadable(path, error):
    """The UserError of a file that cannot be opened or read."""
    if isinstance(error, FileNotFoundError):
        return UserError(f"{shown(path)}: no such file")
    if isinstance(error, IsADirectoryError):
        return UserError(f"{shown(path)}: expected a file, found a folder")
    lines = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()
    text = f"{shown(path)}: the file cannot be read: {lines[0]}"
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
                        f"{shown(self.path)}: expected {len(view)} more bytes at {offset}, found "
                        "the end of the file: it is cut short"
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
