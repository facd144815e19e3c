"""Moves the nodes of a fold between ranks: several ways, one tree, the same bytes.

Each way is a generator that posts messages, yields the requests it waits for, and returns the root
as a flat array on every rank. The caller decides how to wait: to the end, or a test now and then
while other work goes on. All messages are point to point and carry the exchange's own tag, so that
any number of exchanges can be under way without an order of completion.

P ranks, L blocks, n nodes a rank, v bytes a value, logarithms rounded up. What one rank sends, at
most (the tests count it):

    way            rounds           messages    bytes              used for
    gather_nodes   1                P-1         (P-1) n v          small values, few ranks
    up_and_down    log2 L + log2 P  n + log2 P  (n + log2 P) v     small values, many ranks
    pairwise       log2 P           log2 P      log2 P v           P = 2^k, one aligned node each
    segmented      2                2 (P-1)     (n + 1) v (P-1)/P  large values
    (recursive doubling: log2 P rounds of v; a ring: 2 (P-1) rounds, 2 v (P-1)/P bytes)
"""

from functools import lru_cache
from typing import Any

import numpy as np

from mpidl.fold import add, fold_nodes, is_node

SMALL = 16 * 1024  # bytes; below it the number of messages counts, above it their size
FEW = 8  # ranks


def choose(tree, nbytes, combine):
    """The way for one exchange: a function of the layout and the size alone, never of timing."""
    if len(tree.runs) == 1:
        return alone
    if tree.plain and combine is add:
        return allreduce
    small = nbytes <= SMALL
    if _pairs_up(tree) and (small or len(tree.runs) <= FEW):
        return pairwise
    if small or combine is not add:  # (plain values are no nodes that could go up the tree)
        return gather_nodes if tree.plain or len(tree.runs) <= FEW else up_and_down
    return segmented


@lru_cache(maxsize=256)
def _pairs_up(tree):
    """Whether P = 2^k ranks have one node each and neighbours at distance 1, 2, 4, ... join."""
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


def alone(net, tag, tree, nodes, combine):
    """One rank: its nodes are the root already."""
    return fold_nodes(tree, tree.nodes[0], nodes, combine)
    yield


def gather_nodes(net, tag, tree, nodes, combine):
    """Everyone sends its nodes to everyone, and folds them all."""
    inbox: list[Any] = [None] * net.size
    inbox[net.rank] = nodes
    requests = []
    for other in range(net.size):
        if other != net.rank and tree.nodes[other]:
            inbox[other] = np.empty((len(tree.nodes[other]), nodes.shape[1]), nodes.dtype)
            requests.append(net.irecv(inbox[other], other, tag))
    if len(nodes):
        requests += [net.isend(nodes, r, tag) for r in range(net.size) if r != net.rank]
    yield requests
    ranges = [node for own in tree.nodes for node in own]
    values = [np.array(v) for box in inbox if box is not None for v in box]
    return fold_nodes(tree, ranges, values, combine)


@lru_cache(maxsize=64)
def _joins(runs, leaves):
    """The tree's nodes that span ranks, children first: (start, owner, right start, right owner).

    A node's owner is the lowest rank that holds a block of it.
    """
    owner = [r for r, (start, stop) in enumerate(runs) for _ in range(start, stop)]
    found = []

    def visit(start, stop):
        if owner[start] != owner[stop - 1]:
            middle = start + (1 << (stop - start - 1).bit_length() - 1)
            visit(start, middle)
            visit(middle, stop)
            found.append((start, owner[start], middle, owner[middle]))

    visit(0, leaves)
    return tuple(found), owner[0]


def up_and_down(net, tag, tree, nodes, combine):
    """Up the tree: a node's right half goes to its owner; then down: the root to everyone."""
    joins, top = _joins(tree.runs, tree.leaves)
    held = {start: np.array(v) for (start, _), v in zip(tree.nodes[net.rank], nodes, strict=True)}
    sends = []
    for start, left, middle, right in joins:
        if net.rank == right != left:
            sends.append(net.isend(held.pop(middle), left, tag))
        elif net.rank == left:
            if right == left:
                other = held.pop(middle)
            else:
                other = np.empty(nodes.shape[1], nodes.dtype)
                yield [net.irecv(other, right, tag)]
            held[start] = combine(held[start], other)
    root = held[0] if net.rank == top else np.empty(nodes.shape[1], nodes.dtype)
    position = (net.rank - top) % net.size
    reach = 1
    while reach < net.size:
        if position & (2 * reach - 1) == reach:
            yield [net.irecv(root, (top + position - reach) % net.size, tag)]
            break
        reach *= 2
    while reach > 1:
        reach //= 2
        if position + reach < net.size:
            sends.append(net.isend(root, (top + position + reach) % net.size, tag))
    yield sends
    return root


def pairwise(net, tag, tree, nodes, combine):
    """Exchange with the partner at distance 1, 2, 4, ...; both add in the order of their blocks."""
    value = np.array(nodes[0])
    distance = 1
    while distance < net.size:
        partner = net.rank ^ distance
        other = np.empty_like(value)
        yield [net.irecv(other, partner, tag), net.isend(value, partner, tag)]
        value = combine(value, other) if net.rank < partner else combine(other, value)
        distance *= 2
    return value


def segmented(net, tag, tree, nodes, combine):
    """Cut the vector in P segments: rank s folds all nodes of segment s and hands out the sum."""
    width = nodes.shape[1]
    edges = [width * s // net.size for s in range(net.size + 1)]
    low, high = edges[net.rank], edges[net.rank + 1]
    others = [(net.rank + k) % net.size for k in range(1, net.size)]  # not all to rank 0 first
    inbox = {net.rank: nodes[:, low:high].copy()}
    requests = []
    for r in others:
        if tree.nodes[r] and high > low:
            inbox[r] = np.empty((len(tree.nodes[r]), high - low), nodes.dtype)
            requests.append(net.irecv(inbox[r], r, tag))
    for r in others:
        if len(nodes) and edges[r + 1] > edges[r]:
            part = np.ascontiguousarray(nodes[:, edges[r] : edges[r + 1]])
            requests.append(net.isend(part, r, tag))
    yield requests
    root = np.empty(width, nodes.dtype)
    requests = []
    if high > low:
        ranges = [node for own in tree.nodes for node in own]
        values = [v for r in sorted(inbox) for v in inbox[r]]
        root[low:high] = fold_nodes(tree, ranges, values, combine)
        requests = [net.isend(root[low:high], r, tag) for r in others]
    for r in others:
        if edges[r + 1] > edges[r]:
            requests.append(net.irecv(root[edges[r] : edges[r + 1]], r, tag))
    yield requests
    return root


def allreduce(net, tag, tree, nodes, combine):
    """MPI's own sum, whose order is the library's affair: what `plain` asks for."""
    mine = np.array(nodes[0]) if len(nodes) else np.zeros(nodes.shape[1], nodes.dtype)
    root = np.empty_like(mine)
    yield [net.iallreduce(mine, root)]
    return root
