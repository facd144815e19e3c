"""Arguments of library calls: trees, sources, nodes."""

import functools

import numpy as np

from mpidl.blocks import DeferredInput
from mpidl.fold import Partial, Term, add


@functools.lru_cache(maxsize=256)
def tree_of(tree):
    """Return struct tree of kernels/cpu/fold.h as an array."""
    return np.array([*tree.run, tree.leaves, tree.plain], np.int64)


def source_of(x):
    """Return the four arrays of a struct source, of a DeferredInput or of an array."""
    if isinstance(x, DeferredInput):
        return tuple(np.ascontiguousarray(v) for v in x)
    return np.ascontiguousarray(x), None, None, None


def per_channel(vector):
    """Return a vector as kernels take it: float32, C-ordered."""
    return np.ascontiguousarray(vector, np.float32)


def nodes_of(tree):
    """Return how many nodes this rank contributes."""
    return len(tree.nodes[tree.rank])


def partial_of_rows(rows, tree, combine=add, shape=None):
    """Return the Partial of folded rows; the first rows are this rank's nodes."""
    shape = rows.shape[1:] if shape is None else shape
    nodes = [row.reshape(shape) for row in rows[: nodes_of(tree)]]
    return Partial([Term(tree, nodes, combine, rows.dtype)], None, shape, rows.dtype)
