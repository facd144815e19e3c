"""Add up the values of a mini-batch in the same order on any number of ranks.

The blocks of the mini-batch are the leaves of a binary tree. A node is a range (start, stop) of
blocks; a node of more than one block splits at the largest power of two below its length, so the
tree depends only on the number of blocks. Each rank owns a run of consecutive blocks and folds
(combines) their values into the fewest nodes that cover the run. The ranks exchange only these
nodes (`comm.exchange`). Every addition in the tree has the same two operands on any number of
ranks, so the total has the same bytes.

    5 leaves                (0,5)         Rank 0 owns the blocks 0 to 2: its nodes are (0,2)
                       (0,4)     \\       and (2,3). Rank 1 owns the blocks 3 and 4: its nodes
                  (0,2)   (2,4)   \\      are (3,4) and (4,5).
                  0   1   2   3    4
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpidl.core.values import is_device_array

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

Range = tuple[int, int]  # (first block, one past the last block)


def add(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Add two arrays. The sum overwrites `left`."""
    total: np.ndarray = np.add(left, right, out=left)
    return total


def merge_moments(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Combine the moments of two sets of values for C channels. The result overwrites `left`.

    `left` and `right` are float64 arrays [count, mean(C), M2(C)]; M2 is the sum of squared
    deviations from the mean (equation 2.1 of Chan, Golub and LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances", 1979). E[x^2] - E[x]^2 would lose digits.
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
def split_blocks(leaves: int, ranks: int, load: tuple[int, ...] | None = None) -> tuple[Range, ...]:
    """Return the run (start, stop) of consecutive blocks of each rank.

    `load` has one non-negative weight per rank; by default, all weights are equal. A rank gets
    blocks in proportion to its weight, rounded down. The rest goes to the ranks with the largest
    remainders, and among equal ones to the lowest rank.
    """
    load = load or (1,) * ranks
    total = sum(load)
    counts = [leaves * w // total for w in load]
    by_remainder = sorted(range(ranks), key=lambda r: (-(leaves * load[r] % total), r))
    for r in by_remainder[: leaves - sum(counts)]:
        counts[r] += 1
    edges = np.cumsum([0, *counts]).tolist()
    return tuple(zip(edges[:-1], edges[1:], strict=True))


def is_node(start: int, stop: int, leaves: int) -> bool:
    """Return whether the range [start, stop) is a node of the tree over `leaves` blocks."""
    size = 1 << (stop - start - 1).bit_length()
    return start % size == 0 and (stop - start == size or stop == leaves)


@lru_cache(maxsize=4096)
def maximal_nodes(run: Range, leaves: int) -> tuple[Range, ...]:
    """Return the smallest list of nodes that covers `run`, in order. An empty run has no nodes."""
    nodes: list[Range] = []
    for leaf in range(*run):
        nodes.append((leaf, leaf + 1))
        while len(nodes) > 1 and is_node(nodes[-2][0], leaf + 1, leaves):
            nodes[-2:] = [(nodes[-2][0], leaf + 1)]
    return tuple(nodes)


@dataclass(frozen=True)
class Tree:
    """The tree over `leaves` blocks, of which each rank owns a run; `rank` is this rank.

    If `plain` is true, each rank adds up its run from left to right, as other libraries do, and the
    order depends on the number of ranks: a negative control for tests and benchmarks.
    """

    leaves: int
    runs: tuple[Range, ...]
    rank: int
    plain: bool = False

    @property
    def run(self) -> Range:
        """This rank's blocks."""
        return self.runs[self.rank]

    @cached_property
    def nodes(self) -> tuple[tuple[Range, ...], ...]:
        """The nodes that each rank contributes to the tree."""
        if self.plain:
            return tuple((run,) if run[0] < run[1] else () for run in self.runs)
        return tuple(maximal_nodes(run, self.leaves) for run in self.runs)

    def joins(self, start: int, stop: int) -> bool:
        """Return whether two adjacent nodes that together cover [start, stop) may be combined."""
        return self.plain or is_node(start, stop, self.leaves)


class Counter:
    """A binary counter that folds values in the order of their blocks.

    A value that completes a node is combined with the value on its left at once, and the result
    with the next one on the left, like a carry in binary addition. At most about log2(leaves)
    values are kept. `combine(left, right)` may overwrite `left`; `start` is the first block, by
    default the first one of this rank's run.
    """

    def __init__(
        self,
        tree: Tree,
        combine: Callable[[np.ndarray, np.ndarray], np.ndarray] = add,
        start: int | None = None,
    ) -> None:
        self.tree, self.combine = tree, combine
        self.next: int = tree.run[0] if start is None else start
        self.starts: list[int] = []
        self.values: list[np.ndarray] = []

    def push(self, value: Any, stop: int | None = None) -> None:
        """Fold the value of the next block, or of the node up to block `stop`; may overwrite it."""
        self.starts.append(self.next)
        self.values.append(np.asarray(value))
        self.next = self.next + 1 if stop is None else stop
        while len(self.values) > 1 and self.tree.joins(self.starts[-2], self.next):
            right = self.values.pop()
            self.starts.pop()
            self.values[-1] = self.combine(self.values[-1], right)

    def partial(self, shape: Sequence[int] = (), dtype: DTypeLike = np.float32) -> Partial:
        """Return the folded sum as a Partial; a rank without blocks cannot infer its type.

        Raise ValueError if a block is missing, or if a value does not fit `shape` or `dtype`.
        """
        if self.next != self.tree.run[1]:
            raise ValueError(f"folded blocks up to {self.next}, but this rank owns {self.tree.run}")
        for value in self.values:
            if value.dtype != dtype or value.size != np.prod(shape, dtype=int):
                raise ValueError(
                    f"expected values of shape {tuple(shape)} and type {np.dtype(dtype)}, got "
                    f"shape {value.shape} and type {value.dtype}"
                )
        return Partial(
            [Term(self.tree, self.values, self.combine, np.dtype(dtype))], None, shape, dtype
        )


def fold_nodes(
    tree: Tree,
    nodes: Sequence[Range],
    values: Sequence[np.ndarray] | np.ndarray,
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> np.ndarray:
    """Combine the nodes of all ranks, in order, into the root. `values` is overwritten."""
    counter = Counter(tree, combine, start=0)
    for (_, stop), value in zip(nodes, values, strict=True):
        counter.push(value, stop)
    (root,) = counter.values
    return root


class Late:
    """A number in the memory of a device, the float64 `array` (1,), times a constant `factor`.

    A step on a GPU is recorded once and replayed for mini-batches of any size, so 1 / (number of
    images) changes, and is known only when the sum is finished.
    """

    __slots__ = ("array", "factor")

    def __init__(self, array: Any, factor: float = 1.0) -> None:
        self.array, self.factor = array, factor

    def __float__(self) -> float:
        return float(self.array) * self.factor

    def __mul__(self, number: float) -> Late:
        return Late(self.array, self.factor * float(number))

    __rmul__ = __mul__


@dataclass
class Term:
    """One sum of a Partial: the nodes of this rank, and what happens to their total.

    `combine` combines two nodes of type `dtype`. After the fold, the root is multiplied by `scale`,
    a float or a `Late`.
    """

    tree: Tree
    nodes: list[Any]
    combine: Any
    dtype: np.dtype
    scale: Any = 1.0


PLAIN = (int, float, np.ndarray, np.generic)  # types of replicated values, equal on all ranks


class Partial:
    """A sum over the images of the mini-batch that is not yet added up over the ranks.

    Partials can be added to each other and multiplied by a scalar. `World.gplus` converts a Partial
    to an array. The sum of two Partials keeps their terms apart. To add or scale the nodes
    themselves would round at each node, so the result would depend on the number of ranks.

    Parameters
    ----------
    terms
        The sums. Each one is folded, then scaled, and the results are added in order.
    addend
        A value that is equal on all ranks, such as a penalty, or None. It is added last.
    shape, dtype
        Shape and type of the total.
    """

    __slots__ = ("terms", "addend", "shape", "dtype")

    def __init__(
        self,
        terms: Sequence[Term],
        addend: np.ndarray | None,
        shape: Sequence[int],
        dtype: DTypeLike,
    ) -> None:
        self.terms, self.addend = terms, addend
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype: np.dtype = np.dtype(dtype)

    def __add__(self, other: Partial | np.ndarray | float) -> Partial:
        if isinstance(other, Partial):
            if other.shape != self.shape:
                raise ValueError(
                    f"cannot add Partials of shapes {self.shape} and {other.shape}: dl.mean and "
                    "dl.sum reduce over the images, (N, 3) to (3,); axis=(0, 1) reduces over both "
                    "axes, and axis=1 gives one number per image, (N,)"
                )
            addend = _sum_of_present(self.addend, other.addend)
            return Partial([*self.terms, *other.terms], addend, self.shape, self.dtype)
        if not isinstance(other, PLAIN):
            return NotImplemented  # Python then calls the other operand, such as a Var
        if np.shape(other) not in ((), self.shape):
            raise ValueError(
                f"cannot add an array of shape {np.shape(other)} to a Partial of shape {self.shape}"
            )
        addend = np.asarray(_sum_of_present(self.addend, other), self.dtype)
        return Partial(self.terms, addend, self.shape, self.dtype)

    __radd__ = __add__

    def __mul__(self, factor: Late | np.ndarray | float) -> Partial:
        if not isinstance(factor, (Partial, Late, *PLAIN)):
            return NotImplemented
        if isinstance(factor, Partial) or (not isinstance(factor, Late) and np.ndim(factor)):
            self._refuse()
        factor = factor if isinstance(factor, Late) else float(factor)
        terms = [replace(t, scale=t.scale * factor) for t in self.terms]
        addend = self.addend
        if addend is not None:
            addend = np.asarray(addend * float(factor), self.dtype)
        return Partial(terms, addend, self.shape, self.dtype)

    __rmul__ = __mul__

    def __neg__(self) -> Partial:
        return self * -1.0

    def __sub__(self, other: Partial | np.ndarray | float) -> Partial:
        return self + (-other)

    def __truediv__(self, divisor: np.ndarray | float) -> Partial:
        if not isinstance(divisor, (Partial, *PLAIN)):
            return NotImplemented
        return self * (1.0 / float(divisor))

    def astype(self, dtype: DTypeLike) -> Partial:
        """Return a Partial with the same terms, whose total is converted to another type.

        Parameters
        ----------
        dtype
            Type of the total.

        Returns
        -------
        Partial
        """
        return Partial(self.terms, self.addend, self.shape, dtype)

    @property
    def is_root(self) -> bool:
        """Whether the total equals the root of a single term, without scaling or conversion."""
        return (
            len(self.terms) == 1
            and self.addend is None
            and self.terms[0].scale == 1.0
            and self.terms[0].dtype == self.dtype
        )

    def finish(self, roots: Sequence[np.ndarray]) -> np.ndarray:
        """Return the total, given the root of each term: scaled, added in order, then the addend.

        Parameters
        ----------
        roots
            The folded sum of each term.

        Returns
        -------
        ndarray
        """
        scaled = [
            root if term.scale == 1.0 else root * root.dtype.type(float(term.scale))
            for term, root in zip(self.terms, roots, strict=True)
        ]
        total = _sum_of_present(*scaled, self.addend)
        return np.asarray(total, self.dtype).reshape(self.shape)

    def local(self) -> np.ndarray:
        """Return this rank's part of the total: its own sums, scaled and added as by `finish`.

        Returns
        -------
        ndarray; zeros if the rank has no blocks
        """
        return self.finish([_fold_nodes(term, self.shape) for term in self.terms])

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            "a Partial is not yet summed over the ranks, so only sums and multiples of it are "
            "defined: fold it first, with world.gplus(value)"
        )

    __float__ = __bool__ = __len__ = __array__ = __pow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __rtruediv__ = __abs__ = __format__ = _refuse
    __array_ufunc__ = None  # array + partial calls Partial.__radd__

    def __repr__(self) -> str:
        scales = [getattr(term.scale, "factor", term.scale) for term in self.terms]
        pairs = zip(self.terms, scales, strict=True)
        terms = ", ".join(f"{len(term.nodes)} node(s) x {scale:g}" for term, scale in pairs)
        suffix = "" if self.addend is None else ", plus a replicated addend"
        return f"Partial(shape={self.shape}, dtype={self.dtype}, terms=[{terms}]{suffix})"


def _fold_nodes(term: Term, shape: tuple[int, ...]) -> np.ndarray:
    """Return the sum of a rank's nodes, without the term's factor; zeros if there are none."""
    parts = [np.array(value) for value in term.nodes] or [np.zeros(shape, term.dtype)]
    while len(parts) > 1:
        right = parts.pop()
        parts[-1] = term.combine(parts[-1], right)
    return parts[0]


def _sum_of_present(*values: Any) -> Any:
    """Add the values that are not None, in order; return None if all of them are None."""
    present = [value for value in values if value is not None]
    return reduce(operator.add, present) if present else None


def replicated(value: Any) -> Partial:
    """Return a Partial whose total is a value that is equal on all ranks, on its device."""
    value = value if is_device_array(value) else np.asarray(value)
    return Partial([], value, value.shape, value.dtype)
