"""How much of a mini-batch each rank takes, where that is measured."""

import numpy as np

PARTS = 1000  # of the fastest rank's load


class Measured:
    """The time that a rank's own work takes, by which the next epoch's shares are dealt.

    Waits for other ranks do not count. What shares are dealt changes no byte of the result.
    """

    def __init__(self, world):
        self.world = world
        self.blocks, self.seconds, self.began = 0, 0.0, None

    def start(self, now):
        """A step begins."""
        self.began = now - self.world.transport.wait_seconds

    def stop(self, now, blocks):
        """It has ended; this rank held so many blocks."""
        self.seconds += now - self.world.transport.wait_seconds - self.began
        self.blocks += blocks

    def load(self):
        """The weights of the next epoch, one a rank; counting begins anew. Collective."""
        speeds = np.zeros(self.world.size)
        if self.blocks and self.seconds > 0:
            speeds[self.world.rank] = self.blocks / self.seconds
        self.blocks, self.seconds = 0, 0.0
        speeds = self.world.gop("max", speeds)
        if not speeds.any():
            return None
        # one that had no work yet is taken to be as fast as the others
        speeds[speeds == 0] = speeds[speeds > 0].mean()
        return tuple(max(1, round(PARTS * speed)) for speed in (speeds / speeds.max()).tolist())
