"""Test that `dl.launch` returns the result of its ranks and leaves no process and no folder."""

import io
import os
import signal
import sys
import tempfile
import threading
import time
import types
import uuid

import launched
import numpy as np
import pytest
from launcher import marked, mpirun, start
from limits import exceeded, wait_until

import mpidl as dl
from mpidl.jobs import launch as launching
from mpidl.jobs import launch_job, launch_worker
from mpidl.report.progress import notebook
from mpidl.training.files import checkpoint

SLOW = pytest.mark.slow("jobs")


@pytest.fixture(autouse=True)
def mark(monkeypatch, tmp_path):
    """Mark the test's processes with an environment variable; check that none is left."""
    value = uuid.uuid4().hex
    monkeypatch.setenv("MPIDL_TEST_MARK", value)
    for name in [name for name in os.environ if name.startswith(("PMI_", "OMPI_COMM_WORLD_"))]:
        monkeypatch.delenv(name)  # the MPI of this process has set the variable
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read the variable again
    yield value
    wait_until(lambda: not marked(value))  # no process is left
    assert not list(tmp_path.glob("mpidl-launch-*")), "a folder is left"


def test_launch_returns_the_result_of_rank_0():
    array = np.arange(6_000_000, dtype=np.float32)  # 24 MB
    *numbers, (text, returned) = dl.launch(launched.sizes, "a", array, ranks=2)
    assert (*numbers, text) == (0, 2, 3, "a") and np.array_equal(returned, array)


@SLOW
def test_launch_returns_the_trained_network():
    pixels = np.arange(90 * 64).reshape(90, 8, 8) * 31 % 251
    arrays = pixels.astype(np.uint8), np.arange(90) % 3
    nets = [dl.launch(launched.trained, *arrays, ranks=n, show="none") for n in (1, 3)]
    assert dl.weights_sha256(nets[0]) == dl.weights_sha256(nets[1])
    assert dl.classify(nets[0], arrays[0], world=dl.World()).shape == (90,)


@pytest.mark.parametrize(
    "show", [pytest.param("rank 0", marks=SLOW), "all", pytest.param("none", marks=SLOW)]
)
def test_output(show, capsys, monkeypatch, tmp_path):
    """The output is shown immediately: the ranks end only after rank 0's output has arrived."""
    path = tmp_path / "arrived"

    class Reader(io.StringIO):
        def write(self, text):
            if "rank 0 speaks" in text:
                path.touch()
            return super().write(text)

    if show == "none":
        path.touch()
    stdout = Reader()
    monkeypatch.setattr(sys, "stdout", stdout)
    dl.launch(launched.speak, str(path), ranks=2, show=show)
    err = capsys.readouterr().err.splitlines()
    err = [line for line in err if "which slows all of them" not in line]
    lines = {
        "rank 0": ["in two lines", "rank 0 speaks"],
        "all": ["in two lines", "rank 0 speaks", "rank 1: in two lines", "rank 1: rank 1 speaks"],
        "none": [],
    }
    assert sorted(stdout.getvalue().splitlines()) == lines[show]
    assert sorted(err) == ([] if show == "none" else ["and here", "rank 1: and here"])


@pytest.mark.parametrize(
    "ranks", [[1], pytest.param([0], marks=SLOW), pytest.param([1, 2], marks=SLOW)]
)
def test_launch_raises_the_exception_of_a_rank(ranks, capsys):
    start_time, count = time.monotonic(), max(2, max(ranks) + 1)
    with pytest.raises(dl.RankError) as caught:
        dl.launch(launched.fail, "raise_error()", ranks, ranks=count)
    assert not exceeded(start_time, 15)
    text = str(caught.value)
    assert caught.value.rank in ranks and caught.value.host == os.uname().nodename
    assert text.startswith(f"rank {caught.value.rank}") and f"of {count} on " in text
    assert 'raise ValueError("a bad value")' in text and "launch_worker.py" not in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert "Traceback" not in capsys.readouterr().err


@SLOW
def test_an_exception_that_cannot_be_pickled():
    with pytest.raises(dl.RankError, match="Unpicklable: 1 and 2") as caught:
        dl.launch(launched.fail, "raise Unpicklable(1, 2)", [1], ranks=2)
    assert caught.value.rank == 1 and caught.value.__cause__ is None


@SLOW
def test_sys_exit_is_an_error():
    for statement, text in (("sys.exit(3)", "SystemExit: 3"), ("sys.exit()", "SystemExit")):
        with pytest.raises(dl.RankError, match=text) as caught:
            dl.launch(launched.fail, statement, [1], ranks=2)
        assert caught.value.rank == 1


