"""Run the exchanges of `comm.exchange` on simulated ranks with a simulated clock.

The generators are the same as in a real run. Only their transport differs: a `SimulatedRank`
delivers messages inside one process, and computes their cost by the LogGP model of a network
(Alexandrov et al., "LogGP: incorporating long messages into the LogP model", 1995). Each rank has a
clock in seconds, which these events advance:

- Sending a message takes the sender `overhead` seconds. Receiving a message takes the receiver
  `overhead` seconds too.
- A message of n bytes arrives `latency + n * per_byte` seconds after it was sent. A rank sends one
  message at a time, and receives one message at a time.
- Combining two reduction-tree nodes of n bytes takes `n * per_combined_byte` seconds.

Sums in memory that the ranks of a host share (`comm.host_memory`) are modelled. A rank sees the
data of another rank after the latency of a message, and copying n bytes to or from this memory
takes `n * per_byte` seconds. The exchange between hosts uses the generators of a real run.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpidl.comm import exchange, host_memory, sum_plans
from mpidl.core import fold

Message = tuple[float, float, np.ndarray | None]  # arrival, seconds of the transfer, content
SEGMENT = 64  # maximum number of simulated elements per rank; each may represent several elements


class Link(NamedTuple):
    """Cost of the messages between two ranks."""

    # Seconds from the end of the sender's overhead to the arrival of an empty message.
    latency: float
    per_byte: float  # additional seconds for each byte of a message


class Network(NamedTuple):
    """Cost of messages and of combining reduction-tree nodes."""

    overhead: float  # seconds of work per message, for the sender and for the receiver
    inside: Link  # link between two ranks on one compute node
    between: Link  # link between ranks on different compute nodes
    per_combined_byte: float = 0.0  # seconds per byte for combining two nodes of the reduction tree
    # Fixed cost of an exchange in seconds, which does not depend on the algorithm.
    per_exchange: float = 0.0
    ranks_per_node: int = 1  # number of consecutive ranks on a compute node
    # Whether the ranks of a compute node compute sums in memory that they share.
    shares_memory: bool = False


ROUNDS = Network(0.0, Link(1.0, 0.0), Link(1.0, 0.0))  # the clock counts rounds of messages


@dataclass(slots=True)
class _Receive:
    """The request for a message."""

    source: int  # the rank that sends the message
    tag: int
    array: np.ndarray


class Meeting:
    """A request that is complete when all ranks of a compute node have arrived.

    `time` is the simulated time at which the ranks notice that all of them have arrived.
    """

    __slots__ = ("missing", "time", "waiting", "_latency")

    def __init__(self, count: int, latency: float) -> None:
        self.missing, self.time, self._latency = count, 0.0, latency
        self.waiting: list[_Process] = []

    def arrive(self, rank: SimulatedRank) -> Meeting:
        """Record the arrival of a rank, and return this request."""
        self.missing -= 1
        self.time = max(self.time, rank.clock + self._latency)
        if not self.missing:
            for process in self.waiting:
                process.missing -= 1
                if not process.missing:
                    rank.simulation.ready.append(process)
        return self


class SimulatedRank:
    """A simulated rank, with the methods of `comm.transport.Transport` that exchanges use.

    `messages` and `bytes` count what this rank has sent.
    """

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.simulation, self.rank, self.size = simulation, rank, simulation.size
        self.node = rank // simulation.network.ranks_per_node
        # Simulated time of this rank in seconds.
        self.clock = self.send_port_free = self.receive_port_free = 0.0
        self.messages, self.bytes = 0, 0.0
        self.inbox: dict[tuple[int, int], list[Message]] = {}  # by source and tag, in order
        self.waiting: dict[tuple[int, int], _Process] = {}

    def isend(self, array: np.ndarray, dest: int, tag: int) -> None:
        """Send an array. Return None, which stands for a complete request."""
        simulation = self.simulation
        network, nbytes = simulation.network, array.nbytes * simulation.bytes_per_byte
        receiver, key = simulation.ranks[dest], (self.rank, tag)
        latency, per_byte = network.inside if self.node == receiver.node else network.between
        self.clock += network.overhead
        if self.send_port_free < self.clock:
            self.send_port_free = self.clock
        transfer = nbytes * per_byte
        self.send_port_free += transfer
        self.messages += 1
        self.bytes += nbytes
        content = array.copy() if simulation.carries_data else None
        message = self.send_port_free + latency, transfer, content
        if key in receiver.inbox:
            receiver.inbox[key].append(message)
        else:
            receiver.inbox[key] = [message]
        process = receiver.waiting.pop(key, None)
        if process is not None:
            process.missing -= 1
            if not process.missing:
                simulation.ready.append(process)

    def irecv(self, array: np.ndarray, source: int, tag: int) -> _Receive:
        """Return the request for receiving an array."""
        return _Receive(source, tag, array)

    def receive(self, requests: Sequence[_Receive | Meeting | None]) -> None:
        """Take the messages of all requests from the inbox, and advance the clock."""
        network, arrivals = self.simulation.network, []
        for request in requests:
            if request is None:
                continue
            if isinstance(request, Meeting):
                self.clock = max(self.clock, request.time)
                continue
            key = (request.source, request.tag)
            queue = self.inbox[key]
            arrival, transfer, content = queue.pop(0)
            if not queue:
                del self.inbox[key]
            arrivals.append((arrival, transfer))
            if content is not None:
                array = request.array
                if content.size != array.size or content.dtype != array.dtype:
                    raise ValueError(
                        f"expected a message of {array.size} {array.dtype} values, got "
                        f"{content.size} of {content.dtype}"
                    )
                array[...] = content.reshape(array.shape)
        arrivals.sort()
        overhead, clock, port_free = network.overhead, self.clock, self.receive_port_free
        for arrival, transfer in arrivals:  # the rank receives one message at a time
            port_free = max(arrival, port_free + transfer)
            clock = max(clock, port_free) + overhead
        self.clock, self.receive_port_free = clock, port_free

    def spend(self, seconds: float) -> None:
        """Advance the clock by the duration of some work."""
        self.clock += seconds


class _Process:
    """A generator of `comm.exchange` that runs on one simulated rank."""

    __slots__ = ("rank", "steps", "requests", "missing", "root", "is_complete")

    def __init__(self, rank: SimulatedRank, steps: Generator[Any, None, np.ndarray]) -> None:
        self.rank, self.steps = rank, steps
        self.requests: Sequence[Any] = ()
        self.root: Any = None  # until the exchange is complete
        self.missing, self.is_complete = 0, False

    def advance(self) -> None:
        """Run the generator until it waits for a message that has not been sent, or ends."""
        while True:
            self.rank.receive(self.requests)
            try:
                self.requests = next(self.steps)
            except StopIteration as end:
                self.root, self.is_complete = end.value, True
                return
            inbox, waiting = self.rank.inbox, self.rank.waiting
            for request in self.requests:
                if isinstance(request, Meeting):
                    if request.missing:
                        request.waiting.append(self)
                        self.missing += 1
                elif request is not None and (request.source, request.tag) not in inbox:
                    waiting[request.source, request.tag] = self
                    self.missing += 1
            if self.missing:
                return


class Simulation:
    """Simulated ranks that exchange messages in one process.

    Messages carry data, or only take time. `bytes_per_byte` is the number of bytes in the real
    exchange that one byte of the simulated arrays represents.
    """

    def __init__(
        self,
        size: int,
        network: Network = ROUNDS,
        *,
        carries_data: bool = True,
        bytes_per_byte: float = 1,
    ) -> None:
        self.size, self.network = size, network
        self.carries_data, self.bytes_per_byte = carries_data, bytes_per_byte
        self.ready: deque[_Process] = deque()
        # The ranks. Exchanges use them as transports.
        self.ranks = [SimulatedRank(self, rank) for rank in range(size)]

    def run(
        self, exchanges: Iterable[tuple[int, Generator[Any, None, np.ndarray]]]
    ) -> list[np.ndarray]:
        """Run exchanges until all of them have ended, and return their results.

        Raises RuntimeError if an exchange waits for a message that no rank sends, or if a message
        is not received. `exchanges` are pairs of a rank and a generator. A rank may run several
        exchanges with different tags at the same time.
        """
        processes = [_Process(self.ranks[rank], steps) for rank, steps in exchanges]
        self.ready.extend(processes)
        collects = gc.isenabled()
        gc.disable()  # up to a million messages exist at a time, none in a reference cycle
        try:
            while self.ready:
                self.ready.popleft().advance()
        finally:
            if collects:
                gc.enable()
        blocked = sorted({p.rank.rank for p in processes if not p.is_complete})
        if blocked:
            raise RuntimeError(f"the exchange does not end on rank {', '.join(map(str, blocked))}")
        if any(rank.inbox for rank in self.ranks):
            raise RuntimeError("a message was never received")
        return [process.root for process in processes]


class _SharedMemory:
    """A model of the sums that `comm.host_memory.HostMemory` computes on one compute node."""

    def __init__(self, simulation: Simulation, hosts: Sequence[fold.Range], node: int) -> None:
        first, stop = hosts[node]
        self.simulation, self.hosts, self.node = simulation, hosts, node
        self.network, self.size = simulation.network, stop - first
        latency = self.network.inside.latency if self.size > 1 else 0.0
        self.placed, self.folded, self.passed = (Meeting(self.size, latency) for _ in range(3))

    def steps(
        self,
        transport: Any,
        tree: fold.Tree,
        matrix: np.ndarray,
        combine: exchange.Combine,
        combine_nodes: exchange.Combine,
    ) -> Generator[Any, None, Any]:
        """Return the generator of a sum on a rank of the compute node."""
        network, (first, stop) = self.network, self.hosts[self.node]
        nbytes = matrix.shape[1] * matrix.itemsize * self.simulation.bytes_per_byte
        copy_seconds = nbytes * network.inside.per_byte
        runs = tuple((tree.runs[a][0], tree.runs[b - 1][1]) for a, b in self.hosts)
        host_tree = fold.Tree(tree.leaves, runs, self.node)
        count = sum(len(nodes) for nodes in tree.nodes[first:stop])
        rows, rank = len(host_tree.nodes[self.node]), transport.rank - first
        is_direct = combine is not fold.add or count * nbytes <= 2 * sum_plans.SLOT_BYTES
        transport.spend(len(matrix) * copy_seconds)
        yield [self.placed.arrive(transport)]
        folded_bytes = (count - rows) * nbytes
        transport.spend(folded_bytes * network.per_combined_byte / (1 if is_direct else self.size))
        if not is_direct:
            yield [self.folded.arrive(transport)]
            transport.spend(copy_seconds)
        if len(self.hosts) == 1:
            return
        segments = host_memory.count_segments(self.hosts, int(nbytes), combine)
        if rank < segments:
            row = np.zeros(max(matrix.shape[1] // segments, 1), matrix.dtype)
            nodes = np.broadcast_to(row, (rows, len(row)))
            peers: Any = host_memory.Peers(transport, [a + rank for a, _ in self.hosts])
            algorithm = exchange.choose_algorithm(host_tree, int(nbytes / segments), combine)
            yield from algorithm(peers, 0, host_tree, nodes, combine_nodes)
            transport.spend(copy_seconds / segments * (self.size > 1))
        yield [self.passed.arrive(transport)]
        transport.spend(copy_seconds * (segments - (rank < segments)) / segments)


@lru_cache(maxsize=4096)
def exchange_seconds(
    runs: tuple[fold.Range, ...],
    width: int,
    itemsize: int,
    network: Network,
    combine: exchange.Combine = fold.add,
    algorithm: exchange.Algorithm | None = None,
) -> float:
    """Return the simulated duration of an exchange in seconds if all ranks start together.

    `runs` has the range of blocks of each rank (`fold.split_blocks`), and a node has `width`
    elements of `itemsize` bytes. By default, the algorithm is the one that a run would choose.
    """
    size, leaves = len(runs), runs[-1][1]
    if size == 1:
        return 0.0
    trees = [fold.Tree(leaves, runs, rank) for rank in range(size)]
    nodes = trees[0].nodes
    for tree in trees[1:]:
        tree.__dict__["nodes"] = nodes  # the nodes are equal on all ranks, so compute them once
    in_memory = network.shares_memory and algorithm is None and network.ranks_per_node > 1
    chosen_algorithm = algorithm or exchange.choose_algorithm(trees[0], width * itemsize, combine)
    # Simulate fewer elements, each of which represents several, so that 1,024 ranks fit in memory.
    values = np.zeros(min(width, SEGMENT * size), f"V{itemsize}")
    factor = width / max(len(values), 1)
    simulation = Simulation(size, network, carries_data=False, bytes_per_byte=factor)

    starts = range(0, size, network.ranks_per_node)
    ranges = [(first, min(first + network.ranks_per_node, size)) for first in starts]
    hosts = [_SharedMemory(simulation, ranges, node) for node in range(len(ranges))]

    def on(transport: Any) -> Any:
        def combine_nodes(left: np.ndarray, right: np.ndarray) -> np.ndarray:
            transport.spend(left.nbytes * factor * network.per_combined_byte)
            return left

        matrix = np.broadcast_to(values, (len(nodes[transport.rank]), len(values)))
        if in_memory:
            shared = hosts[transport.node]
            return shared.steps(transport, trees[transport.rank], matrix, combine, combine_nodes)
        return chosen_algorithm(transport, 0, trees[transport.rank], matrix, combine_nodes)

    simulation.run((transport.rank, on(transport)) for transport in simulation.ranks)
    return network.per_exchange + max(transport.clock for transport in simulation.ranks)


def allgather_seconds(size: int, nbytes: int, network: Network) -> float:
    """Return the simulated seconds for sending `nbytes` bytes from each rank to all others."""
    if size == 1:
        return 0.0
    runs = tuple((rank, rank + 1) for rank in range(size))
    free = network._replace(per_combined_byte=0.0)
    return exchange_seconds(runs, nbytes, 1, free, algorithm=exchange.gather_nodes)
