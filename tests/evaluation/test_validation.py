"""Test validation during training, patience and the best network, on any number of ranks."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from image_sets import refusal
from short_training import CLASSES, SIDE, pictures, small, trained

import mpidl as dl
from mpidl.data.datastore import Datastore
from mpidl.evaluation import evaluate, validation
from mpidl.ranks import failure
from mpidl.report import Console, metrics, plots
from mpidl.training.files import checkpoint
from mpidl.training.files.model_file import weights_sha256

pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture(scope="module")
def world():
    return dl.World(threads=1)


HELD_OUT = pictures(30, "others")
RUN = {"epochs": 2, "batch_size": 40, "verbose_every": 0}


def checkpoint_in(world, out):
    """Return the checkpoint of a run folder on every rank."""
    return world.broadcast(checkpoint.load(out) if world.rank == 0 else None)


def assert_same_result(result, expected):
    for name in ("stopped", "iterations", "epochs", "loss", "best_iteration"):
        assert getattr(result, name) == getattr(expected, name), name


def test_output_functions_get_the_validation_loss(world):
    losses = {}

    def note(info):
        if info.state != "done" and info.validation_loss is not None:
            losses[info.iteration] = info.validation_loss

    trained(world, output_functions=note, validation=HELD_OUT, validation_frequency=0, epochs=3)
    assert sorted(losses) == [3, 4, 5, 6, 7, 8, 9] and len(set(losses.values())) == 3


@pytest.mark.parametrize(
    "option, value", [("output-network", "best-validation"), ("validation-patience", 3)]
)
def test_options_that_need_validation_images(world, option, value):
    text = refusal(trained, world, **{option.replace("-", "_"): value})
    assert text.startswith(f"--{option} {value}: expected validation images")


VALIDATION = "Validation loss: , Validation accuracy: "
VALIDATED = f"Iteration: {{}}, {VALIDATION}"
EPOCH = "Epoch: {}, Loss: , Accuracy: , Images"
LAST = "Iteration: {}, Epoch: 2, Loss: , Images"


@pytest.mark.slow_on_ranks
@pytest.mark.parametrize(
    "frequency, limit, expected",
    [
        (2, None, [(VALIDATED, 2), (EPOCH, 1), (VALIDATED, 4), (VALIDATED, 6), (EPOCH, 2)]),
        (3, None, [(VALIDATED, 3), (EPOCH, 1), (VALIDATED, 6), (EPOCH, 2)]),
        (0, None, [(VALIDATED, 3), (EPOCH, 1), (VALIDATED, 6), (EPOCH, 2)]),
        (4, 5, [(EPOCH, 1), (VALIDATED, 4), (LAST, 5), (VALIDATED, 5)]),
        (4, 4, [(EPOCH, 1), (VALIDATED, 4), (LAST, 4)]),
    ],
)
def test_each_validation_is_printed_once(world, frequency, limit, expected):
    """In a log, the line of a validation at the end of an epoch must precede the epoch's line."""
    options = {"epochs": 2, "batch_size": 40, "max_iterations": limit}
    options |= {"validation": HELD_OUT, "validation_frequency": frequency}
    console = Console(world.rank, stream=io.StringIO())
    dl.train(small(), pictures(100), dl.TrainingOptions(**options), world=world, console=console)
    if world.rank == 0:
        text = re.sub(r"\d+\.\d+|/s: \d+|, Elapsed.*", "", console.stream.getvalue())
        lines = [line.format(number) for line, number in expected]
        final = "Validation accuracy of the returned network:  (30 images)"
        assert text.splitlines()[: len(lines) + 1] == [*lines, final]


def diverging_rate(epoch, iteration):
    return 0.02 if iteration < 5 else 1.5


@pytest.mark.parametrize("output", ["last-iteration", "best-validation"])
def test_the_result_has_the_validation_of_its_network(world, output):
    options = {"validation": HELD_OUT, "validation_frequency": 1, "max_iterations": 5}
    options |= {"learn_rate_schedule": diverging_rate, "batchnorm_statistics": "moving"}
    net, result = trained(world, output_network=output, **options)
    evaluation = dl.evaluate(net, HELD_OUT, world=world)
    assert result.validation_loss == evaluation.loss
    assert result.validation_accuracy == evaluation.accuracy and result.best_iteration == 4
    _, result = trained(world)
    assert result.validation_loss is result.validation_accuracy is None


