"""Compute normalization within an image, and its gradient, with the C kernels."""

import math

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import nodes_of, per_channel, tree_of
from mpidl.core.blocks import LANES
from mpidl.core.fold import Partial, Term, add


def _numbers(x, gamma, groups):
    """Return the kernels' arguments (blocks, channels, pixels, groups, of_elements)."""
    of_elements = gamma is not None and gamma.ndim > 1
    return *sizes(x), groups or 0, int(of_elements)


def group_norm(x, gamma, beta, groups, epsilon):
    x, numbers = np.ascontiguousarray(x), _numbers(x, gamma, groups)
    blocks, _, pixels = numbers[:3]
    y = arenas.empty(x.shape, x.dtype)
    statistics = arenas.empty((blocks, 2, groups or pixels, LANES))
    factors = per_channel(gamma), per_channel(beta)
    kernels().group_norm(x, *factors, statistics, y, *numbers, epsilon)
    return y, statistics


def group_norm_backward(dy, x, gamma, statistics, groups, tree, needs):
    dy, x = np.ascontiguousarray(dy), np.ascontiguousarray(x)
    shape = x.shape[1:2] if gamma is None else gamma.shape
    dx = arenas.empty(x.shape, x.dtype) if needs[0] else None
    nodes = arenas.empty((nodes_of(tree), 2 * math.prod(shape))) if any(needs[1:]) else None
    arguments = dy, x, per_channel(gamma), statistics, dx, nodes, nodes_of(tree)
    kernels().group_norm_backward(*arguments, *_numbers(x, gamma, groups), tree_of(tree))
    parts = (None, None) if nodes is None else np.split(nodes, 2, axis=1)
    return dx, *(
        _partial(part, shape, tree) if is_needed else None
        for part, is_needed in zip(parts, needs[1:], strict=True)
    )


def _partial(nodes, shape, tree):
    """Return the sum of which this rank's nodes have a part, as a Partial."""
    terms = [Term(tree, [row.reshape(shape) for row in nodes], add, nodes.dtype)]
    return Partial(terms, None, shape, nodes.dtype)
