"""Sampling as MATLAB's parallel loop does it: each rank has a part of the set to itself."""

import numpy as np

from mpidl import keyed
from mpidl.blocks import LANES, blocks_of
from mpidl.fold import split_blocks


def order_of(order, shares, seed, epoch=None):
    """`order`, a permutation of the samples, dealt out so that each rank's images of all
    mini-batches come from one part of it.

    shares: of each mini-batch, of each rank, its (first, one past the last) image. epoch: each part
    is permuted by itself for this epoch; None: it is not.
    """
    counts = np.array([[stop - start for start, stop in runs] for runs in shares], np.int64)
    parts = np.split(order, np.cumsum(counts.sum(axis=0))[:-1])
    if epoch is not None:
        parts = [
            part[keyed.permutation(len(part), seed, f"shuffle part {rank}", epoch=epoch)]
            for rank, part in enumerate(parts)
        ]
    ends = np.cumsum(counts, axis=0)
    pieces = [
        part[end - count : end]
        for row, stops in zip(counts, ends, strict=True)
        for part, count, end in zip(parts, row, stops, strict=True)
    ]
    return np.concatenate(pieces)


def shares_of(count, ranks, load):
    """Of each rank, the (first, one past the last) image of a mini-batch of `count`."""
    runs = split_blocks(blocks_of(count), ranks, load)
    return [tuple(min(edge * LANES, count) for edge in run) for run in runs]
