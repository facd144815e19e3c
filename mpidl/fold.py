"""The tree that adds up a mini-batch in one order, however many ranks share it.

The leaves are the blocks of the global mini-batch, 0 .. leaves-1. A node of the tree is a range
(start, stop) of blocks; a node of more than one block splits at the largest power of two below its
length, so the tree depends on the number of blocks alone. A rank owns one run of blocks, folds
what it owns into its maximal nodes, and the ranks exchange only those (`comm.exchange`): whoever
combines them gets the same bytes, because every sum is made of the same two operands.

    leaves = 5              (0,5)
                       (0,4)     \\
                  (0,2)   (2,4)   \\
                  0   1   2   3    4

With two ranks owning 0-2 and 3-4, rank 0's nodes are (0,2), (2,3) and rank 1's are (3,4), (4,5).
Arithmetic only: no MPI here.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from mpidl.device_array import is_device_array


def add(left, right):
    """The combine operation of a plain sum. Writes into `left`, which the fold owns."""
    return np.add(left, right, out=left)


def merge_moments(left, right):
    """The combine operation of (count, mean, M2), packed as float64 [count, mean(C), M2(C)].

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979, equation 2.1. Never E[x^2] - E[x]^2, which cancels. What counts no image
    changes nothing.
    """
    channels = left.size // 2
    n, m = left[0], right[0]
    if m == 0:
        return left
    if n == 0:
        left[...] = right
        return left
    delta = right[1 : 1 + channels] - left[1 : 1 + channels]
    left[1 : 1 + channels] += delta * (m / (n + m))
    left[1 + channels :] += right[1 + channels :] + delta * delta * (n * m / (n + m))
    left[0] = n + m
    return left


@lru_cache(maxsize=256)
def split_blocks(leaves, ranks, load=None):
    """Deal `leaves` blocks to `ranks` ranks in consecutive runs; returns ((start, stop), ...).

    Equal shares, the remainder to the first ranks; or in proportion to `load`, a tuple of
    non-negative weights, where 0 is an idle rank (largest remainders first, then lowest rank).
    """
    load = load or (1,) * ranks
    total = sum(load)
    counts = [leaves * w // total for w in load]
    by_remainder = sorted(range(ranks), key=lambda r: (-(leaves * load[r] % total), r))
    for r in by_remainder[: leaves - sum(counts)]:
        counts[r] += 1
    edges = np.cumsum([0, *counts]).tolist()
    return tuple(zip(edges[:-1], edges[1:], strict=True))


def is_node(start, stop, leaves):
    """Whether the range [start, stop) is a node of the tree over `leaves` blocks."""
    size = 1 << (stop - start - 1).bit_length()
    return start % size == 0 and (stop - start == size or stop == leaves)


@lru_cache(maxsize=4096)
def maximal_nodes(run, leaves):
    """The fewest nodes that cover `run` = (start, stop), in order; none for an empty run."""
    found = []
    for leaf in range(*run):
        found.append((leaf, leaf + 1))
        while len(found) > 1 and is_node(found[-2][0], leaf + 1, leaves):
            found[-2:] = [(found[-2][0], leaf + 1)]
    return tuple(found)


@dataclass(frozen=True)
class Tree:
    """The tree over `leaves` blocks, how the ranks share them, and which of them this rank is.

    `plain` gives up the fixed order: each rank adds its run from left to right into one value.
    That is what other tools do; it is here to be measured, and to show that the tests notice.
    """

    leaves: int
    runs: tuple
    rank: int
    plain: bool = False

    @property
    def run(self):
        """This rank's (first block, one past its last block)."""
        return self.runs[self.rank]

    @cached_property
    def nodes(self):
        """Of each rank, the nodes it hands over."""
        if self.plain:
            return tuple((run,) if run[0] < run[1] else () for run in self.runs)
        return tuple(maximal_nodes(run, self.leaves) for run in self.runs)

    def joins(self, start, stop):
        """Whether two neighbours may be combined into [start, stop) as soon as both are there."""
        return self.plain or is_node(start, stop, self.leaves)


class Counter:
    """Folds values that arrive in the order of their blocks; at most log2(leaves) stay alive.

    It is a binary counter: a value that completes a node is combined with its left neighbour at
    once, and that node with its own, as carries ripple. Values are leaves, or whole nodes when
    `stop` says where they end.
    """

    def __init__(self, tree, combine=add, start=None):
        self.tree, self.combine = tree, combine
        self.next = tree.run[0] if start is None else start
        self.starts, self.values = [], []

    def push(self, value, stop=None):
        """Take the next value, which the fold may overwrite."""
        self.starts.append(self.next)
        self.values.append(np.asarray(value))
        self.next = self.next + 1 if stop is None else stop
        while len(self.values) > 1 and self.tree.joins(self.starts[-2], self.next):
            right = self.values.pop()
            self.starts.pop()
            self.values[-1] = self.combine(self.values[-1], right)

    def partial(self, shape=(), dtype=np.float32):
        """What was folded, as a Partial; shape and dtype say what it is where nothing was."""
        if self.next != self.tree.run[1]:
            raise ValueError(f"folded blocks up to {self.next}, this rank's end at {self.tree.run}")
        for value in self.values:  # a rank without blocks knows them by shape and dtype alone
            if value.dtype != dtype or value.size != np.prod(shape, dtype=int):
                raise ValueError(
                    f"folded values of shape {value.shape} and type {value.dtype}, said to be of "
                    f"shape {tuple(shape)} and type {np.dtype(dtype)}"
                )
        return Partial(
            [Term(self.tree, self.values, self.combine, np.dtype(dtype))], None, shape, dtype
        )


