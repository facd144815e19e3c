"""Adds Partials up over the ranks, in buckets, while other work goes on."""

from dataclasses import replace

import numpy as np

from mpidl.backends.cpu import builds
from mpidl.comm import exchange
from mpidl.device_array import OnDevice
from mpidl.fold import Partial

BUCKET = 1 << 18  # bytes: the digits network's dense layer leaves as soon as its gradient is there


class Flight:
    """One exchange under way: a generator of requests, advanced whenever they are complete."""

    def __init__(self, generator):
        self.generator, self.requests, self.root, self.done = generator, [], None, False
        self.advance()

    def advance(self):
        """Go on to the next requests; the present ones are complete."""
        try:
            self.requests = next(self.generator)
        except StopIteration as end:
            self.root, self.done, self.requests = end.value, True, []


class Reducer:
    """Takes named values as they become final; `finish` returns their sums.

    Partials are packed into buckets of about `bucket_bytes` in the order they come, which is the
    tape's and so the same on every rank; a full bucket leaves at once. Each term of a Partial is
    folded by itself (see `Partial`). Terms of another tree, type or operation start a new bucket.
    `watch()` is what long kernels call every now and then, until `finish`: it lets exchanges go on.
    """

    def __init__(self, world, bucket_bytes=BUCKET, watch=None):
        self.world, self.bucket_bytes = world, bucket_bytes
        self.values, self.buckets = {}, []
        self.watches = watch is not None and world.size > 1
        if self.watches:
            builds.watch(watch)
        self.open, self.open_key, self.open_bytes = [], None, 0

    def push(self, name, value):
        """Hand over one value: a Partial, or an array that every rank has already.

        A Partial's nodes are kept no longer than they are needed; on one rank the one node is the
        sum, in the same memory.
        """
        self.values[name] = value
        if not isinstance(value, Partial) or not is_on_host(value):
            return
        for term in value.terms:
            if len(term.tree.runs) != self.world.size:
                raise ValueError(
                    f"{name or 'the sum'} is over images that {len(term.tree.runs)} rank(s) share, "
                    f"this world has {self.world.size}: add it up in the world of its images"
                )
        if self.world.size == 1:
            roots = [np.reshape(term.nodes[0], value.shape) for term in value.terms]
            self.values[name] = value.finish(roots)
            return
        shells = [replace(term, nodes=[]) for term in value.terms]
        self.values[name] = Partial(shells, value.once, value.shape, value.dtype)
        for index, term in enumerate(value.terms):
            key = (term.tree, term.combine, term.dtype)
            if self.open and key != self.open_key:
                self._post()
            self.open_key = key
            size = int(np.prod(value.shape))
            self.open.append((name, index, term.nodes, size))
            self.open_bytes += size * term.dtype.itemsize
            if self.open_bytes >= self.bucket_bytes:
                self._post()

    def _post(self):
        tree, combine, dtype = self.open_key
        places = [(name, index, size) for name, index, _, size in self.open]
        if len(self.open) == len(self.open[0][2]) == 1:  # a large one, as it lies
            matrix = np.reshape(self.open[0][2][0], (1, -1))
        else:
            width, at = sum(size for *_, size in self.open), 0
            matrix = np.empty((len(tree.nodes[tree.rank]), width), dtype)
            for _, _, nodes, size in self.open:
                for row, node in zip(matrix, nodes, strict=True):
                    row[at : at + size] = np.reshape(node, -1)
                at += size
        self.buckets.append((places, self.world.fly(tree, matrix, combine)))
        self.open, self.open_key, self.open_bytes = [], None, 0

    def progress(self):
        """Let the exchanges under way go on; never waits."""
        self.world.progress()

    def finish(self):
        """Wait for all sums; returns {name: array}."""
        if self.watches:
            builds.watch(None)
        if self.open:
            self._post()
        roots = {}
        for places, flight in self.buckets:
            self.world.land(flight)
            at = 0
            for name, index, size in places:
                roots[name, index] = flight.root[at : at + size]
                at += size
        sums = self._on_devices()
        for name, value in self.values.items():
            if name in sums:
                continue
            if isinstance(value, Partial):
                found = [roots[name, i] for i in range(len(value.terms))]
                value = value.finish([root.reshape(value.shape) for root in found])
            sums[name] = value
        sums = {name: sums[name] for name in self.values}
        self.values, self.buckets = {}, []
        return sums

    def _on_devices(self):
        """The sums of those whose terms lie on a GPU."""
        there = {n: v for n, v in self.values.items() if not is_on_host(v)}
        if not there:
            return {}
        from mpidl.backends.gpu import sums

        return sums.gplus(there, self.world)


def is_on_host(value):
    """Whether a value, or what a Partial's nodes are, is NumPy's."""
    if not isinstance(value, Partial):
        return True
    there = [*(term.nodes for term in value.terms), value.once]
    return not any(isinstance(v, OnDevice) for v in there)


def post(net, tag, tree, matrix, combine):
    """Start the exchange of a (nodes, width) matrix by the way its layout and size call for."""
    way = exchange.choose(tree, matrix.shape[1] * matrix.itemsize, combine)
    return Flight(way(net, tag, tree, matrix, combine))
