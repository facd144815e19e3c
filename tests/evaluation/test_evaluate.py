"""Compare predictions and metrics of a network, on any number of ranks, with NumPy."""

import re

import numpy as np
import pytest
from image_sets import ReadArrays, refusal
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.backends import settings
from mpidl.errors import UserError
from mpidl.evaluation import evaluate, predict

SHAPE, CLASSES = (2, 6, 5), 4


def small(seed=0, outputs=CLASSES):
    layers = [dl.Conv2D(3, 5), dl.BatchNorm(), dl.ReLU(), dl.MaxPool2D(2), dl.Dense(outputs)]
    net = dl.Network(layers, SHAPE, seed=seed)
    means = numbers("running means", 5, dtype=np.float32)
    net.state = {"batchnorm1.mean": means, "batchnorm1.variance": 1 + means**2}
    return net


def pixels(count):
    return numbers("pixels", count, *SHAPE, low=0, high=256).astype(np.uint8)


def labelled(count):
    return dl.ArrayDatastore(pixels(count), np.arange(count) * 5 % CLASSES, list("abcd"))


def by_layer(net, images):
    """Return {layer: outputs} in float64, computed by sums over windows."""
    p = {name: np.float64(value) for name, value in {**net.parameters, **net.state}.items()}
    x, outputs = images.astype(np.float64) / 255, {}
    windows = np.lib.stride_tricks.sliding_window_view
    outputs["conv1"] = np.einsum("nchwrs,kcrs->nkhw", windows(x, (3, 3), (2, 3)), p["conv1.weight"])
    outputs["conv1"] += p["conv1.bias"][:, None, None]
    mean, variance, gamma, beta = (
        p[f"batchnorm1.{name}"][:, None, None] for name in ("mean", "variance", "gamma", "beta")
    )
    outputs["batchnorm1"] = (outputs["conv1"] - mean) / np.sqrt(variance + 1e-5) * gamma + beta
    outputs["relu1"] = np.maximum(outputs["batchnorm1"], 0)
    outputs["maxpool1"] = windows(outputs["relu1"], (2, 2), (2, 3))[:, :, ::2, ::2].max((4, 5))
    flat = outputs["maxpool1"].reshape(len(x), -1)
    outputs["dense1"] = flat @ p["dense1.weight"].T + p["dense1.bias"]
    return outputs


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def test_classify_can_give_names(world):
    net, store = small(seed=2), labelled(37)
    with pytest.raises(UserError, match="^classify: names=True: expected a network with class na"):
        dl.classify(net, store, world=world, names=True)
    net.classes = ("ape", "bee", "cow", "dog")
    indices = dl.classify(net, store, world=world)
    names = dl.classify(net, store, world=world, names=True)
    assert names.tolist() == [net.classes[i] for i in indices] and len(set(names)) > 1
    at_rank_0 = dl.classify(net, store, world=world, names=True, everywhere=False)
    assert (at_rank_0 is None) == (world.rank > 0)
    assert dl.classify(net, pixels(0), world=world, names=True).shape == (0,)
    with pytest.raises(TypeError, match="^classify: unknown argument MiniBatchSize: did you mean "):
        dl.classify(net, store, MiniBatchSize=3)


@pytest.mark.parametrize("count", [1, 37, 100])
def test_scores_and_labels(count, world):
    net, store = small(), labelled(count)
    expected = by_layer(net, store.images)["dense1"]
    scores = dl.predict(net, store, world=world, batch_size=33)
    assert scores.dtype == np.float32 and scores.shape == (count, CLASSES)
    np.testing.assert_allclose(scores, softmax(expected), atol=2e-6)
    raw = dl.predict(net, store, world=world, batch_size=33, softmax=False)
    np.testing.assert_allclose(raw, expected, atol=1e-5)
    assert np.array_equal(dl.classify(net, store, world=world), expected.argmax(axis=1))


@pytest.mark.parametrize("fuse", [True, False])
def test_scores_in_bf16(fuse, world, monkeypatch):
    """Scores and activations are float32 numbers near the exact ones."""
    monkeypatch.setattr(settings, "precision", "bf16")
    net, store = small(), labelled(100)
    net.fuse = fuse
    expected = by_layer(net, store.images)
    for layer in net.layer_names:
        outputs = dl.activations(net, store, layer, world=world, batch_size=33)
        assert outputs.dtype == np.float32
        error = abs(outputs - expected[layer]).max() / abs(expected[layer]).max()
        assert error < 2**-7, f"{layer}: {error}"
    scores = dl.predict(net, store, world=world, batch_size=33)
    np.testing.assert_allclose(scores, softmax(expected["dense1"]), atol=0.02)
    labels = np.arange(100) * 5 % CLASSES
    accuracy = dl.evaluate(net, store, world=world, batch_size=33).accuracy
    assert accuracy == np.mean(scores.argmax(axis=1) == labels)


def test_arrays_and_worlds(world):
    """Arrays and single images must be accepted, and the default world must have all ranks."""
    net, store = small(), labelled(20)
    scores = dl.predict(net, store, world=world)
    assert np.array_equal(dl.predict(net, store.images), scores)
    floats = store.images / np.float32(255)
    assert np.array_equal(dl.predict(net, floats, world=world), scores)
    assert np.array_equal(dl.predict(net, store.images[3], world=world), scores[3:4])


