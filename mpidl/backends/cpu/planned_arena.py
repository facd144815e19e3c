"""Allocate the large arrays of a training step at planned addresses.

Best fit alone would fragment the memory: gradients, which are needed until the update, take the
place of activations, and then no large array fits between them. Therefore, the Python code of the
step first runs without kernels, with a `Lifetimes` arena. It records when each large array is
allocated and freed. `memory_plan` computes an address for each of these arrays, and a
`PlannedArena` allocates the arrays of the step at these addresses.
"""

import bisect
import collections
import mmap
from typing import NamedTuple

import numpy as np

from mpidl.backends import memory_plan
from mpidl.backends.cpu.arenas import Arena

PLANNED = 1 << 18  # smallest size in bytes of the arrays that have planned addresses


class Plan(NamedTuple):
    """Places of the large arrays of a training step.

    Attributes
    ----------
    places : list of (int, int)
        Size and offset in bytes of each array, in the order of their allocation.
    nbytes : int
        The number of bytes that all places need together.
    """

    places: list[tuple[int, int]]
    nbytes: int


class Lifetimes(Arena):
    """An arena that records when large arrays are allocated and freed.

    The step must not write to many of the arrays, because the arena reuses memory only by best fit.
    """

    def __init__(self):
        super().__init__(_small_pages, smallest=0)
        self._time, self._lives, self._alive = 0, [], {}  # [size, first time, last time] of arrays

    def _allocate(self, size):
        address = super()._allocate(size)
        self._time += 1
        if size >= PLANNED:
            self._alive[address] = [size, self._time, None]
            self._lives.append(self._alive[address])
        return address

    def _give_back(self, address, size):
        super()._give_back(address, size)
        if size >= PLANNED:
            self._alive.pop(address)[2] = self._time

    def plan(self):
        """Return a Plan for the arrays so far. Arrays that are not freed keep their places."""
        never = self._time + 1
        lives = [(size, first, last or never) for size, first, last in self._lives]
        offsets, nbytes = memory_plan.place(lives)
        return Plan(
            [(life[0], offset) for life, offset in zip(lives, offsets, strict=True)], nbytes
        )


def _small_pages(size):
    """Allocate a region from the system that uses memory only for the pages that are written."""
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return region, np.frombuffer(region, np.uint8).ctypes.data, size


class PlannedArena(Arena):
    """An arena that allocates the arrays of a training step at the addresses of a plan.

    If an array is not in the plan, or if another array still uses its place, the array gets other
    memory by best fit. Small arrays have separate memory, so that they never use planned places.
    """

    def __init__(self):
        super().__init__(smallest=0)
        self._small = Arena(smallest=0)
        self._start, self._nbytes = 0, 0  # memory for planned places: address and size
        self._places = {}

    def follow(self, plan):
        """Give the next arrays the places of a plan: the n-th array of a size its n-th place.

        Parameters
        ----------
        plan : Plan or None
            The plan. If None, or if the plan needs more memory than an earlier plan, the arrays
            have no planned places.
        """
        self._places = {}
        if plan is None or not plan.nbytes:
            return
        with self.lock:
            if not self._nbytes:
                self._grow(plan.nbytes)
                self._start, self._nbytes = self.free.pop()
                self._give_back(self._start, self._nbytes)
        if plan.nbytes <= self._nbytes:
            for size, offset in plan.places:
                places = self._places.setdefault(size, collections.deque())
                places.append(self._start + offset)

    def _allocate(self, size):
        if size < PLANNED:
            return self._small._allocate(size)
        places = self._places.get(size)
        if places and self._cut(address := places.popleft(), size):
            return address
        return super()._allocate(size)

    def _cut(self, address, size):
        """Allocate `size` bytes at this address. Return False if they are not free."""
        i = bisect.bisect(self.free, (address, 1 << 62)) - 1
        if i < 0:
            return False
        start, room = self.free[i]
        if start + room < address + size:
            return False
        pieces = (start, address - start), (address + size, start + room - address - size)
        self.free[i : i + 1] = [piece for piece in pieces if piece[1]]
        return True

    def _give_back(self, address, size):
        if size < PLANNED:
            self._small._give_back(address, size)
        else:
            super()._give_back(address, size)
