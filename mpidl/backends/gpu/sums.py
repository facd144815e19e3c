"""Sum Partials on GPUs over all ranks: the GPU part of `World.gplus`.

Sums follow a reduction tree, whose root is the total. Each rank has already folded (summed) its
images into a few nodes of the tree. A single rank already has the root. Several ranks exchange
their nodes through pinned host memory and MPI or, with a mover (`comm.nccl`), from GPU to GPU. In
both cases, the same operands are combined in the same order, so the result has the same bytes.
"""

import functools
import operator
from dataclasses import replace

import numpy as np

from mpidl.backends.gpu import elementwise, fold, launching
from mpidl.core.blocks import LANES
from mpidl.core.fold import Late, Partial

# Maximum size in bytes of the nodes that a GPU gathers from all ranks. Larger nodes are exchanged
# through host memory, where each rank sums a part of each node (`comm.exchange`).
GATHERED = 1 << 28


class Counts:
    """Provides the image counts and indices of a mini-batch to GPU kernels, as `Batch.device`."""

    def valid(self, batch):
        """Return the number of images in this rank's share, (1,) int32."""
        first, last = batch.images
        return launching.scalar("valid", last - first, np.int32)

    def samples(self, batch):
        """Return the epoch (1,) and the sample indices (blocks * 16,), both int32.

        The indices of unused lanes are 0.
        """
        samples = np.zeros(batch.blocks * LANES, np.int32)
        samples[: len(batch.indices)] = batch.indices
        epoch = launching.scalar("epoch", batch.epoch, np.int32)
        return epoch, launching.scalar("samples", samples, np.int32)

    def per_image(self, batch):
        """Return 1 / (number of images in the mini-batch) as a `fold.Late`."""
        return Late(launching.scalar("per_image", 1.0 / batch.count, np.float64))


class Pending:
    """A scalar sum that is still on the GPU. float() waits for the sum and returns its value.

    `roots` are the arrays that `finish` needs: the roots of the Partial's terms, followed by the
    numbers of its Late factors.
    """

    shape, dtype = (), np.dtype(np.float64)

    def __init__(self, partial, roots):
        self.partial = partial
        factors = [t.scale.array for t in partial.terms if isinstance(t.scale, Late)]
        self.roots = [*roots, *factors]

    def finish(self, roots):
        """Return the sum as a float. The argument contains the values of the attribute `roots`."""
        values = [np.asarray(root, np.float64) for root in roots]
        factors, partial = iter(values[len(self.partial.terms) :]), self.partial
        terms = [
            replace(t, scale=float(Late(next(factors), t.scale.factor)))
            if isinstance(t.scale, Late)
            else t
            for t in partial.terms
        ]
        partial = Partial(terms, partial.addend, partial.shape, partial.dtype)
        return float(partial.finish(values[: len(terms)]))

    def __float__(self):
        return self.finish([float(root) for root in self.roots])


def gplus(partials, world):
    """Sum Partials, {name: Partial}, over all ranks; return {name: sum}. Collective.

    A sum of shape () is a Pending. Any other sum is an Array.
    """
    roots, groups = {}, {}
    for name, partial in partials.items():
        for index, term in enumerate(partial.terms):
            if world.size == 1:
                roots[name, index] = term.nodes.matrix.row(0)
            else:
                key = (term.tree, term.combine, term.dtype)
                groups.setdefault(key, []).append((name, index, term.nodes.matrix))
    for (tree, combine, dtype), members in groups.items():
        matrix = members[0][2]
        if len(members) > 1:
            matrix = elementwise.pack([m for *_, m in members], len(tree.nodes[tree.rank]), dtype)
        root, column = _exchange(world, tree, matrix, combine), 0
        for name, index, member in members:
            width = member.shape[1]
            roots[name, index] = root.part(column, (width,))
            column += width
    return {
        name: _finish(name, partial, [roots[name, i] for i in range(len(partial.terms))])
        for name, partial in partials.items()
    }


def _exchange(world, tree, matrix, combine):
    """Exchange nodes with all ranks; return the root. `matrix` has a row per node of this rank."""
    counts, width = [len(nodes) for nodes in tree.nodes], matrix.shape[1]
    rows, words = max(counts), width * matrix.dtype.itemsize // elementwise.WORD
    if world.mover is None or len(counts) * rows * words * elementwise.WORD > GATHERED:
        return launching.sink().exchange(world, tree, matrix, combine)
    padded = matrix
    if len(matrix) < rows:  # all ranks must send the same number of rows
        padded = launching.empty((rows, width), matrix.dtype)
        elementwise.copy([(matrix, padded, len(matrix), words, words, words)])
    gathered = launching.empty((len(counts), rows, width), matrix.dtype)
    launching.sink().between(world.mover, padded, gathered)
    nodes = gathered.reshape(len(counts) * rows, width)
    if min(counts) < rows:
        nodes, pieces = launching.empty((sum(counts), width), matrix.dtype), []
        for rank, count in enumerate(counts):
            to = nodes.part(sum(counts[:rank]) * width, (count, width))
            pieces.append((gathered.row(rank), to, count, words, words, words))
        elementwise.copy(pieces)
    return fold.fold_all(nodes, tree, combine)


def _finish(name, partial, roots):
    """Compute `Partial.finish` on the GPU, or return a Pending for a scalar sum."""
    if partial.shape == ():
        return Pending(partial, roots)
    if not partial.terms:
        return partial.addend
    scaled = [
        root if term.scale == 1.0 else elementwise.scaled(root, term.scale)
        for term, root in zip(partial.terms, roots, strict=True)
    ]
    total = functools.reduce(operator.add, scaled)
    if partial.dtype != total.dtype:
        raise TypeError(
            f"{name or 'a sum'}: {total.dtype} on a GPU cannot be converted to {partial.dtype}"
        )
    layout = next((t.nodes.like for t in partial.terms if t.nodes.like is not None), None)
    if layout is None:
        total.shape = total.dims = partial.shape
        total.order = tuple(range(len(partial.shape)))
    else:
        total.shape, total.dims, total.order = layout.shape, layout.dims, layout.order
    if partial.addend is not None:
        total = total + partial.addend
    return total