def test_no_images(world):
    net, store = small(), labelled(0)
    assert dl.predict(net, store, world=world).shape == (0, CLASSES)
    assert dl.classify(net, store, world=world).shape == (0,)
    assert dl.activations(net, store, "relu1", world=world).shape == (0, 5, 4, 3)
    text = refusal(dl.evaluate, net, store, world=world, top_k=2, confusion=True)
    assert text == "arrays: 0 images of 2x6x5 in 4 classes: expected images, found none"


def test_results_only_on_rank_0(world):
    for function, layer in ((dl.predict, []), (dl.activations, ["conv1"])):
        result = function(small(), labelled(40), *layer, world=world, everywhere=False)
        assert (result is None) == (world.rank > 0)


@pytest.mark.parametrize("fuse", [True, False])
def test_activations(fuse, world):
    """Fused layers must have activations. Those of the last layer must equal the outputs."""
    net, store = small(), labelled(35)
    net.fuse = fuse
    expected = by_layer(net, store.images)
    for layer in net.layer_names:
        outputs = dl.activations(net, store, layer, world=world, batch_size=20)
        np.testing.assert_allclose(outputs, expected[layer], atol=1e-5, err_msg=layer)
    assert np.array_equal(
        outputs, dl.predict(net, store, world=world, batch_size=20, softmax=False)
    )


def test_activations_of_branches(world):
    """Only layers on which the requested layer depends must be computed."""
    layers = [
        dl.Conv2D(3, 4, padding=1, name="left"),
        dl.Conv2D(1, 4, name="right", after="images"),
        dl.Tanh(name="bent"),
        dl.Add(inputs=("left", "bent"), name="both"),
        dl.Dense(3, name="top"),
    ]
    net, store = dl.Network(layers, SHAPE, seed=3), labelled(19)
    images = store.images / np.float32(255)
    weight, bias = net.parameters["right.weight"], net.parameters["right.bias"]
    right = np.einsum("nchw,kc->nkhw", images, weight[:, :, 0, 0]) + bias[:, None, None]
    part = net.up_to("bent")
    assert part.layer_names == ["right", "bent"]
    assert list(part.parameters) == ["right.weight", "right.bias"]
    copy = dl.Network.from_spec(part.spec(), SHAPE)  # the layers name their inputs
    assert copy.layer_names == part.layer_names and copy.reads == part.reads
    names = ("left", "bent", "both")
    left, bent, both = (dl.activations(net, store, name, world=world) for name in names)
    np.testing.assert_allclose(bent, np.tanh(right), atol=1e-5)
    np.testing.assert_allclose(both, left + bent, atol=1e-5)
    assert net.layer_names == ["left", "right", "bent", "both", "top"]  # unchanged


def test_an_unknown_layer(world):
    with pytest.raises(KeyError, match="no layer con1: did you mean conv1"):
        dl.activations(small(), labelled(3), "con1", world=world)


def test_evaluation(world):
    """77 images are evaluated as two mini-batches of 33 and one of 11."""
    net, store = small(), labelled(77)
    expected = by_layer(net, store.images)["dense1"]
    evaluation = dl.evaluate(net, store, world=world, batch_size=33, top_k=2, confusion=True)
    probabilities = softmax(expected)[np.arange(77), store.labels]
    order = np.argsort(-expected, axis=1, kind="stable")
    assert evaluation.images == 77
    assert evaluation.accuracy == (order[:, 0] == store.labels).mean()
    assert evaluation.top_k == (order[:, :2] == store.labels[:, None]).any(axis=1).mean()
    assert evaluation.loss == pytest.approx(-np.log(probabilities).mean(), abs=1e-6)
    counts = np.zeros((CLASSES, CLASSES), int)
    np.add.at(counts, (store.labels, order[:, 0]), 1)
    assert np.array_equal(evaluation.confusion.counts, counts)
    assert evaluation.confusion.classes == ("a", "b", "c", "d")
    assert evaluation.confusion.accuracy == evaluation.accuracy
    counts_of_images = []
    progress = counts_of_images.append
    plain = dl.evaluate(net, store, world=world, batch_size=33, progress=progress)
    assert counts_of_images == [33, 66, 77]
    assert plain[:3] == evaluation[:3] and plain.top_k is None and plain.confusion is None
    predicted = dl.classify(net, store, world=world)
    assert np.array_equal(dl.confusion_matrix(store.labels, predicted).counts, counts)


def test_top_k_may_be_an_integer_of_numpy_or_all_classes(world):
    net, store = small(), labelled(40)
    evaluation = dl.evaluate(net, store, world=world, top_k=np.int64(2))
    assert evaluation == dl.evaluate(net, store, world=world, top_k=2)
    assert dl.evaluate(net, store, world=world, top_k=CLASSES).top_k == 1.0


