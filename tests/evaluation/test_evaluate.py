"""What a network gives and how good it is, on any number of ranks, against plain NumPy."""

import csv
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.data.datastore import Datastore
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
    """{layer: what it gives}, in float64, by plain loops and sums over windows."""
    p = {
        name: np.asarray(value, np.float64)
        for name, value in {**net.parameters, **net.state}.items()
    }
    x, found = images.astype(np.float64) / 255, {}
    windows = np.lib.stride_tricks.sliding_window_view
    found["conv1"] = np.einsum("nchwrs,kcrs->nkhw", windows(x, (3, 3), (2, 3)), p["conv1.weight"])
    found["conv1"] += p["conv1.bias"][:, None, None]
    mean, variance, gamma, beta = (
        p[f"batchnorm1.{name}"][:, None, None] for name in ("mean", "variance", "gamma", "beta")
    )
    found["batchnorm1"] = (found["conv1"] - mean) / np.sqrt(variance + 1e-5) * gamma + beta
    found["relu1"] = np.maximum(found["batchnorm1"], 0)
    found["maxpool1"] = windows(found["relu1"], (2, 2), (2, 3))[:, :, ::2, ::2].max((4, 5))
    flat = found["maxpool1"].reshape(len(x), -1)
    found["dense1"] = flat @ p["dense1.weight"].T + p["dense1.bias"]
    return found


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


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


def test_arrays_and_worlds(world):
    """An array is a datastore; one image is an array of one; all ranks are the world by default."""
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
    found = dl.evaluate(net, store, world=world, top_k=2, confusion=True)
    assert found[:4] == (0, 0, 0, 0) and found.confusion.counts.sum() == 0


def test_on_rank_0_alone(world):
    found = dl.predict(small(), labelled(40), world=world, everywhere=False)
    assert (found is None) == (world.rank > 0)
    found = dl.activations(small(), labelled(40), "conv1", world=world, everywhere=False)
    assert (found is None) == (world.rank > 0)


@pytest.mark.parametrize("fuse", [True, False])
def test_activations(fuse, world):
    """Of every layer, also of those that run as one op; the last one's are the outputs."""
    net, store = small(), labelled(35)
    net.fuse = fuse
    expected = by_layer(net, store.images)
    for layer in net.layer_names:
        found = dl.activations(net, store, layer, world=world, batch_size=20)
        np.testing.assert_allclose(found, expected[layer], atol=1e-5, err_msg=layer)
    assert np.array_equal(found, dl.predict(net, store, world=world, batch_size=20, softmax=False))


def test_activations_of_branches(world):
    """What a layer depends on is not all that stands before it."""
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
    assert part.layer_names == ["right", "bent"] and list(part.parameters) == [
        "right.weight",
        "right.bias",
    ]
    again = dl.Network.from_spec(part.spec(), SHAPE)  # the layers say what they read
    assert again.layer_names == part.layer_names and again.reads == part.reads
    found = dl.activations(net, store, "bent", world=world)
    np.testing.assert_allclose(found, np.tanh(right), atol=1e-5)
    left = dl.activations(net, store, "left", world=world)
    both = dl.activations(net, store, "both", world=world)
    np.testing.assert_allclose(both, left + found, atol=1e-5)
    assert net.layer_names == ["left", "right", "bent", "both", "top"]  # and is what it was


def test_an_unknown_layer(world):
    with pytest.raises(KeyError, match="no layer con1: did you mean conv1"):
        dl.activations(small(), labelled(3), "con1", world=world)


