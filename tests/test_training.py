"""What options do in a training run; right on any number of ranks."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from alone import numbers

import mpidl as dl
from mpidl.blocks import LANES
from mpidl.comm import guard
from mpidl.data import partition
from mpidl.data.datastore import Datastore
from mpidl.errors import UserError
from mpidl.report import Console, metrics, plots
from mpidl.training import checkpoint, configuration, loop, validation
from mpidl.training.load import Measured
from mpidl.training.modelfile import weights_sha256

SIDE, CLASSES = 6, 3


@pytest.fixture(scope="module")
def world():
    return dl.World(threads=1)


def small(*more):
    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), *more, dl.Dense(CLASSES)]
    return dl.Network(layers, (1, SIDE, SIDE), seed=1)


def pictures(count, name="pictures"):
    images = numbers(f"training {name}", count, 1, SIDE, SIDE, low=0, high=200).astype(np.uint8)
    labels = np.arange(count) * 7 % CLASSES
    images[np.arange(count), 0, labels, :] = 255  # a row that tells the class
    return dl.ArrayDatastore(images, labels)


def trained(world, net=None, store=None, **options):
    net = small() if net is None else net
    known = dl.TrainingOptions(**{"epochs": 2, "batch_size": 40, "verbose_every": 0} | options)
    store = pictures(100) if store is None else store
    return net, dl.train(net, store, known, world=world)


# ---- schedules ----


def test_the_rate_of_each_iteration_is_told(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    known = dl.TrainingOptions(
        epochs=3,
        batch_size=40,
        learning_rate=0.5,
        learn_rate_schedule="piecewise",
        learn_rate_drop_period=1,
        warmup_iterations=2,
    )
    dl.train(small(), pictures(100), known, world=world, out=out)
    if world.rank == 0:
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        rates = [r["learning_rate"] for r in found if r["kind"] == "iteration"]
        assert rates == pytest.approx([0.05, 0.275, 0.5, *[0.05] * 3, *[0.005] * 3], rel=1e-12)


def test_a_function_of_epoch_and_iteration(world):
    asked = []

    def rate(epoch, iteration):
        asked.append((epoch, iteration))
        return 0.01 if epoch == 1 else 0.002

    net, _ = trained(world, learn_rate_schedule=rate)
    assert asked[-6:] == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]
    how = {"learn_rate_drop_factor": 0.2, "learn_rate_drop_period": 1}
    other, _ = trained(world, learn_rate_schedule="piecewise", **how)
    assert weights_sha256(net) == weights_sha256(other)


def test_a_rate_for_another_batch_size(world):
    one, _ = trained(world, learning_rate=0.1, scale_rate=80)
    other, _ = trained(world, learning_rate=0.05)
    assert weights_sha256(one) == weights_sha256(other)


# ---- output functions ----


def test_output_functions_are_told_all(world):
    seen = []
    net, result = trained(
        world,
        output_functions=[seen.append],
        validation=pictures(30, "others"),
        validation_frequency=2,
    )
    assert [info.state for info in seen] == [
        *("start", "iteration", "iteration", "iteration", "epoch"),
        *("iteration", "iteration", "iteration", "epoch", "done"),
    ]
    assert [info.iteration for info in seen] == [0, 1, 2, 3, 3, 4, 5, 6, 6, 6]
    assert seen[0].loss is seen[0].accuracy is seen[1].validation_loss is None
    assert all(0 < info.loss < 3 and info.learning_rate == 0.01 for info in seen[1:])
    assert 0 <= seen[4].accuracy <= 1 and seen[3].validation_loss > 0
    assert result.stopped is None and result.best_iteration in (2, 4, 6)


def test_a_stop_that_one_rank_asks_for(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    last = world.size - 1

    def ask(info):
        return world.rank == last and info.iteration == 4

    known = dl.TrainingOptions(epochs=3, batch_size=40, output_functions=ask)
    net = small()
    result = dl.train(net, pictures(100), known, world=world, out=out)
    assert (result.stopped, result.iterations, result.epochs) == ("output_function", 4, 1)
    arrays, facts = world.broadcast(checkpoint.load(out) if world.rank == 0 else None)
    assert facts["position"]["iteration"] == 4
    rest = dataclasses.replace(known, output_functions=())
    again = small()
    result = dl.train(again, pictures(100), rest, world=world, resume=(arrays, facts))
    whole, _ = trained(world, epochs=3)
    assert result.stopped is None
    assert weights_sha256(again) == weights_sha256(whole) != weights_sha256(net)


@pytest.mark.parametrize("state", ["iteration", "epoch"])
def test_a_stop_that_is_asked_for_at_the_end(world, state):
    """The run ends as one that was not asked to stop: with the population's statistics."""

    def ask(info):
        return info.state == state and info.iteration == 6

    whole, _ = trained(world)
    net, result = trained(world, output_functions=ask)
    assert (result.stopped, result.iterations, result.epochs) == (None, 6, 2)
    assert weights_sha256(net) == weights_sha256(whole)