def test_places():
    """Equal scores must rank in class order, as in `argmax`, and NaN must rank last."""
    scores = np.array([[1, 3, 2], [2, 2, 2], [2, 2, 2], [1, np.nan, 0]], np.float32)
    assert evaluate.places(scores, np.array([1, 0, 2, 1])).tolist() == [0, 0, 2, 3]
    assert evaluate.places(np.zeros((0, 3)), np.zeros(0, int)).tolist() == []


def test_softmax_at_the_end_is_not_applied_twice(world):
    net, store = small(), labelled(18)
    with_softmax = dl.Network([*net.layers, dl.Softmax()], SHAPE)
    with_softmax.parameters, with_softmax.state = net.parameters, net.state
    scores = (dl.predict(network, store, world=world) for network in (with_softmax, net))
    assert np.array_equal(*scores)


def with_targets(count, shape):
    targets = numbers("targets", count, *shape, dtype=np.float32)
    return ReadArrays(pixels(count), targets)


@pytest.mark.parametrize(("shape", "last"), [(SHAPE, None), ((3,), 3), ((), 1), ((1,), 1)])
def test_regression_errors(shape, last, world):
    store = with_targets(43, shape)
    layers = [dl.Conv2D(3, 2, padding=1)] + ([] if last is None else [dl.Dense(last)])
    net = dl.Network(layers, SHAPE, seed=1)
    errors = dl.regression_errors(net, store, world=world, batch_size=20)
    outputs = all_images(world, net(blocked(world, store.images / np.float32(255))))
    predicted = dl.predict(net, store, world=world)  # no softmax, because the images have targets
    assert np.abs(predicted - outputs).max() < 1e-5 * np.abs(outputs).max()
    error = outputs.astype(np.float64).reshape(store.values.shape) - store.values
    assert errors.images == 43
    assert errors.rmse == pytest.approx(np.sqrt((error**2).mean()), rel=1e-12)
    assert errors.mae == pytest.approx(np.abs(error).mean(), rel=1e-12)
    text = refusal(dl.regression_errors, net, with_targets(0, shape), world=world)
    assert text.endswith(": expected images, found none")


def test_arguments_are_checked(world):
    net, store = small(), labelled(5)
    blank = dl.ArrayDatastore(pixels(5))
    wide = dl.ArrayDatastore(pixels(5), np.arange(5))
    image = dl.Network([dl.Conv2D(1, 2)], SHAPE)
    outputs = r"expected targets of shape \(4,\), like the network's outputs, found \(3,\)"
    shapes = r"of shape \(2, 6, 5\), which the network expects, found \(1, 6, 5\)"
    for function, network, data, options, text in (
        (dl.evaluate, net, blank, {}, "the images have no labels"),
        (dl.evaluate, net, wide, {}, "expected labels below 4, .* found 4"),
        (dl.evaluate, image, store, {}, r"expected a network with outputs \(K,\)"),
        *(
            (dl.evaluate, net, store, {"top_k": k}, f"from 1 to 4, .* got {k}")
            for k in (5, 0, True)
        ),
        (dl.regression_errors, net, store, {}, "the images have no targets"),
        (dl.regression_errors, net, with_targets(2, (3,)), {}, outputs),
        (dl.predict, net, np.zeros((3, 1, 6, 5)), {}, f"expected images {shapes}"),
    ):
        assert re.search(text, refusal(function, network, data, world=world, **options))


def test_representations_fit_a_line():
    matrix = dl.confusion_matrix([0, 0, 3], [0, 0, 1], list("abcd"))
    assert repr(matrix) == "Confusion(4 classes, 3 labels, accuracy 0.6667)"
    evaluation = dl.Evaluation(0.5, 0.123456789, 6)
    assert repr(evaluation) == "Evaluation(accuracy=0.5, loss=0.123457, images=6)"
    evaluation = dl.Evaluation(None, 2.0, 6, top_k=0.75, confusion=matrix)
    assert repr(evaluation) == (
        "Evaluation(accuracy=None, loss=2, images=6, top_k=0.75, "
        "confusion=Confusion(4 classes, 3 labels, accuracy 0.6667))"
    )
    errors = dl.RegressionErrors(0.25, np.float64(0.125), 3)
    assert repr(errors) == str(errors) == "RegressionErrors(rmse=0.25, mae=0.125, images=3)"


def test_classes_of_pixels(world):
    """A network with scores for each pixel must be evaluated pixel by pixel."""
    net, store = dl.Network([dl.Conv2D(1, 3)], SHAPE, seed=2), labelled(9)
    expected = dl.predict(net, store, world=world).argmax(axis=1)
    predicted = dl.classify(net, store, world=world)
    assert predicted.shape == (9, 6, 5) and np.array_equal(predicted, expected)


def test_by_batch_is_in_order(world):
    batches = predict.by_batch(small(), labelled(50), predict.labels, world=world, batch_size=20)
    indices = []
    for batch_indices, values in batches:
        assert (batch_indices is None) == (values is None) == (world.rank > 0)
        indices.append([] if batch_indices is None else batch_indices.tolist())
    expected = [list(range(20)), list(range(20, 40)), list(range(40, 50))]
    assert indices == (expected if world.rank == 0 else [[], [], []])
