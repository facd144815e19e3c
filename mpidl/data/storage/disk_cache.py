"""Cache the bytes of objects in the folder of `--cache-dir`, which the ranks of a node share.

A file's name is a digest of the object's URL and Stamp, so a changed object gets another file. Each
file of a small object ends with a digest of its content. A file that a crash or a full disk has
damaged is therefore not used. Large objects are read by byte ranges and stored without a digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

from mpidl.data.storage import settings
from mpidl.errors import UserError
from mpidl.files import Stamp, digest
from mpidl.text import printable

DIGEST = 16  # size in bytes of the digest at the end of a small file


def path_of(url: str, stamp: Stamp, suffix: str = "") -> str | None:
    """Return the path of an object's file in the cache, or None without `--cache-dir`."""
    folder = settings.current().cache_dir
    if folder is None:
        return None
    name = digest("object", url, settings.current().endpoint_url, *stamp)
    return os.path.join(folder, name[:2], name[2:40] + suffix)


def read(path: str, size: int) -> bytes | None:
    """Return the content of a small object, or None if its file is missing or damaged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # twice as fast as a Python file
        try:
            data = os.read(descriptor, size + DIGEST + 1)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    content = data[:size]
    return content if data[size:] == _digest(content) else None


def write(path: str, content: bytes) -> None:
    """Write the content of a small object to the cache, completely or not at all.

    If writing fails, for example on a full disk, this rank prints a warning and caches no more
    objects.
    """
    if settings.ACCESS.cache_is_full:
        return
    try:
        with _temporary_file(path) as file:
            file.write(content + _digest(content))
    except OSError as error:
        settings.ACCESS.cache_is_full = True
        print(
            f"mpidl: warning: --cache-dir {printable(settings.current().cache_dir or '')}: "
            f"{error.strerror or error}: this rank caches no more objects",
            file=sys.stderr,
            flush=True,
        )


def bring_over(path: str, size: int, copy: Callable[[int], None]) -> None:
    """Copy a large object of `size` bytes to the cache, unless the node already has a copy.

    Other ranks that need the copy wait until one rank has written it with `copy(descriptor)`.
    Raises UserError if the file cannot be written.
    """
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.lock", "w") as lock:
            with contextlib.suppress(OSError):  # without file locks, every rank writes the copy
                fcntl.flock(lock, fcntl.LOCK_EX)
                for part in glob.glob(f"{glob.escape(path)}.*.part"):  # left by killed processes
                    os.unlink(part)
            if not (os.path.exists(path) and os.path.getsize(path) == size):
                with _temporary_file(path) as file:
                    copy(file.fileno())
                    file.flush()
                    os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"--cache-dir {printable(settings.current().cache_dir or '')}: cannot be written: "
            f"{error.strerror or error}"
        ) from None


@contextlib.contextmanager
def _temporary_file(path: str) -> Iterator:
    """Open a temporary file, and rename it to `path` at the end of the `with` block.

    Unlike with `files.write_whole`, several ranks may write the same file at the same time.
    """
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    descriptor, part = tempfile.mkstemp(".part", f"{name}.", folder)
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _digest(content):
    return hashlib.sha256(content).digest()[:DIGEST]
