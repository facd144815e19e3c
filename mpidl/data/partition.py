"""Sampling as in MATLAB's parallel training loop: each rank draws from its own part of the set."""

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
    """Rearrange an order so that each rank takes all its images from one part of it.

    Parameters
    ----------
    order : np.ndarray
        A permutation of the samples, (n,).
    shares : sequence of sequences of (int, int)
        For each mini-batch, each rank's (first, stop) image.
    seed : int
        Seed of the permutations.
    epoch : int, optional
        Permute each part by itself for this epoch; None leaves the parts in order.

    Returns
    -------
    np.ndarray
        The new permutation, (n,).
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
    """Return each rank's (first, stop) image of a mini-batch of `count` images.

    `load` weights the shares, see `fold.split_blocks`.
    """
    runs = split_blocks(blocks_of(count), ranks, load)
    return [tuple(min(edge * LANES, count) for edge in run) for run in runs]
