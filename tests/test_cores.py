"""How many threads each rank runs, and what is said where that does not fit the machine."""

import pytest

from mpidl import backends
from mpidl.backends import settings
from mpidl.comm.thread_budget import Cores, cores, deal


def bound(*ranks, at_a_time=None):
    """Ranks of one host, each with the cores it may use, and the quota of all."""
    return [("node0", Cores(tuple(own), at_a_time)) for own in ranks]


@pytest.mark.parametrize(
    "ranks, threads",
    [
        (bound(range(8)), [8]),
        (bound(range(8), range(8)), [4, 4]),
        (bound(range(8), range(8), range(8)), [2, 2, 2]),
        (bound(range(4), range(4, 8)), [4, 4]),
        (bound([0], [1], [2, 3]), [1, 1, 2]),
        (bound(range(2), range(2), range(2)), [1, 1, 1]),
        (bound(range(64), at_a_time=4), [4]),
        (bound(range(64), range(64), at_a_time=4), [2, 2]),
        (bound(range(32), range(32, 64), at_a_time=4), [2, 2]),
        ([("node0", Cores(range(4))), ("node1", Cores(range(8)))], [4, 8]),
    ],
)
def test_by_default_cores_are_divided_among_the_ranks_that_may_use_them(ranks, threads):
    assert deal(ranks, 0)[0] == threads


def test_as_many_as_are_asked_for():
    assert deal(bound(range(8), range(8)), 3) == ([3, 3], [])


def test_what_fits_is_not_spoken_of():
    assert deal(bound(range(8), range(8)), 0)[1] == []
    assert deal(bound(range(4), range(4, 8)), 4)[1] == []


def test_too_many_are_told_in_one_line():
    (line,) = deal(bound(range(2), range(2), range(2)), 0)[1]
    assert line.startswith("warning: 3 rank(s) x 1 thread(s) on node0 share 2 core(s)")
    (line,) = deal(bound(range(8), range(8)), 5)[1]
    assert "2 rank(s) x 5 thread(s) on node0 share 8 core(s)" in line
    (line,) = deal(bound(range(64), at_a_time=4), 8)[1]
    assert "1 rank(s) x 8 thread(s) on node0 share 4 core(s)" in line


def test_a_quota_counts_though_ranks_are_bound_to_cores_of_their_own():
    (line,) = deal(bound(range(32), range(32, 64), at_a_time=4), 32)[1]
    assert "2 rank(s) x 32 thread(s) on node0 share 4 core(s)" in line


def test_a_rank_bound_to_fewer_cores_than_its_threads():
    (line,) = deal(bound([0], [1, 2, 3]), 2)[1]
    assert "rank 0 on node0 runs 2 threads but may use 1 core(s)" in line


def test_this_process():
    allowed, quota = cores()
    assert len(allowed) >= 1 and (quota is None or quota >= 1)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"winograd": "on"}])
def test_settings_that_cannot_be(wrong):
    before = settings.threads, settings.winograd
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        backends.configure(**wrong)
    assert (settings.threads, settings.winograd) == before
