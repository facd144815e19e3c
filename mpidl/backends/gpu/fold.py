"""Sums over images on the GPU, by the tree of `mpidl.fold`: the same bytes as on the host.

Leaves may be smaller than a block of 16 images: a power of two of leaves per block refines the tree
without changing it. How threads share a fold changes no byte either, so it may depend on this
rank's share.
"""

import numpy as np

from mpidl.backends.gpu import launching
from mpidl.backends.gpu.array import Array
from mpidl.device_array import OnDevice
from mpidl.fold import Partial, Term, add, merge_moments

LEAVES = {"float": 1 << 16, "double": 1 << 16, "moments": 1 << 10}  # the most of a node in a launch
BLOCKS = 1 << 16  # of a mini-batch, that `fold_all` takes
KINDS = {add: {"f4": "float", "f8": "double"}, merge_moments: {"f8": "moments"}}


class Nodes(list, OnDevice):
    """This rank's nodes of a sum: Arrays, the rows of `matrix` (nodes, width).

    `like` is an Array with the memory layout of the sum, or None for C order.
    """

    def __init__(self, matrix, rows, like=None):
        super().__init__(rows)
        self.matrix, self.like = matrix, like


def partial_of_leaves(values, tree, per_block, combine=add, shape=None, like=None):
    """Return the Partial of a sum given by its leaves, which the fold may overwrite.

    Parameters
    ----------
    values : (blocks * per_block, width) Array
        The leaves of this rank's blocks.
    tree : Tree
        The one node of a plain tree is folded as if its leaves were the mini-batch.
    per_block : int
        Leaves per block, a power of two.
    combine : function
        `fold.add` or `fold.merge_moments`.
    shape : tuple, optional
        Of the sum; (width,) by default.
    like : Array, optional
        The sum has its shape and memory layout: the learnable of a gradient.
    """
    start, stop = tree.run
    rows = (stop - start) * per_block
    if per_block & (per_block - 1) or values.ndim != 2 or len(values) != rows:
        raise ValueError(
            f"expected a matrix of a power of two of rows for each of {stop - start} blocks, got "
            f"shape {values.shape}, {per_block} rows a block"
        )
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
    """Return (len(ranges), width): the fold of each range of rows of a matrix in C order.

    A range is (first row, rows >= 1), folded by the tree over its rows. Returns `values` itself if
    there is nothing to combine.
    """
    if all(count == 1 for _, count in ranges) and len(ranges) == len(values):
        return values
    kind = _kind(values, combine)
    if max(count for _, count in ranges) > LEAVES[kind]:
        group, groups, folded = LEAVES[kind] // 16, [], []
        for first, count in ranges:  # runs of a power of two of rows are nodes of the same tree
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
    """Return (columns, rows, chunk) of a block of threads.

    `columns` threads stand side by side; `rows` share a column, each folding up to `chunk` leaves
    of a node of at most `leaves`.
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
    """Return the root of all ranks' nodes, with the bytes of `fold.fold_nodes`.

    `matrix` is (nodes of all ranks, width), in their order; the root is (width,), or as `shape` and
    `like` say in `partial_of_leaves`.
    """
    nodes = [node for nodes_of_rank in tree.nodes for node in nodes_of_rank]
    if len(nodes) != len(matrix):
        raise ValueError(f"expected the {len(nodes)} nodes of all ranks, got {len(matrix)}")
    if tree.plain:
        raise ValueError("a plain sum has no tree: it is added up by the collective that moves it")
    if tree.leaves > BLOCKS:
        raise ValueError(f"a mini-batch of {tree.leaves} blocks; the GPU folds at most {BLOCKS}")
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
    """Return the columns, one a thread; those of moments are channels."""
    return values.shape[1] // 2 if combine is merge_moments else values.shape[1]


def _seen_as(row, shape, like):
    """Return a row (width,) as an Array of `shape`, or in the layout of `like`."""
    if like is not None:
        return Array(row.buffer, row.dtype, like.shape, like.dims, like.order, row.offset)
    return row if shape is None else row.reshape(shape)


def _power(n):
    """Return the least power of two that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()
