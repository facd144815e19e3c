"""Functions that data formats use to inspect and read both local paths and URLs.

Inside a ``with listed(url)`` block, one listing of the store answers all queries about this URL and
the objects below it. The first query requests the listing. Only rank 0 calls these functions, and
the formats broadcast the results.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from mpidl.data.urls import check_url, is_remote
from mpidl.errors import StorageFault, UserError
from mpidl.files import Stamp, check_regular, open_regular, stamp, unreadable
from mpidl.text import printable


class Entry(NamedTuple):
    """An object or a sub-folder in a remote folder, with the methods of os.DirEntry."""

    name: str
    path: str
    stamp: Stamp | None  # None for a folder

    def is_dir(self) -> bool:
        return self.stamp is None


class Listing:
    """The objects below a URL, as a tree of folders."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.contents: dict[str, bytes] = {}  # contents of objects that `read_whole` has read
        self._folders: dict[str, dict[str, Stamp | None]] | None = None
        self._self: Stamp | None = None

    def contains(self, url: str) -> bool:
        """Return whether a URL is the URL of this listing or below it."""
        return url == self.url or url.startswith(self.url + "/")

    def find(self, url: str) -> tuple[Stamp | None, dict[str, Stamp | None] | None]:
        """Return (Stamp of the object, content of the folder) at a URL. Either may be None."""
        if self._folders is None:
            from mpidl.data.storage.store import store_of

            self._folders = self._tree(store_of(self.url).listing(self.url))
        relative = url[len(self.url) + 1 :]
        content = self._folders.get(relative)
        if not relative:
            return self._self, content
        parent, _, name = relative.rpartition("/")
        return self._folders.get(parent, {}).get(name), content

    def _tree(self, stamps):
        """Return {relative folder: {name: Stamp of an object, or None for a folder}}."""
        self._self = stamps.pop("", None)
        folders: dict[str, dict[str, Stamp | None]] = {}
        for path, value in stamps.items():
            parent, _, name = path.rpartition("/")
            is_new = parent not in folders
            folders.setdefault(parent, {})[name] = value
            while is_new and parent:
                parent, _, name = parent.rpartition("/")
                is_new = parent not in folders
                folders.setdefault(parent, {}).setdefault(name, None)
        return folders


_listings: list[Listing] = []


@contextlib.contextmanager
def listed(path: str) -> Iterator[None]:
    """Answer queries about a URL and the objects below it from one listing.

    For a local path, this context manager has no effect.
    """
    path = path.rstrip("/") if is_remote(path) else path
    if not is_remote(path) or any(listing.contains(path) for listing in _listings):
        yield
        return
    listing = Listing(path)
    _listings.append(listing)
    try:
        yield
    finally:
        _listings.remove(listing)


def _listing_of(url):
    """Return the Listing that contains a URL, or None."""
    return next((listing for listing in _listings if listing.contains(url)), None)


def _find(url):
    url = url.rstrip("/")
    return (_listing_of(url) or Listing(url)).find(url)


def is_file(path: str) -> bool:
    """Return whether a path is a file or an object."""
    return _find(path)[0] is not None if is_remote(path) else os.path.isfile(path)


def is_folder(path: str) -> bool:
    """Return whether a path is a folder or the prefix of objects in a store."""
    return _find(path)[1] is not None if is_remote(path) else os.path.isdir(path)


def exists(path: str) -> bool:
    """Return whether a path is a file, a folder, an object or the prefix of objects."""
    return _find(path) != (None, None) if is_remote(path) else os.path.exists(path)


def scan(folder: str) -> list[Entry] | list[os.DirEntry[str]]:
    """Return the entries of a folder."""
    if not is_remote(folder):
        with os.scandir(folder) as entries:
            return list(entries)
    content = _find(folder)[1] or {}
    return [Entry(name, os.path.join(folder, name), value) for name, value in content.items()]


def stamp_of(path: str) -> Stamp:
    """Return the Stamp of a file or an object.

    Raises UserError if the object does not exist. Raises OSError if the path is not a regular file.
    """
    if not is_remote(path):
        check_regular(status := os.stat(path))
        return stamp(status)
    from mpidl.data.storage.store import store_of

    listing = _listing_of(path)
    now = store_of(path).stamp(path) if listing is None else listing.find(path)[0]
    if now is None:
        raise unreadable(path, FileNotFoundError())
    return now


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert any error of a reader in the `with` block to a UserError that names the file.

    Readers of damaged files raise exceptions of many types, such as KeyError and MemoryError.
    """
    try:
        yield
    except (UserError, StorageFault):
        raise
    except Exception as e:
        raise unreadable(path, e) from None


def open_binary(path: str) -> BinaryIO:
    """Open a file for reading, or read an object into memory and open the buffer."""
    return io.BytesIO(read_whole(path)) if is_remote(path) else open(open_regular(path)[0], "rb")


def read_whole(url: str) -> bytes:
    """Return all bytes of an object. Inside `listed`, each object is read only once."""
    from mpidl.data.storage.objects import request

    listing = _listing_of(url)
    contents = {} if listing is None else listing.contents
    if url not in contents:
        contents[url] = request(url, stamp_of(url)).result()
    return contents[url]


def head(path: str, count: int) -> bytes:
    """Return the first bytes of a file or an object, at most `count`."""
    if not is_remote(path):
        with open_binary(path) as file:
            return file.read(count)
    now = stamp_of(path)
    return next(heads([path], [now], min(count, now.size))) if now.size else b""


def heads(paths: Sequence[str], stamps: Sequence[Stamp], count: int) -> Iterator[bytes]:
    """Yield the first `count` bytes of files, or of objects, which are requested at once."""
    if not is_remote(paths[0]):
        for path in paths:
            with reading(path):
                yield head(path, count)
        return
    from mpidl.data.storage.objects import Fetch, Span

    spans = [Span(path, now, 0, count) for path, now in zip(paths, stamps, strict=True)]
    for fetch in [Fetch(span) for span in spans]:
        yield fetch.result()


def check_remote(url: str, option: str | None = None) -> None:
    """Raise UserError if a URL has credentials, or if it is neither an object nor a prefix.

    `option` is the command-line option that named the URL.
    """
    check_url(url, option or "URL")
    if not exists(url):
        prefix = f"{option} {printable(url)}" if option else printable(url)
        raise UserError(f"{prefix}: no such object, and no objects below it")
