"""USR1, TERM and INT on any rank, or on mpirun: a checkpoint, and exit code 75 on all ranks."""

import os
import re
import signal
import time

import pytest
import small
from launcher import finish, start
from limits import exceeded
from mpi4py import MPI

from mpidl.training.files import checkpoint

STOPPED = 75
MORE = pytest.mark.slow("jobs")


def begin(pictures, out, *options, ranks=3, network="small", until="Epoch: 2,"):
    """Start a run, by default without an end; the Job, once it has printed `until`."""
    words = options or ["--epochs", 10**6]
    words = small.command(
        "train", *words, "--batch-size", 50, network=small.of(network), data=pictures, out=out
    )
    job = start(ranks, *words, env=small.without_plots())
    for line in job.stdout:
        if line.startswith(until):
            return job
    pytest.fail(finish(job).stderr)


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("SIGUSR1", 2),
        ("SIGINT", 1),
        ("SIGTERM", "mpirun"),
        pytest.param("SIGTERM", 0, marks=MORE),
        pytest.param("SIGUSR1", "mpirun", marks=MORE),
        pytest.param("SIGINT", "mpirun", marks=MORE),
    ],
)
def test_a_signal_stops_all_ranks(pictures, tmp_path, name, to):
    out = tmp_path / "run"
    if to == "mpirun" and name != "SIGUSR1" and MPI.get_vendor()[0] == "Open MPI":
        pytest.skip("Open MPI's mpirun ends its ranks itself on TERM and INT")
    with begin(pictures, out) as job:
        pid = job.pid if to == "mpirun" else job.rank_pids()[to]
        sent = time.monotonic()
        os.kill(pid, signal.Signals[name])
        result = finish(job)
    assert not exceeded(sent, 15)
    assert result.returncode == STOPPED, result.stderr
    assert small.own_lines(result) == []
    last = result.stdout.splitlines()[-1]
    text = f"{name}: stopped at iteration (\\d+), checkpoint written; "
    text += f"to continue, run again with --resume {out}"
    iteration = int(re.fullmatch(text, last)[1])
    _, facts = checkpoint.load(out)
    assert facts["position"]["iteration"] == iteration == small.iterations(out)[-1]
    assert not (out / "summary.json").exists()


def test_before_the_first_step(pictures, tmp_path):
    """A checkpoint of iteration 0, from which a run goes on."""
    out = tmp_path / "run"
    with begin(pictures, out, ranks=2, network="late", until="building") as job:
        job.send_signal(signal.SIGUSR1)
        result = finish(job)
    assert result.returncode == STOPPED, result.stderr
    assert "SIGUSR1: stopped at iteration 0, checkpoint written" in result.stdout
    small.resume(2, out, "--max-iterations", 1)
    assert small.iterations(out) == [1]


@pytest.mark.slow("jobs")
def test_in_the_final_test(pictures, tmp_path):
    """The training is not lost, nor done again."""
    out = tmp_path / "run"
    options = ["--epochs", 1, "--max-iterations", 1]
    with begin(pictures, out, *options, ranks=2, network="slow_test", until="testing") as job:
        job.send_signal(signal.SIGUSR1)
        result = finish(job)
    assert result.returncode == STOPPED, result.stderr
    assert "SIGUSR1: stopped at iteration 1, checkpoint written" in result.stdout
    small.resume(2, out)
    assert small.summary(out)["iterations"] == 1 and small.iterations(out) == [1]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=MORE), 1])
def test_a_second_int_ends_at_once(pictures, tmp_path, rank):
    """Not after the step under way, which takes a minute."""
    with begin(pictures, tmp_path, ranks=2, network="slow", until="in the first step") as job:
        pids = job.rank_pids()
        os.kill(pids[rank], signal.SIGINT)
        time.sleep(0.3)
        assert job.poll() is None
        os.kill(pids[rank], signal.SIGINT)
        result = finish(job)
    assert result.returncode not in (0, STOPPED)
    assert small.own_lines(result) == [
        "mpidl: rank 1 was interrupted" if rank else "mpidl: interrupted"
    ]
    assert "Traceback" not in result.stderr
