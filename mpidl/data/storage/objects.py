"""Read objects whole or by byte ranges, and in advance, with the same methods as local files."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from mpidl.data.storage import disk_cache, settings
from mpidl.data.storage.store import store_of
from mpidl.errors import UserError
from mpidl.files import RawFile, Stamp
from mpidl.text import printable

GAP = 64 << 10  # ranges are read by one request if the gap between them has at most this size
MAX_SPAN = 4 << 20  # maximum number of bytes of a request that reads several ranges
BLOCK = 256 << 10  # size in bytes of a block of a `ByteStream`
MAX_BLOCKS = 64  # number of blocks that a `ByteStream` keeps
PIECE = 8 << 20  # bytes per request of a copy to --cache-dir


class CollectorPause:
    """A context manager that pauses Python's garbage collector while a thread is in its block."""

    def __init__(self) -> None:
        self._lock, self._threads, self._was_enabled = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads and self._was_enabled:
                gc.enable()


PAUSE = CollectorPause()


class Span(NamedTuple):
    """The bytes of an object from `start` to `stop` - 1."""

    url: str
    stamp: Stamp
    start: int
    stop: int


class Fetch:
    """A background request for the bytes of a Span.

    When the last reference to a Fetch is deleted, its request is cancelled.
    """

    def __init__(self, span: Span):
        self.span, self._future = span, None
        is_whole = (span.start, span.stop) == (0, span.stamp.size)
        self._path = disk_cache.path_of(span.url, span.stamp) if is_whole else None
        # If the bytes are on disk, the thread that needs them reads them: a task would not be
        # faster.
        if self._path is None or not os.path.exists(self._path):
            self._future = self._request()

    def _request(self) -> Future[bytes]:
        store = store_of(self.span.url)
        return store.start(_read(store, self.span, self._path))

    def result(self) -> bytes:
        """Wait for the bytes and return them.

        Raises UserError if the object is missing, cannot be read, or has changed. Raises
        StorageFault if the store does not answer in time.
        """
        if self._future is None and self._path is not None:
            content = disk_cache.read(self._path, self.span.stamp.size)
            if content is not None:
                return content
        if self._future is None:
            self._future = self._request()  # the file in the cache is damaged
        return self._future.result()

    def has_failed(self) -> bool:
        """Return whether the request has failed."""
        future = self._future
        return future is not None and future.done() and future.exception() is not None

    def __del__(self):
        future = getattr(self, "_future", None)
        if future is not None:
            future.cancel()


async def _read(store, span, path):
    content = await store.read(*span)
    if path is not None:
        disk_cache.write(path, content)
    return content


def request(url: str, stamp: Stamp) -> Fetch:
    """Request all bytes of an object."""
    return Fetch(Span(url, stamp, 0, stamp.size))


class ReadAhead:
    """The active requests of a datastore, by a key such as the index of an image.

    This object holds only weak references: a request is cancelled unless the caller of `start`
    keeps it.
    """

    def __init__(self) -> None:
        self._fetches: weakref.WeakValueDictionary[Hashable, Fetch] = weakref.WeakValueDictionary()

    def start(
        self, keys: Iterable[Hashable], request: Callable[[list[Any]], dict[Any, Fetch]]
    ) -> list[Fetch]:
        """Return one Fetch per key. ``request(keys)`` returns them for keys without a request."""
        keys = list(keys)
        fetches = {key: fetch for key in keys if (fetch := self._fetches.get(key)) is not None}
        fetches = {key: fetch for key, fetch in fetches.items() if not fetch.has_failed()}
        fresh = request([key for key in keys if key not in fetches])
        self._fetches.update(fresh)
        fetches.update(fresh)
        return [fetches[key] for key in keys]