def test_a_stop_before_the_first_iteration_leaves_the_network_as_it_is(world):
    net, result = trained(world, output_functions=lambda info: True)
    assert (result.stopped, result.iterations, result.epochs) == ("output_function", 0, 0)
    assert weights_sha256(net) == weights_sha256(small())


def test_a_softmax_at_the_end_is_the_one_of_the_loss(world):
    ended = dl.Network([*small().layers, dl.Softmax()], (1, SIDE, SIDE), seed=1)
    net, result = trained(world)
    ended, other = trained(world, ended)
    assert weights_sha256(ended) == weights_sha256(net) and other.loss == result.loss
    found = [dl.evaluate(n, pictures(30, "others"), world=world) for n in (net, ended)]
    assert found[0] == found[1]
    images = pictures(5).read(np.arange(5))
    assert ended.predict(images).tobytes() == net.predict(images).tobytes()


def test_options_that_do_not_go_together():
    with pytest.raises(UserError, match="no warm-up beside it"):
        dl.TrainingOptions(learn_rate_schedule=lambda epoch, i: 0.1, warmup_iterations=2)
    with pytest.raises(UserError, match="--sampling partition and --worker-load measured"):
        dl.TrainingOptions(sampling="partition", worker_load="measured")


def test_what_is_no_function_is_refused():
    with pytest.raises(UserError, match="output_functions must be functions"):
        dl.TrainingOptions(output_functions=["print"])


# ---- what is said of the images, and what the network keeps of them ----


def test_classes_without_images_are_told(world):
    """Labels from 1 make an empty class 0."""
    store = pictures(100)
    others = dl.ArrayDatastore(store.images, store.labels + 1)
    shown = Console(world.rank, stream=io.StringIO())
    net = dl.Network([dl.Dense(4)], (1, SIDE, SIDE))
    dl.train(net, others, dl.TrainingOptions(epochs=1), world=world, console=shown)
    if world.rank == 0:
        line = shown.stream.getvalue().splitlines()[0]
        assert line == (
            "warning: arrays: 100 images of 1x6x6 in 4 classes: no image of class 0 (of 4): labels "
            "count from 0"
        )


def test_a_network_keeps_how_its_images_were_made(world):
    how = dl.Preprocess(size=(SIDE, SIDE))
    large = dl.ArrayDatastore(np.repeat(pictures(100).images, 2, axis=3), pictures(100).labels)
    for store in (dl.data.preprocessed(large, how), dl.data.preprocessed(large, how).split(0.5)[0]):
        net, _ = trained(world, store=store, epochs=1)
        assert net.preprocess == how
    trained(world, net=net, epochs=1)  # of images that came through nothing that is known
    assert net.preprocess == how


# ---- validation ----


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


