"""Test a job that a launcher has started: its messages, its end, and its remaining processes."""

import contextlib
import os
import secrets
import signal
import sys
import threading
import time

import pytest
from launcher import marked
from limits import exceeded, wait_until

from mpidl.errors import UserError
from mpidl.jobs import job_process
from mpidl.jobs.job_process import JobProcess
from mpidl.ranks import failure

TOKEN = secrets.token_hex(8)
MPICH = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4711 RUNNING AT n7
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
OPEN_MPI = """
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 4711 on node n7 exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
LOST_HOST = """
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-n1-4242@0,0] on node n1
  Remote daemon: [prterun-n1-4242@0,1] on node n7
"""
HANG = """
mpidl: epoch 1, iteration 3: gop max did not complete within 3 s (--timeout).
  rank 1 on host n7 (process 4711) does not answer: its process is stopped (SIGSTOP)
  rank 0, epoch 1, iteration 3: waits for gop max
"""
RAISED = """
mpidl: rank 1 on host n7 failed, epoch 1, iteration 3:
Traceback (most recent call last):
  File "net.py", line 3, in forward
    1 / 0
ZeroDivisionError: division by zero
"""
CAUSES = {
    MPICH: "process 4711 on host n7 has ended: Killed",
    OPEN_MPI: "rank 1 (process 4711) on host n7 has ended: signal 9 (Killed)",
    LOST_HOST: "mpirun has lost host n7",
    HANG: "epoch 1, iteration 3: gop max did not complete within 3 s (--timeout). rank 1 on host "
    "n7 (process 4711) does not answer: its process is stopped (SIGSTOP)",
    RAISED: "rank 1 on host n7 failed, epoch 1, iteration 3: ZeroDivisionError: division by zero",
    MPICH + RAISED: "rank 1 on host n7 failed, epoch 1, iteration 3: ZeroDivisionError: division "
    "by zero",
    "mpidl: the loss is nan\n": "the loss is nan",
    "": "sh ended with exit code 3",
}


def start(script):
    return JobProcess(["sh", "-c", script], dict(os.environ), TOKEN)


@pytest.mark.parametrize("text", CAUSES, ids=lambda text: " ".join(text.split())[:20])
def test_causes(text, capfd):
    job = start(f"cat >&2 <<'END'\n{text}END\nexit 3")
    code = job.wait(failure.Signals(), has_children=False)
    assert code == 3 and job.cause(code) == CAUSES[text]
    assert capfd.readouterr().err.strip() == text.strip()
    assert job.has_message == ("mpidl: " in text)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (9, "ended with exit code 9: SIGKILL has killed a process"),
        (139, "ended with exit code 139: SIGSEGV has killed a process"),
        (1, "ended with exit code 1"),
        (130, "ended with exit code 130"),
        (-11, "was killed by SIGSEGV"),
    ],
)
def test_causes_of_exit_codes(code, cause):
    assert job_process._cause_of_code("mpirun", code) == f"mpirun {cause}"


def test_a_signal_and_a_program_that_does_not_exist(capfd):
    job = start("kill -9 $$")
    code = job.wait(failure.Signals(), has_children=False)
    assert code == -9 and job.cause(code) == "sh was killed by SIGKILL"
    with pytest.raises(UserError, match="^/none/mpirun: cannot be started: No such file"):
        JobProcess(["/none/mpirun"], dict(os.environ), TOKEN)


def test_processes_of_a_dead_launcher_are_ended():
    """Both processes that a launcher leaves behind are ended, even a process in another session."""
    job = start("sleep 600 & setsid sleep 600 & exit 1")
    assert job.wait(failure.Signals(), has_children=True) == 1
    wait_until(lambda: not marked(TOKEN))


def test_a_launcher_without_processes_is_ended(monkeypatch):
    """A launcher without child processes is ended.

    mpirun has no child processes if its proxy is killed before it has started ranks.
    """
    monkeypatch.setattr(job_process, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(job_process, "ALONE_SECONDS", 0.4)
    # The outer shell becomes a `sleep` without children; its subshell leaves an orphan `sleep`.
    script = "(sleep 600 &); exec sleep 600"
    job = JobProcess(["sh", "-c", script], dict(os.environ), TOKEN)
    job.words = ["sleep"]
    start_time = time.monotonic()
    code = job.wait(failure.Signals(), has_children=True)
    assert not exceeded(start_time, 5)
    assert not marked(TOKEN)
    cause = "the processes of sleep on this host have ended, but sleep itself has not"
    assert job.cause(code) == cause
    job = start("sleep 1 & wait; exit 5")  # negative control
    assert job.wait(failure.Signals(), has_children=True) == 5


def test_a_job_whose_messages_nobody_reads_goes_on(monkeypatch, capfd):
    """A job continues if nobody reads its messages, such as with `2>&1 | head`.

    Without a reader, a full pipe would block the ranks.
    """
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        job = start("head -c 300000 /dev/zero | tr '\\0' '\\n' >&2; echo mpidl: end >&2")
        with failure.Signals() as signals:
            assert job.wait(signals, has_children=False) == 0
        assert job.has_message
        with contextlib.suppress(BrokenPipeError):
            closed.close()


def test_a_request_to_stop_reaches_the_job_as_usr1():
    job = start("trap 'exit 75' USR1; while :; do sleep 0.05; done")
    signals = failure.Signals()
    timer = threading.Timer(0.3, lambda: setattr(signals, "name", signal.SIGTERM.name))
    timer.start()
    assert job.wait(signals, has_children=True) == 75
