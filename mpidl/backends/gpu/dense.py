"""Fully connected layers by kernels/cuda/dense.cu: plain float32, each sum in one order.

A value per image (blocks, F, 16) lies in memory as (images, F), weights (K, F) as (outputs, F), the
features of both in the same order, whatever shape the images had before they were flattened.
"""

import math

import numpy as np

from mpidl.backends.gpu import array, fold, launching
from mpidl.backends.gpu.array import Array
from mpidl.backends.gpu.batchnorm import activation_sums, channel_sums, read
from mpidl.blocks import LANES, DeferredInput
from mpidl.fold import Partial, Term, add

THREADS = 128  # of a block, as dense.cu has it
TILE = 64  # images, and outputs or features, of a tile
LARGE = 2 * TILE  # images of a large one
FEW = 16  # outputs that have kernels of their own, with tiles of as many
CHUNKS = 128  # about as many CTAs have a tile's images, so that a small product fills a GPU
SHORTEST = 128  # features that are worth a CTA
# Of the kernels of the weights' gradient: tile (outputs, features), blocks of a range.
FOLDS = {
    "dense_dweight_few": (FEW, 64, 64),
    "dense_dweight_short": (64, 64, 16),
    "dense_dweight_long": (64, 32, 256),
}
LEAST = 8  # blocks of a range that is made shorter for more CTAs


def rows_of(value, what):
    """(images, K) of a value (blocks, K, 16) that lies as a matrix of them.

    ValueError where it is of images of several pixels and channels, whose order is another.
    """
    if sum(size != 1 for size in value.dims[1:-1]) > 1:
        raise ValueError(f"{what}: expected (blocks, K, 16), got a value of images {value.dims}")
    return value.dims[0] * LANES, math.prod(value.dims[1:-1])