def test_evaluation(world):
    """77 images: 2 mini-batches of 33, and 11."""
    net, store = small(), labelled(77)
    expected = by_layer(net, store.images)["dense1"]
    found = dl.evaluate(net, store, world=world, batch_size=33, top_k=2, confusion=True)
    probabilities = softmax(expected)[np.arange(77), store.labels]
    order = np.argsort(-expected, axis=1, kind="stable")
    assert found.images == 77
    assert found.accuracy == (order[:, 0] == store.labels).mean()
    assert found.top_k == (order[:, :2] == store.labels[:, None]).any(axis=1).mean()
    assert found.loss == pytest.approx(-np.log(probabilities).mean(), abs=1e-6)
    counts = np.zeros((CLASSES, CLASSES), int)
    for label, k in zip(store.labels, order[:, 0], strict=True):
        counts[label, k] += 1
    assert np.array_equal(found.confusion.counts, counts)
    assert found.confusion.classes == ("a", "b", "c", "d")
    assert found.confusion.accuracy == found.accuracy
    without = dl.evaluate(net, store, world=world, batch_size=33)
    assert without[:3] == found[:3] and without.top_k is None and without.confusion is None
    predicted = dl.classify(net, store, world=world)
    assert np.array_equal(dl.confusion_matrix(store.labels, predicted).counts, counts)


def test_top_k_may_be_a_whole_number_of_numpy(world):
    net, store = small(), labelled(40)
    found = dl.evaluate(net, store, world=world, top_k=np.int64(2))
    assert found == dl.evaluate(net, store, world=world, top_k=2)


def test_top_k_of_all_is_everything(world):
    found = dl.evaluate(small(), labelled(21), world=world, top_k=CLASSES)
    assert found.top_k == 1.0


def test_places():
    """Of equal scores the first class comes first, as `argmax` has it; NaN is no place at all."""
    scores = np.array([[1, 3, 2], [2, 2, 2], [2, 2, 2], [1, np.nan, 0]], np.float32)
    assert evaluate.places(scores, np.array([1, 0, 2, 1])).tolist() == [0, 0, 2, 3]
    assert evaluate.places(np.zeros((0, 3)), np.zeros(0, int)).tolist() == []


def test_softmax_at_the_end_is_not_applied_twice(world):
    net, store = small(), labelled(18)
    ended = dl.Network([*net.layers, dl.Softmax()], SHAPE)
    ended.parameters, ended.state = net.parameters, net.state
    assert np.array_equal(
        dl.predict(ended, store, world=world), dl.predict(net, store, world=world)
    )


class Denoise(Datastore):
    """Images whose targets are themselves with less noise; or a vector, or a number, of each."""

    image_shape = SHAPE

    def __init__(self, count, shape):
        self.images, self.targets_shape = pixels(count), shape
        self.wanted = numbers("targets", count, *shape, dtype=np.float32)

    def __len__(self):
        return len(self.images)

    def read(self, indices):
        return self.images[indices]

    def targets(self, indices):
        return self.wanted[indices]


@pytest.mark.parametrize(("shape", "last"), [(SHAPE, None), ((3,), 3), ((), 1), ((1,), 1)])
def test_regression_errors(shape, last, world):
    store = Denoise(43, shape)
    layers = [dl.Conv2D(3, 2, padding=1)] + ([] if last is None else [dl.Dense(last)])
    net = dl.Network(layers, SHAPE, seed=1)
    found = dl.regression_errors(net, store, world=world, batch_size=20)
    given = dl.predict(net, store, world=world)  # no softmax: the images have targets
    error = given.astype(np.float64).reshape(store.wanted.shape) - store.wanted
    assert found.images == 43
    assert found.rmse == pytest.approx(np.sqrt((error**2).mean()), rel=1e-12)
    assert found.mae == pytest.approx(np.abs(error).mean(), rel=1e-12)
    empty = dl.regression_errors(net, Denoise(0, shape), world=world)
    assert empty == (0.0, 0.0, 0)


