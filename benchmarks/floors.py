"""Compute the shortest possible time of work from peak rates of the hardware (roofline).

See Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
multicore architectures", 2009. The model ignores caches, so work on cached data can be faster than
the bound of its bytes.
"""

from typing import NamedTuple


class Floor(NamedTuple):
    """Shortest possible time of some work, in seconds.

    Attributes
    ----------
    products : float
        Time of the floating-point operations at the peak rate.
    bytes : float
        Time of the reads and writes at the memory bandwidth.
    """

    products: float
    bytes: float

    @property
    def seconds(self) -> float:
        """The larger of the two times, because operations and transfers can overlap."""
        return max(self.products, self.bytes)


def floor(flop: float, nbytes: float, flop_rate: float, bandwidth: float) -> Floor:
    """Return the Floor of work with `flop` operations that moves `nbytes` bytes.

    Parameters
    ----------
    flop, nbytes : float
        Number of operations and of bytes.
    flop_rate, bandwidth : float
        Peak rates, per second.
    """
    return Floor(flop / flop_rate, nbytes / bandwidth)