@SLOW
@pytest.mark.parametrize(
    ("statement", "text"),
    [
        pytest.param("os._exit(7)", "exit code", marks=SLOW),
        ("import ctypes; ctypes.string_at(8)", "string_at"),
    ],
)
def test_a_rank_that_dies(statement, text):
    with pytest.raises(dl.RankError, match=text) as caught:
        dl.launch(launched.fail, statement, [1], ranks=2, show="none")
    assert "no result" in str(caught.value) and caught.value.rank is None


def test_a_time_out_ends_all_ranks():
    start_time = time.monotonic()
    with pytest.raises(TimeoutError, match=r"the 2 rank\(s\) did not finish within 2 s"):
        dl.launch(launched.hang, ranks=2, timeout=2)
    assert not exceeded(start_time, 12)


class Interrupter(io.StringIO):
    """A stdout that interrupts this process each time the next given word is printed."""

    def __init__(self, *words):
        super().__init__()
        self.words = list(words)

    def write(self, text):
        if self.words and self.words[0] in text:
            del self.words[0]
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_an_interrupt_stops_a_training_with_its_result(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "stdout", Interrupter("trains"))
    result, sha256 = dl.launch(launched.train_on, str(tmp_path / "run"), ranks=2)
    assert result.stopped == "SIGINT" and result.iterations >= 5
    assert launch_job.INTERRUPTED in capsys.readouterr().err
    loaded = dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(3)], (1, 8, 8))
    arrays, facts = checkpoint.load(str(tmp_path / "run"))
    assert facts["position"]["iteration"] == result.iterations
    loaded.parameters, loaded.state = arrays["learnables"], arrays["state"]
    assert dl.weights_sha256(loaded) == sha256
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def displayed(monkeypatch):
    """Let this process be a notebook's kernel. Return the list of displayed runs."""
    displayed = []
    module = types.ModuleType("IPython.display")

    def display(run, display_id):
        displayed.append(run)
        return types.SimpleNamespace(update=lambda run: None)

    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(notebook, "in_notebook", lambda: True)
    return displayed


def test_an_interrupt_stops_a_custom_loop_that_is_shown_live(displayed, monkeypatch, capsys):
    """The loop ends on all ranks in the same iteration, and prints no line per iteration."""
    monkeypatch.setattr(sys, "stdout", Interrupter("trains"))
    iterations = dl.launch(launched.loop_until_stopped, ranks=3, plots="live")
    assert iterations == [iterations[0]] * 3 and iterations[0] >= 5
    (run,) = displayed
    assert run.facts()[:2] == ["epoch 1", f"iteration {iterations[0]}"]
    assert run.facts()[-1] == "stopped"
    assert "Iteration" not in sys.stdout.getvalue()
    assert launching.NOTHING_SHOWN not in capsys.readouterr().err


def test_a_live_display_without_a_report_says_how(displayed, capsys):
    assert dl.launch(launched.sizes, ranks=1, plots="live")[:2] == (0, 1)
    assert displayed == [] and launching.NOTHING_SHOWN in capsys.readouterr().err


def test_an_interrupt_is_answered_whatever_is_shown(tmp_path, capsys):
    job = object.__new__(launch_job.Job)
    job.interrupts, job.is_interrupted = types.SimpleNamespace(count=1), False
    job.folder, job.show, job.update = str(tmp_path), "none", None
    job._serve()
    assert capsys.readouterr().err == launch_job.INTERRUPTED + "\n"
    assert (tmp_path / launch_worker.INTERRUPT_FILE).exists()


def test_a_handler_that_python_does_not_know_stays(monkeypatch):
    handler_of = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with launch_job.Interrupts():
        assert handler_of(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("function", "words"),
    [
        pytest.param(launched.wait_for_interrupt, ["waits"], marks=SLOW),
        pytest.param(launched.ignore_interrupts, ["waits", "is interrupted"], marks=SLOW),
    ],
)
def test_interrupts_without_a_training(monkeypatch, function, words):
    """One interrupt ends a function without a handler; a second interrupt ends any function."""
    monkeypatch.setattr(sys, "stdout", Interrupter(*words))
    with pytest.raises(KeyboardInterrupt):
        dl.launch(function, ranks=2)
    assert not sys.stdout.words
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@SLOW
def test_a_result_that_cannot_be_pickled():
    with pytest.raises(dl.RankError, match="rank 0's result, a lock, cannot be sent back"):
        dl.launch(launched.unsendable, ranks=2)