def test_what_cannot_be_answered(world, tmp_path):
    net, store = small(), labelled(5)
    blank = dl.ArrayDatastore(pixels(5))
    wide = dl.ArrayDatastore(pixels(5), np.arange(5))
    image = dl.Network([dl.Conv2D(1, 2)], SHAPE)
    cases = [
        (lambda: dl.evaluate(net, blank, world=world), "the images have no labels"),
        (lambda: dl.evaluate(net, wide, world=world), "expected labels below 4, .* found 4"),
        (lambda: dl.evaluate(image, store, world=world), r"expected a network with outputs \(K,\)"),
        (lambda: dl.evaluate(net, store, world=world, top_k=5), "from 1 to 4, .* got 5"),
        (lambda: dl.evaluate(net, store, world=world, top_k=0), "from 1 to 4, .* got 0"),
        (lambda: dl.evaluate(net, store, world=world, top_k=True), "from 1 to 4, .* got True"),
        (lambda: dl.regression_errors(net, store, world=world), "the images have no targets"),
        (
            lambda: dl.regression_errors(net, Denoise(2, (3,)), world=world),
            r"expected targets of shape \(4,\), as the network's outputs, found \(3,\)",
        ),
        (
            lambda: dl.predict(net, np.zeros((3, 1, 6, 5)), world=world),
            r"expected images of shape \(2, 6, 5\), which the network takes, found \(1, 6, 5\)",
        ),
        (lambda: dl.confusion_matrix([0, 1], [0]), "whole numbers of one shape"),
        (lambda: dl.confusion_matrix([0, 3], [0, 1], ["a", "b"]), "from 0 to 1, found 3"),
        (lambda: dl.confusion_matrix([0, -1], [0, 1]), "found -1"),
    ]
    for call, text in cases:
        with pytest.raises(dl.UserError, match=text) as caught:
            call()
        assert "\n" not in str(caught.value)


def confusion():
    return dl.confusion_matrix([0, 0, 0, 1, 1, 3], [0, 0, 1, 1, 0, 1], ["cat", "dog", "elk", "fox"])


def test_what_a_confusion_matrix_says():
    found = confusion()
    assert found.counts.tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0] * 4, [0, 1, 0, 0]]
    assert found.accuracy == 0.5
    np.testing.assert_array_equal(found.recall, [2 / 3, 1 / 2, np.nan, 0])
    np.testing.assert_array_equal(found.precision, [2 / 3, 1 / 3, np.nan, np.nan])
    assert found.most_confused(2) == [("cat", "dog", 1), ("dog", "cat", 1)]
    assert str(found).splitlines() == [
        "true \\ predicted     cat     dog  elk  fox  recall",
        "cat                    2       1    0    0  0.6667",
        "dog                    1       1    0    0  0.5000",
        "elk                    0       0    0    0",
        "fox                    0       1    0    0  0.0000",
        "precision         0.6667  0.3333            0.5000",
    ]


def test_representations_fit_a_line():
    assert repr(confusion()) == "Confusion(4 classes, 6 labels, accuracy 0.5000)"
    evaluation = dl.Evaluation(0.5, 0.123456789, 6)
    assert repr(evaluation) == "Evaluation(accuracy=0.5, loss=0.123457, images=6)"
    evaluation = dl.Evaluation(None, 2.0, 6, top_k=0.75, confusion=confusion())
    assert repr(evaluation) == (
        "Evaluation(accuracy=None, loss=2, images=6, top_k=0.75, "
        "confusion=Confusion(4 classes, 6 labels, accuracy 0.5000))"
    )
    errors = dl.RegressionErrors(0.25, np.float64(0.125), 3)
    assert repr(errors) == str(errors) == "RegressionErrors(rmse=0.25, mae=0.125, images=3)"


