"""Test that a failure in the middle of a job soon ends all ranks, with a short message."""

import os
import re
import signal
import socket
import time

import jobs
import pool
import pytest
from launcher import assert_gone, finish, mpirun
from limits import exceeded

from mpidl.training.files import checkpoint

SLOW = pytest.mark.slow("jobs")
WAITING = "  all ranks respond, but they wait for different operations:"
# A user's program in which one rank fails in the way given by an argument.
PROGRAM = """
import sys
import mpidl as dl

from mpidl.ranks import failure

def refuse():
    raise dl.UserError("images: unusable")

world = dl.World(timeout=1)
rank, fault = int(sys.argv[1]), sys.argv[2]
world.barrier()
if world.rank == rank:
    {"raise": lambda: 1 / 0,
     "exit": sys.exit,
     "exit 3": lambda: sys.exit(3),
     "refuse": lambda: failure.run(refuse),
     "other collective": lambda: world.broadcast(0)}[fault]()
world.gop("max", 1.0)
print("done")
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    return path


def ended_in(seconds, ranks, *words):
    """Return the Result of a job, which must fail within `seconds`."""
    start_time = time.monotonic()
    result = mpirun(ranks, *words, env=jobs.without_plots())
    assert not exceeded(start_time, seconds)
    assert result.returncode != 0
    return result


@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 1])
@pytest.mark.slow("jobs")
def test_an_exception_on_one_rank(program, rank):
    result = ended_in(20, 2, program, rank, "raise")
    lines = jobs.error_lines(result)
    assert lines[0] == f"mpidl: rank {rank} on host {socket.gethostname()} failed, starting:"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert sum("Traceback" in line for line in lines) == 1
    assert "done" not in result.stdout


@pytest.mark.slow("jobs")
def test_an_exception_on_all_ranks(program):
    """If several ranks fail, only one of them must print a traceback."""
    result = ended_in(20, 2, "-c", "import mpidl as dl; dl.World(); 1 / 0")
    assert result.stderr.count("Traceback") == 1
    assert jobs.error_lines(result)[0].startswith("mpidl: rank 0 on host ")


def test_an_exception_in_training_names_the_step(pictures, tmp_path):
    network = jobs.network("raises_on_rank_1")
    words = jobs.command("train", network=network, data=pictures, out=tmp_path / "run")
    lines = jobs.error_lines(ended_in(20, 2, *words))
    assert re.fullmatch("mpidl: rank 1 on host .* failed, epoch 1, iteration 1:", lines[0])
    assert lines[-1] == "ArithmeticError: this network breaks on rank 1"


@pytest.mark.parametrize(("rank", "prefix"), [pytest.param(0, "", marks=SLOW), (1, "rank 1: ")])
def test_a_refusal_of_one_rank(program, rank, prefix):
    assert jobs.refusal(ended_in(20, 2, program, rank, "refuse")) == f"{prefix}images: unusable"


@pytest.mark.parametrize(("rank", "fault"), [pytest.param(0, "exit", marks=SLOW), (1, "exit 3")])
@pytest.mark.slow("jobs")
def test_a_rank_that_leaves(program, rank, fault):
    """If one rank leaves, the job ends with a message about what each rank waits for."""
    result = ended_in(20, 2, program, rank, fault)
    waits = [f"  rank {r}, starting: waits for gop max" for r in (0, 1)]
    waits[rank] = f"  rank {rank}, leaving: waits for the end of the program on all ranks"
    assert jobs.error_lines(result)[1:] == [WAITING, *waits]


def test_ranks_in_different_collectives(program):
    lines = jobs.error_lines(ended_in(20, 2, program, 1, "other collective"))
    text = r"mpidl: starting: (gop max|broadcast) did not complete within 1 s \(--timeout\)\."
    assert re.fullmatch(text, lines[0])
    waits = [
        f"  rank {r}, starting: waits for {name}" for r, name in ((0, "gop max"), (1, "broadcast"))
    ]
    assert lines[1:] == [WAITING, *waits]


def test_a_rank_that_stops_answering(pictures, tmp_path):
    with jobs.start(2, pictures, tmp_path / "run", *jobs.ENDLESS, "--timeout", 1) as job:
        pids = job.rank_pids()
        os.kill(pids[1], signal.SIGSTOP)
        result = finish(job)
        assert_gone(pids.values())
    assert result.returncode not in (0, jobs.STOPPED)
    first, second, *_ = jobs.error_lines(result)
    # On a busy machine, the watchdog may be first, which finds that MPI itself does not return.
    text = r"mpidl: epoch \d+, iteration \d+: .* did not complete within 1 s( \(--timeout\)\.)?"
    assert re.fullmatch(text, first)
    name = f"  rank 1 on host {socket.gethostname()} (process {pids[1]}) does not answer: "
    assert second.startswith(f"{name}its process is stopped (SIGSTOP); last activity: epoch ")


def test_a_loss_that_is_not_finite(pictures, tmp_path):
    """The error names the iteration, and weights that are not finite never replace a checkpoint."""
    out = tmp_path / "run"
    options = ["--learning-rate", 1e30, "--checkpoint-every", 1, "--epochs", 3]
    result = jobs.train(3, pictures, out, *options, check=1)
    (line,) = jobs.error_lines(result)
    assert re.match(
        r"mpidl: (the loss is nan at epoch 1, iteration \d,|.* is not finite after iteration \d,) "
        r"on all ranks; lower --learning-rate \(now 1e\+30\) or check the images; "
        rf"the last checkpoint is in {out}$",
        line,
    )
    checkpoint.load(out)
    assert not (out / "summary.json").exists()


INFINITE = """
import numpy as np
import mpidl as dl
from mpidl.ranks import failure

def main():
    world = dl.World()
    images = np.random.default_rng(0).random((96, 1, 12, 12), np.float32)
    images[70] = 3e38  # weighted sums of these pixels overflow
    train = dl.ArrayDatastore(images, np.arange(96) % 3)
    net = dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(3)], (1, 12, 12))
    dl.train(net, train, dl.TrainingOptions(batch_size=96, shuffle="never"), world=world)

failure.run(main)
"""


def test_the_rank_of_an_infinite_image_is_named():
    """The error names rank 2, which has the infinite image: images 64 to 95 of 96."""
    (line,) = jobs.error_lines(pool.run(3, "-c", INFINITE, check=1))
    assert line.startswith("mpidl: the loss is inf at epoch 1, iteration 1, on rank 2; ")


def test_more_ranks_than_blocks(pictures, tmp_path):
    for ranks in (1, 3):
        words = ["--max-iterations", 2, "--batch-size", 20]
        result = jobs.train(ranks, pictures, tmp_path / str(ranks), *words)
        warnings = [x for x in result.stdout.splitlines() if x.startswith("warning: ")]
        assert warnings == [] if ranks == 1 else "1 rank is idle" in warnings[0]
        assert jobs.error_lines(result) == []
    jobs.assert_same_weights({r: jobs.weights_hash(tmp_path / r) for r in ("1", "3")})


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
    ],
)
def test_a_launcher_of_another_mpi(variables, tmp_path):
    """The launcher of another MPI causes an error, because it starts four jobs of one rank each.

    Only the first of these jobs prints the error.
    """
    words = jobs.command("train", out=tmp_path / "run")
    result = pool.run(None, *words, env=variables, check=2)
    if variables.get("OMPI_COMM_WORLD_RANK") == "1":
        assert jobs.error_lines(result) == []
    else:
        line = jobs.refusal(result)
        assert line.startswith("the launcher started 4 tasks (")
        assert "but MPI sees one rank" in line