def test_the_last_validation_is_printed_and_plotted(world, tmp_path, monkeypatch):
    """A validation after the last iteration of an epoch must belong to this epoch."""
    plotted, out = [], world.broadcast(str(tmp_path))
    monkeypatch.setattr(plots, "progress", lambda path, _: plotted.append(metrics.read(path)))
    options = {"epochs": 2, "batch_size": 40, "validation": HELD_OUT, "validation_frequency": 4}
    options = dl.TrainingOptions(**options)
    console = Console(world.rank, stream=io.StringIO())
    dl.train(small(), pictures(100), options, world=world, out=out, console=console)
    if world.rank:
        assert not plotted
        return
    records = metrics.read(tmp_path / "metrics.jsonl")
    validations = [r for r in records if r["kind"] == "validation"]
    assert [(r["epoch"], r["iteration"]) for r in validations] == [(2, 4), (2, 6)]
    assert plotted[-1] == records
    assert [r["images_per_second"] for r in validations] == [None, None]
    lines = [line for line in console.stream.getvalue().splitlines() if ", Validation" in line]
    assert lines == [
        f"Iteration: {r['iteration']}, Validation loss: {r['loss']:.4f}, "
        f"Validation accuracy: {r['accuracy']:.4f}"
        for r in validations
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
    """The loss rises when the learning rate becomes high. The best network has the lowest loss."""
    options = {"validation": HELD_OUT, "validation_frequency": 1, "shuffle": "every-epoch"}
    options |= {
        "learn_rate_schedule": diverging_rate,
        "batchnorm_statistics": "moving",
        "epochs": 40,
    }
    losses = []

    def note(info):
        if info.state == "iteration" and info.validation_loss is not None:
            losses.append(info.validation_loss)

    stopping = {"validation_patience": 3, "output_network": "best-validation"}
    net, result = trained(world, output_functions=note, **stopping, **options)
    best = result.best_iteration
    assert result.stopped == "validation_patience" and result.iterations == best + 3 < 120
    evaluation = dl.evaluate(net, HELD_OUT, world=world)
    assert evaluation.loss == min(losses) or result.iterations == best
    best_net, _ = trained(world, max_iterations=best, **options)
    assert weights_sha256(net) == weights_sha256(best_net)
    last_net, _ = trained(world, validation_patience=3, **options)
    assert weights_sha256(last_net) != weights_sha256(net)


def test_patience_counts_from_the_least_loss(monkeypatch):
    losses = iter([3.0, 2.0, 2.0, 2.5, 1.0, 1.0, float("nan"), 1.0])
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: dl.Evaluation(0.5, next(losses), 1))
    options = dl.TrainingOptions(validation_patience=3, validation=pictures(3))
    progress, states = validation.Validation(options, None), []
    for iteration in range(1, 9):
        progress.run(small(), iteration)
        states.append((progress.iteration, progress.waited, progress.exhausted))
    assert states[:4] == [(1, 0, False), (2, 0, False), (2, 1, False), (2, 2, False)]
    assert states[4:] == [(5, 0, False), (5, 1, False), (5, 2, False), (5, 3, True)]
    restored = validation.Validation(options, None)
    restored.restore({}, {"validation": json.loads(json.dumps(progress.facts()))})
    assert restored.exhausted and restored.facts() == progress.facts()


def test_a_run_is_resumed_only_with_its_validation_images(world, tmp_path):
    out, store = world.broadcast(str(tmp_path)), pictures(100)
    options = dl.TrainingOptions(**RUN, max_iterations=4, validation=HELD_OUT)
    dl.train(small(), store, options, world=world, out=out)
    saved = checkpoint_in(world, out)
    assert saved[1]["shares"] == {"ranks": world.size, "load": None}
    dl.train(small(), store, options, world=world, resume=saved)
    changed = dataclasses.replace(options, validation=pictures(30, "strange"))
    text = refusal(dl.train, small(), store, changed, world=world, resume=saved)
    assert "--validation-data: the images are not those of the run" in text


class Interrupted(Datastore):
    """Dataset that sends a signal to the rank that reads the last image."""

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
    "frequency, iteration", [(2, 2), pytest.param(0, 3, marks=pytest.mark.slow("jobs"))]
)
def test_a_resumed_run_repeats_an_interrupted_validation(world, tmp_path, frequency, iteration):
    """Patience must end a resumed run at the same iteration as an uninterrupted run."""
    out, images = world.broadcast(str(tmp_path)), pictures(300, "others")
    options = RUN | {"epochs": 4, "learning_rate": 1e-30}
    options |= {"validation_frequency": frequency, "validation_patience": 2}
    options |= {"learn_rate_schedule": "cosine", "warmup_iterations": 1}
    options |= {"batchnorm_statistics": "moving"}
    expected_net, expected = trained(world, validation=images, **options)
    assert expected.stopped == "validation_patience"

    with failure.Signals() as signals:
        store = Interrupted(images, signals)
        options = dl.TrainingOptions(validation=store, **options)
        run = {"world": world, "out": out}
        result = dl.train(small(), pictures(100), options, signals=signals, **run)
    assert (result.stopped, result.iterations) == ("SIGUSR1", iteration)
    assert result.best_iteration is None
    saved = checkpoint_in(world, out)
    state = saved[1]["validation"]
    assert state["owed"] and state["last"] is None and state["waited"] == 0

    store.signals, net = None, small()
    result = dl.train(net, pictures(100), options, resume=saved, **run)
    assert_same_result(result, expected)
    assert weights_sha256(net) == weights_sha256(expected_net)
    if world.rank == 0:
        records = metrics.read(tmp_path / "metrics.jsonl")
        rates = {r["iteration"]: r["learning_rate"] for r in records if r["kind"] == "iteration"}
        validations = [r for r in records if r["kind"] == "validation"]
        iterations = [r["iteration"] for r in validations]
        assert iterations == [iteration, 2 * iteration, 3 * iteration]
        assert [r["learning_rate"] for r in validations] == [rates[i] for i in iterations]
        assert len(set(rates.values())) > 1


