"""Simulate ranks in one process that exchange messages step by step and count them."""

from collections import defaultdict, deque

import numpy as np

from mpidl import fold
from mpidl.comm.reducer import PendingExchange


class Request:
    """A request that is complete once its function has returned true."""

    def __init__(self, complete):
        self.complete, self.is_complete = complete, False

    def test(self):
        self.is_complete = self.is_complete or self.complete()
        return self.is_complete


class Wire:
    """The messages in transit between all ranks; one sent in a step arrives in the next."""

    def __init__(self):
        self.step, self.messages = 0, defaultdict(deque)
        self.rounds = 0  # the step in which the last message arrived


class SimulatedTransport:
    """The methods of `Transport` that an exchange uses, for one rank of the wire."""

    def __init__(self, wire, rank, size):
        self.wire, self.rank, self.size = wire, rank, size
        self.messages = self.bytes = 0

    def isend(self, array, dest, tag):
        self.messages += 1
        self.bytes += array.nbytes
        self.wire.messages[self.rank, dest, tag].append((self.wire.step, array.copy()))
        return Request(lambda: True)

    def irecv(self, array, source, tag):
        def complete():
            queue = self.wire.messages[source, self.rank, tag]
            if not queue or queue[0][0] == self.wire.step:
                return False
            _, sent = queue.popleft()
            self.wire.rounds = self.wire.step
            assert sent.size == array.size and sent.dtype == array.dtype
            array[...] = sent.reshape(array.shape)
            return True

        return Request(complete)


class Outcome:
    """The root that each rank holds after an exchange, and its counts of messages and bytes."""

    def __init__(self, roots, transports, rounds):
        self.roots, self.rounds = roots, rounds
        self.messages = [transport.messages for transport in transports]
        self.bytes = [transport.bytes for transport in transports]


def exchange(algorithm, trees, matrices, combine=fold.add, tag=7):
    """Run an algorithm of `comm.exchange` on all ranks' (nodes, width) matrices to its end."""
    wire, size = Wire(), len(trees)
    transports = [SimulatedTransport(wire, rank, size) for rank in range(size)]
    exchanges = [
        PendingExchange(algorithm(transports[r], tag, trees[r], matrices[r].copy(), combine))
        for r in range(size)
    ]
    while not all(e.is_complete for e in exchanges):
        wire.step += 1
        assert wire.step < 1000, "the exchange does not end"
        for pending in exchanges:
            # A list instead of a generator, so that every request is tested and can complete.
            if not pending.is_complete and all([request.test() for request in pending.requests]):
                pending.advance()
    assert not any(wire.messages.values()), "a message was never received"
    return Outcome([e.root for e in exchanges], transports, wire.rounds)


def folded(trees, leaves, combine=fold.add):
    """Fold each rank's run of `leaves`; return the (nodes, width) matrices and the Partials."""
    matrices, partials = [], []
    for tree in trees:
        counter = fold.Counter(tree, combine)
        for block in range(*tree.run):
            counter.push(leaves[block].copy())
        partial = counter.partial(leaves[0].shape, leaves[0].dtype)
        nodes = partial.terms[0].nodes
        matrices.append(np.stack(nodes) if nodes else np.empty((0, len(leaves[0])), leaves.dtype))
        partials.append(partial)
    return matrices, partials
