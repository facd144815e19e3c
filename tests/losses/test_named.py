"""Test losses by name and by function, on any number of ranks."""

import json

import numpy as np
import pytest
from image_sets import ReadArrays
from single_rank import numbers

import mpidl as dl
from mpidl import losses
from mpidl.errors import UserError
from mpidl.training.files import checkpoint
from mpidl.training.files.model_file import weights_sha256

SIDE, CLASSES = 6, 3
pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture(scope="module")
def world():
    return dl.World(threads=1)


def pairs(count, targets):
    images = numbers("objective", count, 1, SIDE, SIDE, low=0, high=255).astype(np.uint8)
    return ReadArrays(images, targets(images))


def halves(images):
    return images.astype(np.float32) / 510


def brightness(images):
    return images.mean(axis=(1, 2, 3), dtype=np.float32) / 255


def bright(images):
    """Return a label for each pixel, 0 to 2 from dark to bright."""
    return (images[:, 0] // 86).astype(np.int32)


def to_images():
    return dl.Network([dl.Conv2D(3, 4, padding=1), dl.Tanh(), dl.Conv2D(1, 1)], (1, SIDE, SIDE), 1)


def to_pixels():
    layers = [dl.Conv2D(3, 8, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Conv2D(1, CLASSES)]
    return dl.Network(layers, (1, SIDE, SIDE), seed=1)


def to_numbers(count=1):
    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(count)]
    return dl.Network(layers, (1, SIDE, SIDE), seed=1)


def trained(world, net, store, out=None, resume=None, **options):
    options = {"epochs": 3, "batch_size": 40, "learning_rate": 0.1, "verbose": "off"} | options
    options = dl.TrainingOptions(**options)
    return net, dl.train(net, store, options, world=world, out=out, resume=resume)


@pytest.mark.parametrize("loss", ["mse", "mae"])
def test_regression_errors_are_learned(world, loss):
    steps, store = [], pairs(90, halves)

    def error(net):
        errors = dl.regression_errors(net, store, world=world)
        return errors.rmse**2 if loss == "mse" else errors.mae

    before = error(to_images())
    options = {"loss": loss, "validation": store, "output_functions": steps.append}
    net, result = trained(world, to_images(), store, **options)
    after = error(net)
    assert after < (0.25 if loss == "mse" else 0.5) * before and result.loss < before
    scores = dl.evaluate(net, store, world=world, loss=loss, batch_size=33)
    assert scores.accuracy is None and scores.images == 90
    assert scores.loss == pytest.approx(after, rel=1e-6)
    assert all(info.accuracy is None for info in steps) and steps[-1].loss == result.loss
    assert steps[-1].validation_loss == pytest.approx(scores.loss, rel=1e-6)


def test_the_first_loss_is_that_of_float64(world):
    """With a learning rate near zero, the epoch's loss equals the initial network's in float64."""
    store = pairs(50, brightness)
    net, result = trained(
        world, to_numbers(), store, loss="mse", epochs=1, batch_size=50, learning_rate=1e-12
    )
    outputs = trained_outputs(store, world)
    assert result.loss == pytest.approx(np.square(outputs - store.values[:, None]).mean(), rel=1e-5)


def trained_outputs(store, world):
    """Return the float64 outputs of the initial network in training mode."""
    images, targets = next(dl.MinibatchQueue(store, 50, world=world, shuffle="never").epoch(1))
    (_, gathered), _, _ = dl.value_and_grad(loss_and_outputs, reduce=None)(
        to_numbers(), images, targets
    )
    parts = world.broadcast(world.gather(gathered.local().astype(np.float64)))
    return np.concatenate(parts)


def loss_and_outputs(net, images, targets):
    outputs = net(images)
    return dl.mean_squared_error(outputs, targets), outputs


def custom_mse(net, images, targets):
    return dl.mean_squared_error(net(images), targets)


@pytest.mark.slow_on_ranks
def test_a_function_gives_the_weights_of_a_name(world):
    store = pairs(70, brightness)
    nets = [trained(world, to_numbers(), store, loss=loss)[0] for loss in ("mse", custom_mse)]
    assert weights_sha256(nets[0]) == weights_sha256(nets[1])


def test_a_function_may_count_correct_outputs(world):
    labels = np.arange(70) % CLASSES
    store = dl.ArrayDatastore(pairs(70, brightness).images, labels)

    def custom(net, images, labels):
        scores = net.logits(images)
        return dl.softmax_cross_entropy(scores, labels), dl.correct_count(scores, labels)

    results = []
    for loss in ("crossentropy", custom):
        steps = []
        options = {"loss": loss, "output_functions": steps.append}
        net, result = trained(world, to_numbers(CLASSES), store, **options)
        accuracies = [info.accuracy for info in steps]
        results.append((weights_sha256(net), result.loss, accuracies))
    assert results[0] == results[1] and max(a for a in accuracies if a) > 0.3


def test_labels_of_pixels(world):
    steps, store = [], pairs(90, bright)
    options = {"validation": store, "validation_frequency": 0, "output_functions": steps.append}
    net, _ = trained(world, to_pixels(), store, epochs=8, **options)
    evaluation = dl.evaluate(net, store, world=world, confusion=True)
    scores = dl.predict(net, store, world=world)
    accuracy = (scores.argmax(axis=1) == store.values).mean()
    assert evaluation.accuracy == pytest.approx(accuracy, rel=1e-12) and accuracy > 0.8
    assert evaluation.confusion.accuracy == evaluation.accuracy
    assert evaluation.confusion.counts.sum() == 90 * SIDE * SIDE
    expected = np.exp(scores.astype(np.float64))
    expected /= expected.sum(axis=1, keepdims=True)
    probabilities = dl.predict(net, store, world=world, softmax=True)
    np.testing.assert_allclose(probabilities, expected, atol=2e-6)
    correct = np.take_along_axis(expected, store.values[:, None].astype(np.int64), axis=1)
    assert evaluation.loss == pytest.approx(-np.log(correct).mean(), rel=1e-5)
    assert np.array_equal(dl.classify(net, store, world=world), scores.argmax(axis=1))
    assert all(0 <= info.accuracy <= 1 for info in steps if info.accuracy is not None)


@pytest.mark.parametrize("label", [CLASSES, -1])
def test_a_label_beyond_the_classes_is_named(world, label):
    store = pairs(70, bright)
    store.values[41, 2, 3] = label
    with pytest.raises(UserError, match=f"image 41: expected labels from 0 to 2, found {label}"):
        trained(world, to_pixels(), store)


def test_metrics_of_a_loss_without_accuracy(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    trained(world, to_images(), pairs(50, halves), out=out, loss="mse", epochs=1)
    if world.rank == 0:
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert all("accuracy" not in record for record in records)
        kinds = [record["kind"] for record in records]
        assert kinds == ["iteration", "iteration", "epoch", "ranks"]


@pytest.mark.slow_on_ranks
def test_resume_and_another_loss(world, tmp_path):
    out, store = world.broadcast(str(tmp_path)), pairs(70, brightness)
    expected, _ = trained(world, to_numbers(), store, loss="mse", epochs=3)
    trained(world, to_numbers(), store, out=out, loss="mse", max_iterations=3)
    record = world.broadcast(checkpoint.load(out) if world.rank == 0 else None)
    with pytest.raises(UserError, match="--loss was mse, is function"):
        trained(world, to_numbers(), store, resume=record, loss=custom_mse)
    resumed, _ = trained(world, to_numbers(), store, resume=record, loss="mse", epochs=3)
    assert weights_sha256(resumed) == weights_sha256(expected)


def test_a_plain_number_counts_once_on_all_ranks(world):
    def loss(net, images, targets):
        return dl.mean_squared_error(net(images), targets), 20.0

    steps, store = [], pairs(50, brightness)
    options = {"loss": loss, "validation": store, "output_functions": steps.append}
    trained(world, to_numbers(), store, batch_size=25, epochs=1, **options)
    assert [info.accuracy for info in steps if info.state == "epoch"] == [20 / 25]
    assert steps[-1].validation_accuracy == 20 / 50


@pytest.mark.slow_on_ranks
def test_refusals(world):
    labelled = dl.ArrayDatastore(pairs(20, brightness).images, np.arange(20) % CLASSES)
    bare = dl.ArrayDatastore(labelled.images)
    numbered, pictured, pixels = (pairs(20, targets) for targets in (brightness, halves, bright))
    one_class = dl.ArrayDatastore(labelled.images, np.zeros(20, np.int64), ["a", "b", "c"])
    for net, store, loss, text in (
        (to_numbers(), pictured, "crossentropy", "are floats; use --loss mse .*; pixel_labels"),
        (to_numbers(), labelled, "mse", "expected images with targets, found only labels"),
        (to_numbers(), bare, "mse", "expected images with targets, found none"),
        (to_numbers(), bare, "crossentropy", "the images have no labels"),
        (to_numbers(2), numbered, "mse", r"outputs of shape \(\), like the targets, found \(2,\)"),
        (to_numbers(), pixels, "mse", "targets that are floats, found whole numbers: write"),
        (to_numbers(), pixels, "crossentropy", r"expected a network with outputs \(K, 6, 6\)"),
        (to_numbers(2), labelled, "crossentropy", "labels below 2"),
    ):
        with pytest.raises(UserError, match=text):
            losses.check(loss, net, store)
        with pytest.raises(UserError):
            trained(world, net, store, loss=loss)
    losses.check("crossentropy", to_numbers(CLASSES), one_class)
    losses.check("crossentropy", to_pixels(), pairs(20, lambda images: bright(images)[:, None]))
    with pytest.raises(UserError, match="of at least two classes"):
        trained(world, to_numbers(CLASSES), one_class)
    with pytest.raises(UserError, match="loss must be crossentropy, .* mse or mae, found 'l1'"):
        dl.TrainingOptions(loss="l1")
    with pytest.raises(UserError, match="loss must be .* or a function, found l1"):
        dl.evaluate(to_numbers(), numbered, world=world, loss="l1")
    with pytest.raises(
        TypeError, match=r"three: expected a loss, .* each a single number, got \(V"
    ):
        trained(world, to_numbers(), numbered, loss=three)
    for nothing in None, "0.5", [0.5], np.zeros(3), (), (0.5, None):
        with pytest.raises(
            TypeError, match="<lambda>: expected a loss, .* each a single number, got "
        ):
            trained(world, to_numbers(), numbered, loss=lambda *_, v=nothing: v)
    with pytest.raises(UserError, match="top_k: expected loss crossentropy"):
        dl.evaluate(to_numbers(), numbered, world=world, loss="mse", top_k=1)
    with pytest.raises(UserError, match=r"top_k: expected a network with outputs \(K,\)"):
        dl.evaluate(to_pixels(), pixels, world=world, top_k=1)


def three(net, images, targets):
    loss = custom_mse(net, images, targets)
    return loss, loss, loss


def test_the_description_of_a_dice_loss_names_the_default_of_smooth():
    """Checkpoints store the description, so it must stay the same."""
    assert repr(dl.Dice()) == (
        "Dice(class_weights=None, smooth=1.0, ignore_label=None, generalized=False, "
        "cross_entropy=None)"
    )
    assert dl.Dice() == dl.Dice(smooth=1.0)
    assert dl.Dice(generalized=True) == dl.Dice(generalized=True, smooth=1e-8)
