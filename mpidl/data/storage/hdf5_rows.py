"""Read rows of HDF5 files in object stores with many concurrent requests.

The HDF5 library reads one part of a file after the other. Therefore, the bytes of all chunks are
requested before the library reads the chunks. Datasets without chunks are read without the library,
because the offsets of their rows are known.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from mpidl.data.storage.objects import ByteStream

if TYPE_CHECKING:
    import h5py


class RemoteRows:
    """The rows of a dataset in an object store, for one call of `hdf5.read_rows`.

    `stored` is a dataset in a file that was opened from `stream`.
    """

    def __init__(self, stored: h5py.Dataset, indices: np.ndarray, stream: ByteStream):
        self.stored, self.stream = stored, stream
        self._offset = stored.id.get_offset()  # None if the dataset has chunks
        self._row_bytes = int(np.prod(stored.shape[1:])) * stored.dtype.itemsize
        if self._offset is not None:
            self._fetches = stream.file.read_ahead(self._places(indices), self._row_bytes)
        elif stored.chunks and (chunks := self._chunks(indices)):
            fetches = stream.file.read_ahead(*np.array(chunks).T)
            parts = {fetch.span.start: fetch for fetch in fetches}  # close chunks share a request
            stream.give([(start, fetch.result()) for start, fetch in parts.items()])

    def take(self, members: np.ndarray) -> np.ndarray:
        """Return the rows with the given ascending indices, like ``stored[members]``."""
        first, last = int(members[0]), int(members[-1])
        if self._offset is None:
            return self.stored[first : last + 1][members - first]
        rows = np.empty((len(members), *self.stored.shape[1:]), self.stored.dtype)
        self.stream.file.read_rows(rows, self._places(members))
        return rows

    def close(self) -> None:
        """Free the bytes of the chunks."""
        self.stream.give([])

    def _places(self, indices):
        return self._offset + indices * self._row_bytes

    def _chunks(self, indices):
        """Return (offset in the file, size) of every chunk that contains any of the rows."""
        shape, sides = self.stored.shape, self.stored.chunks
        first_rows = np.unique(indices // sides[0]) * sides[0]
        other_starts = [range(0, n, side) for n, side in zip(shape[1:], sides[1:], strict=True)]
        infos = (
            self.stored.id.get_chunk_info_by_coord(tuple(map(int, corner)))
            for corner in itertools.product(first_rows, *other_starts)
        )
        return [(info.byte_offset, info.size) for info in infos if info.byte_offset is not None]
