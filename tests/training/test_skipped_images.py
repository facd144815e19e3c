"""Test runs that skip unreadable images. The tests pass on any number of ranks."""

import csv
import io
import json

import numpy as np
import pytest
from short_training import pictures, small

import mpidl as dl
from mpidl.data.datastore import Derived
from mpidl.errors import UserError
from mpidl.report import Console
from mpidl.training.files import checkpoint

pytestmark = pytest.mark.usefixtures("without_plots")


class Damaged(Derived):
    """A datastore in which the images with indices in `bad` cannot be read."""

    def __init__(self, parent, *bad):
        super().__init__(parent)
        self.bad = set(bad)

    def read(self, indices):
        for i in indices:
            if int(i) in self.bad:
                raise UserError(f"{self.located(i)}: damaged")
        return self.parent.read(indices)


def train(world, store, hooks=(), out=None, resume=None, console=None, **options):
    net = small()
    defaults = {"epochs": 2, "batch_size": 40, "verbose": "off", "on_bad_image": "skip"}
    result = dl.train(
        net,
        store,
        dl.TrainingOptions(**(defaults | options)),
        world=world,
        hooks=hooks,
        out=out,
        resume=resume,
        console=console,
    )
    return dl.weights_sha256(net), result


@pytest.mark.parametrize("normalization", ["rescale-zero-one", "zscore"])
def test_the_run_is_that_of_the_other_images(world, normalization):
    """Skipping bad images gives the same weights as training without them.

    All images are in one mini-batch, so both runs have the same mini-batches.
    """
    options = {"batch_size": 100, "shuffle": "never", "normalization": normalization}
    store = Damaged(pictures(100), 0, 33, 98)
    # Image 0 is a special case: transformed datastores read it when they are created.
    weights, result = train(world, store, **options)
    usable = pictures(100).subset(np.setdiff1d(np.arange(100), [0, 33, 98]))
    assert weights == train(world, usable, **options)[0]
    assert result.skipped_images == 3 and result.iterations == 2
    assert weights != train(world, pictures(100), **options)[0]


@pytest.mark.slow_on_ranks
def test_settings_of_the_input_do_not_matter(world):
    store = Damaged(pictures(100), 5, 41, 70)
    expected, _ = train(world, store)
    for options in ({"prefetch": 0}, {"workers": 3, "prefetch": 3}, {"cache_mb": 0}):
        assert train(world, store, **options)[0] == expected


def test_stop_is_the_default(world):
    with pytest.raises(UserError, match="image 41: damaged"):
        train(world, Damaged(pictures(100), 41), on_bad_image="stop")


class Stop:
    def __init__(self, iteration):
        self.iteration_of_stop = iteration

    def step(self, trainer):
        if trainer.position.iteration == self.iteration_of_stop:
            trainer.stop()


@pytest.mark.parametrize("stop", [2, 4])
def test_a_resumed_run_skips_the_same_images(world, tmp_path, stop):
    out = world.broadcast(str(tmp_path / "run"))
    store = Damaged(pictures(100), 5, 41, 70)
    expected, _ = train(world, store)
    train(world, store, [Stop(stop)], out)
    _, facts = checkpoint.load(out)
    if stop == 4:  # skipped images stay skipped, even if they become readable
        assert sorted(facts["bad_images"]["training"]) == ["41", "5", "70"]
        store.bad.clear()
    weights, result = train(world, store, resume=out)
    assert weights == expected and result.skipped_images == 3


def test_they_are_counted_and_listed(world, tmp_path):
    out, stream = world.broadcast(str(tmp_path / "run")), io.StringIO()
    store = Damaged(pictures(100), 5, 41)
    validation = Damaged(pictures(30, "others"), 2)
    options = {"validation": validation, "validation_frequency": 0, "verbose": "on"}
    console = Console(world.rank, stream=stream)
    _, result = train(world, store, out=out, console=console, **options)
    assert result.skipped_images == 3
    if world.rank:
        return
    with open(tmp_path / "run" / "bad-images.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["set", "image", "reason"],
        ["training", "arrays: image 5", "arrays: image 5: damaged"],
        ["training", "arrays: image 41", "arrays: image 41: damaged"],
        ["validation", "arrays: image 2", "arrays: image 2: damaged"],
    ]
    lines = stream.getvalue().splitlines()
    assert lines.count("warning: skipped an image: arrays: image 5: damaged") == 1
    assert lines.count("warning: skipped an image: arrays: image 2: damaged") == 1
    for epoch in (1, 2):
        line = f"Epoch: {epoch}, Skipped images: 2 of training, 1 of validation"
        assert lines.count(line) == 1


def test_only_the_first_ones_have_a_line(world):
    stream = io.StringIO()
    store = Damaged(pictures(100), *range(20, 30))
    train(world, store, console=Console(world.rank, stream=stream), verbose="on")
    if world.rank == 0:
        assert stream.getvalue().count("warning: skipped an image") == 5
        assert "Epoch: 2, Skipped images: 10 of training" in stream.getvalue()


def test_the_images_of_an_epoch_are_counted_without_them(world, tmp_path):
    out = world.broadcast(str(tmp_path / "run"))
    counts = []

    class Images:
        def step(self, trainer):
            trainer.wait()
            counts.append(trainer.position.images)

    train(world, Damaged(pictures(100), 5, 41), [Images()], out, epochs=1)
    assert counts[-1] == 98
    if world.rank == 0:
        records = [json.loads(line) for line in open(f"{out}/metrics.jsonl")]
        assert [r["iteration"] for r in records if r["kind"] == "iteration"] == [1, 2, 3]
