"""Test what a transport tells its guard, and a world of ranks that no job has started."""

import numpy as np
import pytest

from mpidl.comm.guard import Guard
from mpidl.comm.transport import Transport
from mpidl.comm.world import World


class Witness(Guard):
    """A guard that notes each call, and that extends a wait as often as `reports` says."""

    def __init__(self, reports=0):
        self.card, self.calls, self.reports = "a card", [], reports

    def meet(self, transport, cards):
        self.calls.append(("meet", tuple(cards)))
        return True

    def name_activity(self, text):
        self.calls.append(("activity", text))

    def begin(self, operation, limit):
        self.calls.append(("begin", operation, limit))
        return operation

    def renew(self, operation, timeout):
        self.reports -= 1
        return self.reports >= 0

    def end(self, outer):
        self.calls.append(("end", outer))

    def timed_out(self, operation, problem):
        self.calls.append(("timed out", operation))
        super().timed_out(operation, problem)


def test_a_guard_hears_of_each_wait_and_each_call(world):
    mpi, guard = world.transport.MPI, Witness()
    transport = Transport(mpi, mpi.COMM_SELF, 5.0, guard)
    start = "the start of a world"
    assert guard.calls[0] == ("activity", "starting")
    assert [call[0] for call in guard.calls[1:]] == ["begin", "end", "meet"]
    assert guard.calls[1][1] == guard.calls[2][1] == start
    assert guard.calls[3] == ("meet", ("a card",)) and transport.oversubscribed
    guard.calls.clear()
    transport.activity = "epoch 1"
    transport.wait([], "a sum")
    with pytest.raises(ZeroDivisionError), transport.blocking("a call", 7.0):
        raise ZeroDivisionError
    transport.close()
    assert guard.calls == [
        ("activity", "epoch 1"),
        ("begin", "a sum", 5.0),
        ("end", "a sum"),
        ("begin", "a call", 7.0),
        ("end", "a call"),
        ("begin", "the end of a world", 5.0),
        ("end", "the end of a world"),
    ]


def test_a_guard_ends_a_wait_that_takes_too_long(world):
    mpi, guard = world.transport.MPI, Witness()
    transport = Transport(mpi, mpi.COMM_SELF, 0.05, guard)
    with pytest.raises(TimeoutError, match=r"^a sum did not complete within 0.05 s"):
        transport.wait_until(lambda: False, "a sum")
    assert guard.calls[-2:] == [("timed out", "a sum"), ("end", "a sum")]
    transport.close()


def test_a_wait_goes_on_while_another_rank_reports(world):
    mpi, guard = world.transport.MPI, Witness(reports=2)
    transport, polls = Transport(mpi, mpi.COMM_SELF, 0.0, guard), []

    def is_ready():
        polls.append(guard.reports)
        return guard.reports < -1  # later than the wait would end without a report

    transport.wait_until(is_ready, "a sum")
    assert ("timed out", "a sum") not in guard.calls
    transport.close()


def test_a_world_needs_a_transport_alone(world):
    mpi = world.transport.MPI
    single = World(Transport(mpi, mpi.COMM_SELF, 5.0))
    assert (single.rank, single.size, single.host) == (0, 1, world.host)
    assert single.gop("sum", 3) == 3 and single.allgather("a") == ["a"]
    assert np.array_equal(single.shared_array((2,), np.int32), [0, 0])
    single.close()
