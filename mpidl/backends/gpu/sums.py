"""Sum Partials on GPUs over all ranks: the GPU part of `comm.reducer.Reducer`.

Sums follow a reduction tree, whose root is the total. Each rank has already folded (summed) its
images into a few nodes of the tree. A single rank already has the root. Several ranks exchange
their nodes from GPU to GPU with a mover (`comm.nccl`) or, without one, through pinned host memory
and the world's exchange. In both cases, the same operands are combined in the same order, so the
result has the same bytes.

As in `comm.exchange`, each algorithm is a generator. It passes operations to the launch sink, which
performs or records them, and yields where other operations should come first: SOON, NEXT or LAST.
"""

import functools
import operator
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from mpidl import phases
from mpidl.backends.gpu import elementwise, fold, launching
from mpidl.backends.gpu.program import Operation
from mpidl.core.blocks import LANES
from mpidl.core.fold import Late, Partial, add
from mpidl.core.values import OnDevice

# When to continue a sum: after the launches of the next layers, after the start of the next sum, or
# when the result is needed.
SOON, NEXT, LAST = range(3)

# Maximum size in bytes of a node for which every rank gathers all nodes. A second message takes
# about 10 µs, in which a GPU sends some hundred KB more.
GATHERED = 1 << 18
COLUMNS = 64  # a segment is a multiple of 256 bytes


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


class Layout(OnDevice):
    """Stands for the nodes of a term after they were sent; `like` is as in `fold.Nodes`."""

    def __init__(self, like):
        self.like = like


def without_nodes(partial):
    """Return a Partial without its nodes, for `total`."""
    terms = [replace(term, nodes=Layout(term.nodes.like)) for term in partial.terms]
    return Partial(terms, partial.addend, partial.shape, partial.dtype)


class DeviceSum:
    """A sum over the ranks, of which some operations may have to be launched or recorded.

    `root` (width,) is the sum, once they have been; `point` is then None, and before when to call
    `advance`: SOON, NEXT or LAST.
    """

    def __init__(self, steps):
        self._steps, self.root, self.point = steps, None, None
        self.advance()

    def advance(self):
        """Launch or record further operations."""
        try:
            self.point = next(self._steps)
        except StopIteration as end:
            self.root, self.point = end.value, None


def start(world, term, nodes, is_awaited):
    """Start to sum the nodes of several values in one exchange; return a DeviceSum. Collective.

    `term` has the tree, operation and dtype of all values. If the result `is_awaited`, it is needed
    at once, so that a second stream would not help.
    """
    tree, combine, matrices = term.tree, term.combine, [n.matrix for n in nodes]
    matrix = matrices[0]
    if len(matrices) > 1:
        matrix = elementwise.pack(matrices, len(tree.nodes[tree.rank]), term.dtype)
    if world.mover is None:
        return DeviceSum(_through_host(world, tree, matrix, combine))
    return DeviceSum(_by_mover(world, tree, matrix, combine, is_awaited))


def _through_host(world, tree, matrix, combine):
    """Copy the nodes to the host, let the world sum them, and copy the root to the device."""
    sink, width, name = launching.sink(), matrix.shape[1], phases.place()
    nodes = sink.host_array(matrix.shape, matrix.dtype)
    root, target = sink.host_array((width,), matrix.dtype), launching.empty((width,), matrix.dtype)
    state = SimpleNamespace()

    def start():
        pieces = [(width, list(nodes))]
        state.pending = world.start_sum(tree, pieces, combine, matrix.dtype, name, out=root)

    def finish(device):
        with phases.span(name or "exchange"):
            world.wait(state.pending)
        if state.pending.root is not root:
            root[...] = state.pending.root
        device.upload(target.address, root)

    if nodes.size:
        sink.operate(Operation(lambda device: device.download(nodes, matrix.address)), [matrix])
    yield from _on_host(world, start, [])
    yield LAST
    sink.operate(Operation(finish, captured=False), [target])
    return target


def _on_host(world, act, arrays):
    """Let the host call act() after the operations so far. Other operations may come before."""
    sink, state = launching.sink(), SimpleNamespace()

    def mark(device):
        state.mark = device.mark()

    def play(device):
        while world.is_exchanging and not device.reached(state.mark):
            world.progress()
            os.sched_yield()
        device.wait(state.mark)
        act()

    sink.operate(Operation(mark, captured=False), arrays)
    yield SOON
    sink.operate(Operation(play, captured=False), arrays)


