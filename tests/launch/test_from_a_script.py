"""Ranks started by `dl.launch`: what comes back from them, and that nothing of them stays."""

import contextlib
import ctypes
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import launcher
import numpy as np
import pytest
from limits import exceeded, wait_until

import mpidl as dl
from mpidl.comm import launch as launching
from mpidl.comm import launch_worker

MORE = pytest.mark.slow("jobs")


@pytest.fixture(autouse=True)
def mark(monkeypatch, tmp_path):
    """Of each test: what its processes have in their environment; they are gone at its end."""
    found = uuid.uuid4().hex
    monkeypatch.setenv("MPIDL_TEST_MARK", found)
    for name in [name for name in os.environ if name.startswith(("PMI_", "OMPI_COMM_WORLD_"))]:
        monkeypatch.delenv(name)  # MPI of this process set them
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read the variable anew
    yield found
    wait_until(lambda: not marked(found))  # no process is left behind
    assert not folders(), "a folder was left behind"


def marked(text):
    """The processes with a text in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ")[:200])
    return found


def folders():
    return set(Path(os.environ["TMPDIR"]).glob("mpidl-launch-*"))


def sizes(world, *arguments):
    return world.rank, world.size, world.gop("sum", world.rank + 1), arguments


def test_what_rank_0_returns_comes_back():
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


@pytest.mark.slow("jobs")
def test_training_comes_back_as_the_same_network():
    pixels = np.arange(90 * 64).reshape(90, 8, 8) * 31 % 251
    given = pixels.astype(np.uint8), np.arange(90) % 3
    nets = [dl.launch(weights, *given, ranks=n, show="none") for n in (1, 3)]
    assert dl.weights_sha256(nets[0]) == dl.weights_sha256(nets[1])
    assert dl.classify(nets[0], given[0], world=dl.World()).shape == (90,)


def speak(world):
    print(f"rank {world.rank} speaks\nin two", end=" ")
    print("lines", end="\n" if world.rank == 0 else "")
    print("and here", file=sys.stderr)


@pytest.mark.parametrize(
    "show", [pytest.param("rank 0", marks=MORE), "all", pytest.param("none", marks=MORE)]
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


def wait_to_be_heard(world, path):
    print("waiting", flush=True)
    while not os.path.exists(path):
        time.sleep(0.01)
    return "heard"


def test_output_is_live(tmp_path, monkeypatch):
    class Ear(io.StringIO):
        def write(self, text):
            if "waiting" in text:
                (tmp_path / "heard").touch()
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Ear())
    assert dl.launch(wait_to_be_heard, str(tmp_path / "heard"), ranks=2) == "heard"


class Odd(Exception):
    """Cannot be made again from its pickle."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail(world, how, on):
    if world.rank in on:
        if how == "value":
            raise ValueError("what a value")
        if how == "odd":
            raise Odd(1, 2)
        if how == "user":
            raise dl.UserError("--batch-size must be odd")
        if how == "exit":
            sys.exit(3)
        if how == "good exit":
            sys.exit()
        if how == "at once":
            os._exit(7)
        if how == "crash":
            ctypes.string_at(8)
    world.barrier()


@pytest.mark.parametrize(
    "on", [[1], pytest.param([0], marks=MORE), pytest.param([1, 2], marks=MORE)]
)
def test_an_exception_comes_back_with_its_rank(on, capsys):
    began = time.monotonic()
    with pytest.raises(dl.RankError) as caught:
        dl.launch(fail, "value", on, ranks=3)
    assert not exceeded(began, 15)
    text = str(caught.value)
    assert caught.value.rank in on and caught.value.host == os.uname().nodename
    assert text.startswith(f"rank {caught.value.rank}") and "of 3 on " in text
    assert 'raise ValueError("what a value")' in text and "launch_worker.py" not in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow("jobs")
def test_an_exception_that_cannot_be_pickled():
    with pytest.raises(dl.RankError, match="Odd: 1 and 2") as caught:
        dl.launch(fail, "odd", [1], ranks=2)
    assert caught.value.rank == 1 and caught.value.__cause__ is None


def test_what_a_user_can_mend_stays_that():
    with pytest.raises(dl.UserError, match="^--batch-size must be odd$"):
        dl.launch(fail, "user", [0, 1], ranks=2)


@pytest.mark.parametrize(
    ("how", "text"),
    [("exit", "SystemExit: 3"), pytest.param("good exit", "SystemExit", marks=MORE)],
)
@pytest.mark.slow("jobs")
def test_sys_exit_is_an_error(how, text):
    with pytest.raises(dl.RankError, match=text) as caught:
        dl.launch(fail, how, [1], ranks=2)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("how", "text"), [pytest.param("at once", "exit code", marks=MORE), ("crash", "string_at")]
)
def test_a_rank_that_dies(how, text):
    with pytest.raises(dl.RankError, match=text) as caught:
        dl.launch(fail, how, [1], ranks=2, show="none")
    assert "no result" in str(caught.value) and caught.value.rank is None


