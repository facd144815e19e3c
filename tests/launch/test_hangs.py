"""Test that a rank that hangs or is stopped is reported at most two seconds after the time-out.

The report must contain the Python stacks of a rank that hangs.
"""

import os
import random
import re
import signal
import socket
import time

import jobs
import pytest
from launcher import assert_gone, finish, start
from limits import exceeded, wait_until

pytestmark = pytest.mark.slow("hangs")
TIMEOUT = 3
HOST = socket.gethostname()
# A user's program in which rank 1 stops or hangs at the moment given by an argument.
PROGRAM = f"""
import atexit, os, signal, sys, time
import numpy as np
import mpidl as dl
from mpidl.backends.cpu import builds
from mpidl.comm import transport

def hang():
    if world.rank == 1:
        with open(sys.argv[2], "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP)

def train_until_rank_1_stops():
    play = builds.kernels().play
    def replay(*arguments):
        if world.transport.activity == "epoch 5, iteration 5":
            hang()
        return play(*arguments)
    builds.kernels().play = replay
    images = dl.ArrayDatastore(np.ones((64, 1, 4, 4), "f4"), np.arange(64) % 3)
    net = dl.Network([dl.BatchNorm(), dl.Dense(3)], (1, 4, 4))
    options = dl.TrainingOptions(batch_size=64, epochs=9, plots="none", verbose="off")
    dl.train(net, images, options, world=world)

def sleep_for_ever():
    if world.rank == 1:
        with open(sys.argv[2], "w") as file:
            file.write(str(time.time()))
        time.sleep(600)

world, moment = dl.World(timeout={TIMEOUT}), sys.argv[1]
world.transport.activity = "epoch 1, iteration 2"
world.barrier()
if moment == "in a wait":
    hang()
    world.gop("max", 1)
elif moment == "in a sum":
    world.host_memory()  # so that the ranks do not wait for its allocation
    batch = dl.share(64, world)
    hang()
    world.gplus(dl.sum(dl.from_images(np.ones((batch.images[1] - batch.images[0], 3)), batch)))
elif moment == "in a replayed step":
    train_until_rank_1_stops()
elif moment == "in the user's code":
    sleep_for_ever()
    world.gop("max", 1)
elif moment == "while MPI blocks":
    hang()
    transport.allocate_shared(world.transport, (3,), float)
elif moment == "while the ranks leave":
    atexit.register(hang)
elif moment == "while MPI ends":
    finalize = world.transport.finalize
    world.transport.finalize = lambda: (hang(), finalize())
"""
MESSAGES = {
    "in a wait": "epoch 1, iteration 2: gop max did not complete within 3 s",
    "in a sum": "epoch 1, iteration 2: a sum over the ranks did not complete within 3 s",
    "in a replayed step": "epoch 5, iteration 5: a sum over the ranks did not complete within 3 s",
    "in the user's code": "epoch 1, iteration 2: gop max did not complete within 3 s",
    "while MPI blocks": "epoch 1, iteration 2: shared memory did not complete within 3 s",
    "while the ranks leave": "leaving: the end of the program on all ranks waits for a process "
    "that has been stopped for 3 s",
    "while MPI ends": "leaving: the end of MPI did not complete within 3 s",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("moment", MESSAGES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_hangs(program, tmp_path, ranks, moment):
    with start(ranks, program, moment, tmp_path / "time") as job:
        wait_until(lambda: (tmp_path / "time").exists())
        start_time, pids = time.monotonic(), job.rank_pids()
        result = finish(job)
    assert not exceeded(start_time, TIMEOUT + 2.5)  # ending the processes takes some time
    assert result.returncode != 0
    lines = jobs.error_lines(result)
    assert lines[0].startswith(f"mpidl: {MESSAGES[moment]}")
    name = f"  rank 1 on host {HOST} (process {pids[1]}) does not answer: its process "
    if moment == "in the user's code":
        assert lines[1].startswith(
            f"{name}is running; last activity: epoch 1, iteration 2: computes, after "
        )
        assert "sleep_for_ever" in "\n".join(lines)
    else:
        assert lines[1].startswith(f"{name}is stopped (SIGSTOP); last activity: ")
        assert "  rank 1 is stopped, so it cannot show its Python stacks" in lines
    waiting = [line for line in lines if re.match(r"  rank [02], ", line)]
    assert len(waiting) == ranks - 1
    assert sum(line.startswith("mpidl: ") for line in lines) == 1
    assert_gone(pids.values())


AFTER_MPI = """
import atexit, os, signal, sys, time

def stop():  # registered first, so called last
    if world.rank == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(float(sys.argv[2]))

atexit.register(stop)
import mpidl as dl
world = dl.World(timeout=1)
"""


@pytest.mark.parametrize(
    ("rank", "seconds"),
    [
        pytest.param(0, 0, id="the others have ended"),
        pytest.param(1, 0, id="the first one has ended"),
        pytest.param(0, 2.5, id="the others still exit"),
    ],
)
def test_a_rank_that_is_stopped_after_mpi_has_ended(rank, seconds):
    """A rank that is stopped after MPI has ended is reported and killed.

    Only mpirun still waits for the rank, and mpirun would wait forever.
    """
    with start(3, "-c", AFTER_MPI, rank, seconds) as job:
        wait_until(lambda: rank in job.rank_pids())
        pids = job.rank_pids()
        result = finish(job)
    assert result.returncode != 0
    assert jobs.error_lines(result) == [
        "mpidl: leaving: a process has been stopped for 1 s (--timeout), and is now killed",
        f"  rank {rank} on host {HOST} (process {pids[rank]}) does not answer: its process is "
        "stopped (SIGSTOP)",
    ]
    assert_gone(pids.values())


@pytest.mark.parametrize("turn", range(16))
def test_a_rank_that_is_stopped_at_a_random_moment_of_its_exit(tmp_path, turn):
    numbers, path = random.Random(turn), tmp_path / "time"
    source = "import sys, mpidl as dl; dl.World(timeout=1); open(sys.argv[1], 'w')"
    rank = numbers.randrange(2)
    with start(2, "-c", source, path) as job:
        wait_until(path.exists, 0.001)
        pids = job.rank_pids()
        time.sleep(numbers.uniform(0, 0.15))
        start_time = time.monotonic()
        try:
            os.kill(pids[rank], signal.SIGSTOP)
        except ProcessLookupError:
            return  # the job has ended
        result = finish(job)
    assert not exceeded(start_time, 1 + 2.5)
    is_named = f"process {pids[rank]}" in result.stderr and "is stopped (SIGSTOP)" in result.stderr
    # The job may have ended before the signal.
    assert is_named == (result.returncode != 0), result.stderr
    assert_gone(pids.values())


@pytest.mark.parametrize("turn", range(12))
def test_a_training_that_hangs_at_a_random_moment(pictures, tmp_path, turn):
    """A hang at a random moment is reported on stderr and in the folder of the run.

    The message names the rank and the iteration.
    """
    numbers, out = random.Random(turn), tmp_path / "run"
    options = [*jobs.ENDLESS, "--timeout", TIMEOUT, "--checkpoint-every", 3]
    ranks = 2 + turn % 2
    rank = numbers.randrange(ranks)
    with jobs.start(ranks, pictures, out, *options, until="Epoch: 1,") as job:
        pids = job.rank_pids()
        time.sleep(numbers.random())
        os.kill(pids[rank], signal.SIGSTOP)
        start_time = time.monotonic()
        result = finish(job)
    assert not exceeded(start_time, TIMEOUT + 2.5)
    lines = jobs.error_lines(result)
    assert re.match(r"mpidl: epoch \d+, iteration \d+: .* did not complete within 3 s", lines[0])
    name = f"  rank {rank} on host {HOST} (process {pids[rank]}) does not answer: its process is "
    assert lines[1].startswith(f"{name}stopped (SIGSTOP); last activity: epoch ")
    report = (out / "hang-report.txt").read_text().splitlines()
    assert lines[0] in report and lines[1] in report
    assert_gone(pids.values())