@pytest.mark.parametrize("limit", [None, pytest.param(5, marks=pytest.mark.slow("jobs"))])
def test_resuming_a_finished_run_returns_its_result(world, tmp_path, limit):
    """The run ended at the end of an epoch, or within an epoch after a validation."""
    out, store = world.broadcast(str(tmp_path)), pictures(100)
    options = RUN | {"max_iterations": limit, "validation_frequency": 5 if limit else 0}
    options = dl.TrainingOptions(validation=HELD_OUT, **options)
    expected = dl.train(small(), store, options, world=world, out=out)
    saved = checkpoint_in(world, out)
    infos = []
    options = dataclasses.replace(options, output_functions=infos.append)
    result = dl.train(small(), store, options, world=world, resume=saved)
    assert_same_result(result, expected)
    assert np.isfinite(result.loss) and [info.state for info in infos] == ["start", "done"]
    assert infos[1].loss == expected.loss and infos[1].validation_loss > 0


def test_images_must_fit_the_network(world):
    wide = np.zeros((6, 1, SIDE, SIDE + 1), np.uint8)
    square, labels = wide[..., :SIDE], np.arange(6) % CLASSES
    shape = rf"expected images of shape \(1, {SIDE}, {SIDE}\), .* found \(1, {SIDE}, {SIDE + 1}\)"
    stores = [
        (dl.ArrayDatastore(wide, labels), shape),
        (dl.ArrayDatastore(square, np.arange(6)), "expected labels below 3, .* found 5"),
    ]
    for store, text in stores:
        assert re.match(f"arrays: .*{text}", refusal(trained, world, store=store))
    stores += [
        (square, "validation: expected a datastore, found ndarray"),
        (dl.ArrayDatastore(square[:0], labels[:0]), "validation: .*: expected images, found none"),
        (dl.ArrayDatastore(square), "the images have no labels"),
    ]
    for store, text in stores:
        assert re.search(text, refusal(trained, world, validation=store))
    cut = dl.Augmenter(crop=(SIDE, SIDE))
    larger = dl.ArrayDatastore(np.zeros((6, 1, SIDE, SIDE + 2), np.uint8), labels)
    trained(world, augmenter=cut, validation=larger, epochs=1)


def test_a_fraction_of_the_training_set_validates(world):
    options = dl.TrainingOptions(validation_fraction=0.2)
    training, options = validation.held_out(pictures(90), options)
    assert (len(training), len(options.validation)) == (72, 18)
    assert validation.held_out(training, options) == (training, options)
    text = refusal(trained, world, validation_fraction=0.2, validation=pictures(18))
    assert text == "validation= and --validation-fraction 0.2: expected at most one of them"
    options = dl.TrainingOptions(validation_fraction=0.01)
    text = refusal(validation.held_out, pictures(9), options)
    assert "--validation-fraction 0.01: expected training and validation images" in text
    _, result = trained(world, store=pictures(90), validation_fraction=0.2, epochs=3)
    assert result.iterations == 6 and result.best_iteration == 6


def test_validations_record_metrics(world, tmp_path):
    """Recorded values equal those of an evaluation at that iteration. Nothing else changes."""
    out, values = world.broadcast(str(tmp_path)), []

    class Evaluated:
        def step(self, trainer):
            metrics = dl.evaluate(trainer.net, HELD_OUT, world=world, metrics="f1,recall").metrics
            values.append([metrics["f1"], metrics["recall"]])

    options = RUN | {"validation": HELD_OUT, "validation_frequency": 1}
    options["batchnorm_statistics"] = "moving"
    net, plain = small(), small()
    settings = dl.TrainingOptions(metrics="f1,recall", **options)
    result = dl.train(net, pictures(100), settings, world=world, hooks=[Evaluated()], out=out)
    dl.train(plain, pictures(100), dl.TrainingOptions(**options), world=world)
    assert weights_sha256(net) == weights_sha256(plain)
    series = [result.history.validation]
    if world.rank == 0:
        series.append(dl.history(out).validation)
    for validations in series:
        assert list(validations.metrics) == ["recall", "f1"]
        columns = [validations.metrics["f1"], validations.metrics["recall"]]
        assert np.array_equal(np.transpose(columns), values) and len(set(values[0])) == 2
