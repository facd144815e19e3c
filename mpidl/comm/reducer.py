"""Sum gradients and other `Partial` objects over the ranks while other work continues."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import phases
from mpidl.backends.cpu import builds
from mpidl.comm import exchange
from mpidl.core.fold import Partial, Term, add
from mpidl.core.values import OnDevice

if TYPE_CHECKING:
    from mpidl.backends.gpu.sums import DeviceSum
    from mpidl.comm.recorded_sum import RecordedSum
    from mpidl.comm.world import World

Piece = tuple[int, Sequence[np.ndarray]]  # one value in a sum: its size, and this rank's nodes
Entry = tuple[Any, int, int]  # one term in a bucket: its name, its index and its size
# Size of a full bucket in bytes; a large gradient fills a bucket by itself. A GPU sends 8 MiB in
# about 0.02 ms over NVLink and 0.3 ms over a network, several times the fixed cost of a sum. The
# last bucket of a step, which no computation hides, should not be larger.
BUCKET_BYTES = 1 << 18
GPU_BUCKET_BYTES = 1 << 23


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
    terms, which are summed separately. A bucket contains only terms with the same tree, dtype,
    operation and device; any other term starts a new bucket.

    Parameters
    ----------
    world : World
        The ranks.
    bucket_bytes : float, optional
        Size in bytes at which a bucket is considered full. The default is BUCKET_BYTES, or
        GPU_BUCKET_BYTES for values on a GPU.
    kernel_hook : callable, optional
        Function that advances exchanges. Long kernels call it about every millisecond until
        `finish`. By default, kernels call no function.
    """

    def __init__(
        self,
        world: World,
        bucket_bytes: float | None = None,
        kernel_hook: Callable[[], None] | None = None,
    ) -> None:
        self.world, self.bucket_bytes = world, bucket_bytes
        self._values: dict[str, Any] = {}
        self._buckets: list[tuple[list[Entry], PendingExchange | RecordedSum]] = []
        self._gpu_buckets: list[tuple[list[Entry], DeviceSum]] = []
        self._has_hook = kernel_hook is not None and world.size > 1
        if kernel_hook is not None and self._has_hook:
            self._watch(functools.partial(self._advance, kernel_hook))
        self._bucket: list[tuple[Entry, Term]] = []
        self._bucket_key: tuple[Any, ...] = ()  # tree, operation, dtype and device of the terms
        self._filled_bytes = 0
        self._has_started = False  # whether a sum on a GPU has started since the last `progress`

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
        if not isinstance(value, Partial):
            return
        for term in value.terms:
            if len(term.tree.runs) != self.world.size:
                raise ValueError(
                    f"{name or 'the sum'} was computed from images divided among "
                    f"{len(term.tree.runs)} rank(s), but this world has {self.world.size}; sum it "
                    "in the world that divided the images"
                )
        on_host = is_on_host(value)
        if self.world.size == 1:
            if on_host:
                self._values[name] = total_of(value, [term.nodes[0] for term in value.terms])
            return
        if on_host:
            shells = [replace(term, nodes=[]) for term in value.terms]
            self._values[name] = Partial(shells, value.addend, value.shape, value.dtype)
        else:
            self._values[name] = _gpu_sums().without_nodes(value)
        for index, term in enumerate(value.terms):
            key = (term.tree, term.combine, term.dtype, on_host)
            # Moments cannot be packed side by side, so each of them gets a separate bucket.
            if self._bucket and (key != self._bucket_key or term.combine is not add):
                self._send_bucket()
            self._bucket_key = key
            size = int(np.prod(value.shape))
            self._bucket.append(((name, index, size), term))
            self._filled_bytes += size * term.dtype.itemsize
            default = BUCKET_BYTES if on_host else GPU_BUCKET_BYTES
            full = default if self.bucket_bytes is None else self.bucket_bytes
            if self._filled_bytes >= full:
                self._send_bucket()
        self._record(self._advance, self.world.progress)

    def _send_bucket(self, is_last: bool = False) -> None:
        """Start the exchange of the current bucket."""
        entries, terms = (list(part) for part in zip(*self._bucket, strict=True))
        (tree, combine, dtype, on_host), sizes = self._bucket_key, [size for *_, size in entries]
        self._bucket, self._bucket_key, self._filled_bytes = [], (), 0
        if on_host:
            names = [name for name, *_ in entries if isinstance(name, str) and name]
            title = ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"
            pieces = [(size, term.nodes) for size, term in zip(sizes, terms, strict=True)]
            exchange = self.world.start_sum(tree, pieces, combine, dtype, title)
            self._buckets.append((entries, exchange))
        else:
            nodes, sums = [term.nodes for term in terms], _gpu_sums()
            device_sum: DeviceSum = sums.start(self.world, terms[0], nodes, is_awaited=is_last)
            self._continue(sums.NEXT)
            self._gpu_buckets.append((entries, device_sum))
            self._has_started = True

    def _continue(self, point: int) -> bool:
        """Continue the sums on GPUs that can continue at `point`; return whether there are any.

        The newest comes first, so that it starts before the host waits for others.
        """
        sums = [device_sum for _, device_sum in reversed(self._gpu_buckets)]
        due = [s for s in sums if s.point is not None and s.point <= point]
        for device_sum in due:
            device_sum.advance()
        return bool(due)

    def progress(self) -> None:
        """Advance pending exchanges, without waiting for other ranks."""
        if builds.recorder() is None:
            self._advance(self.world.progress)
        if self._gpu_buckets and not self._has_started:
            self._continue(_gpu_sums().SOON)
        self._has_started = False

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
            self._send_bucket(is_last=True)
        while self._gpu_buckets and self._continue(_gpu_sums().LAST):
            pass
        roots: dict[tuple[str, int], Any] = {}
        for entries, pending in self._buckets:
            self.world.wait(pending)
            roots |= parts_of(entries, pending.root)
        for entries, device_sum in self._gpu_buckets:
            roots |= parts_of(entries, device_sum.root)
        sums = dict(self._values)
        for name, value in sums.items():
            if isinstance(value, Partial):
                sums[name] = self._total(name, value, roots)
        self._values, self._buckets, self._gpu_buckets = {}, [], []
        return sums

    def _total(self, name: str, value: Partial, roots: Mapping[tuple[str, int], Any]) -> Any:
        """Return the total of a Partial, given the root of each term by name and index."""
        if not is_on_host(value):
            if self.world.size == 1:
                return _gpu_sums().total_of_one_rank(name, value)
            ends = [roots[name, i] for i in range(len(value.terms))]
            return _gpu_sums().total(name, value, ends)
        return total_of(value, [roots[name, i] for i in range(len(value.terms))])


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


def parts_of(entries: Sequence[Entry], root: Any) -> dict[tuple[Any, int], Any]:
    """Divide the root of a bucket into its terms; return {(name, index of the term): values}."""
    parts, start = {}, 0
    for name, index, size in entries:
        on_device = isinstance(root, OnDevice)
        parts[name, index] = root.part(start, (size,)) if on_device else root[start : start + size]
        start += size
    return parts


def _gpu_sums() -> Any:
    """Return the module that sums Partials on GPUs. Only ranks with a GPU import it."""
    from mpidl.backends.gpu import sums

    return sums


def is_on_host(value: Any) -> bool:
    """Return False if the value is a Partial with nodes or an addend on a GPU, otherwise True."""
    if not isinstance(value, Partial):
        return True
    parts = [*(term.nodes for term in value.terms), value.addend]
    return not any(isinstance(part, OnDevice) for part in parts)