class Table(HTMLParser):
    """The rows of the one table of a document, as lists of (tag, style, text)."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.stack = [], []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag, attributes):
        self.stack.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append([tag, dict(attributes).get("style"), ""])

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, text):
        if self.stack[-1:] in (["th"], ["td"]):
            self.rows[-1][-1][2] += text


def test_a_confusion_matrix_in_a_notebook():
    """The cells of the text, names escaped; counts are shaded by their part of the row."""
    matrix = dl.confusion_matrix([0, 0, 0, 1], [0, 0, 1, 1], ["<b>cat", "dog & co"])
    text = matrix._repr_html_()
    assert "<b>" not in text
    rows = Table(text).rows
    assert [[cell for *_, cell in row] for row in rows] == [
        [str(cell) for cell in row] for row in matrix.rows()
    ]
    tags = [[tag for tag, *_ in row] for row in rows]
    assert tags == [["th"] * 4, *[["th", "td", "td", "td"]] * 3]
    styles = [[style for _, style, _ in row] for row in rows]
    assert styles[0] == styles[3] == [None] * 4 and styles[1][0] is styles[1][3] is None
    alphas = [re.search(r", ([0-9.]+)\)", style)[1] for row in styles[1:3] for style in row[1:3]]
    assert alphas == ["0.53", "0.27", "0.00", "0.80"]


def test_many_classes_in_a_notebook():
    labels = np.arange(50)
    matrix = dl.confusion_matrix(labels, np.where(labels == 7, 9, labels))
    text = matrix._repr_html_()
    assert text.startswith("<p>50 classes, accuracy 0.9800; most confused:</p>")
    cells = [[cell for *_, cell in row] for row in Table(text).rows]
    assert cells == [["class", "taken for", "times"], ["7", "9", "1"]]


def test_pixel_labels():
    """Labels of any shape: one a pixel, say."""
    labels = np.arange(24).reshape(2, 3, 4) % 3
    assert dl.confusion_matrix(labels, labels).counts.tolist() == np.diag([8] * 3).tolist()


def test_many_classes_are_not_all_printed():
    labels = np.arange(50)
    found = dl.confusion_matrix(labels, np.where(labels == 7, 9, labels))
    assert str(found).splitlines() == [
        "50 classes, accuracy 0.9800; most confused:",
        "class  taken for  times",
        "7              9      1",
    ]


def test_a_confusion_matrix_in_a_table(tmp_path):
    confusion().save(tmp_path / "a.csv")
    with open(tmp_path / "a.csv", newline="") as file:
        assert list(csv.reader(file)) == [[str(c) for c in row] for row in confusion().rows()]
    for name in ("a.txt", "a"):
        with pytest.raises(dl.UserError, match="is written as .csv or .png, found "):
            confusion().save(tmp_path / name)
    with pytest.raises(dl.UserError, match="cannot be written: No such file or directory"):
        confusion().save(tmp_path / "none" / "a.csv")


@pytest.mark.parametrize("classes", [2, 40, pytest.param(100, marks=pytest.mark.slow("jobs"))])
def test_a_confusion_matrix_in_a_picture(classes, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture")
    from PIL import Image

    labels = np.arange(3 * classes) % classes
    found = dl.confusion_matrix(labels, labels[::-1])
    found.save(tmp_path / "a.png")
    if classes == 2:
        found.save(tmp_path / "b.PNG")
        assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.PNG").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG" and min(image.size) > 400
        assert len(image.convert("L").getcolors(256)) > 2


def test_the_title_of_a_picture_counts_labels(monkeypatch, tmp_path):
    """Of which an image may have many."""
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture")
    from matplotlib.axes import Axes

    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda self, text, **how: titles.append(text))
    labels = np.arange(2 * 8 * 8).reshape(2, 8, 8) % 4
    dl.confusion_matrix(labels, labels).save(tmp_path / "a.png")
    assert titles == ["accuracy 1.0000 of 128 labels"]


def test_the_set_may_be_of_targets_and_pixel_labels(world):
    """A network with scores for each pixel: a class for each."""
    net, store = dl.Network([dl.Conv2D(1, 3)], SHAPE, seed=2), labelled(9)
    expected = dl.predict(net, store, world=world).argmax(axis=1)
    found = dl.classify(net, store, world=world)
    assert found.shape == (9, 6, 5) and np.array_equal(found, expected)


def test_by_batch_is_in_order(world):
    seen = []
    given = predict.by_batch(small(), labelled(50), predict.labels, world=world, batch_size=20)
    for indices, values in given:
        assert (indices is None) == (values is None) == (world.rank > 0)
        seen.append(0 if indices is None else len(indices))
        assert indices is None or indices.tolist() == list(range(indices[0], indices[-1] + 1))
    assert seen == ([20, 20, 10] if world.rank == 0 else [0, 0, 0])
