"""Test reading what another process on the host is doing.

A process publishes its current act, which is a wait or an MPI call, and its Python stacks.
"""

import os
import signal
import subprocess
import sys

import launcher
import pytest
from limits import wait_until

from mpidl.ranks import acts

CHILD = """
import time
from mpidl.ranks import acts

record = acts.record()
record.activity("epoch 3, iteration 17")
outer = record.begin("gop max", 5)
print(*record.address, sep="|", flush=True)
def count_sheep():
    print("ready", flush=True)
    while True:
        time.sleep(600)
if input() == "compute":
    record.end(outer)
count_sheep()
"""


@pytest.fixture
def child():
    words = [sys.executable, "-c", CHILD]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(words, text=True, env=launcher.environment(), **pipes) as process:
        pid, namespace, descriptor, inode = process.stdout.readline().strip().split("|")
        process.address = acts.Address(int(pid), namespace, int(descriptor), int(inode))
        yield process
        process.kill()


def tell(child, text):
    child.stdin.write(f"{text}\n")
    child.stdin.flush()
    assert child.stdout.readline() == "ready\n"


def test_a_process_is_seen_while_it_runs_is_stopped_and_has_ended(child):
    tell(child, "wait")
    (running,) = acts.look_at([child.address])
    assert running.state in "RS"
    assert running.act.startswith("epoch 3, iteration 17: waits for gop max, for ")
    assert "in count_sheep" in running.stacks
    (repeated,) = acts.look_at([child.address])
    assert repeated.stacks.count("in count_sheep") == 1  # not the stacks of the first request again
    (silent,) = acts.look_at([child.address], stacks=False)
    assert silent.stacks == ""

    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: acts.state_of(child.address) in acts.STOPPED_STATES)
    (stopped,) = acts.look_at([child.address])
    assert stopped.state == "T" and stopped.stacks == ""
    assert stopped.act.startswith("epoch 3, iteration 17: waits for gop max")

    child.kill()
    wait_until(lambda: acts.state_of(child.address) in acts.ENDED_STATES)
    assert acts.look_at([child.address]) == [acts.Sighting(acts.state_of(child.address))]
    child.wait()
    assert acts.look_at([child.address]) == [acts.Sighting("")]


def test_a_process_that_computes(child):
    tell(child, "compute")
    (sighting,) = acts.look_at([child.address])
    assert sighting.act.startswith("epoch 3, iteration 17: computes, after gop max, for ")


def test_another_process_with_the_same_number_gets_no_signal(child):
    """A process that reuses the ID of a rank gets no signal, because the signal would end it."""
    tell(child, "wait")
    assert acts.look_at([child.address._replace(inode=-1)]) == [acts.Sighting("")]
    hidden = child.address._replace(namespace="pid:[1]")
    assert acts.look_at([hidden]) == [acts.Sighting(acts.HIDDEN)]
    assert child.poll() is None


def test_nested_operations():
    record = acts.ActRecord()
    count = record.count
    outer = record.begin("the sum", 3)
    inner = record.begin("a message", 4)
    assert (record.operation, record.limit) == ("a message", 4)
    record.end(inner)
    assert (record.operation, record.limit) == ("the sum", 3)
    record.end(outer)
    assert record.operation is None and record.count == count + 4
