"""Cache decoded images in shared memory, once per node."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.data.checks import read_images, read_targets
from mpidl.data.datastore import Datastore, Derived, Indices

GIB = 1 << 30


class NodeCache(Derived):
    """A datastore that reads each image of another datastore once per node and caches it.

    The cache holds the first images of the datastore, as many as fit into the budget. If the
    datastore has targets, the cache also holds the targets. The remaining images are read each
    time. A datastore that is already in memory is not cached. Creating a cache is collective over
    `world`.

    Parameters
    ----------
    datastore : Datastore
        The images.
    world : World, optional
        The ranks that share the cache. By default, the cache is private to this rank.
    budget_bytes : int
        Maximum size of the cache per node in bytes. If there is a world, the cache also uses at
        most half of the free shared memory, which may be small in a container.
    """

    is_checked = True  # the functions that fill the tables check the images

    def __init__(self, datastore: Datastore, world: Any = None, budget_bytes: int = GIB):
        super().__init__(datastore)
        self.in_memory, self.preprocess = datastore.in_memory, datastore.preprocess
        tables: list = [(self.image_shape, self.dtype, read_images)]
        if self.targets_shape is not None:
            tables.append((self.targets_shape, self.targets_dtype, read_targets))
        size = sum(int(np.prod(shape)) * dtype.itemsize + 1 for shape, dtype, _ in tables)
        if world is not None:
            budget_bytes = min(budget_bytes, world.available_shared_bytes() // 2)
        fits = 0 if datastore.in_memory else max(0, int(budget_bytes) // size)
        self.capacity: int = min(len(datastore), fits)  # number of images in the cache
        self.tables = [
            _Table(datastore, read, shape, dtype, self.capacity, world)
            for shape, dtype, read in tables
        ]
        self.world = world

    def close(self) -> None:
        """Free the memory of the cache. Later reads bypass the cache. Collective."""
        self.capacity = 0
        for table in self.tables:
            table.close(self.world)

    def read(self, indices: Indices) -> np.ndarray:
        return self.tables[0].rows(np.asarray(indices, np.int64))

    def targets(self, indices: Indices) -> np.ndarray:
        return self.tables[1].rows(np.asarray(indices, np.int64))

    def array(self) -> np.ndarray | None:
        return self.parent.array()

    def read_ahead(self, indices: Indices) -> object:
        indices = np.asarray(indices, np.int64)
        return self.parent.read_ahead(indices[~self.tables[0].hits(indices)])


class _Table:
    """A cache of the first `capacity` images, or the first targets, of a datastore.

    `read` is the function that reads the images or targets: `read_images` or `read_targets`.
    """

    def __init__(self, datastore, read, shape, dtype, capacity, world):
        self.datastore, self.read, self.shape, self.dtype = datastore, read, shape, dtype
        self.capacity = capacity
        allocate = np.zeros if world is None else world.shared_array
        if capacity:
            self.cache = allocate((capacity, *shape), dtype)
            self.filled = allocate((capacity,), np.uint8)  # whether a row of `cache` is valid
        self._fence = threading.Lock()

    def close(self, world):
        """Free the memory of this table. Collective."""
        if self.capacity and world is not None:
            world.free(self.cache)
            world.free(self.filled)
        self.capacity, self.cache, self.filled = 0, None, None

    def rows(self, indices):
        """Return the images or targets of `indices`, from the cache or from the datastore."""
        if not self.capacity:
            return self.read(self.datastore, indices)
        if len(indices) and indices.min() < 0:
            raise IndexError(f"expected indices from 0, got {indices.min()}")
        hits = self.hits(indices)
        self._order_memory()
        if hits.all():
            return _take_rows(self.cache, indices)
        rows = self.read(self.datastore, indices[~hits])
        if hits.any():
            misses, rows = rows, arenas.to_read((len(indices), *self.shape), self.dtype)
            rows[~hits] = misses
            del misses  # limits memory to two copies of the rows
            rows[hits] = _take_rows(self.cache, indices[hits])
        # Two ranks or threads may fill a row at the same time, but both write the same bytes.
        # Readers test the flag of a row, which is written after the pixels.
        (fresh,) = np.nonzero((indices < self.capacity) & ~hits)
        for i in fresh:
            self.cache[indices[i]] = rows[i]
        self._order_memory()
        self.filled[indices[fresh]] = 1
        return rows

    def hits(self, indices):
        """Return, for each index, whether the cache holds the image or target."""
        hits = indices < self.capacity
        if self.capacity:
            hits[hits] = self.filled[indices[hits]] != 0
        return hits

    def _order_memory(self):
        """Prevent the processor from reordering memory accesses across this call.

        ARM and POWER processors may reorder memory accesses. Releasing and acquiring a lock is the
        only memory fence that Python offers.
        """
        with self._fence:
            pass
        with self._fence:
            pass


def _take_rows(rows, indices):
    """Return ``rows[indices]`` in memory from the arena. The indices must be valid."""
    out = arenas.to_read((len(indices), *rows.shape[1:]), rows.dtype)
    return np.take(rows, indices, 0, out, "clip")  # other modes would buffer a second copy
