"""Sum values over the ranks of a host in shared memory, without messages.

Each rank of a host has slots in a window of shared memory. A sum is divided into chunks. All ranks
start the same sums in the same order, so they number the chunks of all sums identically, and a
chunk has the same slot number on every rank. Each rank copies its nodes of the reduction tree into
its slot, and then counts the chunk as placed. Each rank also knows which blocks the other ranks
own, and therefore where their nodes are in the slots. When all ranks have placed a chunk, they fold
(sum) its nodes in one of two ways:

- direct: every rank folds all values. This way is used if all nodes of a chunk together need at
  most twice the size of a slot.
- in segments: each rank folds a part of the values in place, and counts the chunk as folded. When
  all ranks have folded the chunk, they copy the results from the slots.

Both ways follow the reduction tree, so they give the same bytes as the messages of `exchange`. Next
to its slots, each rank stores a hash of the plan of each chunk. If the hashes differ, the ranks
have started different sums. Each rank then raises an error before it reads a wrong value. The work
is done by kernels/cpu/sums.c, because the counts must be written and read in a fixed order, which
NumPy does not guarantee.

With several hosts, the ranks of a host fold the nodes that their host owns. The first rank of each
host exchanges these nodes by messages, as `exchange` does among ranks, and distributes the root
through a second set of slots. Large sums are divided into segments, which the first few ranks of
each host exchange in parallel. The roots are distributed in the order of the sums, although their
messages may arrive in a different order.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import fold
from mpidl.backends.cpu import builds
from mpidl.comm import exchange, watchdog
from mpidl.comm.reducer import Piece
from mpidl.comm.transport import free_shared_bytes
from mpidl.errors import Fault
from mpidl.fold import Tree

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidl.comm.exchange import Combine, Steps
    from mpidl.comm.transport import Transport

SLOTS, SLOT_BYTES = 8, 1 << 16  # number of slots per rank in each set, and size of a slot
COUNTS_BYTES, LINE = 256, 64  # sizes of a rank's counts and of a cache line
PATIENCE = 0.002  # longest wait for other ranks inside a kernel call, in seconds

# {(operation, type): kind of the sum in sums.c}
FLOATS, DOUBLES, MOMENTS = range(3)
NOUNS = ("float32 values", "float64 values", "float64 values of moments")
KINDS: dict[tuple[Any, np.dtype], int] = {
    (fold.add, np.dtype("f4")): FLOATS,
    (fold.add, np.dtype("f8")): DOUBLES,
    (fold.merge_moments, np.dtype("f8")): MOMENTS,
}
MOST_NODES = 1024  # largest number of nodes in a sum; all nodes of a chunk must fit into the slots
QUEUE_WORDS, SUM_WORDS = 19, 7  # sizes of the structs `queue` and `sum` in sums.c
PATIENCE_WORD, WAITED_WORD, FOLDED_WORD = 5, 6, 8  # indices in the struct `queue`
LAST_WORD, DIFFERS_WORD = 16, 17  # indices in the struct `queue`
IDENTITIES = slice(16, 16 + SLOTS)  # in a rank's counts: the hash of the plan in each slot
WIDTHS = slice(24, 24 + SLOTS)  # in a rank's counts: for each slot, 4 * width + kind of the sum
TAKEN_WORD = 6  # index in the struct `sum`
IDENTITY_WORD = 10  # index in a plan


# Objects that kernels may still use: queues with incomplete sums, and the owners of the memory of
# sums that an exception has left incomplete.
_busy: list[SumQueue] = []
_abandoned: list[Any] = []


def address_of(array: np.ndarray) -> int:
    """Return the address of an array's first element."""
    return array.__array_interface__["data"][0]


@lru_cache(maxsize=256)
def plan_of(tree: Tree, ranks: tuple[int, int], rank: int, width: int, kind: int) -> np.ndarray:
    """Return the description of a sum for sums.c, as its struct `plan`.

    Parameters
    ----------
    tree : Tree
        The reduction tree over the blocks.
    ranks : (int, int)
        First rank of the host, and one past the last.
    rank : int
        This rank, counted from the first rank of the host.
    width : int
        Number of values in a node.
    kind : int
        Kind of the sum: `FLOATS`, `DOUBLES` or `MOMENTS`.

    Returns
    -------
    ndarray of int64
        The plan. Its results are the largest nodes whose blocks all belong to this host.
    """
    places, ranges = [], []
    for member in range(ranks[1] - ranks[0]):
        nodes = tree.nodes[ranks[0] + member]
        places += [(member, row) for row in range(len(nodes))]
        ranges += nodes
    joins, results = _joins_of(tree, ranges)
    return _plan(places, joins, results, rank, width, kind)


