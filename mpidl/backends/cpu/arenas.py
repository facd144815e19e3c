"""Allocate arrays in arenas: large regions of memory that successive training steps reuse.

One arena holds all activations. Another arena holds the pixels that threads read from files. Each
queue has an arena for its mini-batches. Every training step allocates the same arrays in the same
order. Therefore, arrays get the same addresses in every step, and the system provides no new pages
after the first step. Regions use huge pages if the system supports them. The memory of an array
returns to its arena when the last reference to the array is gone.
"""

import bisect
import collections
import contextlib
import ctypes
import mmap
import os
import threading

import numpy as np

LINE = 64  # bytes of a cache line
HUGE = 2 << 20  # bytes of a huge page
REGION = 32 << 20  # smallest region to request from the system, in bytes
SMALL = 1 << 14  # bytes; arrays below this size use NumPy's allocator
LARGE = 32 << 20  # bytes; malloc returns freed blocks above this size to the system


class Arena:
    """A best-fit allocator that merges adjacent free blocks of memory.

    The gradients and the updated values of the largest learnables use the same memory, one after
    the other. A first-fit allocator would place small arrays in this memory and fragment it. When
    an arena has been deleted and no array uses its memory any more, its regions are released.
    `region(nbytes)` allocates a region of at least nbytes and returns (owner, first address, size
    in bytes). `smallest` is the smallest size of arrays that `empty` allocates in this arena, and
    `owned` the addresses of the arrays that a training step in this memory may update in place.
    """

    owned: frozenset[int] = frozenset()

    def __init__(self, region=None, smallest=SMALL):
        self.region, self.smallest = region or _of_the_system, smallest
        self.regions, self.free = [], []  # `free`: a sorted list of (address, bytes)
        self.lock = threading.Lock()
        # Finalizers of arrays append to this queue, because their thread may already hold the lock.
        self.returned = collections.deque()
        self.bytes = 0

    def take(self, size):
        """Allocate `size` bytes, a multiple of LINE, and return their address."""
        with self.lock:
            while self.returned:
                self._give_back(*self.returned.popleft())
            return self._allocate(size)

    def _allocate(self, size):
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
                f"cannot allocate {size >> 20} MiB of memory in addition to {self.bytes >> 20} "
                f"MiB: {error.strerror}"
            ) from error
        self.regions.append(owner)
        self.bytes += size
        self.free.append((address, size))  # unsorted: the caller removes this last entry at once

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
    """Allocate a region from the system, with huge pages if the system supports them."""
    region = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # the operating system has no huge pages
    address = np.frombuffer(region, np.uint8).ctypes.data
    return region, address + -address % HUGE, size


_activations, _reading = Arena(), Arena()
_local = threading.local()  # its `arena` replaces the arena of activations in a thread


def _of_activations():
    return getattr(_local, "arena", _activations)


def _forked():
    """Replace the locks in a forked child, because threads of the parent may have held them."""
    for arena in _activations, _reading, _of_activations():
        arena.lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


class _Place:
    """The owner of an array's memory. When the owner is deleted, the arena gets the memory back.

    NumPy reads `__array_interface__` and keeps this object alive as long as the array.
    """

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


@contextlib.contextmanager
def through(arena):
    """Allocate this thread's activations in the given arena within the `with` block."""
    before, _local.arena = _of_activations(), arena
    try:
        yield
    finally:
        _local.arena = before


def address_of(array):
    """Return the address of an array's first element."""
    if array.size and array.flags.writeable and array.flags.c_contiguous:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # four times as fast
    return array.ctypes.data


def may_update(arrays):
    """Return whether the current training step may update all these arrays in place."""
    owned = _of_activations().owned
    return bool(owned) and all(address_of(array) in owned for array in arrays)


def empty(shape, dtype=np.float32, arena=None):
    """Return an uninitialized array from an arena, aligned to 64 bytes.

    The arena of activations is the default. Arrays that are too small for the arena come from
    NumPy's allocator.
    """
    dtype, arena = np.dtype(dtype), arena or _of_activations()
    size = dtype.itemsize
    for n in shape:
        size *= n
    if size < arena.smallest:
        return np.empty(shape, dtype)
    size = max(-(-size // LINE), 1) * LINE
    shape = tuple(int(n) for n in shape)
    return np.asarray(_Place(shape, dtype, arena, arena.take(size), size))


def to_read(shape, dtype):
    """Return an uninitialized array into which a thread reads the pixels of a few blocks.

    All threads share one arena, because malloc would reserve separate memory for each thread.
    """
    large = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize > LARGE
    return np.empty(shape, dtype) if large else empty(shape, dtype, _reading)


def reserved():
    """Return the size in bytes of the arena for activations, including its free memory."""
    return _activations.bytes