def dense(x, weight, bias):
    """y = weight @ x + bias; x (B, F, 16) or a DeferredInput with as many values an
    image, weight (K, F), bias (K,), y (B, K, 16)."""
    x = _read(x)
    _check(x, weight)
    blocks, outputs, features = x.dims[0], len(weight), math.prod(x.dims[1:-1])
    images = blocks * LANES
    y = array.empty_lanes((blocks, outputs, LANES))
    chunk = chunk_of(outputs, features)
    chunks = -(-features // chunk)
    sums = y if chunks == 1 else array.empty((chunks, images * outputs))
    large = outputs > FEW and _large(images, -(-outputs // TILE) * chunks)
    launching.launch(
        "dense_large" if large else "dense_many" if outputs > FEW else "dense_few",
        (
            -(-outputs // (FEW if outputs <= FEW else TILE)),
            -(-images // (LARGE if large else TILE)),
            chunks,
        ),
        THREADS,
        x,
        weight,
        bias if chunks == 1 else None,
        sums,
        images,
        outputs,
        features,
        chunk,
        _aligned(features, x, weight),
        _aligned(outputs, sums),
    )
    if chunks > 1:
        count = images * outputs
        launching.launch(
            "dense_chunks", -(-count // 256), 256, sums, bias, y, count, outputs, chunks
        )
    return y


def chunk_of(outputs, features):
    """How many features a CTA adds up. By the layer alone: not by how many images this rank has."""
    tiles = -(-outputs // (FEW if outputs <= FEW else TILE))
    chunk = max(SHORTEST, -(-features // max(1, CHUNKS // tiles)))
    return -(-chunk // 16) * 16


def _large(images, across):
    """Whether tiles of twice as many images, which read less, are enough to fill the GPU; `across`
    of them have the same images. An element's sum does not depend on its tile."""
    return images > TILE and -(-images // LARGE) * across >= launching.device().processors


def dense_dx(dy, weight):
    """Gradient with respect to x: (B, F, 16), in the order of the weights' features."""
    images, outputs = rows_of(dy, "dense_dx")
    features = math.prod(weight.dims[1:])
    dx = array.empty_lanes((dy.dims[0], *weight.dims[1:], LANES))
    large = _large(images, -(-features // TILE))
    launching.launch(
        "dense_dx_large" if large else "dense_dx",
        (-(-features // TILE), -(-images // (LARGE if large else TILE))),
        THREADS,
        dy,
        weight,
        dx,
        images,
        outputs,
        features,
        _aligned(outputs, dy),
        _aligned(features, weight, dx),
    )
    return dx.reshape(dy.dims[0], features, LANES)


def dense_dweight(dy, x, tree):
    """Partial of the gradient with respect to weight: (K, F); x as `dense` takes it.

    Nothing is as large as the nodes but they: leaves, of a block each, are folded in registers. How
    the blocks are cut into ranges changes no byte, so that it may depend on what this rank holds.
    """
    x = _read(x)
    _, outputs = rows_of(dy, "dense_dweight")
    features = math.prod(x.dims[1:-1])
    nodes = [(start - tree.run[0], stop - tree.run[0]) for start, stop in tree.nodes[tree.rank]]
    kernel, ranges, ends = _cut(nodes, outputs, features, tree.plain)
    rows, columns, _ = FOLDS[kernel]
    matrix = array.empty((len(ranges), outputs * features))
    launching.launch(
        kernel,
        (-(-features // columns), -(-outputs // rows), len(ranges)),
        THREADS,
        dy,
        x,
        matrix,
        launching.constant(np.array(ranges, np.int32)),
        outputs,
        features,
        int(tree.plain),
        _aligned(outputs, dy),
        _aligned(features, x, matrix),
    )
    if len(ranges) > len(nodes):
        matrix = fold.fold_rows(matrix, ends)
    like = Array(None, np.float32, (outputs, features), (outputs, *x.dims[1:-1]), (0, *x.order[2:]))
    return _partial(matrix, tree, like)


def _cut(nodes, outputs, features, plain):
    """(kernel, ranges, ends): which kernel folds which ranges (first block, blocks), and which
    ranges (first, how many) are the parts of each node, to be folded afterwards.

    Parts are of a power of two of blocks, so that they are nodes of the tree themselves; a plain
    sum has no parts.
    """
    longest = max((stop - start for start, stop in nodes), default=0)
    kernel = "dense_dweight_few" if outputs <= FEW else "dense_dweight_short"
    if outputs > FEW and longest > FOLDS[kernel][2]:
        kernel = "dense_dweight_long"
    rows, columns, blocks = FOLDS[kernel]
    tiles = -(-outputs // rows) * -(-features // columns)
    wanted = 4 * launching.device().processors
    while blocks > LEAST and tiles * sum(-(-(b - a) // blocks) for a, b in nodes) < wanted:
        blocks //= 2
    ranges, ends = [], []
    for start, stop in nodes:
        size = stop - start if plain else blocks
        parts = [(at, min(size, stop - at)) for at in range(start, stop, size)]
        ends.append((len(ranges), len(parts)))
        ranges += parts
    return kernel, ranges, ends


def dense_backward(dy, x, weight, tree, needs):
    """(dx, dweight, dbias, sums): the gradients that `needs` wants, None for the others.

    dx (B, F, 16); dweight, dbias: Partials. sums: where x is a DeferredInput and dx is
    wanted, the Partial of dx's `activation_sums`.
    """
    values = _read(x)
    _check(values, weight)
    dx = dense_dx(dy, weight) if needs[0] else None
    sums = None
    if needs[0] and isinstance(x, DeferredInput):
        sums = activation_sums(dx.reshape(x.x.shape), x, tree)
    return (
        dx,
        dense_dweight(dy, values, tree) if needs[1] else None,
        channel_sums(dy, tree) if needs[2] else None,
        sums,
    )


def _read(x):
    return read(x) if isinstance(x, DeferredInput) else x


def _check(x, weight):
    """Features of both must lie in the same order."""
    if x.dims[1:-1] != weight.dims[1:] or x.order[2:] != weight.order[1:]:
        raise ValueError(
            f"dense: expected weights that go with images {x.dims[1:-1]}, got weights of "
            f"{weight.dims[1:]} an output, of shape {weight.shape}"
        )


def _aligned(pitch, *arrays):
    """1 where all rows, of `pitch` floats, lie on 16 bytes."""
    return int(pitch % 4 == 0 and all(a.offset % 16 == 0 for a in arrays))


def _partial(matrix, tree, like):
    """The Partial of this rank's nodes (nodes, width)."""
    rows = [
        Array(row.buffer, row.dtype, like.shape, like.dims, like.order, row.offset)
        for row in map(matrix.row, range(len(matrix)))
    ]
    term = Term(tree, fold.Nodes(matrix, rows, like), add, matrix.dtype)
    return Partial([term], None, like.shape, matrix.dtype)
