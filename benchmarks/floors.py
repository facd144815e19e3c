"""Compute the shortest time of some work from the peak rates of the hardware: its roofline.

See Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
multicore architectures", 2009. Data that stays in a cache is not modelled, so work can be faster
than the bound of its bytes.
"""

from typing import NamedTuple


class Floor(NamedTuple):
    """The shortest time of some work, in seconds.

    Attributes
    ----------
    products : float
        Time of its floating-point operations at the peak rate.
    bytes : float
        Time of its reads and writes at the bandwidth of the memory.
    """

    products: float
    bytes: float

    @property
    def seconds(self) -> float:
        """The larger of the two times, because they can overlap."""
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
