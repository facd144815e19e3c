"""Test that USR1, TERM or INT to a rank or to mpirun stops all ranks with a checkpoint."""

import os
import re
import signal
import time

import jobs
import pytest
from launcher import finish
from limits import exceeded
from mpi4py import MPI

from mpidl.training.files import checkpoint

SLOW = pytest.mark.slow("jobs")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("SIGUSR1", 1),
        pytest.param("SIGTERM", "mpirun", marks=SLOW),
        pytest.param("SIGINT", 1, marks=SLOW),
        pytest.param("SIGTERM", 0, marks=SLOW),
        pytest.param("SIGUSR1", "mpirun", marks=SLOW),
        pytest.param("SIGINT", "mpirun", marks=SLOW),
    ],
)
def test_a_signal_stops_all_ranks(pictures, tmp_path, name, target):
    """A signal at a random moment stops all ranks, and the run can be resumed.

    The resumed run gives the same weights as an uninterrupted run.
    """
    out, reference = tmp_path / "run", tmp_path / "reference"
    if target == "mpirun" and name != "SIGUSR1" and MPI.get_vendor()[0] == "Open MPI":
        pytest.skip("Open MPI's mpirun ends its ranks itself on TERM and INT")
    with jobs.start(2, pictures, out, *jobs.ENDLESS) as job:
        pid = job.pid if target == "mpirun" else job.rank_pids()[target]
        start_time = time.monotonic()
        os.kill(pid, signal.Signals[name])
        result = finish(job)
    assert not exceeded(start_time, 15)
    assert result.returncode == jobs.STOPPED, result.stderr
    assert jobs.error_lines(result) == []
    last = result.stdout.splitlines()[-1]
    text = f"{name}: stopped at iteration (\\d+), checkpoint written; "
    text += f"to continue, run again with --resume {out}"
    iteration = int(re.fullmatch(text, last)[1])
    _, facts = checkpoint.load(out)
    assert facts["position"]["iteration"] == iteration == jobs.iterations(out)[-1]
    assert not (out / "summary.json").exists()
    if name == "SIGUSR1":
        end = ["--max-iterations", iteration + 5]
        jobs.resume(3, out, *end)
        expected = jobs.trained_hash(1, pictures, reference, *jobs.ENDLESS, *end)
        assert jobs.weights_hash(out) == expected
        assert jobs.iterations(out) == list(range(1, iteration + 6))


@pytest.mark.slow("jobs")
@pytest.mark.parametrize(
    ("network", "until", "iteration"),
    [
        # before the first step: the run writes a checkpoint of iteration 0, and can be resumed
        ("late", "building", 0),
        # during the final test: the resumed run does not repeat the training
        pytest.param("slow_test", "testing", 1, marks=SLOW),
    ],
)
def test_before_and_after_the_training(pictures, tmp_path, network, until, iteration):
    out = tmp_path / "run"
    keywords = {"network": jobs.network(network), "until": until}
    with jobs.start(2, pictures, out, "--max-iterations", 1, **keywords) as job:
        job.send_signal(signal.SIGUSR1)
        result = finish(job)
    assert result.returncode == jobs.STOPPED, result.stderr
    assert f"SIGUSR1: stopped at iteration {iteration}, checkpoint written" in result.stdout
    jobs.resume(2, out)
    assert jobs.summary(out)["iterations"] == 1 and jobs.iterations(out) == [1]


@SLOW
@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 1])
def test_a_second_int_ends_at_once(pictures, tmp_path, rank):
    """A second SIGINT ends the job without waiting for the current step, which takes a minute."""
    keywords = {"network": jobs.network("slow"), "until": "in the first step"}
    with jobs.start(2, pictures, tmp_path, **keywords) as job:
        pids = job.rank_pids()
        os.kill(pids[rank], signal.SIGINT)
        time.sleep(0.3)
        assert job.poll() is None
        os.kill(pids[rank], signal.SIGINT)
        result = finish(job)
    assert result.returncode not in (0, jobs.STOPPED)
    assert jobs.error_lines(result) == [
        "mpidl: rank 1 was interrupted" if rank else "mpidl: interrupted"
    ]
    assert "Traceback" not in result.stderr
