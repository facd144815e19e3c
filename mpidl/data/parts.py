"""Divide mini-batches into parts, which a training step computes one after another.

A block holds 16 images. A part consists of 2**k consecutive blocks, which form a node of the
mini-batch's reduction tree. Folding the sums of the parts therefore gives the same bytes as folding
all blocks. Each part is divided among all ranks, like a whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mpidl.core.blocks import LANES, Batch, Blocked, Ranks, blocks_of, share


@dataclass(frozen=True, eq=False)
class PartedBatch:
    """A mini-batch of `count` images in parts, each of which is divided among all ranks.

    A `Blocked` value with this batch holds this rank's blocks of the first part, followed by its
    blocks of the second part, and so on.
    """

    count: int  # number of images in the mini-batch, on all ranks
    # The parts. The "mean" over the images of a part is the sum over these images divided by
    # `count`.
    parts: tuple[Batch, ...]
    epoch: int = 0  # epoch and seed of the samples, as in `Batch`
    seed: int = 0

    @cached_property
    def indices(self) -> np.ndarray:
        """Dataset indices of the samples of this rank, in the order of the blocks."""
        return np.concatenate([part.indices for part in self.parts])

    @cached_property
    def blocks(self) -> int:
        """Number of blocks that this rank holds."""
        return sum(part.blocks for part in self.parts)

    def valid(self, block: int) -> int:
        """Return the number of images in one of this rank's blocks; see `Batch.valid`."""
        return min(LANES, len(self.indices) - block * LANES)


def part_blocks(count: int, parts: int) -> int:
    """Return the number of blocks per part.

    The result is the smallest power of two that divides a mini-batch into at most `parts` parts.
    The last part of a mini-batch may be smaller.
    """
    return 1 << (-(-blocks_of(count) // parts) - 1).bit_length()


def share_parts(
    count: int, blocks: int, world: Ranks, indices: np.ndarray, **options: Any
) -> PartedBatch:
    """Divide a mini-batch into parts of 2^k blocks, and each part among the ranks of `world`.

    `indices` are the sample numbers of all images of the mini-batch. Returns this rank's shares,
    which may be empty.
    """
    parts = []
    for first in range(0, max(count, 1), blocks * LANES):
        of_part = indices[first : first + blocks * LANES]
        parts.append(replace(share(len(of_part), world, indices=of_part, **options), total=count))
    return PartedBatch(count, tuple(parts), parts[0].epoch, parts[0].seed)


def parts_of(images: Blocked, targets: Blocked | None) -> Iterator[tuple[Blocked, Blocked | None]]:
    """Yield (images, targets) of each part, or of the whole mini-batch if it has no parts."""
    if not isinstance(images.batch, PartedBatch):
        yield images, targets
        return
    first = 0
    for part in images.batch.parts:
        blocks = slice(first, first + part.blocks)
        of_part = None if targets is None else Blocked(targets.lanes[blocks], part)
        yield Blocked(images.lanes[blocks], part), of_part
        first += part.blocks