@pytest.mark.parametrize("frequency, at", [(2, 2), (0, 3)])
def test_a_validation_that_a_signal_ends_is_made_up_for(world, tmp_path, frequency, at):
    """The run that goes on ends as one that was never stopped, by patience."""
    out, others = world.broadcast(str(tmp_path)), pictures(300, "others")
    how = {"epochs": 4, "batch_size": 40, "verbose_every": 0, "learning_rate": 1e-30}
    how |= {"validation_frequency": frequency, "validation_patience": 2}
    whole, ended = trained(world, validation=others, **how)
    assert ended.stopped == "validation_patience"

    with guard.Signals() as signals:
        store = Interrupted(others, signals)
        known = dl.TrainingOptions(validation=store, **how)
        given = {"world": world, "out": out, "signals": signals}
        result = loop.train(small(), pictures(100), known, **given)
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


@pytest.mark.parametrize("limit", [None, 5])
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


# ---- statistics of the population ----


def test_population_statistics(world):
    """Of what the convolution gives for all images, each mini-batch with its own statistics."""
    store = pictures(100)
    moving, _ = trained(world, batchnorm_statistics="moving")
    found, _ = trained(world)
    for name, value in moving.parameters.items():
        assert np.array_equal(value, found.parameters[name])
    conv = np.lib.stride_tricks.sliding_window_view(store.images[:, 0] / 255.0, (3, 3), (1, 2))
    weight, bias = (found.parameters[f"conv1.{n}"].astype(np.float64) for n in ("weight", "bias"))
    y = np.einsum("nhwrs,krs->nkhw", conv, weight[:, 0]) + bias[None, :, None, None]
    mean, variance = y.mean(axis=(0, 2, 3)), y.var(axis=(0, 2, 3))
    np.testing.assert_allclose(found.state["batchnorm1.mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(found.state["batchnorm1.variance"], variance, rtol=1e-5)
    assert not np.allclose(moving.state["batchnorm1.mean"], mean, rtol=1e-3)
    assert found.state["batchnorm1.mean"].dtype == np.float32


def test_population_statistics_leave_out_dropout_and_what_is_frozen(world):
    frozen = dl.BatchNorm(name="still", trainable=False)
    layers = dl.Dropout(0.5), dl.Conv2D(3, 2, name="second"), dl.BatchNorm(name="other"), frozen
    net, _ = trained(world, small(*layers))
    twin = small(*(layer for layer in layers if not isinstance(layer, dl.Dropout)))
    assert net.state["still.mean"].tobytes() == twin.state["still.mean"].tobytes()
    twin.parameters, twin.state = net.parameters, dict(net.state)
    from mpidl.training.population import population

    queue = dl.MinibatchQueue(pictures(100), 40, world=world, shuffle="never")
    for state in (population(twin, queue, world), population(net, queue, world)):
        for name, value in state.items():
            assert value.tobytes() == net.state[name].tobytes(), name


# ---- the ranks' loads ----


def test_loads_do_not_matter(world):
    expected, _ = trained(world)
    weights = [n % 3 for n in range(1, world.size + 1)]  # some idle, where there are three
    for load in ("measured", ",".join(map(str, weights)), ",".join(["0.5"] * world.size)):
        found, _ = trained(world, worker_load=load, epochs=2)
        assert weights_sha256(found) == weights_sha256(expected), load


def test_loads_that_cannot_be_used(world):
    for text, words in (
        (",".join(["1"] * (world.size + 1)), "expected a number for each of"),
        (",".join(["0"] * world.size), "expected a rank that works"),
    ):
        with pytest.raises(UserError, match=words):
            trained(world, worker_load=text)
    with pytest.raises(UserError, match="worker_load must be measured, or a number a rank"):
        dl.TrainingOptions(worker_load="1;2")


class Pretended:
    """A world of several ranks, seen from one of them."""

    def __init__(self, speeds, rank):
        self.speeds, self.rank, self.size = speeds, rank, len(speeds)
        self.net = self
        self.waited = 0.0

    def gop(self, operation, mine):
        assert operation == "max" and mine[self.rank] == self.speeds[self.rank]
        return np.array(self.speeds)


def test_loads_are_by_the_time_of_ones_own_work():
    world = Pretended([4.0, 0.0, 2.0, 1.0], 2)
    measured = Measured(world)
    measured.start(10.0)
    world.waited += 3.0
    measured.stop(15.0, 4)  # 4 blocks in 2 seconds of its own
    assert measured.load() == (1000, 583, 500, 250)
    world.speeds = [0.0] * 4
    assert measured.load() is None


# ---- partitions ----


def test_each_rank_has_a_part_of_the_set():
    order, shares = np.arange(100)[::-1], [partition.shares_of(n, 3, None) for n in (40, 40, 20)]
    assert shares[0] == [(0, 16), (16, 32), (32, 40)] and shares[2] == [(0, 16), (16, 20), (20, 20)]
    epochs = [partition.order_of(order, shares, 0, epoch) for epoch in (None, 1, 2)]
    firsts = np.cumsum([0, 40, 40])
    parts = []
    for found in epochs:
        assert sorted(found) == list(range(100))
        each = [
            {i for f, s in zip(firsts, shares, strict=True) for i in found[f:][slice(*s[rank])]}
            for rank in range(3)
        ]
        parts.append(each)
    assert parts[0] == parts[1] == parts[2]
    assert list(epochs[0][:16]) == list(range(99, 83, -1))
    assert not np.array_equal(epochs[1], epochs[2])


def test_sampling_by_partitions(world):
    for shuffle in ("never", "once", "every-epoch"):
        how = {"world": world, "shuffle": shuffle, "sampling": "partition"}
        queue = dl.MinibatchQueue(pictures(100), 40, **how)
        mine = [
            {i for images, _ in queue.epoch(epoch) for i in images.batch.indices.tolist()}
            for epoch in (1, 2)
        ]
        assert mine[0] == mine[1] and sorted(queue.order(1)) == list(range(100))
        parts = world.gather(sorted(mine[0]))
        if parts:
            assert sorted(sum(parts, [])) == list(range(100))
    with pytest.raises(UserError, match="sampling must be global, partition, got part"):
        dl.MinibatchQueue(pictures(3), 3, sampling="part")


def test_one_rank_has_the_whole_set_as_its_part():
    queue = dl.MinibatchQueue(pictures(50), 40, shuffle="once", sampling="partition")
    plain = dl.MinibatchQueue(pictures(50), 40, shuffle="once")
    assert np.array_equal(queue.order(3), plain.order(3)) and LANES == 16


# ---- where values come from ----


def test_a_recipe_belongs_to_its_solver_and_its_rate():
    known = configuration.resolve({}).options
    assert (known.solver, known.learning_rate) == ("sgdm", 0.01)
    known, _, sources = configuration.resolve({"solver": "adam"})
    assert (known.learning_rate, known.epochs) == (0.001, 20)
    assert (sources["learning_rate"], sources["epochs"]) == ("default", "recipe digits")
    assert dl.TrainingOptions.from_recipe("digits", solver="rmsprop").learning_rate == 0.001
    known = configuration.resolve({"network": "cifar", "batch_size": 512}).options
    assert (known.learning_rate, known.scale_rate) == (0.1, 256)
    known = configuration.resolve({"network": "cifar", "learning_rate": 0.3}).options
    assert (known.learning_rate, known.scale_rate) == (0.3, None)


def test_epochs_end_a_cosine():
    saved = {"options": dl.TrainingOptions(epochs=5, learn_rate_schedule="cosine").as_dict()}
    saved |= {"network": [], "fingerprint": ""}
    now = {**saved, "options": {**saved["options"], "epochs": 6}}
    with pytest.raises(UserError, match="was 5, is 6, where --learn-rate-schedule cosine ends"):
        configuration.changed_on_resume(saved, now)
