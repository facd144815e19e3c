"""`dl.launch` returns what its ranks return and leaves no process and no folder."""

import contextlib
import io
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from launcher import mpirun, start
from limits import exceeded, wait_until

import mpidl as dl
from mpidl.comm import launch as launching
from mpidl.comm import launch_worker

SLOW = pytest.mark.slow("jobs")


@pytest.fixture(autouse=True)
def mark(monkeypatch, tmp_path):
    """A value that marks a test's processes in their environment; at the end all are gone."""
    value = uuid.uuid4().hex
    monkeypatch.setenv("MPIDL_TEST_MARK", value)
    for name in [name for name in os.environ if name.startswith(("PMI_", "OMPI_COMM_WORLD_"))]:
        monkeypatch.delenv(name)  # set by this process's MPI
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read the variable again
    yield value
    wait_until(lambda: not marked(value))  # no process is left
    assert not list(tmp_path.glob("mpidl-launch-*")), "a folder is left"


def marked(text):
    """Return the command lines of the processes with a text in their environment."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (process / "environ").read_bytes():
                commands.append((process / "cmdline").read_bytes().replace(b"\0", b" ")[:200])
    return commands


def sizes(world, *arguments):
    return world.rank, world.size, world.gop("sum", world.rank + 1), arguments


def test_launch_returns_the_result_of_rank_0():
    assert dl.launch(sizes, "a", [1], ranks=3) == (0, 3, 6, ("a", [1]))


def double(world, array):
    return array * np.float32(2)


def test_large_arrays():
    array = np.arange(6_000_000, dtype=np.float32)  # 24 MB
    assert np.array_equal(dl.launch(double, array, ranks=2), array * 2)


def weights(world, pixels, labels):
    net = dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(3)], (1, 8, 8))
    store = dl.ArrayDatastore(pixels, labels)
    options = dl.TrainingOptions(epochs=2, batch_size=32, verbose_every=0)
    dl.train(net, store, options, world=world)
    return net


@SLOW
def test_launch_returns_the_trained_network():
    pixels = np.arange(90 * 64).reshape(90, 8, 8) * 31 % 251
    arrays = pixels.astype(np.uint8), np.arange(90) % 3
    nets = [dl.launch(weights, *arrays, ranks=n, show="none") for n in (1, 3)]
    assert dl.weights_sha256(nets[0]) == dl.weights_sha256(nets[1])
    assert dl.classify(nets[0], arrays[0], world=dl.World()).shape == (90,)


def speak(world):
    print(f"rank {world.rank} speaks\nin two", end=" ")
    print("lines", end="\n" if world.rank == 0 else "")
    print("and here", file=sys.stderr)


@pytest.mark.parametrize(
    "show", [pytest.param("rank 0", marks=SLOW), "all", pytest.param("none", marks=SLOW)]
)
def test_output(show, capsys):
    dl.launch(speak, ranks=2, show=show)
    out, err = capsys.readouterr()
    err = [line for line in err.splitlines() if "which slows all of them" not in line]
    lines = {
        "rank 0": ["in two lines", "rank 0 speaks"],
        "all": ["in two lines", "rank 0 speaks", "rank 1: in two lines", "rank 1: rank 1 speaks"],
        "none": [],
    }
    assert sorted(out.splitlines()) == lines[show]
    assert sorted(err) == ([] if show == "none" else ["and here", "rank 1: and here"])


def wait_for_a_file(world, path):
    print("waiting", flush=True)
    while not os.path.exists(path):
        time.sleep(0.01)
    return "seen"


def test_output_is_live(tmp_path, monkeypatch):
    class Reader(io.StringIO):
        def write(self, text):
            if "waiting" in text:
                (tmp_path / "printed").touch()
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Reader())
    assert dl.launch(wait_for_a_file, str(tmp_path / "printed"), ranks=2) == "seen"


class Unpicklable(Exception):
    """The exception's pickle cannot be loaded."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raise_error():
    raise ValueError("a bad value")


