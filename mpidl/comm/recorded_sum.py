"""Record a sum over the ranks as two operations of a training step: its start, and the wait."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.arenas import address_of
from mpidl.comm.host_memory import HostMemory

if TYPE_CHECKING:
    from mpidl.backends.cpu.recorder import Recorder
    from mpidl.comm.exchange import Combine
    from mpidl.comm.messaging import Messaging
    from mpidl.comm.reducer import Piece
    from mpidl.comm.sum_queue import HostSum
    from mpidl.core.fold import Tree


class RecordedSum:
    """A sum of a step that is recorded, in place of a `PendingExchange`.

    A replay computes the same sum, so that ranks that replay a step can exchange sums with ranks
    that run the step eagerly. If all ranks share memory, a replay calls two kernels, which start
    the sum and wait for it. Otherwise, it calls the methods of the world. `root` is the array of
    the sum, which only replays compute.
    """

    def __init__(
        self,
        world: Messaging,
        recorder: Recorder,
        tree: Tree,
        pieces: Sequence[Piece],
        combine: Combine,
        dtype: np.dtype,
    ) -> None:
        self.root: Any = arenas.empty((sum(size for size, _ in pieces),), dtype)
        self._world, self._slab = world, recorder.memory
        self._arguments = tree, combine, dtype
        self._pieces: Any = pieces  # which stay allocated until the wait
        self._places = [
            (size, [recorder.place(np.asarray(n)) for n in nodes]) for size, nodes in pieces
        ]
        self._target = recorder.target(self.root)
        self._sum: HostSum  # which replays compute in memory
        self._pending: Any = None  # the exchange of a replay, from its start to its wait
        self._memory = memory = sums_memory(world, tree, combine, dtype)
        recorder.owners.append(self)
        recorder.at_end(self._bind)
        if memory is None:
            recorder.call_python(self._start)
        else:
            wait = functools.partial(self._wait_in_memory, memory)
            recorder.at_end(lambda: recorder.waits.update({self._address(): wait}))
            recorder.call("sums_start", address_of(memory.up.words), self._address)

    def wait(self, recorder: Recorder) -> None:
        """Record the wait for the sum."""
        if self._memory is None:
            recorder.call_python(self._wait)
        else:
            recorder.call("sums_wait", address_of(self._memory.up.words), self._address)
        recorder.written(self.root)
        self._pieces = None

    def _bind(self) -> None:
        """Prepare the replays: the addresses of the nodes and of the root are known."""
        tree, combine, _ = self._arguments
        self._pieces = [(size, [p.view() for p in places]) for size, places in self._places]
        self.root = None  # an array of the recording
        if self._memory is not None:
            self._sum = self._memory.sum_over_all(tree, self._pieces, combine, self._target.view())

    def _address(self) -> Any:
        return address_of(self._sum.words)

    def _start(self) -> None:
        tree, combine, dtype = self._arguments
        self._pending = self._world.start_sum(
            tree, self._pieces, combine, dtype, out=self._target.view()
        )

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        self._world.wait(pending)
        root, target = pending.root, self._target.view()
        if address_of(root) != address_of(target):
            target[...] = root

    def _wait_in_memory(self, memory: HostMemory) -> None:
        """Wait for a sum that was not complete after the limited wait in a kernel call."""

        def is_complete() -> bool:
            memory.up.advance()
            return self._sum.is_complete

        transport = self._world.transport
        try:
            transport.wait_until(is_complete, "a sum over the ranks", self._world.progress)
        except BaseException:
            memory.leave(self, self._slab)  # other ranks may still use the memory
            raise


def sums_memory(
    world: Messaging, tree: Tree, combine: Combine, dtype: np.dtype
) -> HostMemory | None:
    """Return the memory in which all ranks compute a sum without messages, or None. Collective."""
    memory = world.host_memory() if HostMemory.supports(tree, combine, dtype) else None
    return memory if memory is not None and memory.has_all_ranks else None
