"""Partitioned sampling: each rank draws from one part of the set, as in MATLAB's parallel loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidl import keyed
from mpidl.blocks import LANES, blocks_of
from mpidl.fold import split_blocks


def partition_order(
    order: np.ndarray,
    shares: Sequence[Sequence[tuple[int, int]]],
    seed: int,
    epoch: int | None = None,
) -> np.ndarray:
    """Rearrange the order of samples so that each rank uses one consecutive part of the order.

    Parameters
    ----------
    order : np.ndarray
        A permutation of the samples, (n,).
    shares : sequence of sequences of (int, int)
        For each mini-batch, the range (first, stop) of images of each rank.
    seed : int
        Seed of the permutations of the parts.
    epoch : int, optional
        Epoch for which each part is permuted separately. None leaves each part in order.

    Returns
    -------
    np.ndarray
        The rearranged permutation, (n,).
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
    """Return the range (first, stop) of images of each rank in a mini-batch of `count` images.

    `load` holds the weights of the shares (see `fold.split_blocks`).
    """
    runs = split_blocks(blocks_of(count), ranks, load)
    return [tuple(min(edge * LANES, count) for edge in run) for run in runs]
