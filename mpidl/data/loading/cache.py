"""Decoded images, kept once for all ranks of a node."""

import threading

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.data.datastore import Datastore, read_images, read_targets

GIB = 1 << 30


class NodeCache(Datastore):
    """Another datastore whose images are read and decoded once per node, as far as memory goes.

    The first images by index are kept, as many as fit in `budget_bytes` of memory a node, with
    their targets where the set has any; the others are read anew each time. It takes half of the
    room for shared memory at most (which may be little in a container). A datastore that lies in
    memory is passed through. Making one is collective over `world` (None: one rank).
    """

    def __init__(self, datastore, world=None, budget_bytes=GIB):
        self.datastore = datastore
        self.image_shape, self.dtype = datastore.image_shape, datastore.dtype
        self.classes, self.labels = datastore.classes, datastore.labels
        self.preprocess = datastore.preprocess
        self.targets_shape, self.targets_dtype = datastore.targets_shape, datastore.targets_dtype
        tables: list = [(self.image_shape, self.dtype, read_images)]
        if self.targets_shape is not None:
            tables.append((self.targets_shape, self.targets_dtype, read_targets))
        size = sum(int(np.prod(shape)) * dtype.itemsize + 1 for shape, dtype, _ in tables)
        if world is not None:
            budget_bytes = min(budget_bytes, world.available_shared_bytes() // 2)
        fits = 0 if datastore.in_memory else max(0, int(budget_bytes) // size)
        self.capacity = min(len(datastore), fits)
        self.tables = [
            _Table(datastore, read, shape, dtype, self.capacity, world)
            for shape, dtype, read in tables
        ]
        self.world = world

    def close(self):
        """Give the memory back; the images are read anew from then on. Collective."""
        self.capacity = 0
        for table in self.tables:
            table.close(self.world)

    def __len__(self):
        return len(self.datastore)

    def read(self, indices):
        return self.tables[0].rows(np.asarray(indices, np.int64))

    def targets(self, indices):
        return self.tables[1].rows(np.asarray(indices, np.int64))

    def name(self, i):
        return self.datastore.name(i)

    def located(self, i):
        return self.datastore.located(i)

    def describe(self):
        return self.datastore.describe()

    def fingerprint(self):
        return self.datastore.fingerprint()


class _Table:
    """The images of a datastore, or its targets, of which the first `capacity` are kept."""

    def __init__(self, datastore, read, shape, dtype, capacity, world):
        self.datastore, self.read, self.shape, self.dtype = datastore, read, shape, dtype
        self.capacity = capacity
        allocate = np.zeros if world is None else world.shared_array
        if capacity:
            self.kept = allocate((capacity, *shape), dtype)
            self.there = allocate((capacity,), np.uint8)
        self._fence = threading.Lock()

    def close(self, world):
        if self.capacity and world is not None:
            world.free(self.kept)
            world.free(self.there)
        self.capacity, self.kept, self.there = 0, None, None

    def rows(self, indices):
        if not self.capacity:
            return self.read(self.datastore, indices)
        if len(indices) and indices.min() < 0:
            raise IndexError(f"expected indices from 0, got {indices.min()}")
        (cached,) = np.nonzero(indices < self.capacity)
        known = np.zeros(len(indices), bool)
        known[cached] = self.there[indices[cached]] != 0
        self._order_memory()
        if known.all():
            return _taken(self.kept, indices)
        found = self.read(self.datastore, indices[~known])
        if known.any():
            read, found = found, arenas.to_read((len(indices), *self.shape), self.dtype)
            found[~known] = read
            del read  # there are two copies at most
            found[known] = _taken(self.kept, indices[known])
        # Two ranks, or two threads, may be filling the same place. No harm comes of it: they write
        # the same bytes, decoded from the same file, so whoever wins, or half wins, the place ends
        # up right. A reader looks at the flag first, and the flag is written after the pixels.
        fresh = cached[~known[cached]]
        for i in fresh:
            self.kept[indices[i]] = found[i]
        self._order_memory()
        self.there[indices[fresh]] = 1
        return found

    def _order_memory(self):
        """Keep the processor from moving accesses across this point, as ARM's and POWER's may.

        Giving back and taking a lock does that; Python has no fence of its own.
        """
        with self._fence:
            pass
        with self._fence:
            pass


def _taken(rows, indices):
    """rows[indices], of indices that are there."""
    found = arenas.to_read((len(indices), *rows.shape[1:]), rows.dtype)
    return np.take(rows, indices, 0, found, "clip")  # another mode would make a second copy
