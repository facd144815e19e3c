"""Record the sums over ranks in a training step, so that replays of the step compute them too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import phases
from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.recording import Recorder, address_of, fixed
from mpidl.comm.reducer import BUCKET_BYTES, PendingExchange, Piece, Reducer
from mpidl.comm.sum_queue import HostSum
from mpidl.core.blocks import OneRank
from mpidl.core.fold import Partial

if TYPE_CHECKING:
    from mpidl.comm.exchange import Combine
    from mpidl.comm.world import World
    from mpidl.core.fold import Tree


class RecordedWorld:
    """A world that records its sums, for the argument `reduce` of `value_and_grad`.

    A replay computes the same sums in the same order, on arrays at the same addresses. Ranks that
    replay a step can therefore exchange sums with ranks that run the step eagerly. If all ranks
    share memory, a sum consists of two kernel calls in the replay, which start the sum and wait for
    it. Otherwise the replay calls the methods of the world.

    Parameters
    ----------
    world : World
        The ranks.
    recorder : Recorder
        The recorder of the step.

    Attributes
    ----------
    gradients : dict
        {name: array}, the gradients of the last replay. Empty if there is only one rank.
    loss_root : ndarray or None
        The sum whose product with a factor of at most 1 is the loss, float64 (). None if the loss
        is computed in another way.
    """

    def __init__(self, world: World, recorder: Recorder) -> None:
        self.world, self.recorder = world, recorder
        self.rank, self.size, self.plain = world.rank, world.size, world.plain
        self._ranks = OneRank() if self.size == 1 else world
        self.gradients: dict[str, np.ndarray] = {}
        memory = None if world.plain else world.host_memory()
        self.memory = memory if memory is not None and memory.has_all_ranks else None
        self._result_buffers: list[np.ndarray] = []  # memory for the results of sums
        self._free_buffers: list[np.ndarray] = []  # buffers of another step; see `share_results`
        self._replayed: dict[PendingExchange, HostSum] = {}
        self._by_address: dict[int, HostSum] = {}
        self._totals_of_results: Callable[[], dict[Any, Any]] = dict
        self.loss_root: np.ndarray | None = None
        self._results: dict[Any, Any] = {}
        recorder.wait = self._wait_in_replay

    def gplus(self, value: Any) -> Any:
        """Sum a Partial, or the results of the step as a dict of Partials, over the ranks."""
        if isinstance(value, dict):
            return self._sum_results(value)
        if not isinstance(value, Partial):
            self.recorder.refuse("it sums a value that is not a Partial over the ranks")
            return self.world.gplus(value)
        if self.size == 1 and value.is_root:  # this node already is the sum
            return value.finish([np.reshape(value.terms[0].nodes[0], value.shape)])
        total = arenas.empty(value.shape, value.dtype)
        if self.memory is not None and value.is_root:
            (term,) = value.terms
            pieces = [(total.size, term.nodes)]
            flat = fixed(total).reshape(-1)
            self.wait(self.start_sum(term.tree, pieces, term.combine, term.dtype, out=flat), total)
            return total
        partial, target = self.at_fixed_place(value), fixed(total)

        def exchange() -> None:
            target[...] = self._ranks.gplus(partial)

        total[...] = self._ranks.gplus(value)
        self.recorder.call_python(exchange, [total])
        return total

    def _sum_results(self, values):
        self._results = values  # replays read the results after the update: keep their memory
        if self.memory is not None and all(isinstance(v, Partial) for v in values.values()):
            reducer = SharedReducer(self, float("inf"))
            for key, value in values.items():
                reducer.push(key, value)
            sums = reducer.finish()
            self._totals_of_results = reducer.totals_of_replay
            self._set_loss_root(values, reducer.roots_of_replay)
            return sums
        places = {key: self.at_fixed_place(value) for key, value in values.items()}
        self._totals_of_results = lambda: self._ranks.gplus(places)
        if self.size == 1 and all(isinstance(value, Partial) for value in places.values()):
            roots = {key: [t.nodes[0] for t in value.terms] for key, value in places.items()}
            self._totals_of_results = _totals(places, roots)
            self._set_loss_root(places, roots)
        return self._ranks.gplus(values)

    def _set_loss_root(self, values, roots):
        """Set `loss_root`, given the results and their roots. Result 0 is the loss."""
        loss = values.get(0)
        if loss is None or loss.shape or loss.addend is not None or len(loss.terms) != 1:
            return
        (term,) = loss.terms
        if term.dtype == loss.dtype == np.float64 and abs(float(term.scale)) <= 1:
            self.loss_root = roots[0][0]

    def results(self) -> dict[Any, Any]:
        """Return the results of the replayed step, summed over the ranks, as {key: array}."""
        if self.memory is not None:
            waited = self.memory.up.take_waited()
            phases.move(phases.WAIT, waited)
            self.world.transport.wait_seconds += waited * 1e-9
        return self._totals_of_results()

    def reducer(self) -> Any:
        """Return an object that sums gradients and records the sums."""
        if self.size == 1:
            return self.world.reducer()
        return MessageReducer(self) if self.memory is None else SharedGradients(self)

    def share_results(self, other: RecordedWorld) -> None:
        """Store the results of sums in the memory of another step, which runs at other times."""
        self._free_buffers = list(other._result_buffers)

    def _result_buffer(self, size, dtype):
        for i, buffer in enumerate(self._free_buffers):
            if (buffer.size, buffer.dtype) == (size, dtype):
                return self._free_buffers.pop(i)
        self._result_buffers.append(np.empty(size, dtype))
        return self._result_buffers[-1]

    def at_fixed_place(self, value: Any) -> Any:
        """Return a view of a Partial or array at a fixed address, without owning its memory."""
        if not isinstance(value, Partial):
            return self.recorder.fix(np.asarray(value))
        fix = self.recorder.fix
        terms = [replace(t, nodes=[fix(np.asarray(n)) for n in t.nodes]) for t in value.terms]
        addend = None if value.addend is None else fix(np.asarray(value.addend))
        return Partial(terms, addend, value.shape, value.dtype)

    # If all ranks share memory, a `Reducer` uses the methods below as the methods of its world.

    def start_sum(
        self,
        tree: Tree,
        pieces: Sequence[Piece],
        combine: Combine,
        dtype: np.dtype,
        name: str = "",
        out: np.ndarray | None = None,
    ) -> PendingExchange:
        """Start a sum now, and record its start for replays; see `World.start_sum`."""
        memory, recorder = self.memory, self.recorder
        if memory is None or not memory.supports(tree, combine, dtype):
            recorder.refuse(f"it sums values of type {dtype} over the ranks")
            return self.world.start_sum(tree, pieces, combine, dtype, name)
        if out is None:
            out = recorder.constant(self._result_buffer(sum(size for size, _ in pieces), dtype))
        places = [(size, [recorder.fix(np.asarray(n)) for n in nodes]) for size, nodes in pieces]
        host_sum = memory.sum_over_all(tree, places, combine, out)
        recorder.call_sum("sums_start", memory.up, host_sum)
        pending = self.world.start_sum(tree, pieces, combine, dtype, name, out)
        self._replayed[pending] = self._by_address[address_of(host_sum.words)] = host_sum
        return pending

    def wait(self, pending: PendingExchange, *totals: np.ndarray) -> None:
        """Wait for a sum now, and record the wait for replays.

        `totals` are the arrays that are complete after the wait.
        """
        try:
            self.world.wait(pending)
        except BaseException:
            self._abandon(totals)
            raise
        if pending in self._replayed:
            host_sum = self._replayed.pop(pending)
            self.recorder.call_sum("sums_wait", self.memory.up, host_sum, totals)

    @property
    def pending_exchanges(self) -> list[PendingExchange]:
        """The exchanges that are not complete."""
        return self.world.pending_exchanges

    def progress(self) -> None:
        """Advance pending exchanges, without waiting."""
        self.world.progress()

    def _wait_in_replay(self, address):
        """Wait for a sum that was not complete after the limited wait in a kernel call."""
        host_sum = self._by_address[address]

        def is_complete():
            self.memory.up.advance()
            return host_sum.is_complete

        wait_until = self.world.transport.wait_until
        try:
            wait_until(is_complete, "a sum over the ranks", self.world.progress)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self, *owners):
        """Keep the memory of incomplete sums allocated; this object may be its only owner."""
        if self.memory is not None:
            self.memory.leave(self, *owners)


class SharedReducer(Reducer):
    """Sums values over ranks that all share memory, and records the sums for replays.

    Parameters
    ----------
    ranks : RecordedWorld
        The ranks.
    bucket_bytes : float
        Size in bytes at which a bucket is considered full.
    kernel_hook : callable, optional
        Function that long kernels call, as in `Reducer`.
    """

    def __init__(
        self,
        ranks: Any,  # a RecordedWorld, which has all methods of a World that a Reducer calls
        bucket_bytes: float = BUCKET_BYTES,
        kernel_hook: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(ranks, bucket_bytes, kernel_hook)
        self._recorder = ranks.recorder
        # Keep pushed values until `finish`, so that the recording does not reuse their memory.
        self._pushed: list[Any] = []
        self._arrays: dict[Any, np.ndarray] = {}  # pushed arrays, which `finish` returns unchanged

    def push(self, name: Any, value: Partial | Any) -> None:
        self._pushed.append(value)
        if not isinstance(value, Partial):
            self._arrays[name] = np.asarray(value)
            value = self._recorder.fix(self._arrays[name])
        elif value.addend is not None:
            addend = self._recorder.fix(np.asarray(value.addend))
            value = Partial(value.terms, addend, value.shape, value.dtype)
        super().push(name, value)

    def finish(self) -> dict[str, Any]:
        sums = super().finish() | self._arrays
        self._pushed.clear()
        self._arrays = {}
        return sums

    def _totals(self, values, roots):
        partials = {name: value for name, value in values.items() if isinstance(value, Partial)}
        roots_by_name = {
            name: [roots[name, index].reshape(value.shape) for index in range(len(value.terms))]
            for name, value in partials.items()
        }
        self.totals_of_replay = _totals(partials, roots_by_name)
        self.roots_of_replay = roots_by_name
        return super()._totals(values, roots)


class SharedGradients(SharedReducer):
    """Sums gradients over ranks that all share memory, and records the sums for replays."""

    def __init__(self, ranks: RecordedWorld) -> None:
        super().__init__(ranks, kernel_hook=ranks.world.advance)
        self._ranks = ranks
        self._computed: list[str] = []  # names of gradients to compute from their roots

    def push(self, name: str, value: Partial | Any) -> None:
        if isinstance(value, Partial) and not value.is_root:
            self._computed.append(name)
        super().push(name, value)

    def finish(self) -> dict[str, Any]:
        sums = super().finish()
        self._ranks.gradients = {name: fixed(array) for name, array in sums.items()}
        for name in self._computed:
            self._recorder.input(f"gradient of {name}", sums[name])
        if self._computed:
            self._recorder.call_python(self._compute)
        return sums

    def _compute(self):
        totals = self.totals_of_replay()
        for name in self._computed:
            self._ranks.gradients[name] = total = np.asarray(totals[name])
            self._recorder.inputs.set_address(f"gradient of {name}", address_of(total))


class MessageReducer:
    """Sums gradients with messages, like a `Reducer`, and records the sums for replays."""

    def __init__(self, world: RecordedWorld) -> None:
        self._world, self._recorder = world, world.recorder
        # Keep pushed values until `finish`, so that the recording does not reuse their memory.
        self._pushed: list[Any] = []
        self._sums: list[str] = []
        self._begin()
        self._recorder.call_python(self._begin)

    def _begin(self):
        self._reducer = self._world.world.reducer()

    def push(self, name: str, value: Any) -> None:
        """Add a named value to the sums."""
        self._pushed.append(value)
        if isinstance(value, Partial):
            self._sums.append(name)
        place = self._world.at_fixed_place(value)
        self._reducer.push(name, value)
        self._recorder.call_python(functools.partial(self._push, name, place))

    def _push(self, name, value):
        self._reducer.push(name, value)
        self._reducer.progress()

    def progress(self) -> None:
        """Advance pending exchanges, without waiting."""
        self._reducer.progress()

    def finish(self) -> dict[str, Any]:
        """Wait for all sums, and return {name: array}."""
        sums = self._reducer.finish()
        self._pushed.clear()
        for name in self._sums:
            self._recorder.input(f"gradient of {name}", sums[name])
        self._recorder.call_python(self._finish)
        return sums

    def _finish(self):
        sums = self._world.gradients = self._reducer.finish()
        for name in self._sums:
            self._recorder.inputs.set_address(f"gradient of {name}", address_of(sums[name]))


def _totals(partials, roots):
    """Return a function that returns {name: total} for the current values of the roots.

    `partials` is {name: Partial}, and `roots` is {name: [root of each term]}.
    """
    finishers = {name: value.finisher(roots[name]) for name, value in partials.items()}
    return lambda: {name: finish() for name, finish in finishers.items()}
