"""Shares of a mini-batch in proportion to the measured speed of the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

PARTS = 1000  # weight of the fastest rank


class LoadBalancer:
    """Measures how long this rank's own work takes, and weights the next epoch's shares by it.

    Waiting for other ranks does not count. The shares change no byte of the result.

    Parameters
    ----------
    world : World
        The ranks.
    """

    def __init__(self, world: Any):
        self.world = world
        self.blocks, self.seconds = 0, 0.0
        self.started: float | None = None  # when the current step began, less all waiting before

    def start(self, now: float) -> None:
        """Start timing a step at `now` seconds."""
        self.started = now - self.world.transport.wait_seconds

    def stop(self, now: float, blocks: int) -> None:
        """Stop timing the step, in which this rank held `blocks` blocks."""
        self.seconds += now - self.world.transport.wait_seconds - self.started
        self.blocks += blocks

    def load(self) -> tuple[int, ...] | None:
        """Return each rank's weight for the next epoch and restart the measurement. Collective.

        Returns
        -------
        tuple of int or None
            One weight per rank, at most PARTS; None if no rank measured any work.
        """
        speeds = np.zeros(self.world.size)
        if self.blocks and self.seconds > 0:
            speeds[self.world.rank] = self.blocks / self.seconds
        self.blocks, self.seconds = 0, 0.0
        speeds = self.world.gop("max", speeds)
        if not speeds.any():
            return None
        # A rank without work so far counts as fast as the others on average.
        speeds[speeds == 0] = speeds[speeds > 0].mean()
        return tuple(max(1, round(PARTS * speed)) for speed in (speeds / speeds.max()).tolist())
