"""Fold sums over images on the GPU, with the same bytes as on the host.

`mpidl.core.fold` defines the reduction tree. Leaves are sums over a block of 16 images, nodes are
sums of leaves, and the root is the total. On the GPU, a leaf may also be the sum over a part of a
block. In this case the number of leaves per block is a power of two, so the tree above the blocks
does not change. The bytes do not depend on how threads divide the work, so the division may depend
on the number of images of this rank.
"""

import numpy as np

from mpidl.backends.gpu import launching
from mpidl.backends.gpu.array import Array
from mpidl.core.fold import Partial, Term, add, merge_moments
from mpidl.core.values import OnDevice

# {kind of sum: maximum number of leaves that one launch can fold into a node}.
LEAVES = {"float": 1 << 16, "double": 1 << 16, "moments": 1 << 10}
BLOCKS = 1 << 16  # maximum number of blocks of a mini-batch that `fold_all` accepts
KINDS = {add: {"f4": "float", "f8": "double"}, merge_moments: {"f8": "moments"}}


class Nodes(list, OnDevice):
    """The nodes of a sum that this rank holds. Each node is an Array that views a row of `matrix`.

    `matrix` is an Array (nodes, width). `like` is an Array with the memory layout of the sum, or
    None if the sum is in C order.
    """

    def __init__(self, matrix, rows, like=None):
        super().__init__(rows)
        self.matrix, self.like = matrix, like


def partial_of_leaves(
    values, tree, per_block, combine=add, shape=None, like=None, ranges=None
):
    """Fold this rank's leaves into nodes, and return the sum as a Partial.

    The leaves may be overwritten.

    Parameters
    ----------
    values : (blocks * per_block, width) Array
        The leaves of this rank's blocks.
    tree : Tree
        The reduction tree. In a plain tree, all leaves of a rank are folded into one node.
    per_block : int
        Number of leaves per block, a power of two.
    combine : function
        `fold.add` or `fold.merge_moments`.
    shape : tuple, optional
        Shape of the sum; (width,) by default.
    like : Array, optional
        Array with the shape and memory layout that the sum must get. For the gradient of weights,
        this is the Array of the weights. By default, the sum is in C order.
    ranges : list of (first row, number of rows), optional
        The rows of `values` to fold into each node of this rank, if `values` holds larger nodes
        than leaves.
    """
    start, stop = tree.run
    rows = (stop - start) * per_block
    if per_block & (per_block - 1) or values.ndim != 2 or (ranges is None and len(values) != rows):
        raise ValueError(
            f"expected a power of two as the number of rows for each of {stop - start} blocks, "
            f"got shape {values.shape}, {per_block} rows per block"
        )
    if ranges is None:
        ranges = [
            ((first - start) * per_block, (last - first) * per_block)
            for first, last in tree.nodes[tree.rank]
        ]
    matrix = fold_rows(values, ranges, combine)
    rows = [_seen_as(matrix.row(i), shape, like) for i in range(len(ranges))]
    shape = like.shape if like is not None else values.shape[1:] if shape is None else shape
    term = Term(tree, Nodes(matrix, rows, like), combine, values.dtype)
    return Partial([term], None, shape, values.dtype)


def fold_rows(values, ranges, combine=add):
    """Fold each range of rows of a C-ordered matrix; return an Array (len(ranges), width).

    A range is (first row, number of rows >= 1). The rows of a range are the leaves of a separate
    tree. If every range is a single row, return `values` itself.
    """
    if all(count == 1 for _, count in ranges) and len(ranges) == len(values):
        return values
    kind = _kind(values, combine)
    if max(count for _, count in ranges) > LEAVES[kind]:
        group, groups, folded = LEAVES[kind] // 16, [], []
        for first, count in ranges:  # a run of 2^n rows is a node of the range's tree
            runs = [(first + i, min(group, count - i)) for i in range(0, count, group)]
            folded.append((len(groups), len(runs)))
            groups += runs
        return fold_rows(fold_rows(values, groups, combine), folded, combine)
    width = _width(values, combine)
    roots = launching.empty((len(ranges), values.shape[1]), values.dtype)
    columns, rows, chunk = spread(width, max(count for _, count in ranges), kind)
    nodes = launching.constant(np.array(ranges, np.int32))
    grid, block = (-(-width // columns), len(ranges)), columns * rows
    launching.launch(f"fold_{kind}", grid, block, values, nodes, roots, width, columns, chunk)
    return roots


def spread(width, leaves, kind):
    """Return (columns, rows, chunk): how a thread block folds up to `leaves` leaves into a node.

    The thread block folds `columns` columns. `rows` threads divide the leaves of each column, and
    each thread folds up to `chunk` leaves.
    """
    if kind == "moments":
        columns, threads = 4, 1024
    elif width >= 1 << 15 or leaves <= 4:
        columns, threads = 256, 256
    else:
        columns, threads = 32 if width >= 1 << 10 else 8, 512
    rows = min(threads // columns, max(-(-32 // columns), _power(-(-leaves // 4))))
    return columns, rows, max(4, _power(-(-leaves // rows)))


def fold_all(matrix, tree, combine=add, shape=None, like=None):
    """Fold the nodes of all ranks and return the root, with the same bytes as `fold.fold_nodes`.

    `matrix` has one row per node, in the order of the ranks. The root has the shape (width,) unless
    `shape` or `like` is given (see `partial_of_leaves`).
    """
    nodes = [node for nodes_of_rank in tree.nodes for node in nodes_of_rank]
    if len(nodes) != len(matrix):
        raise ValueError(f"expected the {len(nodes)} nodes of all ranks, got {len(matrix)}")
    if tree.plain:
        raise ValueError("a plain sum has no fold tree: a collective adds it up")
    if tree.leaves > BLOCKS:
        raise ValueError(f"expected a mini-batch of at most {BLOCKS} blocks, got {tree.leaves}")
    if len(nodes) == 1:
        return _seen_as(matrix.row(0), shape, like)
    order = [(start, (stop - start - 1).bit_length()) for start, stop in nodes]
    root, width = launching.empty(matrix.shape[1:], matrix.dtype), _width(matrix, combine)
    order = launching.constant(np.array(order, np.int32))
    name, blocks = f"combine_{_kind(matrix, combine)}", -(-width // 128)
    launching.launch(name, blocks, 128, matrix, order, root, len(nodes), width)
    return _seen_as(root, shape, like)


def _kind(values, combine):
    kinds = KINDS.get(combine)
    if kinds is None:
        raise ValueError(f"the GPU folds by addition or by merging moments, not by {combine}")
    if values.dtype.str[1:] not in kinds:
        raise TypeError(f"cannot fold {values.dtype} by {combine.__name__}")
    return kinds[values.dtype.str[1:]]


def _width(values, combine):
    """Return the number of columns to fold. For moments, this is the number of channels."""
    return values.shape[1] // 2 if combine is merge_moments else values.shape[1]


def _seen_as(row, shape, like):
    """Return a row (width,) as an Array of `shape`, or with the shape and layout of `like`."""
    if like is not None:
        return Array(row.buffer, row.dtype, like.shape, like.dims, like.order, row.offset)
    return row if shape is None else row.reshape(shape)


def _power(n):
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
