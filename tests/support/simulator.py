"""Ranks that exchange messages inside one process, step by step, and are counted."""

from collections import defaultdict, deque

import numpy as np

from mpidl import fold
from mpidl.comm.reducer import PendingExchange


class Request:
    """Complete from the moment its function says so."""

    def __init__(self, complete):
        self.complete, self.done = complete, False

    def test(self):
        self.done = self.done or self.complete()
        return self.done


class Wire:
    """What is under way between all ranks: a message sent in one step arrives in the next."""

    def __init__(self):
        self.step, self.messages = 0, defaultdict(deque)
        self.rounds = 0  # the step in which the last message arrived


class SimulatedTransport:
    """One rank's view of the wire: the methods of `Transport` that an exchange uses."""

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
    """What an exchange left: each rank's root, and what each rank sent."""

    def __init__(self, roots, transports, rounds):
        self.roots, self.rounds = roots, rounds
        self.messages = [transport.messages for transport in transports]
        self.bytes = [transport.bytes for transport in transports]


def exchange(way, trees, matrices, combine=fold.add, tag=7):
    """Run one exchange of all ranks' (nodes, width) matrices to its end."""
    wire, size = Wire(), len(trees)
    transports = [SimulatedTransport(wire, rank, size) for rank in range(size)]
    exchanges = [
        PendingExchange(way(transports[r], tag, trees[r], matrices[r].copy(), combine))
        for r in range(size)
    ]
    while not all(e.is_complete for e in exchanges):
        wire.step += 1
        assert wire.step < 1000, "the exchange does not end"
        for pending in exchanges:
            # all of them are tested: a receive later in the list completes as well
            if not pending.is_complete and all([request.test() for request in pending.requests]):
                pending.advance()
    assert not any(wire.messages.values()), "a message was never received"
    return Outcome([e.root for e in exchanges], transports, wire.rounds)


def folded(trees, leaves, combine=fold.add):
    """Of each rank, the (nodes, width) matrix of its run of `leaves`, and a Partial of it."""
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