def hang(world):
    if world.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)  # longer than the test's limit
    world.barrier()


def test_a_time_out_ends_all_ranks():
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"the 2 rank\(s\) were not done after 3 s"):
        dl.launch(hang, ranks=2, timeout=3)
    assert not exceeded(began, 12)


def unsendable(world):
    return threading.Lock()


@pytest.mark.slow("jobs")
def test_a_result_that_cannot_be_pickled():
    with pytest.raises(dl.RankError, match="rank 0's result, a lock, cannot be brought back"):
        dl.launch(unsendable, ranks=2)


def test_what_cannot_be_sent(monkeypatch):
    with pytest.raises(dl.UserError, match="launch: the function or its arguments cannot be sent"):
        dl.launch(sizes, threading.Lock(), ranks=2)
    monkeypatch.setattr(launch_worker, "cloudpickle", lambda: None)
    with pytest.raises(dl.UserError, match=r"cannot be sent: .*\.\[notebook\]") as caught:
        dl.launch(lambda world: world.size, ranks=2)
    assert "\n" not in str(caught.value)


@pytest.mark.slow("jobs")
def test_lambdas_and_inner_functions():
    pytest.importorskip("cloudpickle", reason="cloudpickle sends functions without a name")
    factor = 3
    made = dl.launch(lambda world: lambda x: factor * x, ranks=2)
    assert made(2) == 6


def launch_again(world):
    return dl.launch(sizes, ranks=2)


def test_ranks_start_no_ranks(monkeypatch):
    with pytest.raises(dl.UserError, match="already, one of 2, and ranks start no ranks"):
        dl.launch(launch_again, ranks=2)
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(dl.UserError, match="one of 4 that PMI_SIZE tells of") as caught:
        dl.launch(sizes, ranks=2)
    assert "\n" not in str(caught.value)


@pytest.mark.slow("jobs")
def test_how_many_ranks(monkeypatch):
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


def test_several_hosts_meet_in_the_cache(monkeypatch, tmp_path):
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
    found = dl.launch(function, Answer("work"), ranks=2)
    assert isinstance(found, Answer)  # the class of this program
    print(found.text)
"""
GUARDED = SCRIPT + '\nif __name__ == "__main__":\n    main(globals()[sys.argv[1]])\n'


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def run(*words, cwd=None):
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=launcher.environment(),
        capture_output=True,
        text=True,
        cwd=cwd,
    )
    return done


def test_a_script(script):
    done = run(script(GUARDED), "work")
    assert done.stdout == "work by 2\n", done.stderr


@MORE
def test_a_module_that_runs_as_the_program(script):
    folder = script(GUARDED).parent
    done = run("-m", "script", "work", cwd=folder)
    assert done.stdout == "work by 2\n", done.stderr


@pytest.mark.slow("jobs")
def test_a_script_without_a_guard(script):
    done = run(script(SCRIPT + "\nmain(work)\n"))
    assert done.returncode == 1
    assert 'call it under if __name__ == "__main__":' in done.stderr.splitlines()[-1]


@MORE
def test_a_function_that_the_ranks_do_not_find(script):
    """It is defined where the script's own work stands, which a rank leaves out."""
    own = "    def inside(world, answer):\n        return answer\n\n    main(inside)\n"
    done = run(script(f'{SCRIPT}\nif __name__ == "__main__":\n{own}'))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("mpidl.errors.UserError: launch: Can't get")
    assert "'inside'" in last and "define it above that line" in last


@pytest.mark.slow("jobs")
def test_a_notebook():
    """What is typed has no file to be read again."""
    pytest.importorskip("cloudpickle", reason="cloudpickle sends what a notebook defines")
    done = run("-c", SCRIPT + "\nmain(work)\n")
    assert done.stdout == "work by 2\n", done.stderr


@MORE
def test_a_notebook_without_cloudpickle():
    text = "from mpidl.comm import launch_worker; launch_worker.cloudpickle = lambda: None\n"
    done = run("-c", text + SCRIPT + "\nmain(work)\n")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "pip install '.[notebook]'" in last


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=MORE), signal.SIGKILL])
def test_the_ranks_end_with_the_program(number, script, mark):
    """Ctrl-C, and a notebook's kernel that is killed. The fixture sees that nothing is left."""
    with launcher.start(None, script(GUARDED), "stay") as job:
        assert job.stdout.readline() == "staying\n"
        assert len(marked(mark)) >= 3  # the program, and two ranks
        job.send_signal(number)
        _, err = job.communicate()
    assert "KeyboardInterrupt" in err or number == signal.SIGKILL
