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

THREADS = 512  # per block
BUSY = 256  # blocks of threads that keep a GPU busy
LONGEST = 1 << 20  # maximum number of leaves that one thread folds, as in fold.cu
BLOCKS = 1 << 16  # maximum number of blocks of a mini-batch that `fold_all` accepts
KERNELS = "fold_float", "fold_double", "fold_moments"
KINDS = {add: {"f4": "float", "f8": "double"}, merge_moments: {"f8": "moments"}}


class Nodes(list, OnDevice):
    """The nodes of a sum that this rank holds. Each node is an Array that views a row of `matrix`.

    `matrix` is an Array (nodes, width). `like` is an Array with the memory layout of the sum, or
    None if the sum is in C order.
    """

    def __init__(self, matrix, rows, like=None):
        super().__init__(rows)
        self.matrix, self.like = matrix, like


def partial_of_leaves(values, tree, per_block, combine=add, shape=None, like=None, ranges=None):
    """Fold this rank's leaves into nodes, and return the sum as a Partial of `shape`.

    `values` is (blocks * per_block, width), with the leaves of this rank's blocks, and may be
    overwritten; per_block is a power of two. The sum is in C order, or has the shape and memory
    layout of the Array `like`, such as the weights. `ranges` has a (first row, number of rows) for
    each node of this rank if the rows are larger nodes than leaves. In a plain tree, all leaves of
    a rank are folded into one node.
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
    tree. If every range is a single row, return `values` itself. In a recorded step, all folds that
    nothing has needed before go out in one launch.
    """
    if all(count == 1 for _, count in ranges) and len(ranges) == len(values):
        return values
    kind, width = _kind(values, combine), _width(values, combine)
    roots = launching.empty((len(ranges), values.shape[1]), values.dtype)
    for i, (first, count) in enumerate(ranges):
        columns, chunk = spread(width, count, kind)
        leaves = values.part(first * values.shape[1], (count, values.shape[1]))
        row, root = [leaves, roots.row(i), count, width, columns, chunk], [roots.row(i)]
        launching.later(f"fold_{kind}", row, root, -(-width // columns), THREADS)
    return roots


def leaves_of(root, combine):
    """Return (leaves, their number, root): the rows of which the fold is a root.

    The caller's kernel must fold them and store the root. If the root is already computed, return
    (root, 1, None).
    """
    row = launching.take(f"fold_{_kind(root, combine)}", root)
    return (root, 1, None) if row is None else (row[0], row[2], root)


def spread(width, leaves, kind):
    """Return (columns, chunk): how a block of threads folds up to `leaves` leaves into a node.

    The block folds `columns` columns at a time. THREADS / columns threads divide the leaves of each
    column. Each thread folds up to `chunk` leaves, or 4 leaves at a time if the sum is of moments.
    """
    fours = _power(-(-leaves // 4))
    if kind == "moments":
        columns = 4
        while columns > 1 and 4 * THREADS < leaves * columns and width <= BUSY * columns:
            columns //= 2
        return columns, 4
    narrowest = 512 if width >= 1 << 15 else 32 if width >= 1 << 10 else 8
    columns = max(narrowest, THREADS // fours)
    chunk = max(4, _power(-(-leaves * columns // THREADS)))
    if chunk > LONGEST:
        raise ValueError(f"expected a sum of fewer leaves than {leaves}")
    return columns, chunk


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


def threads_of(leaves, columns):
    """Return the number of threads of a block that folds `columns` columns, 4 leaves at a time."""
    return min(1024, max(32, columns * _power(-(-leaves // 4))))


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