@lru_cache(maxsize=256)
def broadcast_plan(root: int, rank: int, width: int, kind: int) -> np.ndarray:
    """Return the plan of a sum with a single node, on rank `root` of the host; see `plan_of`."""
    return _plan([(root, 0)], [], [0], rank, width, kind)


@lru_cache(maxsize=256)
def _count_nodes(tree):
    return sum(map(len, tree.nodes))


def _joins_of(tree, ranges):
    """Return the pairs (left, right) of nodes to combine, and the nodes that hold the results."""
    stack, joins = [], []
    for node, (start, stop) in enumerate(ranges):
        stack.append((node, start))
        while len(stack) > 1 and tree.joins(stack[-2][1], stop):
            right, _ = stack.pop()
            joins.append((stack[-1][0], right))
    return joins, [node for node, _ in stack]


def _plan(places, joins, results, rank, width, kind):
    item, size, fixed_bytes = (4 if kind == FLOATS else 8), width, 0
    if kind == MOMENTS:  # a chunk of moments has the count, and mean and M2 of some channels
        item, size, fixed_bytes = 16, width // 2, 8
    rows = max((row + 1 for _, row in places), default=1)
    # Use a multiple of the cache line, so that the nodes in a slot are aligned.
    limit = SLOT_BYTES // rows
    if kind == MOMENTS:
        limit = min(limit, 2 * SLOT_BYTES // max(len(places), 1))
    limit -= limit % LINE
    chunk = max(1, min(size, (limit - fixed_bytes) // item))
    stride = -(-(fixed_bytes + chunk * item) // LINE) * LINE
    chunks = max(1, -(-size // chunk))
    is_direct = kind == MOMENTS or len(places) * stride <= 2 * SLOT_BYTES
    own_nodes = sum(member == rank for member, _ in places)
    head = [kind, width, chunk, chunks, stride, is_direct, own_nodes]
    head += [len(places), len(joins), len(results)]
    table = [*np.ravel(places), *np.ravel(joins), *results]
    shared = [*head[:6], *head[7:], *table]  # the words that must be equal on all ranks
    digest = hashlib.blake2b(np.array(shared, np.int64).tobytes(), digest_size=8).digest()
    return np.array([*head, int.from_bytes(digest, "little", signed=True), *table], np.int64)


class HostSum:
    """A sum that a `SumQueue` computes, as the struct `sum` of sums.c.

    Parameters
    ----------
    plan : ndarray
        The result of `plan_of` or `broadcast_plan`.
    pieces : sequence of Piece
        This rank's nodes of one or more values, which are summed together as one vector. The nodes
        stay allocated until the sum is complete.
    out : ndarray or None
        Contiguous memory for the results; None if this rank does not need the results.

    Attributes
    ----------
    words : ndarray
        The content of the struct.
    """

    __slots__ = ("words", "_chunks", "_owners")

    def __init__(self, plan: np.ndarray, pieces: Sequence[Piece], out: np.ndarray | None) -> None:
        table, flat = [len(pieces)], []
        for size, nodes in pieces:
            flat.append([np.ascontiguousarray(node) for node in nodes])
            table += [size, *map(address_of, flat[-1])]
        addresses = np.array(table, np.int64)
        self.words = np.zeros(SUM_WORDS, np.int64)
        self.words[:2] = address_of(plan), address_of(addresses)
        self.words[2] = 0 if out is None else address_of(out)
        self._chunks, self._owners = int(plan[3]), (plan, flat, addresses, out)

    @property
    def is_complete(self) -> bool:
        """Whether this rank has the results, and other ranks no longer need its nodes."""
        return bool(self.words[TAKEN_WORD] == self._chunks)


class SumQueue:
    """A queue of the incomplete sums of one rank, with the slots through which they are computed.

    Parameters
    ----------
    memory : ndarray of uint8, shape (queue_bytes(ranks),)
        The slots of all ranks, initially zero, and aligned to 64 bytes.
    rank, ranks : int
        Number of this rank among the ranks that share the memory, and number of these ranks.
    patience : float
        Longest wait inside a call of the kernel library, in seconds.
    first : int
        Number in the world of the first rank that shares the memory, for error messages.

    Raises
    ------
    Fault
        If the ranks have started different sums. The constructor does not raise this error, but
        `start`, `advance` and `wait` do.

    Attributes
    ----------
    words : ndarray
        The content of the struct `queue` of sums.c.
    """

    def __init__(
        self,
        memory: np.ndarray,
        rank: int,
        ranks: int,
        patience: float = PATIENCE,
        first: int = 0,
    ) -> None:
        self.rank, self.ranks, self.first = rank, ranks, first
        self._library = builds.kernels()
        self._scratch = np.empty(2 * SLOT_BYTES, np.uint8)
        self._memory = memory
        self._sums: list[HostSum] = []  # incomplete sums, and possibly some complete sums
        self.words = np.zeros(QUEUE_WORDS, np.int64)
        self.words[:5] = address_of(memory), rank, ranks, SLOTS, SLOT_BYTES
        self.words[PATIENCE_WORD] = int(patience * 1e9)
        self.words[-1] = address_of(self._scratch)

    def start(self, host_sum: HostSum) -> None:
        """Start a sum. All ranks must start the same sums in the same order."""
        self.release()
        self._sums.append(host_sum)
        _busy[:] = [queue for queue in _busy if queue.is_busy and queue is not self]
        _busy.append(self)
        self._library.sums_start(self.words, host_sum.words)
        self._check()

    def advance(self) -> None:
        """Advance all sums without waiting."""
        self._library.sums_advance(self.words)
        self._check()
        self.release()

    def _check(self):
        """Raise a Fault if the ranks have started different sums, which will never complete."""
        if not self.words[DIFFERS_WORD]:
            return
        counts = self._memory[: self.ranks * COUNTS_BYTES].view(np.int64)
        counts = counts.reshape(self.ranks, -1)
        slot = int(self.words[FOLDED_WORD]) % SLOTS
        identities, widths = counts[:, IDENTITIES][:, slot], counts[:, WIDTHS][:, slot]
        sums: dict[tuple[int, int], list[str]] = {}
        for rank, sum_of_rank in enumerate(zip(identities.tolist(), widths.tolist(), strict=True)):
            sums.setdefault(sum_of_rank, []).append(str(self.first + rank))
        texts = [
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} {width // 4} "
            f"{NOUNS[width % 4]}"
            for (_, width), ranks in sums.items()
        ]
        raise Fault(
            f"the ranks sum different values at the same time: {'; '.join(texts)}: all ranks must "
            "call the same functions in the same order, with values of the same shapes"
        )

    def release(self) -> None:
        """Drop the references to sums that are complete."""
        if self._sums:
            self._sums = [host_sum for host_sum in self._sums if not host_sum.is_complete]

    def wait(self, host_sum: HostSum) -> None:
        """Wait for a sum inside the kernel library, for at most `patience` seconds."""
        waited = self.words[WAITED_WORD]
        self._library.sums_wait(self.words, host_sum.words)
        self.words[WAITED_WORD] = waited  # do not add this wait, because the caller counts it
        self._check()
        self.release()

    @property
    def is_busy(self) -> bool:
        """Whether there are incomplete sums."""
        return bool(self.words[LAST_WORD])

    def take_waited(self) -> int:
        """Return how long replayed steps have waited since the last call, in nanoseconds."""
        waited, self.words[WAITED_WORD] = int(self.words[WAITED_WORD]), 0
        return waited

    def close(self) -> None:
        """Stop kernels from advancing the sums."""
        self._library.sums_leave(self.words)


def count_segments(hosts: Sequence[tuple[int, int]], nbytes: int, combine: Combine) -> int:
    """Return the number of segments into which several hosts divide a sum.

    Parameters
    ----------
    hosts : sequence of (int, int)
        First rank of each host, and one past the last.
    nbytes : int
        Size of a node in bytes.
    combine : callable
        Function that combines two nodes.
    """
    if combine is not fold.add:
        return 1
    return max(1, min(nbytes // SLOT_BYTES, *(stop - first for first, stop in hosts)))


def queue_bytes(ranks: int) -> int:
    """Return the size in bytes of the memory of a `SumQueue` for a number of ranks."""
    return ranks * (COUNTS_BYTES + SLOTS * SLOT_BYTES)


class Completion:
    """A function that returns whether a sum in shared memory is complete.

    The generator of an exchange yields this object instead of MPI requests.

    Parameters
    ----------
    queue : SumQueue
        The queue that computes the sum.
    host_sum : HostSum
        The sum.
    """

    def __init__(self, queue: SumQueue, host_sum: HostSum) -> None:
        self._queue, self._sum = queue, host_sum

    def __call__(self) -> bool:
        self._queue.advance()
        return self._sum.is_complete

    def wait(self) -> None:
        """Wait for the sum, for at most the queue's `patience` in seconds."""
        self._queue.wait(self._sum)


class HostMemory:
    """The memory that the ranks of this host share for sums. Call `allocate` to create it.

    Attributes
    ----------
    hosts : list of (int, int)
        For each host, its first rank and one past its last rank.
    """

    def __init__(
        self,
        transport: Transport,
        hosts: Sequence[tuple[int, int]],
        memory: np.ndarray,
        window: MPI.Win | None,
    ) -> None:
        self.hosts, self.window, self._transport = list(hosts), window, transport
        rank = transport.rank
        self._host = next(i for i, (first, stop) in enumerate(hosts) if first <= rank < stop)
        self._ranks = first, stop = hosts[self._host]
        patience = 0.0 if transport.oversubscribed else PATIENCE
        size = queue_bytes(stop - first)
        self.up = SumQueue(memory[:size], rank - first, stop - first, patience, first)
        self.down = SumQueue(memory[-size:], rank - first, stop - first, patience, first)
        # Number of exchanges between hosts that were started, and that reached `self.down`.
        self._roots = self._passed_roots = 0

    @classmethod
    def allocate(cls, transport: Transport) -> HostMemory | None:
        """Allocate the memory; return None if no ranks share a host or memory is insufficient.

        Collective. The result is None either on all ranks or on no rank.
        """
        mpi, comm = transport.MPI, transport.comm
        with watchdog.guard("shared memory", transport.timeout):
            sharing = comm.Split_type(mpi.COMM_TYPE_SHARED)
            # Split by the launcher's host names too: a host's ranks must be numbered consecutively.
            of_host = sharing.Split(transport.hosts.index(transport.hosts[transport.rank]))
            sharing.Free()
            firsts = comm.allgather(of_host.allreduce(transport.rank, mpi.MIN))
            hosts = [(first, first + firsts.count(first)) for first in dict.fromkeys(firsts)]
            nbytes = queue_bytes(of_host.size) * min(len(hosts), 2)
            is_possible = firsts == sorted(firsts) and len(hosts) < transport.size
            is_possible = is_possible and free_shared_bytes(transport) >= nbytes + LINE
            memory = array = window = None
            if comm.allreduce(is_possible, mpi.LAND):
                try:
                    array, window = _window(mpi, of_host, nbytes)
                except mpi.Exception:
                    pass  # a limit of this process, such as on file sizes, is too low
                if comm.allreduce(array is not None, mpi.LAND):
                    memory = cls(transport, hosts, array, window)
                    of_host.Barrier()
                elif window is not None:
                    window.Free()
            of_host.Free()  # the window keeps its own reference
        return memory

    @property
    def is_busy(self) -> bool:
        """Whether this rank has incomplete sums."""
        return self.up.is_busy or self.down.is_busy

    @property
    def has_all_ranks(self) -> bool:
        """Whether all ranks share this memory, so that sums need no messages."""
        return len(self.hosts) == 1

    @staticmethod
    def supports(tree: Tree, combine: Combine, dtype: np.dtype) -> bool:
        """Return whether a sum of this kind can be computed in shared memory."""
        return not tree.plain and (combine, dtype) in KINDS and _count_nodes(tree) <= MOST_NODES

    def sum_over_all(
        self,
        tree: Tree,
        pieces: Sequence[Piece],
        combine: Combine,
        out: np.ndarray,
    ) -> HostSum:
        """Create a sum over all ranks of the world, all of which must share this memory."""
        width = sum(size for size, _ in pieces)
        plan = plan_of(tree, self._ranks, self.up.rank, width, KINDS[combine, out.dtype])
        return HostSum(plan, pieces, out)

    def exchange(
        self, tag: int, tree: Tree, pieces: Sequence[Piece], combine: Combine, out: np.ndarray
    ) -> Steps:
        """Fold the nodes of all ranks; a generator like those in the module `exchange`.

        Parameters
        ----------
        tag : int
            Tag of the messages between hosts.
        tree : Tree
            The reduction tree over the blocks.
        pieces : sequence of Piece
            This rank's nodes.
        combine : callable
            Function that combines two nodes.
        out : ndarray, shape (width,)
            Memory for the root (the total), which the generator returns.
        """
        if not self.has_all_ranks:
            return (yield from self._between_hosts(tag, tree, pieces, combine, out))
        host_sum = self.sum_over_all(tree, pieces, combine, out)
        self.up.start(host_sum)
        if not host_sum.is_complete:
            yield Completion(self.up, host_sum)
        self.up.release()
        return out

    def _between_hosts(self, tag, tree, pieces, combine, out):
        kind, rank, width = KINDS[combine, out.dtype], self.up.rank, len(out)
        count = count_segments(self.hosts, out.nbytes, combine)
        edges = [width * number // count for number in range(count + 1)]
        runs = tuple((tree.runs[a][0], tree.runs[b - 1][1]) for a, b in self.hosts)
        host_tree = Tree(tree.leaves, runs, self._host)
        place, self._roots = self._roots, self._roots + 1
        upward, downward, nodes = [], [], None
        for number, (low, high) in enumerate(itertools.pairwise(edges)):
            plan = plan_of(tree, self._ranks, rank, high - low, kind)
            rows = len(host_tree.nodes[self._host]) if number == rank else 0
            folded = np.empty((rows, high - low), out.dtype) if number == rank else None
            nodes = folded if number == rank else nodes
            upward.append(HostSum(plan, _columns(pieces, low, high), folded))
            self.up.start(upward[-1])
        if nodes is not None:
            yield lambda: self._complete(upward[rank : rank + 1])
            peers: Any = Peers(self._transport, [first + rank for first, _ in self.hosts])
            algorithm = exchange.choose_algorithm(
                host_tree, nodes.shape[1] * nodes.itemsize, combine
            )
            root = yield from algorithm(peers, tag, host_tree, nodes, combine)
            out[edges[rank] : edges[rank + 1]] = root
        yield lambda: self._passed_roots == place
        self._passed_roots += 1
        for number, (low, high) in enumerate(itertools.pairwise(edges)):
            plan, part = broadcast_plan(number, rank, high - low, kind), out[low:high]
            own_pieces = [(high - low, [part])] if number == rank else []
            downward.append(HostSum(plan, own_pieces, None if number == rank else part))
            self.down.start(downward[-1])
        yield lambda: self._complete([*upward, *downward])
        return out

    def _complete(self, sums):
        """Advance all sums; return whether the given sums are complete."""
        self.up.advance()
        self.down.advance()
        return all(host_sum.is_complete for host_sum in sums)

    def close(self) -> None:
        """Free the memory. Collective over the ranks of the host. All sums must be complete."""
        self.up.close()
        self.down.close()
        if self.window is not None:
            self.window.Free()

    def leave(self, *owners: Any) -> None:
        """Stop using the memory, but keep it and `owners` allocated.

        Other ranks and kernels may still access the memory.
        """
        self.up.close()
        self.down.close()
        _abandoned.append((self, owners))


class Peers:
    """A transport for exchanges between hosts, in which one rank represents each host.

    Parameters
    ----------
    transport : Transport
        The transport that sends the messages.
    ranks : sequence of int
        For each host, the rank that represents it.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport, self._ranks = transport, ranks
        self.rank, self.size = ranks.index(transport.rank), len(ranks)

    def isend(self, array: Any, dest: int, tag: int) -> Any:
        """Start sending an array to the rank that represents host `dest`; return the request."""
        return self._transport.isend(array, self._ranks[dest], tag)

    def irecv(self, array: Any, source: int, tag: int) -> Any:
        """Start receiving an array from the rank that represents host `source`."""
        return self._transport.irecv(array, self._ranks[source], tag)


def _columns(pieces, low, high):
    """Return the columns [low, high) of the matrix that the pieces form next to each other."""
    part, start = [], 0
    for size, nodes in pieces:
        first, stop = max(low - start, 0), min(high - start, size)
        if first < stop or high - low == 0:
            part.append((max(stop - first, 0), [np.ravel(node)[first:stop] for node in nodes]))
        start += size
    return part


def _window(mpi, comm, nbytes):
    """Allocate memory that the ranks of `comm` share; return the memory and its MPI window."""
    window = mpi.Win.Allocate_shared(nbytes + LINE if comm.rank == 0 else 0, 1, comm=comm)
    memory = np.frombuffer(window.Shared_query(0)[0], np.uint8)
    start = -address_of(memory) % LINE  # the same on all ranks, because pages are aligned
    memory = memory[start : start + nbytes]
    # Each rank first touches a part of the memory, which is then allocated near the rank's core.
    memory[nbytes * comm.rank // comm.size : nbytes * (comm.rank + 1) // comm.size] = 0
    return memory, window
