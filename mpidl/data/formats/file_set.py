"""Read byte ranges from several files or objects, such as the shards of a packed set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpidl.data.urls import is_remote
from mpidl.files import RawFile, Stamp

if TYPE_CHECKING:
    from mpidl.data.storage.objects import Fetch, RemoteFile

MAX_OPEN = 256  # with more files, each call opens and closes the files that it needs


def open_raw(path: str, stamp: Stamp) -> RawFile | RemoteFile:
    """Open a local file or an object for reading by byte offset."""
    if not is_remote(path):
        return RawFile(path, stamp)
    from mpidl.data.storage.objects import remote_file

    return remote_file(path, stamp)


class FileSet:
    """A sequence of files whose bytes are read by file number and offset.

    Each file is opened on first use, and must have its Stamp whenever it is read.
    """

    def __init__(self, paths: Sequence[str], stamps: Sequence[Stamp]):
        self._files = [open_raw(path, now) for path, now in zip(paths, stamps, strict=True)]

    @property
    def is_remote(self) -> bool:
        """Whether the files are objects in a store."""
        return not isinstance(self._files[0], RawFile)

    def _opened(self, number):
        """Check a file and return it."""
        file = self._files[number]
        if len(self._files) > MAX_OPEN and isinstance(file, RawFile):
            file = RawFile(file.path, file.expected)  # closes when the caller drops its reference
        file.check()
        return file

    def _runs(self, files):
        """Yield (file, start, stop) for each run of consecutive ranges in one file."""
        opened: dict[int, RawFile | RemoteFile] = {}
        edges = [0, *(np.nonzero(np.diff(files))[0] + 1), len(files)]
        for start, stop in zip(edges[:-1], edges[1:], strict=True):
            if start < stop:
                number = int(files[start])
                if number not in opened:
                    opened[number] = self._opened(number)
                yield opened[number], start, stop

    def read_ahead(self, files: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> list[Fetch]:
        """Request byte ranges of objects, and return the requests, or [] for local files."""
        if not self.is_remote:
            return []
        fetches = []
        for number in np.unique(files).tolist():
            mask = files == number
            fetches += self._files[number].read_ahead(offsets[mask], sizes[mask])
        return fetches

    def read_rows(self, rows: np.ndarray, files: np.ndarray, offsets: np.ndarray) -> None:
        """Fill each row of a C-ordered array with bytes that start at an offset of a file."""
        sizes = np.full(len(files), rows.nbytes // max(len(rows), 1))
        fetches = self.read_ahead(files, offsets, sizes)  # of all files, before the first read
        for file, start, stop in self._runs(files):
            file.read_rows(rows[start:stop], offsets[start:stop])
        del fetches

    def read_ranges(self, files: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> list[bytes]:
        """Return the bytes of each range. Sizes may differ."""
        fetches, ranges = self.read_ahead(files, offsets, sizes), list[bytes]()
        for file, start, stop in self._runs(files):
            places = zip(offsets[start:stop].tolist(), sizes[start:stop].tolist(), strict=True)
            ranges += [file.read_range(offset, size) for offset, size in places]
        del fetches
        return ranges