def fold_nodes(tree, nodes, values, combine):
    """Combine all nodes of all ranks, in order, into the root. Overwrites `values`."""
    counter = Counter(tree, combine, start=0)
    for (_, stop), value in zip(nodes, values, strict=True):
        counter.push(value, stop)
    (root,) = counter.values
    return root


class Late:
    """A factor that is known only when a sum is finished: 1 / (images of the mini-batch) in a step
    that was recorded once and is replayed for mini-batches of other sizes.

    value(): the number as of now, without `factor`; array: where the device keeps it, (1,) float64.
    """

    __slots__ = ("value", "array", "factor")

    def __init__(self, value, array, factor=1.0):
        self.value, self.array, self.factor = value, array, factor

    def __float__(self):
        return self.value() * self.factor

    def __mul__(self, number):
        return Late(self.value, self.array, self.factor * float(number))

    __rmul__ = __mul__


@dataclass
class Term:
    """One folded sum: this rank's nodes of it, their type, and a factor applied after the fold."""

    tree: Tree
    nodes: list
    combine: object
    dtype: np.dtype
    scale: object = 1.0  # a number, or Late


PLAIN = (int, float, np.ndarray, np.generic)  # what a replicated number or array can be


class Partial:
    """A sum over the images of the mini-batch that is not added up over the ranks yet.

    It is linear: it can be added to and scaled. What is added is kept as a separate term and each
    term is folded by itself, then scaled, then the terms are added in order: adding or scaling node
    by node would round at the nodes, and which nodes there are depends on the number of ranks.
    `once` is the sum of the replicated addends (a penalty, say); it comes last, and once.
    `World.gplus` makes it a number.
    """

    __slots__ = ("terms", "once", "shape", "dtype")

    def __init__(self, terms, once, shape, dtype):
        self.terms, self.once = terms, once
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)

    def __add__(self, other):
        if isinstance(other, Partial):
            if other.shape != self.shape:
                raise ValueError(
                    f"adding Partials of shapes {self.shape} and {other.shape}: dl.mean and dl.sum "
                    "go over the images and leave the rest of a shape, (3,) of (N, 3); one number "
                    "comes of one for each image, (N,), as an op of your own (@dl.op) makes them"
                )
            once = other.once if self.once is None else self.once
            if self.once is not None and other.once is not None:
                once = self.once + other.once
            return Partial([*self.terms, *other.terms], once, self.shape, self.dtype)
        if not isinstance(other, PLAIN):
            return NotImplemented  # a value of the tape, which knows what to do
        if np.shape(other) not in ((), self.shape):
            raise ValueError(
                f"adding an array of shape {np.shape(other)} to a Partial of shape {self.shape}"
            )
        once = other if self.once is None else self.once + other
        return Partial(self.terms, np.asarray(once, self.dtype), self.shape, self.dtype)

    __radd__ = __add__

    def __mul__(self, factor):
        if not isinstance(factor, (Partial, Late, *PLAIN)):
            return NotImplemented
        if isinstance(factor, Partial) or (not isinstance(factor, Late) and np.ndim(factor)):
            self._refuse()
        factor = factor if isinstance(factor, Late) else float(factor)
        terms = [replace(t, scale=t.scale * factor) for t in self.terms]
        once = None if self.once is None else np.asarray(self.once * float(factor), self.dtype)
        return Partial(terms, once, self.shape, self.dtype)

    __rmul__ = __mul__

    def __neg__(self):
        return self * -1.0

    def __sub__(self, other):
        return self + (-other)

    def __truediv__(self, divisor):
        if not isinstance(divisor, (Partial, *PLAIN)):
            return NotImplemented
        return self * (1.0 / float(divisor))

    def astype(self, dtype):
        """The same sum, given in another type once it is folded."""
        return Partial(self.terms, self.once, self.shape, dtype)

    def finish(self, roots):
        """The value, given the root of each term: scaled, added in order, `once` last."""
        total = None
        for term, root in zip(self.terms, roots, strict=True):
            value = root if term.scale == 1.0 else root * root.dtype.type(float(term.scale))
            total = value if total is None else total + value
        if self.once is not None:
            total = self.once if total is None else total + self.once
        return np.asarray(total, self.dtype).reshape(self.shape)

    def local(self):
        """This rank's own part of a single sum, added up; zero where the rank has no block."""
        (term,) = self.terms
        parts = [np.array(value) for value in term.nodes] or [np.zeros(self.shape, self.dtype)]
        while len(parts) > 1:
            right = parts.pop()
            parts[-1] = term.combine(parts[-1], right)
        return parts[0]

    def _refuse(self, *_):
        raise TypeError(
            "a Partial is not added up over the ranks yet, so only sums and multiples of it have a "
            "meaning: fold it first, with world.gplus(value)"
        )

    __float__ = __bool__ = __len__ = __array__ = __pow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __rtruediv__ = __abs__ = __format__ = _refuse
    __array_ufunc__ = None  # so that array + partial asks the Partial, not NumPy

    def __repr__(self):
        terms = ", ".join(f"{len(t.nodes)} node(s) x {t.scale:g}" for t in self.terms)
        return f"Partial(shape={self.shape}, terms=[{terms}], once={self.once is not None})"


def replicated(value):
    """A Partial of a value that every rank has already: nothing to exchange, it counts once."""
    value = value if is_device_array(value) else np.asarray(value)  # (one on a GPU stays there)
    return Partial([], value, value.shape, value.dtype)