class RemoteFile:
    """An object that is read by byte offset, with the methods of `files.RawFile`.

    It must have the expected Stamp whenever it is read. With `--cache-dir`, the first call of
    `check` copies the object to that folder, once per node.
    """

    def __init__(self, url: str, expected: Stamp):
        self.url, self.expected = url, expected
        self._pending, self._lock = ReadAhead(), threading.Lock()
        self._copy: RawFile | None = None

    def check(self) -> None:
        """Copy the object to `--cache-dir`, if set. Otherwise, requests check the Stamp."""
        path = disk_cache.path_of(self.url, self.expected, ".file")
        if path is None:
            return
        with self._lock:
            if self._copy is None:
                disk_cache.bring_over(path, self.expected.size, self._write_copy)
                status = os.stat(path)
                copy = RawFile(path, Stamp(status.st_size, status.st_mtime_ns))
                copy.check()
                self._copy = copy

    def _write_copy(self, descriptor):
        size, depth = self.expected.size, settings.current().requests
        spans = [self._span(offset, min(offset + PIECE, size)) for offset in range(0, size, PIECE)]
        fetches = [Fetch(span) for span in spans[:depth]]
        for i, span in enumerate(spans):
            if i + depth < len(spans):
                fetches.append(Fetch(spans[i + depth]))
            view, offset = memoryview(fetches.pop(0).result()), span.start
            while view:
                count = os.pwrite(descriptor, view, offset)
                view, offset = view[count:], offset + count

    def _span(self, start, stop):
        return Span(self.url, self.expected, start, stop)

    def read_ahead(self, offsets: np.ndarray, nbytes: int | np.ndarray) -> list[Fetch]:
        """Request `nbytes` bytes starting at each offset, and return the requests.

        `nbytes` is one number for all offsets, or one number per offset.
        """
        if settings.current().cache_dir is not None or not np.all(nbytes):
            return []
        return self._start(offsets, nbytes)

    def read_range(self, offset: int, size: int) -> bytes:
        """Return `size` bytes starting at `offset`."""
        if self._copy is not None:
            return self._copy.read_range(offset, size)
        (fetch,) = self._start(np.array([offset]), size)
        start = offset - fetch.span.start
        return fetch.result()[start : start + size]

    def _start(self, offsets, nbytes):
        """Return one Fetch per offset. Offsets that are close together share a Fetch."""
        sizes = np.broadcast_to(nbytes, np.shape(offsets))
        ranges = list(zip(np.asarray(offsets).tolist(), sizes.tolist(), strict=True))

        def request(keys):
            fetches: dict[tuple[int, int], Fetch] = {}
            for start, stop, members in _joined(sorted(keys)):
                fetches.update(dict.fromkeys(members, Fetch(self._span(start, stop))))
            return fetches

        return self._pending.start(ranges, request)

    def read_rows(self, rows: np.ndarray, offsets: np.ndarray) -> None:
        """Fill each row of a C-ordered array with the bytes that start at the row's offset."""
        nbytes = rows.nbytes // max(len(rows), 1)
        if not nbytes:
            return
        if int(np.max(offsets)) + nbytes > self.expected.size:
            raise UserError(
                f"{printable(self.url)}: expected {nbytes} bytes at {int(np.max(offsets))}, found "
                "the end of the file: it is truncated"
            )
        if self._copy is not None:
            self._copy.read_rows(rows, offsets)
            return
        flat = rows.reshape(len(rows), -1).view(np.uint8)
        for row, offset, fetch in zip(flat, offsets, self._start(offsets, nbytes), strict=True):
            row[:] = np.frombuffer(fetch.result(), np.uint8, nbytes, int(offset) - fetch.span.start)


def _joined(ranges):
    """Join sorted ranges (offset, size) that are close together. Yield (start, stop, ranges)."""
    members, stop = [], 0
    for offset, size in ranges:
        if members and (offset - stop > GAP or offset + size - members[0][0] > MAX_SPAN):
            yield members[0][0], stop, members
            members, stop = [], 0
        members.append((offset, size))
        stop = max(stop, offset + size)
    if members:
        yield members[0][0], stop, members


class ByteStream(io.RawIOBase):
    """An object in the form of a Python file, for the HDF5 library.

    The stream caches blocks of the object, because the library reads the descriptions of datasets
    in small pieces. If `--cache-dir` holds a copy of the object, the stream reads the copy.
    """

    def __init__(self, url: str, stamp: Stamp):
        self.file, self.position = remote_file(url, stamp), 0
        self._block = functools.lru_cache(MAX_BLOCKS)(self._read_block)
        self._provided = threading.local()

    def __repr__(self) -> str:  # `h5py.File.filename`, which messages contain
        return self.file.url

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self.position}.get(whence, self.file.expected.size)
        self.position = origin + offset
        return self.position

    @contextlib.contextmanager
    def in_hdf5(self) -> Iterator[None]:
        """Pause Python's garbage collector while the HDF5 library reads from this file.

        h5py holds a lock while it waits for the event loop's thread. If the garbage collector ran
        in that thread and deleted an h5py object, it would need the same lock, and both threads
        would wait forever.
        """
        with PAUSE:
            # Wait for a collection that has already started in the event loop's thread.
            store_of(self.file.url).wait_for_loop()
            yield

    def give(self, spans: list[tuple[int, bytes]]) -> None:
        """Store parts (offset, bytes) of the object for the next reads in this thread."""
        self._provided.spans = spans

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        start = self.position
        stop = min(start + len(view), self.file.expected.size)
        for offset, content in getattr(self._provided, "spans", ()):
            if offset <= start and stop <= offset + len(content):
                view[: stop - start] = content[start - offset : stop - offset]
                break
        else:
            for offset in range(start - start % BLOCK, stop, BLOCK):
                first, last = max(offset, start), min(offset + BLOCK, stop)
                block = self._block(offset)
                view[first - start : last - start] = block[first - offset : last - offset]
        self.position = max(start, stop)
        return max(0, stop - start)

    def _read_block(self, offset):
        return self.file.read_range(offset, min(BLOCK, self.file.expected.size - offset))


@functools.lru_cache(16)
def remote_file(url: str, stamp: Stamp) -> RemoteFile:
    """Return the RemoteFile of the version of an object that has the given Stamp."""
    return RemoteFile(url, stamp)
