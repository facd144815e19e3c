"""Run exchanges on simulated ranks, and count messages and rounds."""

import numpy as np

from mpidl.comm.simulation import Simulation
from mpidl.core import fold


class Outcome:
    """The root that each rank has after an exchange, and its numbers of messages and bytes."""

    def __init__(self, roots, ranks):
        self.roots = roots
        self.rounds = max(rank.clock for rank in ranks)  # each message takes one second
        self.messages = [rank.messages for rank in ranks]
        self.bytes = [rank.bytes for rank in ranks]


def exchange(algorithm, trees, matrices, combine=fold.add, tag=7):
    """Run an algorithm of `comm.exchange` to its end on all ranks' (nodes, width) matrices."""
    simulation = Simulation(len(trees))
    roots = simulation.run(
        (r, algorithm(rank, tag, trees[r], matrices[r].copy(), combine))
        for r, rank in enumerate(simulation.ranks)
    )
    return Outcome(roots, simulation.ranks)


def folded(trees, leaves, combine=fold.add):
    """Fold each rank's run of `leaves`, and return the (nodes, width) matrices and Partials."""
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
