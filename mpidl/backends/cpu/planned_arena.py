"""Allocate the large arrays of a training step at planned addresses.

Best fit alone would fragment the memory: gradients, which are needed until the update, take the
place of activations, and then no large array fits between them. Therefore, a `recorder.Recorder`
plans a place for each large array. Replays use these places, and so do eager computations of the
same mini-batch, whose arrays come from a `PlannedArena` in the same order.
"""

import bisect
import collections

from mpidl.backends.cpu.arenas import Arena

PLANNED = 1 << 18  # smallest size in bytes of the arrays that have planned addresses


class PlannedArena(Arena):
    """The memory of a training step: planned places of large arrays, and small arrays.

    If an array has no place, or if another array still uses its place, the array gets other memory
    by best fit. Small arrays have separate memory, so that they never use planned places. `owned`
    are the addresses of the arrays that the step may update in place.
    """

    def __init__(self, owned=()):
        super().__init__(smallest=0)
        self.owned, self.small = frozenset(owned), Arena(smallest=0)
        self._start, self._nbytes = 0, 0  # memory for planned places: address and size
        self._places = {}

    def reserve(self, nbytes):
        """Return the address of at least nbytes for planned places."""
        if nbytes > self._nbytes:
            with self.lock:
                self._grow(nbytes)
                self._start, self._nbytes = self.free.pop()
                self._give_back(self._start, self._nbytes)
        return self._start

    def follow(self, places):
        """Give the next arrays these places: the n-th array of a size the n-th place of this size.

        `places` lists the size and the offset of each place, from the address of `reserve`.
        """
        self._places = {}
        for size, offset in places:
            self._places.setdefault(size, collections.deque()).append(self._start + offset)

    def _allocate(self, size):
        if size < PLANNED:
            return self.small._allocate(size)
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
            self.small._give_back(address, size)
        else:
            super()._give_back(address, size)
