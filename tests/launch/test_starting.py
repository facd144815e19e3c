"""Test the first seconds of a job: signals, ranks that stop or end, and shared memory."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import jobs
import launcher
import pytest
from limits import exceeded, wait_until
from mpi4py import MPI

from mpidl.training.files import checkpoint

SLOW = pytest.mark.slow("jobs")
# Like run/train, block signals, so that a signal that arrives before Python runs stays pending.
BLOCKED = ("env", "--block-signal=USR1,TERM")
HOST = socket.gethostname()
IS_MPICH = MPI.get_vendor()[0] == "MPICH"


def signalled(pictures, out, number, seconds):
    """Send a signal to all ranks of a run `seconds` after their start, and return the Result."""
    words = jobs.command(
        "train", "--batch-size", 50, *jobs.ENDLESS, network=jobs.SMALL, data=pictures, out=out
    )
    with launcher.start(2, *words, env=jobs.without_plots(), wrapper=BLOCKED) as job:
        wait_until(lambda: are_safe(job), 0.002)
        time.sleep(seconds)
        for pid in job.rank_pids().values():
            os.kill(pid, number)
        return launcher.finish(job)


def are_safe(job):
    """Return whether both ranks block USR1 or have a handler for it."""
    masks = []
    for pid in job.rank_pids().values():
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(maxsplit=1) for line in file if line.startswith("Sig"))
        masks.append(int(fields["SigBlk:"], 16) | int(fields["SigCgt:"], 16))
    return len(masks) == 2 and all(mask >> (signal.SIGUSR1 - 1) & 1 for mask in masks)


def assert_stopped(result, out, name):
    assert result.returncode == jobs.STOPPED, result.stdout + result.stderr
    assert jobs.error_lines(result) == []
    text = rf"{name}: stopped at iteration \d+, checkpoint written"
    assert re.search(text, result.stdout.splitlines()[-1])
    checkpoint.load(out)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("SIGUSR1", 0.0),
        pytest.param("SIGTERM", 0.5, marks=SLOW),
        pytest.param("SIGUSR1", 0.3, marks=SLOW),
    ],
)
def test_a_signal_in_the_first_second(pictures, tmp_path, name, seconds):
    result = signalled(pictures, tmp_path / "run", signal.Signals[name], seconds)
    assert_stopped(result, tmp_path / "run", name)


@SLOW
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_signal_at_any_moment(pictures, tmp_path, name):
    """A signal at any moment stops the run with a checkpoint from which it can be resumed.

    The resumed runs give the same weights as an uninterrupted run.
    """
    expected = jobs.trained_hash(1, pictures, tmp_path / "reference", "--max-iterations", 6)
    codes = {}
    for tenths in range(41):
        out = tmp_path / str(tenths)
        result = signalled(pictures, out, signal.Signals[name], tenths / 10)
        codes[tenths / 10] = result.returncode
        if result.returncode == jobs.STOPPED and tenths % 8 == 0:
            assert_stopped(result, out, name)
            if checkpoint.load(out)[1]["position"]["iteration"] < 6:
                jobs.resume(3, out, "--max-iterations", 6)
                assert jobs.weights_hash(out) == expected
    assert set(codes.values()) == {jobs.STOPPED}, codes


@SLOW
def test_an_early_signal_kills_a_command_without_checkpoints(tmp_path):
    """Negative control: a signal kills a command that does not support stopping."""
    with launcher.start(None, "-m", "mpidl.info", wrapper=BLOCKED) as job:
        job.send_signal(signal.SIGTERM)
        assert launcher.finish(job).returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)


@SLOW
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_before_it_starts_mpi(pictures, tmp_path, rank):
    """If one rank is stopped, the other ranks end in MPI_Init after the time-out.

    mpirun then ends the stopped rank.
    """
    words = jobs.command("train", "--timeout", 2, data=pictures, out=tmp_path / "run")
    with launcher.start(2, *words, env=jobs.without_plots()) as job:
        wait_until(lambda: len(job.rank_pids()) == 2)
        pids = job.rank_pids()
        os.kill(pids[rank], signal.SIGSTOP)
        start_time = time.monotonic()
        result = launcher.finish(job)
        launcher.assert_gone(pids.values())
    assert not exceeded(start_time, 22)
    assert result.returncode not in (0, jobs.STOPPED)
    (line,) = jobs.error_lines(result)
    assert line == (
        f"mpidl: rank {1 - rank} on host {HOST}: MPI did not start within 2 s (--timeout) plus 10 "
        f"s for its start: stopped on this host: process {pids[rank]}"
    )


# A program in which rank 1 ends before MPI starts, in the way given by the argument. The other
# ranks wait for rank 1 in MPI_Init.
BEFORE_MPI = """
import os, signal, sys
import mpidl as dl
from mpidl.ranks import failure

if failure.launched_rank() == 1:
    {"exit": sys.exit,
     "exit 3": lambda: sys.exit(3),
     "die": lambda: os._exit(0),
     "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
     "raise": lambda: 1 / 0}[sys.argv[1]]()
dl.World()
print("done")
"""


@pytest.mark.slow("jobs")
@pytest.mark.parametrize(
    "fault",
    ["exit 3", *(pytest.param(name, marks=SLOW) for name in ("exit", "die", "kill", "raise"))],
)
def test_a_rank_that_ends_before_it_starts_mpi(fault):
    if not IS_MPICH and fault not in ("exit", "die"):
        pytest.skip("prterun 5.0.11 notices it itself, but may hang after it has ended all ranks")
    start_time = time.monotonic()
    result = launcher.mpirun(2, "-c", BEFORE_MPI, fault)
    assert not exceeded(start_time, 8)  # 5 s, plus the start of Python
    assert result.returncode != 0 and "done" not in result.stdout
    if fault != "kill":  # mpirun itself notices a killed rank
        assert jobs.error_lines(result)[-1] == (
            f"mpidl: rank 0 on host {HOST}: MPI did not start because another rank on this host "
            "has ended before it started MPI"
        )


AFTER_MPI = """
import os, signal, sys
import mpidl as dl
from mpidl.ranks import failure

