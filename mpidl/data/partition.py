"""Partitioned sampling: each rank draws from its own part of the set, as in MATLAB's `parfor`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidl.core import keyed
from mpidl.core.blocks import LANES, blocks_of
from mpidl.core.fold import split_blocks


def partition_order(
    order: np.ndarray,
    shares: Sequence[Sequence[tuple[int, int]]],
    seed: int,
    epoch: int | None = None,
) -> np.ndarray:
    """Rearrange the order of samples so that each rank uses one consecutive part of the order.

    `shares` has the range (first, stop) of each rank's images in each mini-batch. The seed and the
    epoch determine the permutation of each part; without an epoch, each part keeps its order.
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


def image_shares(count: int, ranks: int, load: tuple | None) -> list[tuple[int, ...]]:
    """Return each rank's range (first, stop) of the `count` images of a mini-batch.

    `load` holds the weight of each rank's share, or is None for equal shares (see
    `fold.split_blocks`).
    """
    runs = split_blocks(blocks_of(count), ranks, load)
    return [tuple(min(edge * LANES, count) for edge in run) for run in runs]
