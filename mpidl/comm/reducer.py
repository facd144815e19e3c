"""Sum gradients and other `Partial` objects over the ranks while other work continues."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import phases
from mpidl.backends.cpu import builds
from mpidl.comm import exchange
from mpidl.core.fold import Partial, add
from mpidl.core.values import OnDevice

if TYPE_CHECKING:
    from mpidl.comm.recorded_sum import RecordedSum
    from mpidl.comm.world import World

Piece = tuple[int, Sequence[np.ndarray]]  # one value in a sum: its size, and this rank's nodes
Entry = tuple[Any, int, int]  # one term in a bucket: its name, its index and its size
BUCKET_BYTES = 1 << 18  # size of a full bucket in bytes; a large gradient fills a bucket by itself


class PendingExchange:
    """An exchange in progress: a generator, and the requests for which the generator waits.

    Parameters
    ----------
    steps : generator
        The generator of an algorithm in the module `exchange` or `host_memory`.
    name : str
        Name of the sum in the timeline.
    nbytes : int
        Size in bytes of this rank's tree nodes, for the timeline.

    Attributes
    ----------
    requests : sequence of mpi4py.MPI.Request, or callable
        Requests that must complete before the next `advance`, or a function that returns whether
        the exchange can advance.
    is_complete : bool
        Whether `root` is available.
    root : ndarray, shape (width,), or None
        The sum, that is, the root of the reduction tree; None until the exchange is complete.
    """

    def __init__(self, steps: exchange.Steps, name: str = "", nbytes: int = 0) -> None:
        self._steps, self._name, self._nbytes = steps, name, nbytes
        self._start = phases.now()
        self.requests: Sequence[Any] | Callable[[], bool] = []
        self.root: Any = None
        self.is_complete = False
        self.advance()

    def is_ready(self, testall: Callable[[Sequence[Any]], bool]) -> bool:
        """Return whether the exchange can advance; `testall` tests a list of MPI requests."""
        return self.requests() if callable(self.requests) else testall(self.requests)

    def advance(self) -> None:
        """Run the generator up to its next requests; the current requests must be complete."""
        try:
            with phases.Phase(phases.SUM, "fold"):
                self.requests = next(self._steps)
        except StopIteration as end:
            self.root, self.is_complete, self.requests = end.value, True, []
            if (spans := phases.spans()) is not None:
                name, nbytes = self._name or "sum", min(self._nbytes, 0xFFFFFFFF)
                spans.add(phases.SUMS, "sum", name, self._start, phases.now(), nbytes)


class Reducer:
    """Sums named values over the ranks, starting each sum as soon as its value is available.

    Partials are packed into buckets in the order of the calls to `push`. In a backward pass, this
    order is the same on every rank. A full bucket is sent at once. A Partial may consist of several
    terms, which are summed separately. A bucket contains only terms with the same tree, dtype and
    operation; any other term starts a new bucket.

    Parameters
    ----------
    world : World
        The ranks.
    bucket_bytes : float
        Size in bytes at which a bucket is considered full.
    kernel_hook : callable, optional
        Function that advances exchanges. Long kernels call it about every millisecond until
        `finish`. By default, kernels call no function.
    """

    def __init__(
        self,
        world: World,
        bucket_bytes: float = BUCKET_BYTES,
        kernel_hook: Callable[[], None] | None = None,
    ) -> None:
        self.world, self.bucket_bytes = world, bucket_bytes
        self._values: dict[str, Any] = {}
        self._buckets: list[tuple[list[Entry], PendingExchange | RecordedSum]] = []
        self._has_hook = kernel_hook is not None and world.size > 1
        if kernel_hook is not None and self._has_hook:
            self._watch(functools.partial(self._advance, kernel_hook))
        self._bucket: list[tuple[str, int, Sequence[np.ndarray], int]] = []
        self._bucket_key: tuple[Any, ...] = ()  # tree, operation and dtype of the bucket's terms
        self._filled_bytes = 0

    def push(self, name: str, value: Partial | Any) -> None:
        """Add a named value to the sums.

        The nodes of a Partial are released as soon as they are packed or sent. With a single rank,
        each term has one tree node, and this node is used as the sum without copying.

        Parameters
        ----------
        name : str
            Key of the value in the result of `finish`.
        value : Partial or ndarray
            A Partial is summed over the ranks. An array must already be the same on all ranks, and
            `finish` returns it unchanged.

        Raises
        ------
        ValueError
            If the Partial was computed in a world with a different number of ranks.
        """
        self._values[name] = value
        if not isinstance(value, Partial) or not is_on_host(value):
            return
        for term in value.terms:
            if len(term.tree.runs) != self.world.size:
                raise ValueError(
                    f"{name or 'the sum'} was computed from images divided among "
                    f"{len(term.tree.runs)} rank(s), but this world has {self.world.size}; sum it "
                    "in the world that divided the images"
                )
        if self.world.size == 1:
            self._values[name] = total_of(value, [term.nodes[0] for term in value.terms])
            return
        shells = [replace(term, nodes=[]) for term in value.terms]
        self._values[name] = Partial(shells, value.addend, value.shape, value.dtype)
        for index, term in enumerate(value.terms):
            key = (term.tree, term.combine, term.dtype)
            # Moments cannot be packed side by side, so each of them gets a separate bucket.
            if self._bucket and (key != self._bucket_key or term.combine is not add):
                self._send_bucket()
            self._bucket_key = key
            size = int(np.prod(value.shape))
            self._bucket.append((name, index, term.nodes, size))
            self._filled_bytes += size * term.dtype.itemsize
            if self._filled_bytes >= self.bucket_bytes:
                self._send_bucket()
        self._record(self._advance, self.world.progress)

    def _send_bucket(self) -> None:
        """Start the exchange of the current bucket."""
        tree, combine, dtype = self._bucket_key
        entries: list[Entry] = [(name, index, size) for name, index, _, size in self._bucket]
        pieces = [(size, nodes) for *_, nodes, size in self._bucket]
        names = [name for name, *_ in entries if isinstance(name, str) and name]
        title = ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"
        self._bucket, self._bucket_key, self._filled_bytes = [], (), 0
        self._buckets.append((entries, self.world.start_sum(tree, pieces, combine, dtype, title)))

    def progress(self) -> None:
        """Advance pending exchanges, without waiting."""
        if builds.recorder() is None:
            self._advance(self.world.progress)

    def _watch(self, progress: Callable[[], None] | None) -> None:
        """Let kernels call progress(), or no function, from now on."""
        if builds.recorder() is None:
            builds.watch(progress)
        self._record(builds.watch, progress)

    def _record(self, function: Callable[[Any], None], argument: Any) -> None:
        """While a step is recorded, let its replays call function(argument) if they send messages.

        If all ranks share memory, kernels of replays advance the sums themselves.
        """
        recorder = builds.recorder()
        if self._has_hook and recorder is not None and self.world.sends_messages():
            recorder.call_python(functools.partial(function, argument))

    def _advance(self, progress: Callable[[], None]) -> None:
        if self.world.pending_exchanges:
            with phases.Phase(phases.SUM, "progress", phases.BRIEF):
                progress()
        else:
            progress()

    def finish(self) -> dict[str, Any]:
        """Wait for all sums and return {name: array}."""
        if self._has_hook:
            self._watch(None)
        if self._bucket:
            self._send_bucket()
        roots: dict[tuple[str, int], np.ndarray] = {}
        for entries, pending in self._buckets:
            self.world.wait(pending)
            roots |= parts_of(entries, pending.root)
        sums = self._values | self._sums_on_devices()
        for name, value in sums.items():
            if isinstance(value, Partial):
                sums[name] = total_of(value, [roots[name, i] for i in range(len(value.terms))])
        self._values, self._buckets = {}, []
        return sums

    def _sums_on_devices(self) -> dict[str, Any]:
        """Sum the values that are on a GPU, and return {name: array}."""
        values = {name: value for name, value in self._values.items() if not is_on_host(value)}
        if not values:
            return {}
        from mpidl.backends.gpu import sums

        totals: dict[str, Any] = sums.gplus(values, self.world)
        return totals


def total_of(value: Partial, roots: Sequence[np.ndarray]) -> np.ndarray:
    """Return the total of a Partial, given the root of each term; it may share their memory.

    If a step is being recorded, replays compute the total.
    """
    roots = [np.reshape(root, value.shape) for root in roots]
    recorder = builds.recorder()
    return (
        value.finish(roots) if recorder is None or value.is_root else recorder.total(value, roots)
    )


def packed(pieces: Sequence[Piece], rows: int, dtype: np.dtype) -> np.ndarray:
    """Return a matrix with one row per node; each row contains all values side by side."""
    if len(pieces) == rows == 1:  # a single node needs no copy
        return np.reshape(pieces[0][1][0], (1, -1))
    matrix, offset = np.empty((rows, sum(size for size, _ in pieces)), dtype), 0
    for size, nodes in pieces:
        for row, node in zip(matrix, nodes, strict=True):
            row[offset : offset + size] = np.reshape(node, -1)
        offset += size
    return matrix


def parts_of(entries: Sequence[Entry], root: np.ndarray) -> dict[tuple[Any, int], np.ndarray]:
    """Divide the root of a bucket into its terms; return {(name, index of the term): values}."""
    stops = np.cumsum([size for *_, size in entries])
    return {
        (name, index): root[stop - size : stop]
        for (name, index, size), stop in zip(entries, stops, strict=True)
    }


def is_on_host(value: Any) -> bool:
    """Return False if the value is a Partial with nodes or an addend on a GPU, otherwise True."""
    if not isinstance(value, Partial):
        return True
    parts = [*(term.nodes for term in value.terms), value.addend]
    return not any(isinstance(part, OnDevice) for part in parts)