world = dl.World()

def main():
    world.barrier()
    if world.rank == 1:
        {"exit": sys.exit,
         "exit 3": lambda: sys.exit(3),
         "die": lambda: os._exit(4),
         "kill": lambda: os.kill(os.getpid(), signal.SIGKILL)}[sys.argv[1]]()
    world.gop("max", 1.0)
    print("done")
    return 0

failure.run(main) if sys.argv[2] == "command" else main()
"""


@pytest.mark.parametrize(
    ("fault", "program"),
    [
        ("exit", "script"),
        pytest.param("exit 3", "command", marks=SLOW),
        pytest.param("exit", "command", marks=SLOW),
        pytest.param("exit 3", "script", marks=SLOW),
        pytest.param("die", "script", marks=SLOW),
        pytest.param("kill", "script", marks=SLOW),
    ],
)
def test_a_rank_that_ends_while_others_wait_for_it(fault, program):
    start_time = time.monotonic()
    result = launcher.mpirun(3, "-c", AFTER_MPI, fault, program)
    assert not exceeded(start_time, 9)  # 5 s, plus the start of Python and MPI
    assert result.returncode != 0 and "done" not in result.stdout
    lines = jobs.error_lines(result)
    if fault == "exit 3" and program == "command":
        assert lines == [f"mpidl: rank 1 on host {HOST} has exited with code 3"]
        assert result.returncode == 3
    elif fault.startswith("exit"):
        head = f"mpidl: rank 1 on host {HOST} has ended its program, but other ranks wait for it:"
        waits = [f"  rank {rank}, starting: waits for gop max" for rank in (0, 2)]
        assert lines == [head, *waits]


LONG_TAIL = """
import time
import mpidl as dl

world = dl.World()
world.barrier()
if world.rank == 0:
    time.sleep(6)
    print("done")
"""


@SLOW
def test_a_rank_that_works_on_while_others_have_ended():
    """Negative control: waiting for a rank that computes does not end the job."""
    result = launcher.mpirun(3, "-c", LONG_TAIL, check=0)
    assert result.stdout == "done\n" and jobs.error_lines(result) == []


@SLOW
def test_the_mpirun_of_another_mpi_is_named_before_mpi_starts(tmp_path):
    variables = {"PMI_SIZE": 2, "PMI_RANK": 0, "MPI_LOCALNRANKS": 2}
    if IS_MPICH:
        variables = {"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_RANK": 0}
    words = jobs.command("train", out=tmp_path / "run")
    line = jobs.refusal(launcher.mpirun(None, *words, env=variables))
    assert line.startswith("the launcher started 2 tasks (")
    mpirun = os.path.join(os.path.dirname(sys.executable), "mpirun")
    assert line.endswith(f"start the ranks with {mpirun}")


SMALL_SHM = 'mount -t tmpfs -o size="$1" tmpfs /dev/shm && shift && exec "$@"'


def in_small_shm(megabytes, ranks, *words):
    """Run a job in a mount namespace with a /dev/shm of `megabytes` MB."""
    shell = ["unshare", "-m", "sh", "-c", SMALL_SHM, "sh", f"{megabytes}m"]
    command = [*shell, *launcher.command(ranks, *words)]
    env = launcher.environment(jobs.without_plots())
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    return launcher.Result(result.returncode, result.stdout, result.stderr)


@SLOW
@pytest.mark.skipif(not IS_MPICH, reason="Open MPI checks its shared memory itself")
def test_a_small_shared_memory(tmp_path):
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace requires privileges")
    words = ("-m", "mpidl.train", "--max-iterations", 2, "--out", tmp_path / "run")
    line = jobs.refusal(in_small_shm(2, 2, *words))
    assert line.startswith(f"/dev/shm on host {HOST}: expected 2.1 MB free for the messages")
    assert in_small_shm(4, 2, *words).returncode == 0


SEGMENTS = "import glob, mpidl as dl; dl.World(); print(*glob.glob('/dev/shm/mpich_shm_*'))"


@SLOW
@pytest.mark.skipif(not IS_MPICH, reason="names of MPICH")
def test_segments_of_a_killed_job_are_removed(pictures, tmp_path):
    """The segments of a killed job are removed, and the segments of a running job are kept."""
    with jobs.start(2, pictures, tmp_path / "killed", *jobs.ENDLESS) as killed:
        pids = killed.rank_pids()
        dead = segments_of(pids[0])
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        launcher.finish(killed)
    assert dead and all(map(os.path.exists, dead))
    for path in dead:
        os.utime(path, times=(0, 0))
    with jobs.start(2, pictures, tmp_path / "live", *jobs.ENDLESS) as live:
        alive = segments_of(live.rank_pids()[0])
        for path in alive:
            os.utime(path, times=(0, 0))
        launcher.mpirun(2, "-c", SEGMENTS, check=0)
        assert alive and all(map(os.path.exists, alive))
        assert not any(map(os.path.exists, dead))


def segments_of(pid):
    """Return the paths of the files in /dev/shm that a process has mapped."""
    with open(f"/proc/{pid}/maps") as lines:
        paths = {line.split(maxsplit=5)[-1].strip() for line in lines if "/dev/shm/" in line}
    return sorted(path for path in paths if not path.endswith("(deleted)"))
