"""Validation while training, patience, the best network; right on any number of ranks."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from short_training import CLASSES, SIDE, pictures, small, trained

import mpidl as dl
from mpidl.comm import failure
from mpidl.data.datastore import Datastore
from mpidl.errors import UserError
from mpidl.evaluation import validation
from mpidl.report import Console, metrics, plots
from mpidl.training import trainer
from mpidl.training.files import checkpoint
from mpidl.training.files.model_file import weights_sha256

pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture(scope="module")
def world():
    return dl.World(threads=1)


def test_validation_while_training(world):
    at = []
    others = pictures(30, "others")

    def note(info):
        if info.state != "done":
            at.append((info.iteration, info.validation_loss))

    trained(world, output_functions=note, validation=others, validation_frequency=0, epochs=3)
    found = {iteration: loss for iteration, loss in at if loss is not None}
    assert sorted(found) == [3, 4, 5, 6, 7, 8, 9] and len(set(found.values())) == 3
    for needs, said in (
        ({"output_network": "best-validation"}, "--output-network best-validation"),
        ({"validation_patience": 3}, "--validation-patience 3"),
    ):
        with pytest.raises(UserError, match=f"^{said}: expected images to validate on"):
            trained(world, **needs)


class Shown(Console):
    """The lines of a run, each with its numbers left out but that of the iteration or epoch."""

    def __init__(self, rank):
        super().__init__(rank, stream=io.StringIO())

    def lines(self):
        return [re.sub(r"\d+\.\d+|/s: \d+|, Elapsed.*", "", line) for line in self.printed()]

    def printed(self):
        return self.stream.getvalue().splitlines()


EPOCH, FOUND = "Loss: , Accuracy: , ", "Validation loss: , Validation accuracy: "


@pytest.mark.parametrize(
    "frequency, limit, wanted",
    [
        (2, None, ["Iteration: 2", "Epoch: 1", "Iteration: 4", "Epoch: 2+"]),
        (3, None, ["Epoch: 1+", "Epoch: 2+"]),
        (0, None, ["Epoch: 1+", "Epoch: 2+"]),
        (4, 5, ["Epoch: 1", "Iteration: 4", "last: 5", "Iteration: 5"]),
        (4, 4, ["Epoch: 1", "Iteration: 4", "last: 4"]),
    ],
)
def test_each_validation_is_told_once(world, frequency, limit, wanted):
    """With the epoch whose last iteration it is of, else by itself."""
    known = dl.TrainingOptions(
        epochs=2,
        batch_size=40,
        max_iterations=limit,
        validation=pictures(30, "others"),
        validation_frequency=frequency,
    )
    shown = Shown(world.rank)
    dl.train(small(), pictures(100), known, world=world, console=shown)
    looks = {
        "Iteration: ": f"{{}}, {FOUND}",
        "Epoch: ": f"{{}}, {EPOCH}Images",
        "last: ": "Iteration: {}, Epoch: 2, Loss: , Images",
    }
    if world.rank == 0:
        lines = []
        for text in wanted:
            kind = text.partition(": ")[0] + ": "
            line = looks[kind].format(text.removeprefix("last: ").removesuffix("+"))
            lines.append(line.replace("Images", f"{FOUND}, Images") if text[-1] == "+" else line)
        assert shown.lines() == lines


@pytest.mark.parametrize("output", ["last-iteration", "best-validation"])
def test_the_result_has_the_validation_of_its_network(world, output):
    how = {"validation": pictures(30, "others"), "validation_frequency": 1, "max_iterations": 5}
    how |= {"learn_rate_schedule": lambda epoch, iteration: 0.02 if iteration < 5 else 1.5}
    net, ended = trained(world, output_network=output, batchnorm_statistics="moving", **how)
    found = dl.evaluate(net, how["validation"], world=world)
    assert (ended.validation_loss, ended.validation_accuracy) == (found.loss, found.accuracy)
    assert ended.best_iteration == 4
    _, without = trained(world)
    assert without.validation_loss is without.validation_accuracy is None


def test_the_validation_at_the_end_is_told_and_drawn(world, tmp_path, monkeypatch):
    """It is of the epoch that has ended, and the picture has it."""
    drawn, out = [], world.broadcast(str(tmp_path))
    monkeypatch.setattr(plots, "progress", lambda path, _: drawn.append(metrics.read(path)))
    known = dl.TrainingOptions(
        epochs=2, batch_size=40, validation=pictures(30, "others"), validation_frequency=4
    )
    shown = Console(world.rank, stream=io.StringIO())
    dl.train(small(), pictures(100), known, world=world, out=out, console=shown)
    if world.rank:
        assert not drawn
        return
    records = metrics.read(tmp_path / "metrics.jsonl")
    found = [(r["epoch"], r["iteration"]) for r in records if r["kind"] == "validation"]
    assert found == [(2, 4), (2, 6)] and drawn[-1] == records
    told = [r for r in records if r["kind"] == "validation"]
    assert [r["images_per_second"] for r in told] == [None, None]
    lines = [line for line in shown.stream.getvalue().splitlines() if "Validation" in line]
    assert lines == [
        f"Iteration: {r['iteration']}, Validation loss: {r['loss']:.4f}, "
        f"Validation accuracy: {r['accuracy']:.4f}"
        for r in told
    ]


def test_the_last_picture_is_drawn_before_the_run_is_called_done(world, tmp_path, monkeypatch):
    calls, out = [], world.broadcast(str(tmp_path))
    monkeypatch.setattr(plots, "progress", lambda path, _: calls.append("picture"))
    options = dl.TrainingOptions(
        epochs=1, batch_size=40, output_functions=lambda info: calls.append(info.state)
    )
    dl.train(small(), pictures(100), options, world=world, out=out, console=Console(1))
    assert calls[-1] == "done" and (world.rank or calls[-2] == "picture")


def test_patience_and_the_best_network(world):
    """At a rate like this the loss goes up; the network is that of where it was least."""
    how = {
        "validation": pictures(30, "others"),
        "validation_frequency": 1,
        "learn_rate_schedule": lambda epoch, iteration: 0.02 if iteration < 5 else 1.5,
        "batchnorm_statistics": "moving",
        "shuffle": "every-epoch",
    }
    losses = []

    def note(info):
        if info.state == "iteration" and info.validation_loss is not None:
            losses.append(info.validation_loss)

    net, result = trained(
        world,
        epochs=40,
        validation_patience=3,
        output_network="best-validation",
        output_functions=note,
        **how,
    )
    best = result.best_iteration
    assert result.stopped == "validation_patience" and result.iterations == best + 3 < 120
    found = dl.evaluate(net, how["validation"], world=world)
    assert found.loss == min(losses) or result.iterations == best
    until, _ = trained(world, epochs=40, max_iterations=best, **how)
    assert weights_sha256(net) == weights_sha256(until)
    last, _ = trained(world, epochs=40, validation_patience=3, **how)
    assert weights_sha256(last) != weights_sha256(net)


class Losses:
    """Stands for the losses of a validation set."""

    def __init__(self, monkeypatch, losses):
        found = iter(losses)
        monkeypatch.setattr(
            validation, "evaluate", lambda *_, **__: dl.Evaluation(0.5, next(found), 1)
        )


def test_patience_counts_from_the_least_loss(monkeypatch):
    Losses(monkeypatch, [3.0, 2.0, 2.0, 2.5, 1.0, 1.0, float("nan"), 1.0])
    known = dl.TrainingOptions(validation_patience=3, validation=pictures(3))
    watched, seen = validation.Validation(known, None), []
    for iteration in range(1, 9):
        watched.run(small(), iteration)
        seen.append((watched.iteration, watched.waited, watched.exhausted))
    assert seen[:4] == [(1, 0, False), (2, 0, False), (2, 1, False), (2, 2, False)]
    assert seen[4:] == [(5, 0, False), (5, 1, False), (5, 2, False), (5, 3, True)]
    other = validation.Validation(known, None)
    other.restore({}, {"validation": json.loads(json.dumps(watched.facts()))})
    assert other.exhausted and other.facts() == watched.facts()


def test_a_run_goes_on_with_its_validation_images_alone(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    known = {"epochs": 2, "batch_size": 40, "verbose_every": 0, "max_iterations": 4}
    others = pictures(30, "others")
    options = dl.TrainingOptions(**known, validation=others)
    dl.train(small(), pictures(100), options, world=world, out=out)
    kept = world.broadcast(checkpoint.load(out) if world.rank == 0 else None)
    assert kept[1]["shares"] == {"ranks": world.size, "load": None}
    dl.train(small(), pictures(100), options, world=world, resume=kept)
    wrong = dl.TrainingOptions(**known, validation=pictures(30, "strange"))
    with pytest.raises(UserError, match="--validation-data: the images are not those of the run"):
        dl.train(small(), pictures(100), wrong, world=world, resume=kept)


class Interrupted(Datastore):
    """A set in whose reading a signal comes to the last rank, at the last of its images."""

    def __init__(self, store, signals):
        self.store, self.signals = store, signals
        self.image_shape, self.classes, self.labels = store.image_shape, store.classes, store.labels

    def fingerprint(self):
        return self.store.fingerprint()

    def read(self, indices):
        if self.signals and max(indices, default=0) == len(self) - 1:
            self.signals.name = "SIGUSR1"
        return self.store.read(indices)


@pytest.mark.parametrize(
    "frequency, at", [(2, 2), pytest.param(0, 3, marks=pytest.mark.slow("jobs"))]
)
def test_a_validation_that_a_signal_ends_is_made_up_for(world, tmp_path, frequency, at):
    """The run that goes on ends as one that was never stopped, by patience."""
    out, others = world.broadcast(str(tmp_path)), pictures(300, "others")
    how = {"epochs": 4, "batch_size": 40, "verbose_every": 0, "learning_rate": 1e-30}
    how |= {"validation_frequency": frequency, "validation_patience": 2}
    whole, ended = trained(world, validation=others, **how)
    assert ended.stopped == "validation_patience"

    with failure.Signals() as signals:
        store = Interrupted(others, signals)
        known = dl.TrainingOptions(validation=store, **how)
        given = {"world": world, "out": out, "signals": signals}
        result = trainer.train(small(), pictures(100), known, **given)
    assert (result.stopped, result.iterations, result.best_iteration) == ("SIGUSR1", at, None)
    kept = world.broadcast(checkpoint.load(out) if world.rank == 0 else None)
    found = kept[1]["validation"]
    assert found["owed"] and found["last"] is None and found["waited"] == 0

    store.signals, net = None, small()
    result = dl.train(net, pictures(100), known, world=world, out=out, resume=kept)
    for name in ("stopped", "iterations", "epochs", "loss", "best_iteration"):
        assert getattr(result, name) == getattr(ended, name), name
    assert weights_sha256(net) == weights_sha256(whole)
    if world.rank == 0:
        lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        validated = [line["iteration"] for line in lines if line["kind"] == "validation"]
        assert validated == [at, 2 * at, 3 * at]


@pytest.mark.parametrize("limit", [None, pytest.param(5, marks=pytest.mark.slow("jobs"))])
def test_a_run_that_is_over_knows_its_end(world, tmp_path, monkeypatch, limit):
    """One that ended with an epoch, or in the midst of one, after a validation."""
    out = world.broadcast(str(tmp_path))
    how = {"epochs": 2, "batch_size": 40, "verbose_every": 0, "max_iterations": limit}
    often = {"validation": pictures(30, "others"), "validation_frequency": 5 if limit else 0}
    known = dl.TrainingOptions(**how, **often)
    ended = dl.train(small(), pictures(100), known, world=world, out=out)
    kept = world.broadcast(checkpoint.load(out) if world.rank == 0 else None)
    monkeypatch.setattr(validation, "evaluate", None)
    seen = []
    known = dataclasses.replace(known, output_functions=seen.append)
    again = dl.train(small(), pictures(100), known, world=world, resume=kept)
    for name in ("loss", "epochs", "iterations", "best_iteration", "stopped"):
        assert getattr(again, name) == getattr(ended, name), name
    assert np.isfinite(again.loss) and [info.state for info in seen] == ["start", "done"]
    assert seen[1].loss == ended.loss and seen[1].validation_loss > 0


def test_images_that_the_network_cannot_be_trained_or_validated_on(world):
    wide = np.zeros((6, 1, SIDE, SIDE + 1), np.uint8)
    square, labels = wide[..., :SIDE], np.arange(6) % CLASSES
    shape = rf"expected images of shape \(1, {SIDE}, {SIDE}\), .* found \(1, {SIDE}, {SIDE + 1}\)"
    stores = [
        (dl.ArrayDatastore(wide, labels), shape),
        (dl.ArrayDatastore(square, np.arange(6)), "expected labels below 3, .* found 5"),
    ]
    for store, text in stores:
        with pytest.raises(UserError, match=f"^arrays: .*{text}") as caught:
            trained(world, store=store)
        assert "\n" not in str(caught.value)
    stores += [
        (square, "validation: expected a datastore, found ndarray"),
        (dl.ArrayDatastore(square[:0], labels[:0]), "validation: .*: expected images, found none"),
        (dl.ArrayDatastore(square), "the images have no labels"),
    ]
    for store, text in stores:
        with pytest.raises(UserError, match=text) as caught:
            trained(world, validation=store)
        assert "\n" not in str(caught.value)
    cut = dl.Augmenter(crop=(SIDE, SIDE))
    larger = dl.ArrayDatastore(np.zeros((6, 1, SIDE, SIDE + 2), np.uint8), labels)
    trained(world, augmenter=cut, validation=larger, epochs=1)


def test_a_share_of_the_training_set(world):
    known = dl.TrainingOptions(validation_fraction=0.2)
    kept, options = validation.held_out(pictures(90), known)
    assert (len(kept), len(options.validation)) == (72, 18)
    assert validation.held_out(kept, options) == (kept, options)
    with pytest.raises(UserError, match="--validation-fraction 0.01: expected images"):
        validation.held_out(pictures(9), dl.TrainingOptions(validation_fraction=0.01))
    _, result = trained(world, store=pictures(90), validation_fraction=0.2, epochs=3)
    assert result.iterations == 6 and result.best_iteration == 6
