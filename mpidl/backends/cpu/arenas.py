"""Arenas: large regions of memory that steps reuse.

One arena holds all activations, one the pixels that are being read, and one the mini-batches of
each queue. A step allocates the same arrays in the same order each time: after the first step no
page comes from the system, and every array lies where it lay before. Regions lie on huge pages if
the system offers them. An array returns its memory when the last reference to it is gone.
"""

import bisect
import collections
import mmap
import os
import threading

import numpy as np

LINE = 64  # bytes, a cache line
HUGE = 2 << 20  # bytes of a huge page
REGION = 32 << 20  # bytes, the least to take from the system
SMALL = 1 << 14  # bytes below which NumPy's own allocator does well
LARGE = 32 << 20  # bytes from which malloc returns freed memory to the system


class Arena:
    """An allocator that takes the best fit over its regions and joins free neighbours.

    With first fit, small arrays would cut up the memory that the gradients and new values of the
    largest learnables leave to each other. Regions return to the system with the arena, once the
    last of its arrays is gone.

    Parameters
    ----------
    region : callable, optional
        region(nbytes) returns (owner, first address, bytes) of more memory; from the system by
        default.
    """

    def __init__(self, region=None):
        self.region = region or _of_the_system
        self.regions, self.free = [], []  # free: sorted [(address, bytes)]
        self.lock = threading.Lock()
        self.returned = collections.deque()  # by finalizers, which may run anywhere, lock or not
        self.bytes = 0

    def take(self, size):
        """Return the address of `size` bytes, a multiple of LINE."""
        with self.lock:
            while self.returned:
                self._give_back(*self.returned.popleft())
            fits = [(room, i) for i, (_, room) in enumerate(self.free) if room >= size]
            if fits:
                room, i = min(fits)
                address, _ = self.free[i]
                if room == size:
                    del self.free[i]
                else:
                    self.free[i] = (address + size, room - size)
                return address
            self._grow(size)
            address, room = self.free.pop()
            if room > size:
                bisect.insort(self.free, (address + size, room - size))
            return address

    def _grow(self, size):
        size = -(-max(size, REGION) // HUGE) * HUGE
        try:
            owner, address, size = self.region(size)
        except OSError as error:
            raise MemoryError(
                f"no {size >> 20} MiB more of memory, beside {self.bytes >> 20} MiB: "
                f"{error.strerror}"
            ) from error
        self.regions.append(owner)
        self.bytes += size
        self.free.append((address, size))  # last: take() uses it at once

    def _give_back(self, address, size):
        i = bisect.bisect(self.free, (address, 0))
        if i < len(self.free) and address + size == self.free[i][0]:
            size += self.free.pop(i)[1]
        if i and sum(self.free[i - 1]) == address:
            address, size = self.free[i - 1][0], self.free[i - 1][1] + size
            i -= 1
            del self.free[i]
        self.free.insert(i, (address, size))


def _of_the_system(size):
    """Return a region of the system, on huge pages if it has any."""
    region = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages
    address = np.frombuffer(region, np.uint8).ctypes.data
    return region, address + -address % HUGE, size


_arena, _reading = Arena(), Arena()


def _forked():
    """Replace the locks in a forked child: a thread of the parent may have held them."""
    for arena in _arena, _reading:
        arena.lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


class _Place:
    """Owns the memory of an array; NumPy reads the interface and keeps the owner."""

    __slots__ = ("arena", "address", "size", "__array_interface__")

    def __init__(self, shape, dtype, arena, address, size):
        self.arena, self.address, self.size = arena, address, size
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (self.address, False),
        }

    def __del__(self):
        self.arena.returned.append((self.address, self.size))


def empty(shape, dtype=np.float32, arena=_arena):
    """Return an uninitialized array, aligned to 64 bytes.

    Its memory returns to the arena with the last reference to it. Arrays of less than SMALL bytes
    are NumPy's own.
    """
    dtype = np.dtype(dtype)
    size = dtype.itemsize
    for n in shape:
        size *= n
    if size < SMALL:
        return np.empty(shape, dtype)
    size = -(-size // LINE) * LINE
    shape = tuple(int(n) for n in shape)
    return np.asarray(_Place(shape, dtype, arena, arena.take(size), size))


def to_read(shape, dtype):
    """Return an uninitialized array for pixels that a thread reads, some blocks at a time.

    All threads share one arena; malloc would keep memory for each of them.
    """
    large = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize > LARGE
    return np.empty(shape, dtype) if large else empty(shape, dtype, _reading)


def reserved():
    """Return the bytes that the arena of activations holds, in use or not."""
    return _arena.bytes
