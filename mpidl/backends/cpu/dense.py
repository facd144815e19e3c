"""Compute fully connected layers and their gradients with the C kernels."""

import numpy as np

from mpidl.backends import settings
from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import (
    NO_NORM,
    as_type,
    nodes_of,
    operand,
    partial_of_rows,
    per_channel,
    source_of,
    tree_of,
)
from mpidl.core.blocks import LANES, DeferredInput
from mpidl.core.values import BF16

FEW = 16  # maximum number of outputs for which one pass over x computes all gradients


def _sizes(x):
    """Return (features, channels) of an array (blocks, C, ..., 16), with 16 images per block."""
    return int(np.prod(x.shape[1:-1])), x.shape[1]


def dense(x, weight, bias):
    source = source_of(operand(x))
    y = arenas.empty((len(source[0]), len(weight), LANES))
    weight, bias = per_channel(weight), per_channel(bias)
    kernels().dense(*source, weight, bias, y, len(y), *_sizes(source[0]), len(weight))
    return y


def dense_dx(dy, weight):
    dy, weight = np.ascontiguousarray(dy), per_channel(weight)
    outputs, features = weight.shape
    blocks, nothing = len(dy), (None, *NO_NORM)
    storage = BF16 if settings.precision == "bf16" else np.float32
    dx = arenas.empty((blocks, features, LANES), storage)
    tree = np.array([0, blocks, blocks, 0], np.int64)
    kernels().dense_dx(dy, *nothing, weight, dx, None, tree, features, 1, outputs)
    return as_type(dx, dy.dtype)


def dense_dweight(dy, x, tree):
    source = source_of(operand(x))
    features, channels = _sizes(source[0])
    nodes = arenas.empty((nodes_of(tree), dy.shape[1], features))
    sizes = tree_of(tree), features, channels, dy.shape[1]
    kernels().dense_dweight(np.ascontiguousarray(dy), *source, nodes, *sizes)
    return partial_of_rows(nodes, tree)


def _dense_dbias(dy, tree):
    """Return the gradient of the bias, which is the sum of dy over the images, as a Partial."""
    nodes = arenas.empty((nodes_of(tree), dy.shape[1]))
    kernels().dense_dbias(dy, nodes, tree_of(tree), dy.shape[1])
    return partial_of_rows(nodes, tree)


def dense_backward(dy, x, weight, tree, needs):
    source = source_of(operand(x))
    features, channels = _sizes(source[0])
    dy, weight = np.ascontiguousarray(dy), per_channel(weight)
    sizes = tree_of(tree), features, channels, len(weight)
    storage = x.x.dtype if isinstance(x, DeferredInput) else x.dtype
    dx = rows = nodes = None
    if needs[0]:
        dx = arenas.empty((len(dy), features, LANES), source[0].dtype)
        rows = None if source[1] is None else arenas.empty((len(dy), 2 * channels), "f8")
    if needs[1]:
        nodes = arenas.empty((nodes_of(tree), *weight.shape))
    if needs[0] and needs[1] and len(weight) <= FEW:
        kernels().dense_backward(dy, *source, weight, dx, rows, nodes, *sizes)
    else:
        if needs[0]:
            kernels().dense_dx(dy, *source, weight, dx, rows, *sizes)
        if needs[1]:
            kernels().dense_dweight(dy, *source, nodes, *sizes)
    return (
        None if dx is None else as_type(dx, storage),
        None if nodes is None else partial_of_rows(nodes, tree),
        _dense_dbias(dy, tree) if needs[2] else None,
        None if rows is None else partial_of_rows(rows, tree),
    )
