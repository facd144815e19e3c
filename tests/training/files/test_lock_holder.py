"""Test the description of a lock's holder in a file, and the check for a running process."""

import dataclasses
import json
import os
import signal
import subprocess
import time

import pytest
from limits import wait_until

from mpidl.training.files import lock_holder
from mpidl.training.files.lock_holder import Holder

SLURM = {"SLURM_JOB_ID": "77", "SLURM_CLUSTER_NAME": "blue", "SLURM_RESTART_COUNT": "1"}
LAUNCH = {"MPIDL_JOB_TOKEN": "ab", "MPIDL_JOB_START": "2"}


def test_a_holder_is_what_its_file_says():
    holder = Holder.current(SLURM | LAUNCH)
    assert Holder.parse(holder.content()) == holder
    assert (holder.pid, holder.job, holder.restart) == (os.getpid(), "77 of cluster blue", 1)
    assert (holder.launch, holder.start) == ("ab", 2)
    other = Holder.current(SLURM | LAUNCH)
    assert other.token != holder.token
    assert dataclasses.replace(other, token=holder.token, since=holder.since) == holder


def test_a_holder_in_words(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    values = {"host": "n1", "pid": 12, "since": 86400.0}
    holder = dataclasses.replace(Holder.current({}), **values)
    assert holder.describe() == "process 12 on host n1 since 1970-01-02 00:00:00"
    holder = dataclasses.replace(Holder.current(SLURM | LAUNCH), **values)
    job = "Slurm job 77 of cluster blue, restart 1; start 2 of mpidl launch"
    assert holder.describe() == f"process 12 on host n1 ({job}) since 1970-01-02 00:00:00"
    monkeypatch.undo()
    time.tzset()


BAD_VALUES = [
    {"pid": "1"},
    {"pid": 2**70},
    {"pid": True},
    {"since": float("nan")},
    {"since": 1e300},
    {"host": 3},
    {"host": "n" * 1000},
    {"token": "../../other"},
    {"token": ""},
    {"more": 1},
]


@pytest.mark.parametrize("values", BAD_VALUES, ids=str)
def test_a_file_with_other_values_describes_no_holder(values):
    described = json.loads(Holder.current({}).content())
    assert Holder.parse(json.dumps(described).encode()) is not None
    assert Holder.parse(json.dumps(described | values).encode()) is None


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b"[]", b"3", b"null", b"[" * 3000])
def test_other_contents_describe_no_holder(content):
    assert Holder.parse(content) is None


def test_a_control_character_does_not_reach_the_terminal():
    holder = dataclasses.replace(Holder.current({}), host="n1\x1b[2J\nmpidl: done")
    assert holder.describe().isprintable()


def test_a_process_is_alive_until_it_ends():
    child = subprocess.Popen(["sleep", "100"])
    start = lock_holder._process_start(child.pid)
    holder = dataclasses.replace(Holder.current({}), pid=child.pid, process_start=start)
    assert holder.is_alive() is True
    child.send_signal(signal.SIGSTOP)
    assert holder.is_alive() is True
    child.kill()
    wait_until(lambda: holder.is_alive() is False)  # the process is now a zombie
    child.wait()
    assert holder.is_alive() is False


def test_another_process_with_the_same_number_is_not_the_holder():
    holder = Holder.current({})
    assert holder.is_alive() is True
    assert dataclasses.replace(holder, process_start=holder.process_start - 1).is_alive() is False


def test_processes_that_cannot_be_seen():
    """For processes on another machine, or without /proc, `is_alive` returns None."""
    holder = Holder.current({})
    assert dataclasses.replace(holder, machine="other").is_alive() is None
    assert dataclasses.replace(holder, machine="").is_alive() is None
    assert dataclasses.replace(holder, process_start=-1).is_alive() is None


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        ({}, {}, False),
        (SLURM, SLURM, False),
        (SLURM, SLURM | {"SLURM_RESTART_COUNT": "2"}, True),
        (SLURM | {"SLURM_RESTART_COUNT": "2"}, SLURM, False),
        (SLURM, SLURM | {"SLURM_RESTART_COUNT": "2", "SLURM_CLUSTER_NAME": "red"}, False),
        (SLURM, SLURM | {"SLURM_RESTART_COUNT": "2", "SLURM_JOB_ID": "78"}, False),
        ({"SLURM_JOB_ID": "5"}, {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "1"}, True),
        ({}, {"SLURM_RESTART_COUNT": "1"}, False),
        (LAUNCH, LAUNCH, False),
        (LAUNCH, LAUNCH | {"MPIDL_JOB_START": "3"}, True),
        (LAUNCH, {"MPIDL_JOB_TOKEN": "cd", "MPIDL_JOB_START": "3"}, False),
        ({}, {"MPIDL_JOB_START": "3"}, False),
    ],
)
def test_later_starts_of_the_same_job(earlier, later, expected):
    assert Holder.current(later).follows(Holder.current(earlier)) is expected
