"""Test the files in the folder of a run, and runs that overwrite or resume another run.

The tests pass on any number of ranks.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.errors import UserError
from mpidl.report import metrics
from mpidl.training.files import checkpoint, run_folder
from mpidl.training.files.background import BackgroundWriter

SIDE = 6
OPTIONS = dl.TrainingOptions(
    epochs=2, batch_size=16, verbose="off", plots="none"
)  # 3 iterations per epoch


@pytest.fixture
def folder(world, tmp_path):
    """Return a folder that all ranks use."""
    return Path(world.broadcast(str(tmp_path)))


def small(seed=1):
    layers = [dl.Conv2D(3, 2), dl.BatchNorm(), dl.ReLU(), dl.Dense(3)]
    return dl.Network(layers, (1, SIDE, SIDE), seed=seed)


def pictures():
    images = numbers("keeping", 40, 1, SIDE, SIDE, low=0, high=255).astype(np.uint8)
    return dl.ArrayDatastore(images, np.arange(40) % 3)


def trained(world, net=None, *, options=(), **arguments):
    """Train. Return the network and the result."""
    options = dataclasses.replace(OPTIONS, **dict(options))
    net = small() if net is None else net
    return net, dl.train(net, pictures(), options, world=world, **arguments)


def content(world, folder):
    """Return the content of a folder, {file name: bytes}, on all ranks."""
    world.barrier()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    world.barrier()
    return files


def iterations(world, folder):
    """Return the iterations of the iteration records in metrics.jsonl."""
    world.barrier()
    records = metrics.read(folder / "metrics.jsonl")
    return [record["iteration"] for record in records if record["kind"] == "iteration"]


def test_a_folder_with_another_run_is_refused(world, folder):
    out = folder / "run"
    trained(world, out=out)
    before = content(world, out)
    text = f"^out={out}: it contains a run \\(iteration 6\\): resume={out} continues it, "
    with pytest.raises(UserError, match=f"{text}overwrite=True replaces it$"):
        trained(world, out=out)
    assert content(world, out) == before
    if world.rank == 0:  # a node failure may leave only the previous checkpoint
        os.replace(out / "checkpoint.h5", out / "checkpoint-previous.h5")
    before = content(world, out)
    with pytest.raises(UserError, match="it contains a run"):
        trained(world, out=out)
    assert content(world, out) == before


def test_a_folder_with_a_torn_checkpoint_is_refused_too(world, folder):
    if world.rank == 0:
        (folder / "checkpoint.h5").write_bytes(b"torn")
    world.barrier()
    with pytest.raises(UserError, match="it contains a run, whose checkpoint cannot be loaded"):
        trained(world, out=str(folder))


def test_overwriting_a_run_removes_its_files(world, folder):
    out = folder / "run"
    trained(world, out=out)
    if world.rank == 0:
        for name in ("model.h5", "summary.json", "notes.txt"):
            (out / name).write_text("old")
    world.barrier()
    trained(world, out=out, overwrite=True, options={"max_iterations": 2})
    files = {"checkpoint.h5", "metrics.jsonl", "notes.txt", "status.json"}
    assert set(content(world, out)) == files
    assert iterations(world, out) == [1, 2]


def test_a_refused_run_overwrites_nothing(world, folder):
    out = folder / "run"
    trained(world, out=out)
    before = content(world, out)
    with pytest.raises(UserError, match="--seed was 0, is 1"):
        trained(world, resume=out, overwrite=True, options={"seed": 1})
    with pytest.raises(UserError, match="expected a folder with checkpoint.h5, found none"):
        trained(world, out=out, resume=folder / "none", overwrite=True)
    assert content(world, out) == before


def test_a_run_resumes_in_its_folder(world, folder):
    """A resumed run gives the same weights as an uninterrupted run.

    The initial weights of the network in the resumed run do not matter.
    """
    out, (unstopped, _) = folder / "run", trained(world)
    _, result = trained(world, out=out, options={"max_iterations": 4})
    assert result.iterations == 4
    net, result = trained(world, small(seed=5), resume=str(out))
    assert (result.iterations, result.epochs) == (6, 2)
    assert dl.weights_sha256(net) == dl.weights_sha256(unstopped)
    assert iterations(world, out) == [1, 2, 3, 4, 5, 6]
    (_, facts), _ = checkpoint.load(out), world.barrier()
    assert facts["position"]["iteration"] == 6


def test_a_run_resumes_in_another_folder(world, folder):
    first, second = folder / "first", folder / "second"
    trained(world, out=first, options={"epochs": 1})
    trained(world, out=second, options={"max_iterations": 1})
    before = content(world, first)
    with pytest.raises(UserError, match="^out=.*second: it contains a run \\(iteration 1\\)"):
        trained(world, out=second, resume=first)
    trained(world, out=second, resume=first, overwrite=True)
    assert iterations(world, second) == [1, 2, 3, 4, 5, 6]
    assert content(world, first) == before


def test_resume_expects_a_folder(world):
    with pytest.raises(UserError, match="^resume: expected the folder of a run, found bool$"):
        trained(world, resume=True)


@pytest.fixture
def drawn(monkeypatch):
    """A list to which each drawing of the plot appends the records of metrics.jsonl."""
    drawn = []

    def plot(self, path, _, *, wait):
        drawn.append(metrics.read(path))

    monkeypatch.setattr(BackgroundWriter, "plot", plot)
    return drawn


@pytest.mark.slow_on_ranks
@pytest.mark.parametrize("seconds, count", [(0.0, 5), (1000.0, 1)])
def test_the_picture_is_drawn_now_and_then(world, folder, monkeypatch, drawn, seconds, count):
    """The plot is drawn after an epoch if enough time has passed, and at the end of the run."""
    monkeypatch.setattr(run_folder, "PLOT_SECONDS", seconds)
    trained(world, out=folder, options={"epochs": 4, "plots": "training-progress"})
    assert len(drawn) == (0 if world.rank else count)
    if world.rank == 0:
        assert drawn[0][-1]["epoch"] == (1 if count > 1 else 4)
        assert drawn[-1] == metrics.read(folder / "metrics.jsonl")


def test_a_stopped_run_draws_its_picture(world, folder, drawn):
    def stop(info):
        return info.iteration == 5

    options = {"output_functions": stop, "plots": "training-progress"}
    _, result = trained(world, out=folder, options=options)
    assert result.stopped == "output_function"
    if world.rank == 0:
        assert drawn[-1][-1]["iteration"] == 5


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))


def test_a_new_run_keeps_files_of_others(tmp_path):
    """A new run removes the files of an earlier run only if the folder belongs to a run."""
    files = ["notes.txt", "timeline.json.gz"]
    for name in files:
        (tmp_path / name).touch()
    run_folder.make_folder(str(tmp_path))
    assert names(tmp_path) == files
    (tmp_path / "metrics.jsonl").touch()  # this file marks the folder of a run
    run_folder.make_folder(str(tmp_path))
    assert names(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("name", ["model.h5", "options.toml"])
def test_a_folder_in_the_place_of_a_result_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").touch()
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(OSError, match=f"{name}: expected a file, found a folder"):
        run_folder.make_folder(str(tmp_path))
    assert names(tmp_path) == sorted([name, f"{name}/notes.txt", "metrics.jsonl"])
