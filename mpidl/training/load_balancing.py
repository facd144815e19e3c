"""Divide mini-batches among the ranks in proportion to their measured speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpidl.training.progress import EpochSummary
    from mpidl.training.trainer import Trainer

PARTS = 1000  # the weight of the fastest rank


class LoadBalancer:
    """The hook that measures the ranks' speed, and sets their shares of the next epoch.

    The measurement excludes time spent waiting for other ranks. The shares do not affect the
    training results, not even their rounding errors.

    Parameters
    ----------
    world : World
        The ranks.
    """

    def __init__(self, world: Any):
        self.world = world
        self.blocks, self.seconds = 0, 0.0
        self.started: float | None = None  # start of the training step minus all waiting time

    def begin(self, now: float) -> None:
        """Start timing a training step. `now` is the time in seconds."""
        self.started = now - self.world.transport.wait_seconds

    def stop(self, now: float, blocks: int) -> None:
        """Stop timing a step in which this rank computed `blocks` blocks of 16 images."""
        self.seconds += now - self.world.transport.wait_seconds - self.started
        self.blocks += blocks

    def load(self) -> tuple[int, ...] | None:
        """Return each rank's weight for the next epoch, and restart the measurement. Collective.

        Returns
        -------
        tuple of int or None
            One weight per rank, from 1 to `PARTS`, proportional to the rank's speed. None if no
            rank measured any work.
        """
        speeds = np.zeros(self.world.size)
        if self.blocks and self.seconds > 0:
            speeds[self.world.rank] = self.blocks / self.seconds
        self.blocks, self.seconds = 0, 0.0
        speeds = self.world.gop("max", speeds)
        if not speeds.any():
            return None
        # A rank that has measured nothing gets the mean speed of the other ranks.
        speeds[speeds == 0] = speeds[speeds > 0].mean()
        return tuple(max(1, round(PARTS * speed)) for speed in (speeds / speeds.max()).tolist())

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        trainer.queue.load = self.load()
