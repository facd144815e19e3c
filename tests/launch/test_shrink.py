"""Test runs that lose ranks and continue to the same weights (--on-lost-rank shrink).

These tests need Open MPI: MPIDL_MPI=openmpi ./run/test --part shrink
"""

import json
import os
import random
import signal

import jobs
import launcher
import pytest
from limits import wait_until

from mpidl.report import metrics

pytestmark = [pytest.mark.slow("shrink"), pytest.mark.timeout(240)]
ULFM = ("--with-ft", "ulfm")
RANKS = 4
PROGRAM = launcher.ROOT / "tests" / "launch" / "shrinking.py"
SUPPORT = os.pathsep.join(str(launcher.ROOT / "tests" / name) for name in ("support", ""))
WAITS = 300  # rank 0 of 4 makes about this number of waits; a rank survives if its moment is later
FIRST_WAIT = 20  # approximate number of the first wait during training
ITERATIONS = 60
OPTIONS = ["--batch-size", 50, "--epochs", 15, "--validation-fraction", 0.1, "--plots", "none"]
SHRINK = ["--on-lost-rank", "shrink"]


@pytest.fixture(autouse=True, scope="module")
def _open_mpi():
    MPI = pytest.importorskip("mpi4py.MPI", reason="needs mpi4py")
    if MPI.get_vendor()[0] != "Open MPI":
        pytest.skip("needs Open MPI: MPIDL_MPI=openmpi ./run/test --part shrink")


def run_program(ranks, out, moments):
    """Run shrinking.py and return the JSON content of its last line."""
    words = PROGRAM, out, json.dumps(moments)
    path = os.pathsep.join([SUPPORT, str(launcher.ROOT)])
    options = ULFM if ranks else ()
    result = launcher.finish(
        launcher.start(ranks, *words, env={"PYTHONPATH": path}, options=options)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads(result.stdout.strip().splitlines()[-1])
    assert sum("lost:" in line for line in result.stdout.splitlines()) <= len(content["lost"])
    return content


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run_program(None, tmp_path_factory.mktemp("undisturbed") / "run", {})


@pytest.mark.parametrize("victims", ["0", "2", "3", "0 3", "1 2", "3 2 1", "0 1 2"])
def test_ranks_that_end_at_drawn_moments(tmp_path, undisturbed, victims):
    seed = int(os.environ.get("MPIDL_SEED", "0")) or random.randrange(1, 10**6)
    print(f"MPIDL_SEED={seed}")
    draw = random.Random(f"{victims} {seed}")
    moments = {rank: draw.randint(FIRST_WAIT, WAITS) for rank in victims.split()}
    content = run_program(RANKS, tmp_path / "run", moments)
    assert set(content["lost"]) <= set(map(int, moments))
    assert content["ranks"] == RANKS - len(content["lost"])
    assert content["lost_ranks"] == len(content["lost"])
    for name in ("sha256", "losses", "validations", "records", "iterations", "states"):
        assert content[name] == undisturbed[name], (name, moments)


def words_of(out, data, *options):
    return jobs.command("train", *OPTIONS, *options, network=jobs.SMALL, data=data, out=out)


@pytest.fixture(scope="module")
def expected(pictures, tmp_path_factory):
    out = tmp_path_factory.mktemp("expected") / "run"
    return jobs.trained_hash(1, pictures, out, *OPTIONS[2:])


def end_rank(job, out, rank, iteration):
    """Kill a rank as soon as the run has recorded `iteration` iterations."""
    path = out / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_text().count('"kind": "iteration"') >= iteration)
    os.kill(job.rank_pids()[rank], signal.SIGKILL)


def lines_about(text, result):
    return [line for line in result.stdout.splitlines() if text in line]