def test_arguments_that_cannot_be_sent(monkeypatch):
    with pytest.raises(dl.UserError, match="launch: the function or its arguments cannot be sent"):
        dl.launch(launched.sizes, threading.Lock(), ranks=2)
    monkeypatch.setattr(launch_worker, "cloudpickle", lambda: None)
    with pytest.raises(dl.UserError, match=r"cannot be sent: .*mpidl\[notebook\]") as caught:
        dl.launch(lambda world: world.size, ranks=2)
    assert "\n" not in str(caught.value)


@SLOW
def test_lambdas_and_inner_functions():
    pytest.importorskip("cloudpickle", reason="cloudpickle sends functions without a name")
    factor = 3
    multiply = dl.launch(lambda world: lambda x: factor * x, ranks=2)
    assert multiply(2) == 6


def test_ranks_cannot_start_ranks(monkeypatch):
    """`launch` on a rank raises a UserError, which the outer `launch` raises unchanged."""
    text = "^launch: this process is already a rank, one of 1, and cannot start ranks; .*:$"
    with pytest.raises(dl.UserError, match=text):
        dl.launch(launched.launch_inside, ranks=1)
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(dl.UserError, match="one of 4 according to PMI_SIZE") as caught:
        dl.launch(launched.sizes, ranks=2)
    assert "\n" not in str(caught.value)
    monkeypatch.delenv("PMI_SIZE")
    monkeypatch.setenv(launch_job.SIZE_VARIABLE, "")  # says nothing
    assert dl.launch(launched.sizes, ranks=1)[1] == 1


@SLOW
def test_the_number_of_ranks(monkeypatch):
    for ranks in (0, "2", 1.5, True):
        with pytest.raises(dl.UserError, match="launch: ranks must be a whole number"):
            dl.launch(launched.sizes, ranks=ranks)
    with pytest.raises(dl.UserError, match="launch: show must be one of rank 0, all, none"):
        dl.launch(launched.sizes, ranks=1, show="some")
    assert dl.launch(launched.sizes, ranks=np.int32(1))[1] == 1
    monkeypatch.setenv("SLURM_NTASKS", "3")
    assert dl.launch(launched.sizes)[1] == 3
    monkeypatch.delenv("SLURM_NTASKS")
    with pytest.raises(dl.UserError, match="launch: plots must be one of none, live, got 'on'"):
        dl.launch(launched.sizes, ranks=1, plots="on")
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
    assert isinstance(answer, Answer)  # the class that this program defines
    print(answer.text)
"""
GUARDED = SCRIPT + '\nif __name__ == "__main__":\n    main(globals()[sys.argv[1]])\n'


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script and returns its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def run_and_check(*words, cwd=None):
    result = mpirun(None, *words, cwd=cwd, check=0)
    assert result.stdout == "work by 2\n", result.stderr


def last_error(*words):
    """Return the last stderr line of a program that fails."""
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
    """A function defined under the `__main__` guard causes an error: ranks skip that code."""
    guarded = "    def inside(world, answer):\n        return answer\n\n    main(inside)\n"
    text = last_error(script(f'{SCRIPT}\nif __name__ == "__main__":\n{guarded}'))
    assert text.startswith("mpidl.errors.UserError: launch: Can't get")
    assert "'inside'" in text and "define it above that line" in text


@SLOW
def test_a_notebook():
    """Functions of an interactive session work, although no file contains them."""
    pytest.importorskip("cloudpickle", reason="cloudpickle sends functions defined in a notebook")
    run_and_check("-c", SCRIPT + "\nmain(work)\n")


@SLOW
def test_a_notebook_without_cloudpickle():
    text = "from mpidl.jobs import launch_worker; launch_worker.cloudpickle = lambda: None\n"
    assert "pip install 'mpidl[notebook]'" in last_error("-c", text + SCRIPT + "\nmain(work)\n")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=SLOW), signal.SIGKILL])
def test_the_ranks_end_with_the_program(number, script, mark):
    """If the program is interrupted or killed, its ranks end; the fixture checks for leftovers."""
    with start(None, script(GUARDED), "stay") as job:
        assert job.stdout.readline() == "staying\n"
        assert len(marked(mark)) >= 3  # the program and two ranks
        job.send_signal(number)
        _, err = job.communicate()
    assert "KeyboardInterrupt" in err or number == signal.SIGKILL
