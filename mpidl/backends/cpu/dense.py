"""Fully connected layers by the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import nodes_of, partial_of_rows, per_channel, source_of, tree_of
from mpidl.blocks import LANES

FEW = 16  # outputs up to which all of backward is one pass over x


def _sizes(x):
    """(features, channels) of an array (blocks, C, ..., 16)."""
    return int(np.prod(x.shape[1:-1])), x.shape[1]


def dense(x, weight, bias):
    """y = weight @ x + bias; x (B, F, 16) or a DeferredInput with as many values an
    image, weight (K, F), bias (K,), y (B, K, 16)."""
    source = source_of(x)
    y = arenas.empty((len(source[0]), len(weight), LANES))
    weight, bias = per_channel(weight), per_channel(bias)
    kernels().dense(*source, weight, bias, y, len(y), *_sizes(source[0]), len(weight))
    return y


def dense_dx(dy, weight):
    """Gradient with respect to x: (B, F, 16)."""
    dy, weight = np.ascontiguousarray(dy), per_channel(weight)
    outputs, features = weight.shape
    blocks, nothing = len(dy), (None,) * 4
    dx = arenas.empty((blocks, features, LANES))
    tree = np.array([0, blocks, blocks, 0], np.int64)
    kernels().dense_dx(dy, *nothing, weight, dx, None, tree, features, 1, outputs)
    return dx


def dense_dweight(dy, x, tree):
    """Partial of the gradient with respect to weight: (K, F); x as `dense` takes it."""
    source = source_of(x)
    features, channels = _sizes(source[0])
    nodes = arenas.empty((nodes_of(tree), dy.shape[1], features))
    kernels().dense_dweight(
        np.ascontiguousarray(dy), *source, nodes, tree_of(tree), features, channels, dy.shape[1]
    )
    return partial_of_rows(nodes, tree)


def _dense_dbias(dy, tree):
    """What channel_sums gives."""
    nodes = np.empty((nodes_of(tree), dy.shape[1]), np.float32)
    kernels().dense_dbias(dy, nodes, tree_of(tree), dy.shape[1])
    return partial_of_rows(nodes, tree)


def dense_backward(dy, x, weight, tree, needs):
    """(dx, dweight, dbias, sums): the gradients that `needs` wants, None for the others.

    dx (B, F, 16); dweight, dbias: Partials. sums: where x is a DeferredInput and dx is
    wanted, the Partial of dx's `activation_sums`.
    """
    source = source_of(x)
    features, channels = _sizes(source[0])
    dy, weight = np.ascontiguousarray(dy), per_channel(weight)
    sizes = tree_of(tree), features, channels, len(weight)
    dx = rows = nodes = None
    if needs[0]:
        dx = arenas.empty((len(dy), features, LANES))
        rows = None if source[1] is None else np.empty((len(dy), 2 * channels))
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
        dx,
        None if nodes is None else partial_of_rows(nodes, tree),
        _dense_dbias(dy, tree) if needs[2] else None,
        None if rows is None else partial_of_rows(rows, tree),
    )
