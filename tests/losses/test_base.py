"""Test training with several labels per image and with the Dice loss, on one or more ranks."""

import numpy as np
import pytest
from image_sets import ReadArrays
from single_rank import numbers

import mpidl as dl
from mpidl.errors import UserError
from mpidl.training.files import checkpoint
from mpidl.training.files.model_file import weights_sha256

SIDE, LABELS, CLASSES = 6, 3, 3
pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture(scope="module")
def world():
    return dl.World(threads=1)


def pixels_of(count):
    return numbers("label losses", count, 1, SIDE, SIDE, low=0, high=255).astype(np.uint8)


def with_labels(count=90, dtype=np.int32):
    """Return images with three targets: whether each third of the rows is brighter than average."""
    images = pixels_of(count)
    means = images.reshape(count, LABELS, -1).mean(axis=2)
    targets = (means > means.mean(axis=0)).astype(dtype)
    return dl.ArrayDatastore(images, classes=["top", "middle", "bottom"], targets=targets)


def with_pixel_labels(count=90, classes=CLASSES):
    images = pixels_of(count)
    return ReadArrays(images, (images[:, 0] // (255 // classes + 1)).astype(np.int32))


def to_labels(outputs=LABELS, sigmoid=True):
    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(outputs)]
    return dl.Network([*layers, *[dl.Sigmoid()] * sigmoid], (1, SIDE, SIDE), seed=1)


def to_pixels(outputs=CLASSES):
    layers = [dl.Conv2D(3, 8, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Conv2D(1, outputs)]
    return dl.Network(layers, (1, SIDE, SIDE), seed=1)


def trained(world, net, store, out=None, resume=None, **options):
    options = {"epochs": 3, "batch_size": 40, "learning_rate": 0.1, "verbose": "off"} | options
    options = dl.TrainingOptions(**options)
    dl.train(net, store, options, world=world, out=out, resume=resume)
    return weights_sha256(net)


def test_several_labels_are_learned(world):
    store, net = with_labels(), to_labels()
    trained(world, net, store, loss="binary-crossentropy", validation=store, epochs=20)
    assert net.classes == ("top", "middle", "bottom")
    evaluation = dl.evaluate(net, store, world=world, loss="binary-crossentropy", batch_size=33)
    p = dl.predict(net, store, world=world).astype(np.float64)
    targets = store.targets(np.arange(90))
    assert evaluation.accuracy == ((p > 0.5) == targets).mean() > 0.9
    losses = -np.where(targets, np.log(p), np.log1p(-p))
    assert evaluation.loss == pytest.approx(losses.mean(), rel=1e-5)
    assert p.min() >= 0 and p.max() <= 1  # predict applies no softmax after a sigmoid
    with pytest.raises(UserError, match="found one for several labels per image"):
        dl.classify(net, store, world=world)


def test_the_sigmoid_of_the_network_does_not_change_the_training(world):
    options = {"loss": "binary-crossentropy", "positive_weights": [1, 2, 0.5], "focal_gamma": 1}
    hashes = {
        trained(world, to_labels(sigmoid=sigmoid), with_labels(dtype=dtype), **options)
        for sigmoid in (True, False)
        for dtype in (np.int32, np.float32, np.uint8, bool)
    }
    weighted = dl.BinaryCrossEntropy([1, 2, 0.5], focal_gamma=1)
    assert hashes == {trained(world, to_labels(), with_labels(), loss=weighted)}
    assert hashes != {trained(world, to_labels(), with_labels(), loss="binary-crossentropy")}


def test_balanced_positive_weights(world):
    store = with_labels(60)
    store._targets[:30, 1] = 0
    store._targets[:, 2] = 0
    positives = store._targets.sum(axis=0)
    loss = dl.BinaryCrossEntropy("balanced").for_images(store, LABELS, world)
    expected = [(60 - positives[0]) / positives[0], (60 - positives[1]) / positives[1], 1]
    assert loss.positive_weights == tuple(expected)
    options = {"loss": "binary-crossentropy", "positive_weights": "balanced"}
    assert trained(world, to_labels(), store, **options) == trained(
        world, to_labels(), store, loss=loss
    )


def test_one_output_for_two_classes(world):
    """A network with one output learns two classes, whose labels become targets 0 and 1."""
    images = pixels_of(80)
    labels = (images[:, 0, :3].mean(axis=(1, 2)) > 127).astype(int)
    store = dl.ArrayDatastore(images, labels, ["dark", "bright"])
    targets = dl.ArrayDatastore(images, targets=labels)
    net = to_labels(1)
    hashes = [
        trained(world, n, s, loss="binary-crossentropy")
        for n, s in ((net, store), (to_labels(1), targets))
    ]
    assert hashes[0] == hashes[1]
    assert net.classes == ("bright",)
    evaluation = dl.evaluate(net, store, world=world, loss="binary-crossentropy")
    p = dl.predict(net, store, world=world)
    assert evaluation.accuracy == ((p[:, 0] > 0.5) == labels).mean()


def test_ignored_labels_do_not_count(world):
    store = with_labels()
    store._targets[::2, 1] = -1
    net, options = to_labels(), {"loss": "binary-crossentropy", "ignore_label": -1}
    trained(world, net, store, **options)
    loss = dl.BinaryCrossEntropy(ignore_label=-1)
    evaluation = dl.evaluate(net, store, world=world, loss=loss, batch_size=32)
    p, t = dl.predict(net, store, world=world).astype(np.float64), store._targets
    assert evaluation.accuracy == ((p > 0.5) == t)[t >= 0].mean()
    losses = -np.where(t == 1, np.log(p), np.log1p(-p))[t >= 0]
    assert evaluation.loss == pytest.approx(losses.mean(), rel=1e-5)
    with pytest.raises(UserError, match="expected labels from 0 to 1, found -1"):
        trained(world, to_labels(), store, loss="binary-crossentropy")


@pytest.mark.parametrize(
    ("loss", "outputs"),
    [(loss, CLASSES) for loss in ("dice", "crossentropy+dice", "tversky")]
    + [("dice", 1), ("tversky", 1)],
)
def test_a_loss_of_the_overlap_is_learned(world, loss, outputs):
    store, net = with_pixel_labels(classes=max(outputs, 2)), to_pixels(outputs)
    before = dl.evaluate(net, store, world=world, loss=loss)
    trained(world, net, store, loss=loss, validation=store, epochs=15)
    after = dl.evaluate(net, store, world=world, loss=loss, batch_size=33)
    assert after.loss < 0.7 * before.loss and after.accuracy > 0.8
    scores = dl.predict(net, store, world=world, softmax=False)
    predicted = scores.argmax(axis=1) if outputs > 1 else scores[:, 0] > 0
    assert after.accuracy == pytest.approx((predicted == store.values).mean(), rel=1e-12)


RUNS = {
    "labels": (
        to_labels,
        with_labels,
        {"loss": "binary-crossentropy", "positive_weights": "balanced"},
    ),
    "ignored": (to_labels, with_labels, {"loss": "binary-crossentropy", "ignore_label": -1}),
    "dice": (to_pixels, with_pixel_labels, {"loss": "dice", "class_weights": [0, 1, 1]}),
    "tversky": (to_pixels, with_pixel_labels, {"loss": dl.Tversky([0, 1, 2], alpha=0.4)}),
    "sum": (
        to_pixels,
        with_pixel_labels,
        {"loss": "crossentropy+dice", "class_weights": "balanced", "ignore_label": 255},
    ),
}


@pytest.mark.slow_on_ranks
@pytest.mark.parametrize("run", RUNS)
def test_a_stopped_and_resumed_run_has_the_same_weights(world, tmp_path, run):
    build, data, options = RUNS[run]
    out, store = world.broadcast(str(tmp_path)), data()
    expected = trained(world, build(), store, **options)
    trained(world, build(), store, out=out, max_iterations=4, **options)
    record = world.broadcast(checkpoint.load(out) if world.rank == 0 else None)
    assert trained(world, build(), store, resume=record, **options) == expected


@pytest.mark.parametrize("run", RUNS)
def test_one_thread_and_two_give_the_same_weights(world, run):
    """One thread, two threads, eager and replayed steps give the same weights."""
    build, data, options = RUNS[run]
    expected = trained(world, build(), data(), **options)
    assert trained(world, build(), data(), **options, graphs="off") == expected
    two = dl.World(threads=2) if world.size == 1 else world
    assert trained(two, build(), data(), **options) == expected


@pytest.mark.parametrize(
    ("net", "store", "loss", "message"),
    [
        (
            to_labels(2),
            with_labels,
            "binary-crossentropy",
            r"outputs of shape \(3,\), like the targets",
        ),
        (to_labels(), lambda: dl.ArrayDatastore(pixels_of(9)), "binary-crossentropy", "found none"),
        (
            to_labels(),
            lambda: dl.ArrayDatastore(pixels_of(9), np.arange(9) % 3),
            "binary-crossentropy",
            "expected a network with one output",
        ),
        (
            to_labels(),
            lambda: with_labels(dtype=np.float32),
            dl.BinaryCrossEntropy(ignore_label=-1),
            "ignore_label -1: expected whole numbers as targets",
        ),
        (to_labels(), with_labels, dl.BinaryCrossEntropy([1, 2]), "a number for each of 3 labels"),
        (to_pixels(), lambda: with_labels(), "dice", r"outputs \(K, 3\)"),
        (
            to_pixels(1),
            lambda: with_pixel_labels(classes=2),
            "crossentropy+dice",
            "found one output",
        ),
        (to_pixels(1), with_pixel_labels, dl.Dice(ignore_label=1), r"outside 0\.\.1"),
        (to_pixels(), with_pixel_labels, dl.Dice([1, 2]), "a number for each of 3 classes"),
        (to_pixels(), with_pixel_labels, dl.Tversky(ignore_label=2), r"outside 0\.\.2"),
    ],
)
def test_data_that_do_not_fit_are_refused(world, net, store, loss, message):
    with pytest.raises(UserError, match=message):
        trained(world, net, store(), loss=loss)


def test_targets_beyond_0_and_1_are_named(world):
    store = with_labels(dtype=np.float32)
    store._targets[41, 1] = 1.5
    with pytest.raises(UserError, match="image 41: expected labels from 0 to 1, found 1.5"):
        trained(world, to_labels(), store, loss="binary-crossentropy")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dl.BinaryCrossEntropy("even"), "expected numbers or 'balanced'"),
        (lambda: dl.BinaryCrossEntropy([1, -1]), "expected numbers >= 0"),
        (lambda: dl.BinaryCrossEntropy(ignore_label=1), "other than 0 and 1"),
        (lambda: dl.BinaryCrossEntropy(focal_gamma=-1), "focal_gamma must be"),
        (lambda: dl.Dice("balanced"), "expected numbers for the Dice loss"),
        (lambda: dl.Dice([0, 0]), "expected numbers >= 0"),
        (lambda: dl.Dice(smooth=-1), "smooth must be"),
        (lambda: dl.Tversky("balanced"), "expected numbers for the Tversky loss"),
        (lambda: dl.Tversky(alpha=-0.1), "Tversky: expected numbers alpha and beta >= 0"),
        (lambda: dl.Tversky(alpha=0, beta=0), "not both 0, got 0 and 0"),
        (
            lambda: dl.Dice(cross_entropy=dl.CrossEntropy(ignore_label=9)),
            "expected the ignore_label",
        ),
        (
            lambda: dl.TrainingOptions(loss="dice", focal_gamma=1),
            "--focal-gamma 1.0: expected the loss crossentropy, binary-crossentropy or",
        ),
        (
            lambda: dl.TrainingOptions(positive_weights=[1, 2]),
            "--positive-weights .*: expected the loss binary-crossentropy, found crossentropy",
        ),
    ],
)
def test_unusable_arguments_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