def fail(world, statement, ranks):
    """Execute a statement on some of the ranks, while the others wait."""
    if world.rank in ranks:
        exec(statement)
    world.barrier()


@pytest.mark.parametrize(
    "ranks", [[1], pytest.param([0], marks=SLOW), pytest.param([1, 2], marks=SLOW)]
)
def test_launch_raises_the_exception_of_a_rank(ranks, capsys):
    start_time = time.monotonic()
    with pytest.raises(dl.RankError) as caught:
        dl.launch(fail, "raise_error()", ranks, ranks=3)
    assert not exceeded(start_time, 15)
    text = str(caught.value)
    assert caught.value.rank in ranks and caught.value.host == os.uname().nodename
    assert text.startswith(f"rank {caught.value.rank}") and "of 3 on " in text
    assert 'raise ValueError("a bad value")' in text and "launch_worker.py" not in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert "Traceback" not in capsys.readouterr().err


@SLOW
def test_an_exception_that_cannot_be_pickled():
    with pytest.raises(dl.RankError, match="Unpicklable: 1 and 2") as caught:
        dl.launch(fail, "raise Unpicklable(1, 2)", [1], ranks=2)
    assert caught.value.rank == 1 and caught.value.__cause__ is None


def test_launch_raises_the_user_error_of_a_rank():
    with pytest.raises(dl.UserError, match="^--batch-size must be odd$"):
        dl.launch(fail, 'raise dl.UserError("--batch-size must be odd")', [0, 1], ranks=2)


@pytest.mark.parametrize(
    ("statement", "text"),
    [("sys.exit(3)", "SystemExit: 3"), pytest.param("sys.exit()", "SystemExit", marks=SLOW)],
)
@SLOW
def test_sys_exit_is_an_error(statement, text):
    with pytest.raises(dl.RankError, match=text) as caught:
        dl.launch(fail, statement, [1], ranks=2)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        pytest.param("os._exit(7)", "exit code", marks=SLOW),
        ("import ctypes; ctypes.string_at(8)", "string_at"),
    ],
)
def test_a_rank_that_dies(statement, text):
    with pytest.raises(dl.RankError, match=text) as caught:
        dl.launch(fail, statement, [1], ranks=2, show="none")
    assert "no result" in str(caught.value) and caught.value.rank is None


def hang(world):
    if world.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)  # longer than the test's limit
    world.barrier()


def test_a_time_out_ends_all_ranks():
    start_time = time.monotonic()
    with pytest.raises(TimeoutError, match=r"the 2 rank\(s\) did not finish within 3 s"):
        dl.launch(hang, ranks=2, timeout=3)
    assert not exceeded(start_time, 12)


def unsendable(world):
    return threading.Lock()


@SLOW
def test_a_result_that_cannot_be_pickled():
    with pytest.raises(dl.RankError, match="rank 0's result, a lock, cannot be sent back"):
        dl.launch(unsendable, ranks=2)


def test_arguments_that_cannot_be_sent(monkeypatch):
    with pytest.raises(dl.UserError, match="launch: the function or its arguments cannot be sent"):
        dl.launch(sizes, threading.Lock(), ranks=2)
    monkeypatch.setattr(launch_worker, "cloudpickle", lambda: None)
    with pytest.raises(dl.UserError, match=r"cannot be sent: .*\.\[notebook\]") as caught:
        dl.launch(lambda world: world.size, ranks=2)
    assert "\n" not in str(caught.value)


@SLOW
def test_lambdas_and_inner_functions():
    pytest.importorskip("cloudpickle", reason="cloudpickle sends functions without a name")
    factor = 3
    multiply = dl.launch(lambda world: lambda x: factor * x, ranks=2)
    assert multiply(2) == 6


def launch_inside(world):
    return dl.launch(sizes, ranks=2)


def test_ranks_cannot_start_ranks(monkeypatch):
    with pytest.raises(dl.UserError, match="already a rank, one of 2, and cannot start ranks"):
        dl.launch(launch_inside, ranks=2)
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(dl.UserError, match="one of 4 as PMI_SIZE says") as caught:
        dl.launch(sizes, ranks=2)
    assert "\n" not in str(caught.value)


