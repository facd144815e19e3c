"""Convert Python objects to and from the arguments of the compiled CPU kernels."""

import functools

import numpy as np

from mpidl.backends import settings
from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.builds import kernels
from mpidl.core.blocks import DeferredInput
from mpidl.core.fold import Partial, Term, add
from mpidl.core.values import BF16

NO_NORM = None, None, None, 0.0, 0.0  # the fields of `struct source` that follow x


@functools.lru_cache(maxsize=256)
def tree_of(tree):
    """Return a `fold.Tree` as an int64 array laid out as `struct tree` in kernels/cpu/fold.h."""
    return np.array([*tree.run, tree.leaves, tree.plain], np.int64)


def as_type(x, dtype):
    """Return an array in a dtype; if one of the two is BF16, a kernel converts it."""
    if x.dtype == dtype:
        return x
    x, y = np.ascontiguousarray(x), arenas.empty(x.shape, dtype)
    convert = kernels().narrow if dtype == BF16 else kernels().widen
    convert(x, y, x.size)
    return y


def operand(x):
    """Return the operand of a layer with weights: images in bfloat16 if that is the precision."""
    if settings.precision != "bf16" or isinstance(x, DeferredInput):
        return x
    return as_type(x, BF16)


def widened(x):
    """Return an array or a DeferredInput whose numbers are stored as float32."""
    if isinstance(x, DeferredInput):
        return x._replace(x=as_type(x.x, np.dtype(np.float32)))
    return as_type(x, np.dtype(np.float32))


def source_of(x):
    """Convert a DeferredInput or an array to the fields of `struct source` of activation.h.

    The fields are x, mean, scale, beta, low and high. For an array, only x is used.
    """
    if isinstance(x, DeferredInput):
        return *(np.ascontiguousarray(v) for v in x[:4]), x.low, x.high
    return np.ascontiguousarray(x), *NO_NORM


def per_channel(vector):
    """Convert a vector to the C-ordered float32 array that kernels expect. None stays None."""
    return None if vector is None else np.ascontiguousarray(vector, np.float32)


def nodes_of(tree):
    """Return the number of reduction-tree nodes that this rank contributes."""
    return len(tree.nodes[tree.rank])


def partial_of_rows(rows, tree, combine=add, shape=None):
    """Create a Partial from folded rows. The first rows are this rank's tree nodes."""
    shape = rows.shape[1:] if shape is None else shape
    nodes = [rows[i, ...].reshape(shape) for i in range(nodes_of(tree))]
    return Partial([Term(tree, nodes, combine, rows.dtype)], None, shape, rows.dtype)
