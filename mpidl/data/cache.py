"""Decoded images, kept once for all ranks of a node."""

import threading

import numpy as np

from mpidl.data.datastore import Datastore

GIB = 1 << 30


class NodeCache(Datastore):
    """Another datastore whose images are read and decoded once per node, as far as memory goes.

    The first images by index are kept, as many as fit in `budget_bytes` of memory a node; the
    others are read anew each time. It takes half of the room for shared memory at most (which may
    be little in a container). A datastore that lies in memory is passed through. Making one is
    collective over `world` (None: one rank).
    """

    def __init__(self, datastore, world=None, budget_bytes=GIB):
        self.datastore = datastore
        self.image_shape, self.dtype = datastore.image_shape, datastore.dtype
        self.classes, self.labels = datastore.classes, datastore.labels
        size = int(np.prod(self.image_shape)) * self.dtype.itemsize + 1
        if world is not None:
            budget_bytes = min(budget_bytes, world.shared_room() // 2)
        fits = 0 if datastore.in_memory else max(0, int(budget_bytes) // size)
        self.capacity = min(len(datastore), fits)
        allocate = np.zeros if world is None else world.shared_array
        if self.capacity:
            self.pixels = allocate((self.capacity, *self.image_shape), self.dtype)
            self.there = allocate((self.capacity,), np.uint8)
        self._fence = threading.Lock()
        self.world = world

    def close(self):
        """Give the memory back; the images are read anew from then on. Collective."""
        if self.capacity and self.world is not None:
            self.world.free(self.pixels)
            self.world.free(self.there)
        self.capacity, self.pixels, self.there = 0, None, None

    def __len__(self):
        return len(self.datastore)

    def read(self, indices):
        indices = np.asarray(indices, np.int64)
        if not self.capacity:
            return self.datastore.read(indices)
        (cached,) = np.nonzero(indices < self.capacity)
        known = np.zeros(len(indices), bool)
        known[cached] = self.there[indices[cached]] != 0
        self._order_memory()
        if known.all():
            return self.pixels[indices]
        images = np.empty((len(indices), *self.image_shape), self.dtype)
        images[known] = self.pixels[indices[known]]
        images[~known] = self.datastore.read(indices[~known])
        # Two ranks, or two threads, may be filling the same place. No harm comes of it: they write
        # the same bytes, decoded from the same file, so whoever wins, or half wins, the place ends
        # up right. A reader looks at the flag first, and the flag is written after the pixels.
        fresh = cached[~known[cached]]
        self.pixels[indices[fresh]] = images[fresh]
        self._order_memory()
        self.there[indices[fresh]] = 1
        return images

    def name(self, i):
        return self.datastore.name(i)

    def describe(self):
        return self.datastore.describe()

    def fingerprint(self):
        return self.datastore.fingerprint()

    def _order_memory(self):
        """Keep the processor from moving accesses across this point, as ARM's and POWER's may.

        Giving back and taking a lock does that; Python has no fence of its own.
        """
        with self._fence:
            pass
        with self._fence:
            pass
