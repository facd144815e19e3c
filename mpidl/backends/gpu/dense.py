"""Compute fully connected layers in float32 with kernels/cuda/dense.cu.

Each sum is computed in one fixed order. Images are stored in blocks of 16. In memory, an array
(blocks, F, 16) with F features per image is a matrix (images, F). Weights (K, F) are a matrix
(outputs, F). The features have the same order in both matrices, for any shape of the images before
flattening.
"""

import math

import numpy as np

from mpidl.backends.gpu import array, fold, launching
from mpidl.backends.gpu.array import Array
from mpidl.backends.gpu.batchnorm import activation_sums, channel_sums, read
from mpidl.core.blocks import LANES, DeferredInput
from mpidl.core.fold import Partial, Term, add

THREADS = 128  # threads per block, as in dense.cu
TILE = 64  # number of images in a tile, and number of outputs or features in a tile
LARGE = 2 * TILE  # number of images in a large tile
FEW = 16  # layers with at most 16 outputs use kernels with tiles of 16 outputs
CHUNKS = 128  # approximate number of CTAs (thread blocks) per tile of images, to fill the GPU
SHORTEST = 128  # minimum number of features that a CTA sums
# {kernel of the weight gradient: (outputs per tile, features per tile, maximum number of blocks of
# 16 images per range)}.
FOLDS = {
    "dense_dweight_few": (FEW, 64, 64),
    "dense_dweight_short": (64, 64, 16),
    "dense_dweight_long": (64, 32, 256),
}
SHORTEST_RANGE = 8  # blocks; longer ranges are halved until the ranges fill the GPU


def rows_of(value, name):
    """Return the shape (images, K) of the matrix that stores an array (blocks, K, 16).

    Raise ValueError for images with several pixels and channels, because their memory order is
    different.
    """
    if sum(size != 1 for size in value.dims[1:-1]) > 1:
        raise ValueError(f"{name}: expected (blocks, K, 16), got images {value.dims}")
    return value.dims[0] * LANES, math.prod(value.dims[1:-1])


