"""Test complete runs of the command train: requests to stop, and the content of status.json."""

from pathlib import Path

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.cli import arguments, train_run
from mpidl.evaluation import evaluate
from mpidl.ranks import failure
from mpidl.report import status, stop_file
from mpidl.report.live.run import LiveRun
from mpidl.training import input_pipeline
from mpidl.training.files.folder_lock import FolderLock

NETWORK = """
import mpidl as dl

def layers(shape, classes):
    return [dl.Conv2D(3, 2), dl.ReLU(), dl.Dense(classes)]
"""


@pytest.fixture
def folder(world, tmp_path, monkeypatch):
    """A folder for all ranks, with a data set and a network."""
    monkeypatch.setattr(stop_file, "SECONDS", 0)
    folder = Path(world.broadcast(str(tmp_path)))
    if world.rank == 0:
        images = numbers("command", 40, 1, 6, 6, low=0, high=255).astype(np.uint8)
        sets = {"images": images, "labels": np.arange(40) % 3}
        np.savez(folder / "set.npz", images_test=images, labels_test=np.arange(40) % 3, **sets)
        (folder / "network.py").write_text(NETWORK)
    world.barrier()
    return folder


def run(folder, *options):
    """Train on all ranks. Return the exit code and the final status of the run."""
    words = ["--data", folder / "set.npz", "--network", f"{folder / 'network.py'}:layers"]
    words += ["--out", folder / "run", "--epochs", 2, "--batch-size", 16, "--plots", "none"]
    world = dl.World(threads=1)
    typed = arguments.train([str(x) for x in (*words, *options)])
    with failure.Signals() as signals, FolderLock(world) as lock:
        code = train_run.train(typed, world, signals, lock)
    world.barrier()
    return code, read_status(folder / "run")


def read_status(out):
    return status.parse((out / "status.json").read_bytes())


def before(monkeypatch, module, name, action):
    """Call `action` before each call of a function of a module."""
    function = getattr(module, name)

    def call(*args, **keywords):
        action()
        return function(*args, **keywords)

    monkeypatch.setattr(module, name, call)


@pytest.mark.slow_on_ranks
@pytest.mark.parametrize(("module", "name"), [(input_pipeline, "prepare"), (evaluate, "evaluate")])
def test_a_request_before_the_training_or_in_the_test(world, folder, monkeypatch, module, name):
    """A request stops the run like a signal, and the resumed run completes the remaining work."""
    out, contents = folder / "run", []

    def request():
        contents.append(read_status(out))
        if world.rank == 0:
            stop_file.request(out, stop_file.NOW)

    with monkeypatch.context() as context:
        before(context, module, name, request)
        code, content = run(folder)
    assert [content.state for content in contents] == [status.RUNNING]
    assert code == arguments.STOPPED
    assert (content.state, content.stopped) == (status.FINISHED, stop_file.REASON)
    assert not (out / "stop").exists() and not (out / "summary.json").exists()
    world.barrier()
    if world.rank == 0:
        stop_file.request(out, stop_file.NOW)  # too late for this job; the next job must ignore it
    world.barrier()
    code, content = run(folder, "--resume", out)
    assert (code, content.state, content.stopped) == (0, status.FINISHED, None)
    page = LiveRun(str(out), "run")
    page.poll()
    assert page.describe().startswith("done, test accuracy ") and page.progress() == 1


def test_a_test_that_fails(folder, monkeypatch):
    def fail():
        raise dl.UserError("set.npz: cannot be read")

    before(monkeypatch, evaluate, "evaluate", fail)
    with pytest.raises(dl.UserError):
        run(folder)
    dl.World(threads=1).barrier()
    content = read_status(folder / "run")
    assert (content.state, content.error) == (status.FAILED, "set.npz: cannot be read")


def test_a_run_that_ends_by_patience_is_complete(folder):
    options = ["--validation-data", "test", "--validation-patience", 1]
    options += ["--validation-frequency", 1, "--learning-rate", 1e-30]
    code, content = run(folder, *options)
    assert (code, content.state, content.stopped) == (0, status.FINISHED, "validation_patience")
    page = LiveRun(str(folder / "run"), "run")
    page.poll()
    description = page.describe()
    assert description.startswith("done (validation_patience), validation accuracy ")
    assert ", test accuracy " in description
