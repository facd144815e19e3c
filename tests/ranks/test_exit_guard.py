"""Test that the exit guard ends stopped processes and leaves all other processes alone."""

import ast
import os
import signal
import subprocess
import sys

import pytest
from limits import wait_until

from mpidl.ranks import exit_guard


@pytest.fixture
def rank():
    words = [sys.executable, "-c", "input()"]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(words, text=True, **pipes) as process:
        yield process
        process.kill()


def guard(*words, timeout=0.2):
    """Start the exit guard as a rank does. Each word is "PID TICK NAME" of a process to watch."""
    command = [sys.executable, "-I", "-S", exit_guard.__file__, str(timeout), *words]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE)


def stop(process):
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: exit_guard.status_of(process.pid)[0] == "T")


def test_a_stopped_process_is_named_and_ended(rank):
    word = f"{rank.pid} {exit_guard.start_tick(rank.pid)} rank 1 on host a"
    stop(rank)
    _, stderr = guard(word).communicate()
    assert rank.wait() == -signal.SIGKILL
    assert stderr.splitlines() == [
        "mpidl: leaving: a process has been stopped for 0.2 s (--timeout), and is now killed",
        "  rank 1 on host a does not answer: its process is stopped (SIGSTOP)",
    ]


def test_a_process_that_goes_on_is_left_alone(rank):
    """If a process continues, the guard prints nothing. It ends when the last process ends."""
    process = guard(f"{rank.pid} {exit_guard.start_tick(rank.pid)} rank 1", timeout=30)
    stop(rank)
    os.kill(rank.pid, signal.SIGCONT)
    assert process.stdout.read() == ""  # the guard has closed its stdout
    assert process.poll() is None
    rank.communicate("\n")
    assert rank.returncode == 0
    assert process.communicate() == ("", "") and process.returncode == 0


def test_another_process_with_the_same_number_is_left_alone(rank):
    stop(rank)
    tick = int(exit_guard.start_tick(rank.pid))
    assert guard(f"{rank.pid} {tick - 1} rank 1").communicate() == ("", "")
    assert rank.poll() is None and exit_guard.status_of(rank.pid)[0] == "T"


def test_without_processes_the_program_ends():
    assert guard().communicate() == ("", "")
    assert exit_guard.start_tick(-1) == ""


def test_it_imports_nothing_that_python_does_not_load_anyway():
    """The guard imports only modules that Python has loaded, because it must start quickly."""
    source = "import os, sys, time; before = {*sys.modules}; import exit_guard; "
    source += "print({*sys.modules} - before)"
    words = [sys.executable, "-S", "-c", source]
    folder = os.path.dirname(exit_guard.__file__)
    stdout = subprocess.check_output(words, env={"PYTHONPATH": folder}, text=True)
    assert ast.literal_eval(stdout) == {"exit_guard", "__future__"}