def dense(x, weight, bias):
    x = read(x)
    _check(x, weight)
    blocks, outputs, features = x.dims[0], len(weight), math.prod(x.dims[1:-1])
    images = blocks * LANES
    y = array.empty_lanes((blocks, outputs, LANES))
    chunk = chunk_of(outputs, features)
    chunks = -(-features // chunk)
    sums = y if chunks == 1 else array.empty((chunks, images * outputs))
    few, large = outputs <= FEW, outputs > FEW and _large(images, -(-outputs // TILE) * chunks)
    name = "dense_few" if few else "dense_large" if large else "dense_many"
    grid = -(-outputs // (FEW if few else TILE)), -(-images // (LARGE if large else TILE)), chunks
    arrays = x, weight, bias if chunks == 1 else None, sums
    aligned = _aligned(features, x, weight), _aligned(outputs, sums)
    launching.launch(name, grid, THREADS, *arrays, images, outputs, features, chunk, *aligned)
    if chunks > 1:
        count = images * outputs
        blocks = -(-count // 256)
        launching.launch("dense_chunks", blocks, 256, sums, bias, y, count, outputs, chunks)
    return y


def chunk_of(outputs, features):
    """Return the number of features that a CTA sums. The number depends only on the layer."""
    tiles = -(-outputs // (FEW if outputs <= FEW else TILE))
    chunk = max(SHORTEST, -(-features // max(1, CHUNKS // tiles)))
    return -(-chunk // 16) * 16


def _large(images, across):
    """Return whether there are enough large tiles to fill the GPU. Large tiles read less memory.

    `across` is the number of tiles that share the same images. The size of the tiles does not
    change the bytes of the result.
    """
    return images > TILE and -(-images // LARGE) * across >= launching.device().processors


def dense_dx(dy, weight):
    # dx has the same order of features as the weights
    images, outputs = rows_of(dy, "dense_dx")
    features = math.prod(weight.dims[1:])
    dx = array.empty_lanes((dy.dims[0], *weight.dims[1:], LANES))
    large = _large(images, -(-features // TILE))
    name = "dense_dx_large" if large else "dense_dx"
    grid = -(-features // TILE), -(-images // (LARGE if large else TILE))
    numbers = images, outputs, features, _aligned(outputs, dy), _aligned(features, weight, dx)
    launching.launch(name, grid, THREADS, dy, weight, dx, *numbers)
    return dx.reshape(dy.dims[0], features, LANES)


def dense_dweight(dy, x, tree):
    # The kernel folds the leaves of the reduction tree, one per block of 16 images, in registers.
    # How the blocks are cut into ranges does not change the bytes of the result, so the ranges may
    # depend on this rank's share.
    x = read(x)
    _, outputs = rows_of(dy, "dense_dweight")
    features = math.prod(x.dims[1:-1])
    nodes = [(start - tree.run[0], stop - tree.run[0]) for start, stop in tree.nodes[tree.rank]]
    kernel, ranges, ends = _cut(nodes, outputs, features, tree.plain)
    rows, columns, _ = FOLDS[kernel]
    matrix = array.empty((len(ranges), outputs * features))
    grid = -(-features // columns), -(-outputs // rows), len(ranges)
    arrays = dy, x, matrix, launching.constant(np.array(ranges, np.int32))
    aligned = _aligned(outputs, dy), _aligned(features, x, matrix)
    launching.launch(kernel, grid, THREADS, *arrays, outputs, features, int(tree.plain), *aligned)
    if len(ranges) > len(nodes):
        matrix = fold.fold_rows(matrix, ends)
    like = Array(None, np.float32, (outputs, features), (outputs, *x.dims[1:-1]), (0, *x.order[2:]))
    return _partial(matrix, tree, like)


def _cut(nodes, outputs, features, plain):
    """Cut tree nodes into enough ranges of blocks to fill the GPU; return (kernel, ranges, ends).

    `kernel` is the name of the kernel that folds the ranges. Each range is a pair (first block,
    number of blocks). `ends` has a pair (first range, number of ranges) for each node. The caller
    folds these ranges into the node. Except for the last range of a node, the number of blocks is a
    power of two, so each range is itself a node of the tree. The nodes of a plain sum are not cut.
    """
    longest = max((stop - start for start, stop in nodes), default=0)
    kernel = "dense_dweight_few" if outputs <= FEW else "dense_dweight_short"
    if outputs > FEW and longest > FOLDS[kernel][2]:
        kernel = "dense_dweight_long"
    rows, columns, blocks = FOLDS[kernel]
    tiles = -(-outputs // rows) * -(-features // columns)
    enough = 4 * launching.device().processors
    while blocks > SHORTEST_RANGE and tiles * sum(-(-(b - a) // blocks) for a, b in nodes) < enough:
        blocks //= 2
    ranges, ends = [], []
    for start, stop in nodes:
        size = stop - start if plain else blocks
        parts = [(first, min(size, stop - first)) for first in range(start, stop, size)]
        ends.append((len(ranges), len(parts)))
        ranges += parts
    return kernel, ranges, ends


def dense_backward(dy, x, weight, tree, needs):
    values = read(x)
    _check(values, weight)
    dx = dense_dx(dy, weight) if needs[0] else None
    sums = None
    if dx is not None and isinstance(x, DeferredInput):
        sums = activation_sums(dx.reshape(x.x.shape), x, tree)
    return (
        dx,
        dense_dweight(dy, values, tree) if needs[1] else None,
        channel_sums(dy, tree) if needs[2] else None,
        sums,
    )


def _check(x, weight):
    """Raise ValueError unless the features of x and of the weights have the same order."""
    if x.dims[1:-1] != weight.dims[1:] or x.order[2:] != weight.order[1:]:
        raise ValueError(
            f"dense: expected weights for images {x.dims[1:-1]}, got {weight.dims[1:]} per "
            f"output, weight shape {weight.shape}"
        )


def _aligned(pitch, *arrays):
    """Return 1 if all rows of `pitch` floats are aligned to 16 bytes, else 0."""
    return int(pitch % 4 == 0 and all(a.offset % 16 == 0 for a in arrays))


def _partial(matrix, tree, like):
    """Return a sum as a Partial. The rows of `matrix` are the sum's nodes on this rank.

    `like` is an Array with the shape and memory layout of the sum.
    """
    rows = [
        Array(row.buffer, row.dtype, like.shape, like.dims, like.order, row.offset)
        for row in map(matrix.row, range(len(matrix)))
    ]
    term = Term(tree, fold.Nodes(matrix, rows, like), add, matrix.dtype)
    return Partial([term], None, like.shape, matrix.dtype)
