"""Test the comparison of the ranks' clocks, with clocks that are wrong by a known amount."""

import numpy as np

from mpidl import phases
from mpidl.comm import clocks
from mpidl.comm.clocks import ClockOffset, compare_clocks, to_rank_0

SECOND = 10**9


def test_planted_offsets_are_measured_within_the_error(world, monkeypatch):
    planted = 5 * SECOND * world.rank * (-1) ** world.rank
    monkeypatch.setattr(clocks, "now", lambda: phases.now() + planted)
    offsets = compare_clocks(world)
    if world.rank:
        assert offsets == []
    else:
        assert len(offsets) == world.size and offsets[0][1:] == (0, 0)
        for rank, offset in enumerate(offsets):
            expected = 5 * SECOND * rank * (-1) ** rank
            assert abs(offset.offset - expected) <= offset.error < SECOND
    world.barrier()


def test_ranks_of_a_host_share_a_clock(world):
    hosts = set(world.hosts)
    for offset in compare_clocks(world):
        assert len(hosts) > 1 or offset[1:] == (0, 0)


def test_times_are_corrected_for_offset_and_drift():
    """Times of a clock that is 3 s ahead and gains 100 microseconds per second are corrected."""
    true = np.arange(0, 20 * SECOND, SECOND // 7, dtype=np.int64)
    gain = 1e-4
    clock = true + 3 * SECOND + np.rint(true * gain).astype(np.int64)
    first = ClockOffset(3 * SECOND, 3 * SECOND, 0)
    last = ClockOffset(int(clock[-1]), int(clock[-1] - true[-1]), 0)
    assert np.abs(to_rank_0(clock, first, last) - true).max() <= 2
    late = to_rank_0(clock, first, first._replace(time=last.time))
    assert np.abs(late - true).max() > 10**6  # negative control: the drift is not corrected
