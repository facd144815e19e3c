"""Test the thread that watches the start of MPI."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from mpidl.ranks import mpi_start


@pytest.fixture
def watched(monkeypatch):
    """Return a function that watches a block and returns the reasons to end the process."""
    monkeypatch.setattr(mpi_start, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(mpi_start, "GONE_SECONDS", 0.05)
    monkeypatch.setattr(mpi_start, "START_SECONDS", 0.02)

    def watch(timeout, seconds, states=None):
        """Watch a block that takes `seconds`. `states` are {PID: state} of this host's ranks."""
        end_event, reasons = threading.Event(), []
        watch = mpi_start.Watch(timeout)
        if states is not None:
            monkeypatch.setattr(mpi_start, "_watched_ranks", lambda: 2)
            monkeypatch.setattr(mpi_start, "_states_of_ranks", lambda: states)

        def end(reason):
            reasons.append(reason)
            end_event.set()
            watch._is_over.set()

        watch._end = end
        with watch:
            end_event.wait(seconds)
        return reasons

    return watch


def test_a_start_that_takes_too_long(watched):
    assert watched(0.1, 60) == ["within 0.1 s (--timeout) plus 0.02 s for its start"]


def test_a_stopped_rank_is_named(watched):
    states = {os.getpid(): "R", 77: "T"}
    assert watched(0.1, 60, states) == [
        "within 0.1 s (--timeout) plus 0.02 s for its start: stopped on this host: process 77"
    ]


@pytest.mark.parametrize("states", [{os.getpid(): "R", 77: "Z"}, {os.getpid(): "R"}])
def test_a_rank_that_has_ended(watched, states):
    text = "because another rank on this host has ended before it started MPI"
    assert watched(100, 60, states) == [text]


def test_a_launcher_that_has_ended(watched, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(mpi_start.os, "getppid", lambda: 1)
    assert watched(100, 60) == ["because the launcher on this host has ended"]


def test_a_process_ends_although_nobody_reads_its_message(monkeypatch):
    """The process ends even if its launcher was killed and no longer reads stderr."""
    codes = []

    class Pipe:
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(mpi_start.sys, "stderr", Pipe())
    monkeypatch.setattr(mpi_start.os, "_exit", codes.append)
    mpi_start.Watch(1)._end("within 1 s")
    assert codes == [1]


@pytest.mark.parametrize("states", [None, {os.getpid(): "R", 77: "S"}, {}])
def test_a_start_in_time(watched, states):
    """A process that starts in time is not ended, even if other ranks' states are unknown."""
    assert watched(100, 0.3, states) == []


def test_the_time_while_the_process_was_stopped_does_not_count(watched, monkeypatch):
    jumps = iter([0, 1000, 1000, 2000])
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + next(jumps, 2000))
    monkeypatch.setattr(mpi_start, "time", clock)
    assert watched(100, 0.3) == []


@pytest.mark.parametrize(
    ("context", "name", "value"),
    [("_without_network", "UCX_TLS", "^tcp"), ("without_rdma", "UCX_MODULES", "^ib,rdmacm")],
)
def test_variables_for_mpi_are_not_left_to_other_processes(monkeypatch, context, name, value):
    monkeypatch.setattr(mpi_start, "RDMA_FOLDERS", ())
    monkeypatch.delenv(name, raising=False)
    with getattr(mpi_start, context)():
        assert os.environ[name] == value
    assert name not in os.environ
    monkeypatch.setenv(name, "of the site")
    with getattr(mpi_start, context)():
        assert os.environ[name] == "of the site"
    assert os.environ[name] == "of the site"


@pytest.mark.parametrize("device", range(len(mpi_start.RDMA_FOLDERS)))
def test_a_fast_network_is_never_left_out(monkeypatch, tmp_path, device):
    """If any folder of RDMA devices exists, UCX decides alone which networks it uses."""
    folders = [tmp_path / str(number) for number in range(len(mpi_start.RDMA_FOLDERS))]
    folders[device].mkdir()
    monkeypatch.setattr(mpi_start, "RDMA_FOLDERS", folders)
    monkeypatch.delenv("UCX_MODULES", raising=False)
    with mpi_start.without_rdma():
        assert "UCX_MODULES" not in os.environ
