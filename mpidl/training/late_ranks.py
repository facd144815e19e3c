"""Find ranks that keep the other ranks waiting all the time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidl.phases import Seconds

WINDOW = 10.0  # shortest period for which late ranks are reported, in seconds
ALWAYS = 0.9  # fraction of this period during which a rank must be late to be reported
DELAY = 0.1  # a late rank delays the other ranks by at least this fraction of an interval
MOST_NAMES = 3  # largest number of ranks that the message names


class LateRanks:
    """Determines which ranks kept the other ranks waiting almost all the time.

    A rank is late in an interval if two conditions hold. The rank took longer to read, compute and
    sum than other ranks would take for the same number of images, and the other ranks waited. Both
    the excess time and the wait must be at least the fraction `DELAY` of the interval. A rank does
    not count as late merely because it has more images or writes the files of the run.

    Parameters
    ----------
    hosts : sequence of str
        Host name of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self.named_ranks: tuple[int, ...] = ()  # the ranks in the last message
        self._clear()

    def _clear(self):
        self.seconds = 0.0
        self.late_seconds, self.waits = np.zeros(len(self.hosts)), np.zeros(len(self.hosts))

    def add(self, times: Sequence[Seconds], images: Sequence[int]) -> None:
        """Add the measurements of an interval.

        Parameters
        ----------
        times : sequence of Seconds
            Seconds that each rank spent on each kind of work in the interval.
        images : sequence of int
            Number of images of each rank in a mini-batch.
        """
        share = np.array(images, float)
        if (share > 0).sum() < 2:
            return
        length = max(map(sum, times))
        waits = np.array([t.wait for t in times])
        work = np.array([t.input + t.compute + t.sum for t in times])
        pace = np.divide(work, share, out=np.full(len(work), np.nan), where=share > 0)
        excess = work - _median_of_others(pace) * share
        delay = np.minimum(excess, _median_of_others(waits))
        is_late = (share > 0) & (delay >= DELAY * length)
        self.seconds += length
        self.late_seconds += np.where(is_late, length, 0.0)
        self.waits += waits

    def message(self) -> str | None:
        """Return a line that names the late ranks, or None if there is nothing to report.

        The line covers all intervals since the end of the last period, which must together last at
        least `WINDOW` seconds. The line is not repeated while the same ranks are late.
        """
        if self.seconds < WINDOW:
            return None
        late = np.flatnonzero(self.late_seconds >= ALWAYS * self.seconds)
        seconds, waits = self.seconds, np.delete(self.waits, late)
        is_news = len(late) > 0 and tuple(late) != self.named_ranks
        self.named_ranks = tuple(late)
        self._clear()
        if not is_news:
            return None
        names = [f"rank {rank} on host {self.hosts[rank]}" for rank in late[:MOST_NAMES]]
        names += [f"{len(late) - MOST_NAMES} more"] if len(late) > MOST_NAMES else []
        return (
            f"warning: always late: {', '.join(names)}; in the last {seconds:.0f} s, the other "
            f"ranks waited {np.median(waits) / seconds:.0%} of the time (--worker-load measured "
            "gives slow ranks less work)"
        )


def _median_of_others(values):
    """Return, for each rank, the median of the other ranks' values, ignoring NaN."""
    return np.array([np.nanmedian(np.delete(values, rank)) for rank in range(len(values))])
