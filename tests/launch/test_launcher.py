"""Test the helpers that start jobs for the tests."""

import pool
import pytest
from launcher import assert_gone, mpirun, start
from limits import wait_until

# Each rank prints with a single write, so that the lines of two ranks do not mix.
SAY_RANK = "import sys; from mpi4py.MPI import COMM_WORLD as c; "
SAY_RANK += "sys.stdout.write(f'{c.rank}/{c.size}\\n'); sys.stdout.flush()"


def test_ranks_and_exit_code():
    result = mpirun(2, "-c", SAY_RANK + "; raise SystemExit(75)", check=75)
    assert sorted(result.stdout.split()) == ["0/2", "1/2"]
    assert mpirun(None, "-c", SAY_RANK, check=0).stdout == "0/1\n"


def test_input_and_environment():
    text = "import os, sys; print(os.environ['GREETING'], sys.stdin.readline())"
    result = mpirun(1, "-c", text, env={"GREETING": "hello"}, input="world\n", check=0)
    assert result.stdout.split() == ["hello", "world"]


def test_a_wrong_exit_code_shows_the_output():
    with pytest.raises(pytest.fail.Exception, match=r"exit code 0, expected 1[^$]*here it is"):
        mpirun(1, "-c", "print('here it is')", check=1)


def test_rank_pids():
    with start(2, "-c", SAY_RANK + "; import time; time.sleep(600)") as job:
        wait_until(lambda: len(job.rank_pids()) == 2)
        pids = job.rank_pids()
        assert sorted(pids) == [0, 1]
    assert_gone(pids.values())


def test_a_process_that_a_rank_has_started_is_not_the_rank(tmp_path):
    """A process that has just been forked still has the variables of the rank."""
    text = "import os, sys; from mpi4py import MPI; child = os.fork(); "
    text += "path = f'{sys.argv[1]}/{os.getpid()}'; open(path, 'w') if child else None; "
    text += "import time; time.sleep(600)"
    with start(2, "-c", text, tmp_path) as job:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        assert {str(pid) for pid in job.rank_pids().values()} == {
            path.name for path in tmp_path.iterdir()
        }


# The ranks of a pool have a separate sys.stdout for each command, so that `print` is safe.
SAY_WORLD = "import mpidl as dl; w = dl.World(); print(f'{w.rank}/{w.size}')"


def test_a_pool_runs_many_commands():
    for _ in range(2):
        assert pool.run(3, "-c", SAY_WORLD, check=0).stdout.split() == ["0/3", "1/3", "2/3"]
    assert pool.run(3, "-c", "raise SystemExit(75)").returncode == 75
    words = "import os; print(os.environ['GREETING'], os.getcwd())"
    assert pool.run(1, "-c", words, env={"GREETING": "hello"}, cwd="/").stdout == "hello /\n"
    assert pool.run(1, "-c", "import os; print('GREETING' in os.environ)").stdout == "False\n"


def test_a_pool_that_dies_fails_the_test_and_is_replaced():
    with pytest.raises(pytest.fail.Exception, match=r"the job ended with 3"):
        pool.run(None, "-c", "import os; os._exit(3)")
    assert pool.run(None, "-c", SAY_WORLD, check=0).stdout == "0/1\n"
