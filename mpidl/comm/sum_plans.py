"""Describe sums over the ranks of a host for kernels/cpu/sums.c, as its struct `plan`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mpidl.core import fold
from mpidl.core.fold import Range, Tree

Pairs = Sequence[tuple[int, int]]
SLOT_BYTES, LINE = 1 << 16, 64  # sizes of a slot and of a cache line
# {(operation, type): kind of the sum in sums.c}
FLOATS, DOUBLES, MOMENTS = range(3)
KINDS: dict[tuple[Any, np.dtype], int] = {
    (fold.add, np.dtype("f4")): FLOATS,
    (fold.add, np.dtype("f8")): DOUBLES,
    (fold.merge_moments, np.dtype("f8")): MOMENTS,
}
NOUNS = ("float32 values", "float64 values", "float64 values of moments")  # names of the kinds
IDENTITY_WORD = 10  # index in a plan


@lru_cache(maxsize=256)
def plan_of(tree: Tree, ranks: tuple[int, int], rank: int, width: int, kind: int) -> np.ndarray:
    """Return the description of a sum for sums.c, as its struct `plan`.

    Parameters
    ----------
    tree : Tree
        The reduction tree over the blocks.
    ranks : (int, int)
        First rank of the host, and one past its last rank.
    rank : int
        This rank, counted from the first rank of the host.
    width : int
        Number of values in a node.
    kind : int
        Kind of the sum: `FLOATS`, `DOUBLES` or `MOMENTS`.

    Returns
    -------
    ndarray of int64
        The plan. Its results are the largest nodes whose blocks all belong to this host.
    """
    places: list[tuple[int, int]] = []
    ranges: list[Range] = []
    for member in range(ranks[1] - ranks[0]):
        nodes = tree.nodes[ranks[0] + member]
        places += [(member, row) for row in range(len(nodes))]
        ranges += nodes
    joins, results = _joins_of(tree, ranges)
    return _plan(places, joins, results, rank, width, kind)


@lru_cache(maxsize=256)
def broadcast_plan(root: int, rank: int, width: int, kind: int) -> np.ndarray:
    """Return the plan of a sum with a single node, on rank `root` of the host; see `plan_of`."""
    return _plan([(root, 0)], [], [0], rank, width, kind)


@lru_cache(maxsize=256)
def count_nodes(tree: Tree) -> int:
    return sum(map(len, tree.nodes))


def _joins_of(tree: Tree, ranges: Sequence[Range]) -> tuple[Pairs, Sequence[int]]:
    """Return the pairs (left, right) of nodes to combine, and the nodes that hold the results."""
    stack: list[tuple[int, int]] = []
    joins: list[tuple[int, int]] = []
    for node, (start, stop) in enumerate(ranges):
        stack.append((node, start))
        while len(stack) > 1 and tree.joins(stack[-2][1], stop):
            right, _ = stack.pop()
            joins.append((stack[-1][0], right))
    return joins, [node for node, _ in stack]


def _plan(
    places: Pairs, joins: Pairs, results: Sequence[int], rank: int, width: int, kind: int
) -> np.ndarray:
    item, size, fixed_bytes = (4 if kind == FLOATS else 8), width, 0
    if kind == MOMENTS:  # a chunk of moments has the count, and the mean and M2 of some channels
        item, size, fixed_bytes = 16, width // 2, 8
    rows = max((row + 1 for _, row in places), default=1)
    # Use a multiple of the cache line, so that the nodes in a slot are aligned.
    limit = SLOT_BYTES // rows
    if kind == MOMENTS:
        limit = min(limit, 2 * SLOT_BYTES // max(len(places), 1))
    limit -= limit % LINE
    chunk = max(1, min(size, (limit - fixed_bytes) // item))
    stride = -(-(fixed_bytes + chunk * item) // LINE) * LINE
    chunks = max(1, -(-size // chunk))
    is_direct = kind == MOMENTS or len(places) * stride <= 2 * SLOT_BYTES
    own_nodes = sum(member == rank for member, _ in places)
    head = [kind, width, chunk, chunks, stride, is_direct, own_nodes]
    head += [len(places), len(joins), len(results)]
    table = [*np.ravel(places), *np.ravel(joins), *results]
    shared = [*head[:6], *head[7:], *table]  # the words that must be equal on all ranks
    digest = hashlib.blake2b(np.array(shared, np.int64).tobytes(), digest_size=8).digest()
    return np.array([*head, int.from_bytes(digest, "little", signed=True), *table], np.int64)
