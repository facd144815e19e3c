"""Test the options of the cross-entropy in training and evaluation."""

import re

import numpy as np
import pytest
from image_sets import ReadArrays
from single_rank import numbers

import mpidl as dl
from mpidl.data import target_counts
from mpidl.errors import UserError
from mpidl.training.files.model_file import weights_sha256

SIDE, CLASSES, IGNORED = 6, 3, 255
pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture(scope="module")
def world():
    return dl.World(threads=1)


def to_pixels():
    layers = [dl.Conv2D(3, 8, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Conv2D(1, CLASSES)]
    return dl.Network(layers, (1, SIDE, SIDE), seed=1)


def to_classes():
    return dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(CLASSES)], (1, SIDE, SIDE), seed=1)


def labelled_pixels(count=90):
    """Return images with a label for each pixel, except for the pixels of a corner."""
    images = numbers("label pixels", count, 1, SIDE, SIDE, low=0, high=255).astype(np.uint8)
    labels = (images[:, 0] // 86).astype(np.int32)
    labels[:, :2, :3] = IGNORED
    return ReadArrays(images, labels)


def pictures(counts=(50, 30, 10)):
    images = numbers("pictures", sum(counts), 1, SIDE, SIDE, low=0, high=255).astype(np.uint8)
    return dl.ArrayDatastore(images, np.repeat(np.arange(len(counts)), counts))


def trained(world, net, store, **options):
    options = {"epochs": 2, "batch_size": 40, "learning_rate": 0.1, "verbose": "off"} | options
    return dl.train(net, store, dl.TrainingOptions(**options), world=world)


def test_balanced_weights_are_those_of_scikit_learn():
    utilities = pytest.importorskip("sklearn.utils", reason="scikit-learn is not installed")
    store = pictures()
    expected = utilities.compute_class_weight(
        "balanced", classes=np.arange(CLASSES), y=np.asarray(store.labels)
    )
    weights = dl.CrossEntropy("balanced").for_images(store, CLASSES).class_weights
    assert weights == pytest.approx(tuple(expected))


def test_balanced_weights_count_each_class_alike():
    loss = dl.CrossEntropy("balanced").for_images(pictures((30, 10, 0)), CLASSES)
    assert loss.class_weights == (40 / (3 * 30), 40 / (3 * 10), 0)


def test_options_are_the_loss_of_python(world):
    hashes = set()
    for options in (
        {"class_weights": "balanced", "label_smoothing": 0.1},
        {"class_weights": [0.6, 1, 3], "label_smoothing": 0.1},
        {"loss": dl.CrossEntropy((0.6, 1, 3), label_smoothing=0.1)},
        {"loss": dl.CrossEntropy("balanced", 0.1)},
    ):
        net = to_classes()
        trained(world, net, pictures(), **options)
        hashes.add(weights_sha256(net))
    assert len(hashes) == 1
    plain = to_classes()
    trained(world, plain, pictures())
    assert weights_sha256(plain) not in hashes


def test_ignored_pixels_do_not_count(world):
    """Ignored pixels affect neither training nor accuracy."""
    store, net = labelled_pixels(), to_pixels()
    labels = store.targets(np.arange(len(store)))
    trained(world, net, store, ignore_label=IGNORED, validation=store)
    loss = dl.CrossEntropy(ignore_label=IGNORED)
    evaluation = dl.evaluate(net, store, world=world, loss=loss, confusion=True)
    scores = dl.predict(net, store, world=world, softmax=False)
    counted = labels != IGNORED
    right = scores.argmax(axis=1)[counted] == labels[counted]
    assert evaluation.accuracy == right.mean()
    z = np.moveaxis(scores, 1, -1)[counted].astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    losses = np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(z)), labels[counted]]
    assert evaluation.loss == pytest.approx(losses.mean(), rel=1e-6)
    assert evaluation.confusion.counts.sum() == counted.sum()
    with pytest.raises(UserError, match="expected labels from 0 to 2, found 255"):
        trained(world, to_pixels(), store)


def test_an_evaluation_weighs_mini_batches_by_their_labels(world):
    net, store = to_classes(), pictures()
    loss = dl.CrossEntropy([0.5, 1, 4])
    expected, parts = (
        dl.evaluate(net, store, world=world, loss=loss, batch_size=n).loss for n in (90, 16)
    )
    assert expected == pytest.approx(parts, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_weights": [1, 2]}, "class_weights: expected a number for each of 3 classes"),
        ({"class_weights": [0, 0, 0]}, "class_weights: expected numbers >= 0"),
        ({"class_weights": "even"}, "class_weights must be balanced, or a number"),
        ({"label_smoothing": 1.0}, "label_smoothing must be"),
        ({"focal_gamma": 2, "label_smoothing": 0.1}, "expected at most one of them"),
        ({"ignore_label": 2}, "ignore_label 2: expected a label outside 0..2"),
        (
            {"loss": "mse", "label_smoothing": 0.1},
            "expected the loss crossentropy or crossentropy+dice, found mse",
        ),
    ],
)
def test_unusable_options_are_refused(world, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        trained(world, to_classes(), pictures(), **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_weights": "even"}, "expected numbers or 'balanced'"),
        ({"label_smoothing": -0.1}, "label_smoothing must be"),
        ({"focal_gamma": float("inf")}, "focal_gamma must be"),
    ],
)
def test_unusable_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        dl.CrossEntropy(**arguments)


@pytest.mark.parametrize("count", [90, 1])
def test_balanced_weights_of_pixels_count_those_of_all_ranks(world, count, monkeypatch):
    monkeypatch.setattr(target_counts, "CHUNK", 7)
    store = labelled_pixels(count)
    labels = store.targets(np.arange(count))
    counts = np.bincount(labels[labels < CLASSES], minlength=CLASSES)
    expected = np.where(counts, counts.sum() / (CLASSES * np.maximum(counts, 1)), 0)
    loss = dl.CrossEntropy("balanced").for_images(store, CLASSES, world)
    assert loss.class_weights == tuple(expected)
    trained(world, to_pixels(), store, ignore_label=IGNORED, class_weights="balanced", epochs=1)
