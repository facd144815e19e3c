"""Sum values over the ranks of a host in shared memory, without messages.

Each rank of a host has slots in a window of shared memory. A sum is divided into chunks. All ranks
start the same sums in the same order and number the chunks of all sums identically. A chunk
therefore has the same slot number on every rank. Each rank copies its nodes of the reduction tree
into its slot, and then counts the chunk as placed. Each rank also knows which blocks the other
ranks own, and therefore where their nodes are in the slots. When all ranks have placed a chunk,
they fold (sum) its nodes in one of two ways:

- directly: every rank folds all values. The ranks do this if all nodes of a chunk together need at
  most twice the size of a slot.
- in segments: each rank folds a part of the values in place, and counts the chunk as folded. When
  all ranks have folded the chunk, they copy the results from the slots.

Both ways follow the reduction tree, so they give the same bytes as the algorithms in `exchange`.
Next to its slots, each rank stores a hash of the plan of each chunk. If the hashes differ, the
ranks have started different sums. Each rank then raises an error before it reads a wrong value.
The work is done by kernels/cpu/sums.c, because the counts must be written and read in a fixed
order, which NumPy does not guarantee.

With several hosts, the ranks of a host fold the nodes that their host owns. The first rank of each
host exchanges these nodes in messages, as `exchange` does among ranks, and distributes the root
through a second set of slots. Large sums are divided into segments, which the first few ranks of
each host exchange in parallel. The roots are distributed in the order of the sums, although their
messages may arrive in a different order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.backends.cpu.arenas import address_of
from mpidl.comm import exchange
from mpidl.comm.reducer import Piece
from mpidl.comm.sum_plans import KINDS, LINE, SLOT_BYTES, broadcast_plan, count_nodes, plan_of
from mpidl.comm.sum_queue import (
    PATIENCE,
    Completion,
    HostSum,
    SumQueue,
    queue_bytes,
)
from mpidl.comm.transport import free_shared_bytes
from mpidl.core import fold
from mpidl.core.fold import Tree

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidl.comm.exchange import Combine, Steps
    from mpidl.comm.transport import Transport

MOST_NODES = 1024  # largest number of nodes in a sum; all nodes of a chunk must fit into the slots

# Owners of memory that may still be used by sums that an exception has interrupted.
_abandoned: list[Any] = []


def count_segments(hosts: Sequence[tuple[int, int]], nbytes: int, combine: Combine) -> int:
    """Return the number of segments into which several hosts divide a sum.

    Parameters
    ----------
    hosts : sequence of (int, int)
        For each host, its first rank and one past its last rank.
    nbytes : int
        Size of a node in bytes.
    combine : callable
        Function that combines two nodes.
    """
    if combine is not fold.add:
        return 1
    return max(1, min(nbytes // SLOT_BYTES, *(stop - first for first, stop in hosts)))


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
        # Numbers of exchanges between hosts that have started and that have reached `self.down`.
        self._roots = self._passed_roots = 0

    @classmethod
    def allocate(cls, transport: Transport) -> HostMemory | None:
        """Allocate the memory; return None if no ranks share a host or memory is insufficient.

        Collective. The result is None either on all ranks or on no rank.
        """
        mpi, comm = transport.MPI, transport.comm
        with transport.blocking("shared memory"):
            sharing = comm.Split_type(mpi.COMM_TYPE_SHARED)
            # Split by the launcher's host names too: a host's ranks must be numbered consecutively.
            of_host = sharing.Split(transport.hosts.index(transport.hosts[transport.rank]))
            sharing.Free()
            firsts = comm.allgather(of_host.allreduce(transport.rank, mpi.MIN))
            hosts = [(first, first + firsts.count(first)) for first in dict.fromkeys(firsts)]
            nbytes = queue_bytes(of_host.size) * min(len(hosts), 2)
            is_possible = firsts == sorted(firsts) and len(hosts) < transport.size
            is_possible = is_possible and free_shared_bytes(transport) >= nbytes + LINE
            memory: HostMemory | None = None
            array: np.ndarray | None = None
            window: MPI.Win | None = None
            if comm.allreduce(is_possible, mpi.LAND):
                try:
                    array, window = _window(mpi, of_host, nbytes)
                except mpi.Exception:
                    pass  # a limit of this process, such as its limit on file sizes, is too low
                if comm.allreduce(array is not None, mpi.LAND) and array is not None:
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
        return not tree.plain and (combine, dtype) in KINDS and count_nodes(tree) <= MOST_NODES

    def sum_over_all(
        self,
        tree: Tree,
        pieces: Sequence[Piece],
        combine: Combine,
        out: np.ndarray,
    ) -> HostSum:
        """Create a sum over all ranks of the world; they must share this memory."""
        width = sum(size for size, _ in pieces)
        plan = plan_of(tree, self._ranks, self.up.rank, width, KINDS[combine, out.dtype])
        return HostSum(plan, pieces, out)

    def exchange(
        self, tag: int, tree: Tree, pieces: Sequence[Piece], combine: Combine, out: np.ndarray
    ) -> Steps:
        """Fold the nodes of all ranks, as a generator like those in the module `exchange`.

        Parameters
        ----------
        tag : int
            Tag of the messages between hosts.
        tree : Tree
            The reduction tree over the blocks.
        pieces : sequence of Piece
            For each value in the sum, its size and this rank's nodes.
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

    def _between_hosts(
        self, tag: int, tree: Tree, pieces: Sequence[Piece], combine: Combine, out: np.ndarray
    ) -> Steps:
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

    def _complete(self, sums: Sequence[HostSum]) -> bool:
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


def _columns(pieces: Sequence[Piece], low: int, high: int) -> list[Piece]:
    """Return the columns [low, high) of the matrix that consists of the pieces side by side."""
    part: list[Piece] = []
    start = 0
    for size, nodes in pieces:
        first, stop = max(low - start, 0), min(high - start, size)
        if first < stop or high - low == 0:
            part.append((max(stop - first, 0), [np.ravel(node)[first:stop] for node in nodes]))
        start += size
    return part


def _window(
    mpi: ModuleType | SimpleNamespace, comm: MPI.Comm, nbytes: int
) -> tuple[np.ndarray, MPI.Win]:
    """Allocate memory that the ranks of `comm` share; return the memory and its MPI window."""
    window = mpi.Win.Allocate_shared(nbytes + LINE if comm.rank == 0 else 0, 1, comm=comm)
    memory = np.frombuffer(window.Shared_query(0)[0], np.uint8)
    start = -address_of(memory) % LINE  # the same on all ranks, because pages are aligned
    memory = memory[start : start + nbytes]
    # Each rank first touches a part of the memory, which is then allocated near the rank's core.
    memory[nbytes * comm.rank // comm.size : nbytes * (comm.rank + 1) // comm.size] = 0
    return memory, window
