"""Metrics of NaN and infinite scores, empty classes and ignored labels, against definitions.

A metric is never finite if its definition has no value in float64.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest

import mpidl as dl

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, for NaN

COUNT, K, IGNORED = 37, 3, 255
NAN, INF = np.nan, np.inf
SPECIAL = {  # {name: scores of image 20}
    "finite": (0.25, -1, 0.5),
    "nan": (NAN, 1, 2),
    "nan in the last class": (2, 1, NAN),
    "all nan": (NAN, NAN, NAN),
    "inf": (INF, 1, 2),
    "-inf": (1, -INF, 2),
    "all -inf": (-INF, -INF, -INF),
}


@pytest.fixture(scope="module")
def world():
    return dl.World(threads=1)


@dl.op
def special_numbers(x):
    y = np.select([x == 1000, x == 1001, x == 1002], [NAN, INF, -INF], x)
    return y.astype(x.dtype), lambda dy: (dy,)


@dataclass
class Scores(dl.Layer):
    """A layer whose outputs are its inputs, except for numbers that stand for NaN, inf and -inf."""

    def build(self, shape):
        return dl.Built(shape)

    def forward(self, x, context):
        return special_numbers(x)


def network(outputs, *pixels):
    """Return a network whose outputs (K,) or (K, H, W) are the pixels of its input."""
    layers = [Scores()] if pixels else [Scores(), dl.Flatten()]
    return dl.Network(layers, (outputs, *(pixels or (1, 1))))


def scores_with(special, shape=()):
    x = np.random.default_rng(5).uniform(-2, 2, (COUNT, K, *shape)).astype(np.float32)
    x.reshape(COUNT, K, -1)[20, :, 0] = SPECIAL[special]
    return x


def stored(x):
    """Return scores as images without NaN."""
    return np.select([np.isnan(x), x == INF, x == -INF], [1000, 1001, 1002], x).astype(np.float32)


def class_metrics(x, y):
    """Return the metrics of scores (n, K) and labels (n,), from their definitions."""
    if np.isnan(x).any() or not len(x):
        return dict.fromkeys(
            ("accuracy", "balanced-accuracy", "precision", "recall", "f1"), NAN
        ) | {name: NAN for name in ("iou", "dice", "roc-auc", "average-precision", "top-2")}
    predicted, rows = x.argmax(axis=1), {}
    for k in range(K):
        both = sum((predicted == k) & (y == k))
        actual, labelled = sum(predicted == k), sum(y == k)
        rows[k] = (both, actual, labelled)
    present = [row for row in rows.values() if row[1] + row[2]]
    mean = {
        "precision": np.mean([b / f if f else 0 for b, f, n in present]),
        "recall": np.mean([b / n if n else 0 for b, f, n in present]),
        "f1": np.mean([2 * b / (f + n) for b, f, n in present]),
        "iou": np.mean([b / (f + n - b) for b, f, n in present]),
        "balanced-accuracy": np.mean([b / n for b, f, n in present if n]),
    }
    order = np.argsort(-x, axis=1, kind="stable")[:, :2]
    p = np.exp(x - x.max(axis=1, keepdims=True))
    p = (p / p.sum(axis=1, keepdims=True)).astype(np.float32)
    areas, precisions = zip(*(ranking(p[:, k], y == k) for k in range(K)), strict=True)
    return mean | {
        "accuracy": np.mean(predicted == y),
        "dice": mean["f1"],
        "top-2": np.mean((order == y[:, None]).any(axis=1)),
        "roc-auc": np.mean([a for a in areas if not math.isnan(a)] or [NAN]),
        "average-precision": np.mean([a for a in precisions if not math.isnan(a)] or [NAN]),
    }


def ranking(p, positive):
    """Return the area under the ROC curve (Mann and Whitney) and the average precision."""
    if np.isnan(p).any() or not positive.any():
        return NAN, NAN
    ups, downs = p[positive], p[~positive]
    wins = sum((up > downs).sum() + (up == downs).sum() / 2 for up in ups)
    recall, precision, total = 0.0, 0.0, 0.0
    for threshold in sorted(set(p), reverse=True):
        hits = sum(ups >= threshold)
        precision, new = hits / sum(p >= threshold), hits / len(ups)
        total, recall = total + (new - recall) * precision, new
    return (wins / (len(ups) * len(downs)) if len(downs) else NAN), total


def assert_not_hidden(actual, expected, special):
    for name, value in expected.items():
        if math.isfinite(value):
            is_undefined = special != "finite" and math.isnan(actual[name])
            assert is_undefined or actual[name] == pytest.approx(value, rel=1e-9), name
        else:
            assert not math.isfinite(actual[name]), f"{name}: {actual[name]}"


LABELS = {
    "all classes": lambda y: y,
    "an empty class": lambda y: np.where(y == 1, 2, y),
    "one class": np.zeros_like,
}


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("special", SPECIAL)
def test_classes(world, special, labels):
    x = scores_with(special)
    y = LABELS[labels](np.arange(COUNT) * 5 % 7 % K)
    net = network(K)
    store = dl.ArrayDatastore(stored(x)[..., None, None], y, classes=["a", "b", "c"])
    result = dl.evaluate(net, store, world=world, metrics="all", top_k=2, confusion=True)
    actual = dict(result.metrics.values) | {"accuracy": result.accuracy, "top-2": result.top_k}
    assert_not_hidden(actual, class_metrics(x, y), special)
    is_nan = np.isnan(x).any(axis=1)
    assert result.confusion.counts.sum() == COUNT - is_nan.sum()
    classes = dl.classify(net, store, world=world)
    assert np.array_equal(classes, np.where(is_nan, -1, x.argmax(axis=1)))


PIXEL_LABELS = {
    "all classes": lambda y: y,
    "the special pixel is ignored": lambda y: y,
    "all are ignored": lambda y: np.full_like(y, IGNORED),
}


@pytest.mark.parametrize("loss", ["crossentropy", "dice"])
@pytest.mark.parametrize("labels", PIXEL_LABELS)
@pytest.mark.parametrize("special", SPECIAL)
def test_classes_of_pixels(world, special, labels, loss):
    x, y = scores_with(special, (2, 3)), (np.arange(COUNT * 6) * 5 % 7 % K).reshape(COUNT, 2, 3)
    y = PIXEL_LABELS[labels](y.astype(np.int32))
    if "ignored" in labels:
        y[20, 0, 0] = IGNORED
    counted = y != IGNORED
    options = {"ignore_label": IGNORED} if "ignored" in labels else {}
    function = (dl.Dice if loss == "dice" else dl.CrossEntropy)(**options)
    store = dl.ArrayDatastore(stored(x), targets=y)
    result = dl.evaluate(network(K, 2, 3), store, world=world, loss=function, metrics="all")
    expected = class_metrics(np.moveaxis(x, 1, -1)[counted].reshape(-1, K), y[counted])
    actual = dict(result.metrics.values) | {"accuracy": result.accuracy}
    assert_not_hidden(actual, {name: expected[name] for name in actual}, special)
    if labels == "all are ignored" and loss == "crossentropy":
        assert math.isnan(result.loss)  # the mean of no terms


def label_metrics(x, targets):
    """Return the metrics of several labels per image, from their definitions."""
    names = ("accuracy", "subset-accuracy", "precision", "recall", "f1", "iou", "dice")
    names += ("f1-micro", "f1-samples", "roc-auc", "average-precision")
    if np.isnan(x).any():
        return dict.fromkeys(names, NAN)
    actual, labelled = x > 0, targets == 1
    both, f, n = ((v).sum(axis=0) for v in (actual & labelled, actual, labelled))

    def mean(parts, wholes):
        return np.mean(
            [part / total if total else 0 for part, total in zip(parts, wholes, strict=True)]
        )

    f1 = mean(2 * both, f + n)
    samples = (2 * (actual & labelled).sum(axis=1), actual.sum(axis=1) + labelled.sum(axis=1))
    pairs = [ranking(x[:, k], labelled[:, k]) for k in range(K)]
    areas, precisions = (
        [v for v in values if not math.isnan(v)] or [NAN] for values in zip(*pairs, strict=True)
    )
    values = np.mean(actual == labelled), np.mean((actual == labelled).all(axis=1))
    values += mean(both, f), mean(both, n), f1, mean(both, f + n - both), f1
    values += 2 * both.sum() / (f + n).sum(), mean(*samples), np.mean(areas), np.mean(precisions)
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("special", SPECIAL)
def test_several_labels(world, special, empty):
    x = scores_with(special)
    targets = (np.arange(COUNT * K) * 7 % 11 % 3 == 0).reshape(COUNT, K).astype(np.int32)
    if empty:
        targets[:, 1] = 0
    store = dl.ArrayDatastore(stored(x)[..., None, None], targets=targets)
    result = dl.evaluate(network(K), store, world=world, loss="binary-crossentropy", metrics="all")
    actual = dict(result.metrics.values) | {"accuracy": result.accuracy}
    assert_not_hidden(actual, label_metrics(x, targets), special)


@pytest.mark.parametrize("special", SPECIAL)
def test_regression_errors(world, special):
    x, targets = scores_with(special), np.ones((COUNT, K), np.float32)
    store = dl.ArrayDatastore(stored(x)[..., None, None], targets=targets)
    errors, exact = dl.regression_errors(network(K), store, world=world), x.astype(np.float64) - 1
    expected = {"rmse": np.sqrt(np.mean(exact**2)), "mae": np.mean(abs(exact))}
    assert_not_hidden({"rmse": errors.rmse, "mae": errors.mae}, expected, special)


def test_names_of_nan_scores_are_empty(world):
    net = network(K)
    net.classes = ("a", "b", "c")
    names = dl.classify(net, stored(scores_with("nan"))[..., None, None], world=world, names=True)
    assert names[20] == "" and set(names) <= {"a", "b", "c", ""} and (names == "").sum() == 1