def _by_mover(world, tree, matrix, combine, is_awaited):
    """Send nodes from GPU to GPU, in the device's stream for sums unless the result is awaited.

    `arrays` are those that the second stream uses. They stay in use until the main stream waits.
    """
    sink, arrays, state = launching.sink(), [matrix], SimpleNamespace()

    def back(device):
        state.token = device.back()

    is_aside = world.mover.captured and not is_awaited
    if is_aside:
        sink.operate(Operation(lambda device: device.aside()), arrays)
    is_small = matrix.shape[1] * matrix.dtype.itemsize <= GATHERED
    algorithm = gather_nodes if is_small or combine is not add else segmented
    root = yield from algorithm(world, tree, matrix, combine, arrays)
    if is_aside:
        sink.operate(Operation(back), [])
        yield LAST
        sink.operate(Operation(lambda device: device.join(state.token)), [*arrays, root])
    return root


def gather_nodes(world, tree, matrix, combine, arrays):
    """Send the nodes of each rank to all ranks; every rank folds all nodes."""
    mover, width = world.mover, matrix.shape[1]
    counts = [len(nodes) for nodes in tree.nodes]
    nodes = launching.empty((sum(counts), width), matrix.dtype)
    arrays.append(nodes)
    if min(counts) == max(counts):
        messages = functools.partial(mover.allgather, matrix, nodes)
    else:
        firsts = np.cumsum([0, *counts])
        parts = [
            (rank, nodes.part(int(firsts[rank]) * width, (count, width)))
            for rank, count in enumerate(counts)
            if count
        ]
        sends = [(rank, matrix) for rank in range(world.size) if len(matrix)]
        messages = functools.partial(mover.exchange, sends, parts)
    yield from _transfer(world, messages, [matrix, nodes], LAST)
    return fold.fold_all(nodes, tree, combine)


def segmented(world, tree, matrix, combine, arrays):
    """Split the columns into one segment per rank; each rank folds and distributes its segment."""
    mover, rank, width = world.mover, tree.rank, matrix.shape[1]
    size = -(-width // (world.size * COLUMNS)) * COLUMNS
    sizes = [max(min(size, width - s * size), 0) for s in range(world.size)]
    owners = [owner for owner, nodes in enumerate(tree.nodes) for _ in nodes]
    # The last segments may be shorter. The columns after their end are folded too, but not used.
    inbox = launching.empty((len(owners), size), matrix.dtype)
    root = launching.empty((world.size * size,), matrix.dtype)
    sends = [
        (s, matrix.part(row * width + s * size, (count,)))
        for s, count in enumerate(sizes)
        for row in range(len(matrix))
        if count
    ]
    receives = [
        (owner, inbox.part(row * size, (sizes[rank],)))
        for row, owner in enumerate(owners)
        if sizes[rank]
    ]
    arrays += [inbox, root]
    messages = functools.partial(mover.exchange, sends, receives)
    yield from _transfer(world, messages, [matrix, inbox], NEXT)
    part = fold.fold_all(inbox, tree, combine)
    arrays.append(part)
    messages = functools.partial(mover.allgather, part, root)
    yield from _transfer(world, messages, [part, root], LAST)
    return root.part(0, (width,))


def _transfer(world, messages, arrays, point):
    """Let messages() start to move `arrays`, and wait until they have arrived.

    The operations are launched without a yield if a CUDA graph can contain the messages.
    """
    sink, mover, state = launching.sink(), world.mover, SimpleNamespace()
    if mover.captured:
        sink.operate(Operation(lambda device: messages()), arrays)
        return

    def post():
        state.requests = messages()

    yield from _on_host(world, post, arrays)
    yield point
    wait = Operation(lambda device: mover.wait(state.requests), captured=False)
    sink.operate(wait, arrays)


def total_of_one_rank(name, partial):
    """Return the `total` of a Partial of the only rank."""
    return total(name, partial, [term.nodes.matrix.row(0) for term in partial.terms])


def total(name, partial, roots):
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
