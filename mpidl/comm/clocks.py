"""Compare the clocks of the ranks, so that times from different hosts can be shown together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpidl.comm.messaging import Messaging
from mpidl.phases import now

TAG = 6  # tag of the messages; exchanges use tags from FIRST_TAG on
ROUNDS = 24  # number of round trips per rank; the fastest one is used
OPERATION = "the comparison of the clocks"


class ClockOffset(NamedTuple):
    """The clock of a rank compared with the clock of rank 0.

    Attributes
    ----------
    time : int
        Time of the comparison on the clock of the rank, in nanoseconds.
    offset : int
        Clock of the rank minus clock of rank 0, in nanoseconds.
    error : int
        Largest possible error of `offset` in nanoseconds: half a round trip.
    """

    time: int
    offset: int
    error: int


def compare_clocks(world: Messaging) -> list[ClockOffset]:
    """Compare the clocks of all ranks with the clock of rank 0. Collective.

    As in NTP, rank 0 exchanges `ROUNDS` messages with one rank after another. The offset is
    computed from the fastest round trip, because its two messages differ least in travel time.
    Processes on one host share a clock, so an offset that is smaller than its error is set to 0 for
    ranks on the host of rank 0.

    Returns
    -------
    list of ClockOffset
        On rank 0, the offset of each rank. The list is empty on the other ranks.
    """
    transport, buffer = world.transport, np.zeros(1, np.int64)
    if world.rank:
        for _ in range(ROUNDS):
            transport.wait([transport.irecv(buffer, 0, TAG)], OPERATION)
            buffer[0] = now()
            transport.wait([transport.isend(buffer, 0, TAG)], OPERATION)
        return []
    offsets = [ClockOffset(now(), 0, 0)]
    for rank in range(1, world.size):
        rounds = []
        for _ in range(ROUNDS):
            start = now()
            requests = [transport.isend(np.zeros(1, np.int64), rank, TAG)]
            requests.append(transport.irecv(buffer, rank, TAG))
            transport.wait(requests, OPERATION)
            end, time = now(), int(buffer[0])
            rounds.append((end - start, time, time - (start + end) // 2))
        duration, time, offset = min(rounds)
        error = duration // 2
        if transport.hosts[rank] == transport.hosts[0] and abs(offset) <= error:
            offset = error = 0
        offsets.append(ClockOffset(time, offset, error))
    return offsets


def to_rank_0(times: np.ndarray, first: ClockOffset, last: ClockOffset) -> np.ndarray:
    """Convert times on a rank's clock to times on the clock of rank 0.

    Parameters
    ----------
    times : ndarray of int64
        Times on the clock of the rank, in nanoseconds.
    first, last : ClockOffset
        Two comparisons of the rank's clock. The offset is assumed to change linearly between them.

    Returns
    -------
    ndarray of int64
        The same times on the clock of rank 0, in nanoseconds.
    """
    span = max(last.time - first.time, 1)
    drift = (last.offset - first.offset) / span
    return times - first.offset - np.rint((times - first.time) * drift).astype(np.int64)
