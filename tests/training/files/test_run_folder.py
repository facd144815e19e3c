"""What a run leaves in its folder, when, and how another run goes on in it; right on any number of
ranks."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.errors import UserError
from mpidl.report import metrics, plots
from mpidl.training.files import checkpoint, run_folder

SIDE = 6
OPTIONS = dl.TrainingOptions(epochs=2, batch_size=16, verbose="off", plots="none")  # 3 an epoch


@pytest.fixture(scope="module")
def world():
    return dl.World(threads=1)


@pytest.fixture
def folder(world, tmp_path):
    """One for all ranks."""
    return Path(world.broadcast(str(tmp_path)))


def small(seed=1):
    layers = [dl.Conv2D(3, 2), dl.BatchNorm(), dl.ReLU(), dl.Dense(3)]
    return dl.Network(layers, (1, SIDE, SIDE), seed=seed)


def pictures():
    images = numbers("keeping", 40, 1, SIDE, SIDE, low=0, high=255).astype(np.uint8)
    return dl.ArrayDatastore(images, np.arange(40) % 3)


def trained(world, net=None, **how):
    options = dataclasses.replace(OPTIONS, **how.pop("options", {}))
    net = small() if net is None else net
    return dl.weights_sha256(net), dl.train(net, pictures(), options, world=world, **how), net


def content(world, folder):
    """{name: bytes} of a folder, the same on all ranks."""
    world.barrier()
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    world.barrier()
    return found


def test_another_run_in_the_folder_is_refused(world, folder):
    out = folder / "run"
    trained(world, out=out)
    before = content(world, out)
    text = f"^out={out}: it holds a run \\(iteration 6\\): resume={out} goes on with it, "
    with pytest.raises(UserError, match=f"{text}overwrite=True replaces it$"):
        trained(world, out=out)
    assert content(world, out) == before
    if world.rank == 0:  # what a node that failed may have left
        os.replace(out / "checkpoint.h5", out / "checkpoint-previous.h5")
    before = content(world, out)
    with pytest.raises(UserError, match="it holds a run"):
        trained(world, out=out)
    assert content(world, out) == before


def test_a_run_that_cannot_be_loaded_is_refused_too(world, folder):
    if world.rank == 0:
        (folder / "checkpoint.h5").write_bytes(b"torn")
    world.barrier()
    with pytest.raises(UserError, match="it holds a run, whose checkpoint cannot be loaded"):
        trained(world, out=str(folder))


def test_a_run_that_is_overwritten(world, folder):
    out = folder / "run"
    trained(world, out=out)
    if world.rank == 0:
        for name in ("model.h5", "summary.json", "notes.txt"):
            (out / name).write_text("old")
    world.barrier()
    trained(world, out=out, overwrite=True, options={"max_iterations": 2})
    assert set(content(world, out)) == {"checkpoint.h5", "metrics.jsonl", "notes.txt"}
    assert [r["iteration"] for r in metrics.read(out / "metrics.jsonl")] == [1, 2]


def test_what_is_refused_for_other_reasons_overwrites_nothing(world, folder):
    out = folder / "run"
    trained(world, out=out)
    before = content(world, out)
    with pytest.raises(UserError, match="--seed was 0, is 1"):
        trained(world, resume=out, overwrite=True, options={"seed": 1})
    with pytest.raises(UserError, match="expected a folder with checkpoint.h5, found none"):
        trained(world, out=out, resume=folder / "none", overwrite=True)
    assert content(world, out) == before


def test_a_run_goes_on_in_its_folder(world, folder):
    """To the weights of one that was never stopped, whatever network it is given."""
    out, (_, _, whole) = folder / "run", trained(world)
    _, ended, _ = trained(world, out=out, options={"max_iterations": 4})
    assert ended.iterations == 4
    _, ended, net = trained(world, small(seed=5), resume=str(out))
    assert (ended.iterations, ended.epochs) == (6, 2)
    assert dl.weights_sha256(net) == dl.weights_sha256(whole)
    world.barrier()
    records = metrics.read(out / "metrics.jsonl")
    assert [r["iteration"] for r in records if r["kind"] == "iteration"] == [1, 2, 3, 4, 5, 6]
    (_, facts), _ = checkpoint.load(out), world.barrier()
    assert facts["position"]["iteration"] == 6


def test_a_run_goes_on_in_another_folder(world, folder):
    first, second = folder / "first", folder / "second"
    trained(world, out=first, options={"epochs": 1})
    trained(world, out=second, options={"max_iterations": 1})
    before = content(world, first)
    with pytest.raises(UserError, match="^out=.*second: it holds a run \\(iteration 1\\)"):
        trained(world, out=second, resume=first)
    trained(world, out=second, resume=first, overwrite=True)
    world.barrier()
    records = metrics.read(second / "metrics.jsonl")
    assert [r["iteration"] for r in records if r["kind"] == "iteration"] == [1, 2, 3, 4, 5, 6]
    assert content(world, first) == before


def test_what_is_no_folder_to_go_on_from(world):
    with pytest.raises(UserError, match="^resume: expected the folder of a run, found bool$"):
        trained(world, resume=True)


@pytest.mark.parametrize("seconds, count", [(0.0, 5), (1000.0, 2)])
def test_the_picture_is_drawn_now_and_then(world, folder, monkeypatch, seconds, count):
    """At the end of the first epoch, of others where it is time, and of the run."""
    drawn = []
    monkeypatch.setattr(run_folder, "PLOT_SECONDS", seconds)
    monkeypatch.setattr(plots, "progress", lambda path, _: drawn.append(metrics.read(path)))
    trained(world, out=folder, options={"epochs": 4, "plots": "training-progress"})
    assert len(drawn) == (0 if world.rank else count)
    if world.rank == 0:
        assert drawn[0][-1]["epoch"] == 1 and drawn[-1] == metrics.read(folder / "metrics.jsonl")


def test_the_picture_of_a_run_that_is_stopped(world, folder, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "progress", lambda path, _: drawn.append(metrics.read(path)))

    def stop(info):
        return info.iteration == 5

    how = {"output_functions": stop, "plots": "training-progress"}
    _, result, _ = trained(world, out=folder, options=how)
    assert result.stopped == "output_function"
    if world.rank == 0:
        assert drawn[-1][-1]["iteration"] == 5
