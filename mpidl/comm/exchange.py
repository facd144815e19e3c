"""Define algorithms that combine (fold) nodes of the reduction tree over the ranks.

The tree has one leaf per block of 16 images. A node combines the leaves of a range of blocks, and
the root (the total) combines all leaves. All algorithms except `allreduce` follow the same tree, so
they return the same bytes.

Each algorithm is a generator. It posts messages, yields the requests that it waits for, and returns
the root as a flat array on every rank. (The generator in `host_memory` also yields functions that
return whether the generator can continue.) The caller decides how to wait: by blocking, or by
testing the requests from time to time while other work continues. All messages are point-to-point
and carry the tag of their exchange. Any number of exchanges can therefore be pending, and they can
complete in any order.

This table gives upper bounds on the messages and bytes that one rank sends; the tests check these
bounds. P is the number of ranks, L the number of blocks, n the number of nodes per rank, and v the
size of a node in bytes. Logarithms are rounded up.

    algorithm      rounds           messages    bytes              used for
    gather_nodes   1                P-1         (P-1) n v          small nodes, few ranks
    up_and_down    log2 L + log2 P  n + log2 P  (n + log2 P) v     small nodes, many ranks
    pairwise       log2 P           log2 P      log2 P v           P = 2^k, one node per rank
    segmented      2                2 (P-1)     (n + 1) v (P-1)/P  large nodes

For comparison, recursive doubling sends v bytes in each of log2 P rounds. A ring sends
2 v (P-1)/P bytes in 2 (P-1) rounds.

All algorithms have the same parameters:

transport : Transport
    Sends and receives the messages.
tag : int
    Tag of the messages of this exchange.
tree : fold.Tree
    Reduction tree over the blocks, with the run of blocks that each rank holds.
nodes : ndarray, shape (nodes, width)
    The largest nodes whose blocks are all on this rank.
combine : callable
    Function that combines two nodes: `fold.add` or `fold.merge_moments`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.core.fold import Range, Tree, add, fold_nodes, is_node

if TYPE_CHECKING:
    from mpidl.comm.transport import Transport

SMALL_BYTES = 16 * 1024  # up to this size, the number of messages matters more than their size
FEW_RANKS = 8

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]
Join = tuple[int, int, int, int]  # see `_joins`
Steps = Generator[Sequence[Any] | Callable[[], bool], None, np.ndarray]
Algorithm = Callable[["Transport", int, Tree, np.ndarray, Combine], Steps]


def choose_algorithm(tree: Tree, nbytes: int, combine: Combine) -> Algorithm:
    """Choose an algorithm based on the tree and the size of a node, but not on any timing.

    Parameters
    ----------
    tree : fold.Tree
        Reduction tree over the blocks.
    nbytes : int
        Size of one node in bytes.
    combine : callable
        Function that combines two nodes: `fold.add` or `fold.merge_moments`.

    Returns
    -------
    callable
        A generator function of this module.
    """
    if len(tree.runs) == 1:
        return single_rank
    if tree.plain and combine is add:
        return allreduce
    small = nbytes <= SMALL_BYTES
    if _pairs_up(tree) and (small or len(tree.runs) <= FEW_RANKS):
        return pairwise
    # The values of a plain sum are not nodes of the tree, so they cannot use `up_and_down`.
    if small or combine is not add:
        return gather_nodes if tree.plain or len(tree.runs) <= FEW_RANKS else up_and_down
    return segmented


@lru_cache(maxsize=256)
def _pairs_up(tree: Tree) -> bool:
    """Return whether `pairwise` can be used.

    The number of ranks must be a power of two, each rank must have one node, and partners at
    distance 1, 2, 4, ... must hold the two halves of a node.
    """
    ranks = len(tree.runs)
    if tree.plain or ranks & (ranks - 1) or any(len(nodes) != 1 for nodes in tree.nodes):
        return False
    distance = 1
    while distance < ranks:
        distance *= 2
        for low in range(0, ranks, distance):
            if not is_node(tree.runs[low][0], tree.runs[low + distance - 1][1], tree.leaves):
                return False
    return True


def single_rank(
    transport: Transport, tag: int, tree: Tree, nodes: np.ndarray, combine: Combine
) -> Steps:
    """Fold the nodes of the only rank without sending messages."""
    return fold_nodes(tree, tree.nodes[0], nodes, combine)
    yield


def gather_nodes(
    transport: Transport, tag: int, tree: Tree, nodes: np.ndarray, combine: Combine
) -> Steps:
    """Send the nodes of each rank to all other ranks; every rank folds all nodes."""
    inbox: list[np.ndarray | None] = [None] * transport.size
    inbox[transport.rank] = nodes
    requests = []
    for rank in range(transport.size):
        if rank != transport.rank and tree.nodes[rank]:
            inbox[rank] = np.empty((len(tree.nodes[rank]), nodes.shape[1]), nodes.dtype)
            requests.append(transport.irecv(inbox[rank], rank, tag))
    if len(nodes):
        peers = [rank for rank in range(transport.size) if rank != transport.rank]
        requests += [transport.isend(nodes, rank, tag) for rank in peers]
    yield requests
    ranges = [node for rank_nodes in tree.nodes for node in rank_nodes]
    values = [np.array(node) for rows in inbox if rows is not None for node in rows]
    return fold_nodes(tree, ranges, values, combine)


@lru_cache(maxsize=64)
def _joins(runs: tuple[Range, ...], leaves: int) -> tuple[tuple[Join, ...], int]:
    """Return the nodes that span several ranks, and the owner of the root.

    Children precede their parents. A node is a tuple (start, owner, start of the right half, owner
    of the right half). The owner of a node is the lowest rank that holds one of the node's blocks.
    """
    owner = [rank for rank, (start, stop) in enumerate(runs) for _ in range(start, stop)]
    joins: list[Join] = []

    def visit(start: int, stop: int) -> None:
        if owner[start] != owner[stop - 1]:
            middle = start + (1 << (stop - start - 1).bit_length() - 1)
            visit(start, middle)
            visit(middle, stop)
            joins.append((start, owner[start], middle, owner[middle]))

    visit(0, leaves)
    return tuple(joins), owner[0]


def up_and_down(
    transport: Transport, tag: int, tree: Tree, nodes: np.ndarray, combine: Combine
) -> Steps:
    """Send the right half of each node to the owner of the left half, then broadcast the root."""
    joins, root_owner = _joins(tree.runs, tree.leaves)
    values = {
        start: np.array(node)
        for (start, _), node in zip(tree.nodes[transport.rank], nodes, strict=True)
    }
    sends = []
    for start, left, middle, right in joins:
        if transport.rank == right != left:
            sends.append(transport.isend(values.pop(middle), left, tag))
        elif transport.rank == left:
            if right == left:
                right_value = values.pop(middle)
            else:
                right_value = np.empty(nodes.shape[1], nodes.dtype)
                yield [transport.irecv(right_value, right, tag)]
            values[start] = combine(values[start], right_value)
    root = values[0] if transport.rank == root_owner else np.empty(nodes.shape[1], nodes.dtype)
    position = (transport.rank - root_owner) % transport.size
    reach = 1
    while reach < transport.size:
        if position & (2 * reach - 1) == reach:
            yield [transport.irecv(root, (root_owner + position - reach) % transport.size, tag)]
            break
        reach *= 2
    while reach > 1:
        reach //= 2
        if position + reach < transport.size:
            sends.append(
                transport.isend(root, (root_owner + position + reach) % transport.size, tag)
            )
    yield sends
    return root


def pairwise(
    transport: Transport, tag: int, tree: Tree, nodes: np.ndarray, combine: Combine
) -> Steps:
    """Swap values with partners at distance 1, 2, 4, ...; both partners combine in block order."""
    value = np.array(nodes[0])
    distance = 1
    while distance < transport.size:
        partner = transport.rank ^ distance
        received = np.empty_like(value)
        yield [transport.irecv(received, partner, tag), transport.isend(value, partner, tag)]
        value = combine(value, received) if transport.rank < partner else combine(received, value)
        distance *= 2
    return value


def segmented(
    transport: Transport, tag: int, tree: Tree, nodes: np.ndarray, combine: Combine
) -> Steps:
    """Split values into one segment per rank; each rank folds and distributes its segment."""
    width = nodes.shape[1]
    edges = [width * s // transport.size for s in range(transport.size + 1)]
    low, high = edges[transport.rank], edges[transport.rank + 1]
    # Each rank starts with the next rank, so that not all ranks send to rank 0 at the same time.
    peers = [(transport.rank + k) % transport.size for k in range(1, transport.size)]
    inbox = {transport.rank: nodes[:, low:high].copy()}
    requests = []
    for r in peers:
        if tree.nodes[r] and high > low:
            inbox[r] = np.empty((len(tree.nodes[r]), high - low), nodes.dtype)
            requests.append(transport.irecv(inbox[r], r, tag))
    for r in peers:
        if len(nodes) and edges[r + 1] > edges[r]:
            part = np.ascontiguousarray(nodes[:, edges[r] : edges[r + 1]])
            requests.append(transport.isend(part, r, tag))
    yield requests
    root = np.empty(width, nodes.dtype)
    requests = []
    if high > low:
        ranges = [node for rank_nodes in tree.nodes for node in rank_nodes]
        values = [v for r in sorted(inbox) for v in inbox[r]]
        root[low:high] = fold_nodes(tree, ranges, values, combine)
        requests = [transport.isend(root[low:high], r, tag) for r in peers]
    for r in peers:
        if edges[r + 1] > edges[r]:
            requests.append(transport.irecv(root[edges[r] : edges[r + 1]], r, tag))
    yield requests
    return root


def allreduce(
    transport: Transport, tag: int, tree: Tree, nodes: np.ndarray, combine: Combine
) -> Steps:
    """Sum with MPI's Allreduce, in an order that MPI chooses; used by `World(plain=True)`."""
    partial_sum = np.array(nodes[0]) if len(nodes) else np.zeros(nodes.shape[1], nodes.dtype)
    root = np.empty_like(partial_sum)
    yield [transport.iallreduce(partial_sum, root)]
    return root