@SLOW
def test_the_number_of_ranks(monkeypatch):
    for ranks in (0, "2", 1.5, True):
        with pytest.raises(dl.UserError, match="launch: ranks must be a whole number"):
            dl.launch(sizes, ranks=ranks)
    with pytest.raises(dl.UserError, match="launch: show must be one of rank 0, all, none"):
        dl.launch(sizes, ranks=1, show="some")
    assert dl.launch(sizes, ranks=np.int32(1))[1] == 1
    monkeypatch.setenv("SLURM_NTASKS", "3")
    assert dl.launch(sizes)[1] == 3
    monkeypatch.delenv("SLURM_NTASKS")
    assert launching._default_ranks() <= len(os.sched_getaffinity(0))


def test_several_hosts_use_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("MPIDL_CACHE", str(tmp_path / "cache"))
    assert launching._parent_folder() == str(tmp_path / "cache") and (tmp_path / "cache").is_dir()


SCRIPT = """
import sys
import mpidl as dl

class Answer:
    def __init__(self, text):
        self.text = text

def work(world, answer):
    world.barrier()
    return Answer(f"{answer.text} by {world.size}")

def stay(world, answer):
    print("staying", flush=True)
    import time
    time.sleep(1000)  # longer than the test's limit

def main(function):
    answer = dl.launch(function, Answer("work"), ranks=2)
    assert isinstance(answer, Answer)  # the class of this program
    print(answer.text)
"""
GUARDED = SCRIPT + '\nif __name__ == "__main__":\n    main(globals()[sys.argv[1]])\n'


@pytest.fixture
def script(tmp_path):
    """A function that writes a script and returns its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def run_and_check(*words, cwd=None):
    result = mpirun(None, *words, cwd=cwd, check=0)
    assert result.stdout == "work by 2\n", result.stderr


def last_error(*words):
    """Return the last line of a program that fails."""
    return mpirun(None, *words, check=1).stderr.splitlines()[-1]


def test_a_script(script):
    run_and_check(script(GUARDED), "work")


@SLOW
def test_a_module_that_runs_as_the_program(script):
    run_and_check("-m", "script", "work", cwd=script(GUARDED).parent)


@SLOW
def test_a_script_without_a_guard(script):
    text = last_error(script(SCRIPT + "\nmain(work)\n"))
    assert 'call launch under if __name__ == "__main__":' in text


@SLOW
def test_a_function_that_the_ranks_do_not_find(script):
    """The script defines the function under its guard, which the ranks do not run."""
    guarded = "    def inside(world, answer):\n        return answer\n\n    main(inside)\n"
    text = last_error(script(f'{SCRIPT}\nif __name__ == "__main__":\n{guarded}'))
    assert text.startswith("mpidl.errors.UserError: launch: Can't get")
    assert "'inside'" in text and "define it above that line" in text


@SLOW
def test_a_notebook():
    """Code from an interactive session is not in a file that the ranks could read."""
    pytest.importorskip("cloudpickle", reason="cloudpickle sends functions defined in a notebook")
    run_and_check("-c", SCRIPT + "\nmain(work)\n")


@SLOW
def test_a_notebook_without_cloudpickle():
    text = "from mpidl.comm import launch_worker; launch_worker.cloudpickle = lambda: None\n"
    assert "pip install '.[notebook]'" in last_error("-c", text + SCRIPT + "\nmain(work)\n")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=SLOW), signal.SIGKILL])
def test_the_ranks_end_with_the_program(number, script, mark):
    """Interrupt or kill the program; the fixture checks that no process is left."""
    with start(None, script(GUARDED), "stay") as job:
        assert job.stdout.readline() == "staying\n"
        assert len(marked(mark)) >= 3  # the program, and two ranks
        job.send_signal(number)
        _, err = job.communicate()
    assert "KeyboardInterrupt" in err or number == signal.SIGKILL