@pytest.mark.parametrize("rank", [0, 2, RANKS - 1])
def test_a_killed_rank_costs_nothing_but_time(pictures, tmp_path, expected, rank):
    out = tmp_path / "run"
    options = ["--tensorboard", "on", "--timeline", "inf", "--checkpoint-every", 2, *SHRINK]
    words = words_of(out, pictures, *options)
    with launcher.start(RANKS, *words, options=ULFM) as job:
        end_rank(job, out, rank, random.randrange(1, 30))
        result = launcher.finish(job)
    assert result.returncode == 0, result.stdout + result.stderr
    assert jobs.weights_hash(out) == expected
    (line,) = lines_about(f"warning: rank {rank} on host ", result)
    assert "was lost: 3 ranks continue after iteration " in line and "time lost: " in line
    assert (jobs.summary(out)["ranks"], jobs.summary(out)["lost_ranks"]) == (3, 1)
    records = metrics.read(out / "metrics.jsonl")
    iterations = [r["iteration"] for r in records if r["kind"] == "iteration"]
    assert iterations == list(range(1, ITERATIONS + 1))
    (lost,) = [record for record in records if record["kind"] == "lost"]
    assert (lost["ranks"], lost["ranks_left"]) == ([rank], 3) and lost["seconds_lost"] > 0
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["ranks"], status["lost_ranks"]) == ("finished", 3, 1)
    assert (out / "timeline.json.gz").exists() and lines_about("Timeline: ", result)


def test_a_restarting_launcher_has_nothing_to_do(pictures, tmp_path, expected):
    out = tmp_path / "run"
    training = launcher.command(RANKS, *words_of(out, pictures, *SHRINK), options=ULFM)
    words = ["-m", "mpidl.launch", "--restarts", 3, "--", *training]
    with launcher.start(None, *words) as job:
        end_rank(job, out, 1, 5)
        result = launcher.finish(job)
    assert result.returncode == 0, result.stdout + result.stderr
    assert jobs.weights_hash(out) == expected and not (out / "restarts.log").exists()


def test_a_stop_after_a_loss_can_be_resumed(pictures, tmp_path, expected):
    out = tmp_path / "run"
    with launcher.start(RANKS, *words_of(out, pictures, *SHRINK), options=ULFM) as job:
        end_rank(job, out, 0, 3)
        path = out / "metrics.jsonl"
        wait_until(lambda: '"kind": "lost"' in path.read_text())
        os.kill(job.rank_pids()[2], signal.SIGUSR1)
        result = launcher.finish(job)
    assert result.returncode == jobs.STOPPED, result.stdout + result.stderr
    assert lines_about(f"to continue, run again with --resume {out}", result)
    words = ["-m", "mpidl.train", "--resume", out, "--on-lost-rank", "stop"]
    launcher.mpirun(2, *words, check=0)
    assert jobs.weights_hash(out) == expected


TEST_THAT_LOSES_A_RANK = """
import os, signal, sys
from mpidl.cli import train, train_results
from mpidl.ranks import failure

test_network = train_results.test_network

def lose_a_rank(*arguments):
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return test_network(*arguments)

train_results.test_network = lose_a_rank
failure.run(lambda: train.main(sys.argv[1:]))
"""


def test_a_rank_that_ends_in_the_test(pictures, tmp_path, expected):
    program, out = tmp_path / "program.py", tmp_path / "run"
    program.write_text(TEST_THAT_LOSES_A_RANK)
    words = words_of(out, pictures, *SHRINK, "--certify")[2:]
    result = launcher.finish(launcher.start(RANKS, program, *words, options=ULFM))
    assert result.returncode == 0, result.stdout + result.stderr
    assert jobs.weights_hash(out) == expected and jobs.summary(out)["lost_ranks"] == 1
    assert list(jobs.states(out))[-1] == ITERATIONS
    assert lines_about("was lost: 3 ranks continue with the test, which starts again", result)
    assert len(lines_about("Test accuracy: ", result)) == 1


def test_by_default_a_lost_rank_ends_the_job(pictures, tmp_path):
    out = tmp_path / "run"
    with launcher.start(RANKS, *words_of(out, pictures), options=ULFM) as job:
        end_rank(job, out, 2, 3)
        result = launcher.finish(job)
    assert result.returncode == 1
    assert any(
        ", iteration" in line and ": lost rank 2 on host " in line
        for line in jobs.error_lines(result)
    )
    assert "Traceback" not in result.stderr


def test_a_launcher_that_ends_all_ranks_is_refused(pictures, tmp_path):
    result = launcher.mpirun(2, *words_of(tmp_path / "run", pictures, *SHRINK))
    expected = "--on-lost-rank shrink: expected Open MPI 5 and mpirun --with-ft ulfm -n 2 "
    expected += "python -m mpidl.train ..., found mpirun without --with-ft ulfm"
    assert jobs.refusal(result) == expected
    assert not (tmp_path / "run").exists()
