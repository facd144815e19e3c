"""Compare metrics of classifiers with scikit-learn's on the network's predictions."""

import numpy as np
import pytest
from image_sets import ReadArrays
from single_rank import numbers

import mpidl as dl
from mpidl.errors import UserError
from mpidl.evaluation import class_metrics, evaluate, ranking

SIDE, CLASSES = 6, 4
LABELS = "binary-crossentropy"


@pytest.fixture(scope="module")
def world():
    return dl.World(threads=1)


def sklearn_metrics():
    return pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")


def images(count=75):
    return numbers("metrics", count, 1, SIDE, SIDE, low=0, high=255).astype(np.uint8)


def classifier(outputs=CLASSES):
    return dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(outputs)], (1, SIDE, SIDE), seed=3)


def pixel_classifier(outputs=CLASSES):
    layers = [dl.Conv2D(3, 4, padding=1), dl.ReLU(), dl.Conv2D(1, outputs)]
    return dl.Network(layers, (1, SIDE, SIDE), seed=3)


def labelled(classes=CLASSES, count=75):
    return dl.ArrayDatastore(images(count), np.arange(count) * 7 % 11 % classes, range(classes))


def with_targets(outputs=CLASSES, count=75):
    targets = (np.arange(count * outputs) * 7 % 11 % 3 == 0).reshape(count, outputs)
    return dl.ArrayDatastore(images(count), targets=targets.astype(np.int32))


def with_pixel_labels(classes=CLASSES, count=40):
    labels = (np.arange(count * SIDE * SIDE) * 7 % 11 % classes).astype(np.int32)
    return ReadArrays(images(count), labels.reshape(count, SIDE, SIDE))


def outputs_of(world, net, store, function=None):
    """Return the scores of all images on all ranks, computed as in `evaluate`."""
    parts = []
    for batch, _ in evaluate.in_order(net, store, world, 33):
        scores = net.logits(batch)
        scores = scores if function is None else function(scores)
        parts += world.broadcast(world.gather(scores.local()))
    return np.concatenate(parts)


def assert_equal(result, expected):
    assert set(result.values) == set(expected)
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, abs=1e-12), name


def scores_of(sk, y, predicted, zero=0):
    """Return scikit-learn's count-based metrics for one class per image or pixel."""
    options = {"average": "macro", "zero_division": zero}
    return {
        "balanced-accuracy": sk.balanced_accuracy_score(y, predicted),
        "precision": sk.precision_score(y, predicted, **options),
        "recall": sk.recall_score(y, predicted, **options),
        "f1": sk.f1_score(y, predicted, **options),
        "iou": sk.jaccard_score(y, predicted, **options),
        "dice": sk.f1_score(y, predicted, **options),
    }


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("absent", [None, 2])
def test_one_class_per_image(world, absent):
    """The means must include a class without labels if the class is predicted."""
    sk, store, net = sklearn_metrics(), labelled(), classifier()
    if absent is not None:
        store.labels[store.labels == absent] = 0
    names = class_metrics.OF_COUNTS if absent is not None else "all"
    result = dl.evaluate(net, store, world=world, metrics=names, batch_size=33).metrics
    p = outputs_of(world, net, store, dl.softmax)
    expected = scores_of(sk, store.labels, p.argmax(axis=1))
    if absent is None:
        hot = np.eye(CLASSES, dtype=int)[store.labels]
        expected["roc-auc"] = sk.roc_auc_score(hot, p, average="macro")
        expected["average-precision"] = sk.average_precision_score(hot, p, average="macro")
        areas = sk.roc_auc_score(hot, p, average=None)
        np.testing.assert_allclose(result.per_class["roc-auc"], areas, atol=1e-12)
    assert_equal(result, expected)
    ious = sk.jaccard_score(store.labels, p.argmax(axis=1), average=None, zero_division=0)
    np.testing.assert_allclose(result.per_class["iou"], ious, atol=1e-12)
    assert result.classes == ("0", "1", "2", "3")


def test_several_labels_per_image(world):
    sk, store, net = sklearn_metrics(), with_targets(), classifier()
    result = dl.evaluate(net, store, world=world, loss=LABELS, metrics="all", batch_size=33).metrics
    x, y = outputs_of(world, net, store), store.targets(np.arange(75))
    predicted, options = (x > 0).astype(int), {"zero_division": 0}
    expected = {
        name: value
        for name, value in scores_of(sk, y[:, 0], predicted[:, 0]).items()
        if name != "balanced-accuracy"
    }
    for name, function in {
        "precision": sk.precision_score,
        "recall": sk.recall_score,
        "f1": sk.f1_score,
        "dice": sk.f1_score,
        "iou": sk.jaccard_score,
    }.items():
        expected[name] = function(y, predicted, average="macro", **options)
        vector = np.nan_to_num(result.per_class[name])
        np.testing.assert_allclose(vector, function(y, predicted, average=None, **options))
    expected["subset-accuracy"] = sk.accuracy_score(y, predicted)
    for average in ("micro", "samples"):
        expected[f"f1-{average}"] = sk.f1_score(y, predicted, average=average, **options)
    expected["roc-auc"] = sk.roc_auc_score(y, x, average="macro")
    expected["average-precision"] = sk.average_precision_score(y, x, average="macro")
    assert_equal(result, expected)


@pytest.mark.parametrize("outputs", [CLASSES, 1])
def test_pixels(world, outputs):
    sk, store, net = (
        sklearn_metrics(),
        with_pixel_labels(max(outputs, 2)),
        pixel_classifier(outputs),
    )
    loss = "crossentropy" if outputs > 1 else "dice"
    result = dl.evaluate(net, store, world=world, loss=loss, metrics="all", batch_size=17).metrics
    x = outputs_of(world, net, store)
    predicted = x.argmax(axis=1) if outputs > 1 else (x[:, 0] > 0).astype(int)
    assert_equal(result, scores_of(sk, store.values.ravel(), predicted.ravel()))


def test_ignored_labels_do_not_count(world):
    sk, store, net = sklearn_metrics(), with_pixel_labels(), pixel_classifier()
    store.values[:, :2] = 255
    loss = dl.CrossEntropy(ignore_label=255)
    result = dl.evaluate(net, store, world=world, loss=loss, metrics=["iou", "f1"]).metrics
    predicted = outputs_of(world, net, store).argmax(axis=1)
    counted = store.values != 255
    expected = scores_of(sk, store.values[counted], predicted[counted])
    assert_equal(result, {name: expected[name] for name in ("f1", "iou")})
    store, net = with_targets(), classifier()
    store._targets[::3, 1] = -1
    loss = dl.BinaryCrossEntropy(ignore_label=-1)
    result = dl.evaluate(net, store, world=world, loss=loss, metrics="roc-auc,precision").metrics
    x, y = outputs_of(world, net, store), store._targets
    counted = y[:, 1] >= 0
    area = sk.roc_auc_score(y[counted, 1], x[counted, 1])
    assert result.per_class["roc-auc"][1] == pytest.approx(area, abs=1e-12)
    precision = sk.precision_score(y[counted, 1], x[counted, 1] > 0)
    assert result.per_class["precision"][1] == pytest.approx(precision, abs=1e-12)


@pytest.mark.slow_on_ranks
def test_the_size_of_mini_batches_and_ranks_does_not_matter(world):
    """The metrics must be equal to the last bit, even means over the images."""
    for net, store, loss in (
        (classifier(), labelled(), "crossentropy"),
        (classifier(), with_targets(), LABELS),
    ):
        values = {
            (
                dl.evaluate(net, store, world=w, loss=loss, metrics="all", batch_size=size).metrics
            ).values.__repr__()
            for w, size in ((world, 75), (world, 16), (dl.World(threads=1), 33))
        }
        assert len(values) == 1


@pytest.mark.parametrize("count", [2, 5, 300])
@pytest.mark.parametrize("digits", [0, 1, 6])
def test_areas_and_precisions_with_equal_scores(count, digits):
    sk = sklearn_metrics()
    scores = np.round(numbers("scores", count, low=-2, high=2), digits).astype(np.float32)
    labels = (np.arange(count) % 3 == 0).astype(np.uint8)
    area, precision = ranking.area_and_precision(scores, labels)
    assert area == pytest.approx(sk.roc_auc_score(labels, scores), abs=1e-14)
    assert precision == pytest.approx(sk.average_precision_score(labels, scores), abs=1e-14)
    ignored = np.concatenate([labels, np.full(count, 2, np.uint8)])
    assert ranking.area_and_precision(np.tile(scores, 2), ignored) == (area, precision)


def test_undefined_areas():
    x = np.array([0.5, 1, 2], np.float32)
    for states in ([0, 0, 0], [2, 2, 2], []):
        area, precision = ranking.area_and_precision(x[: len(states)], np.array(states, np.uint8))
        assert np.isnan(area) and np.isnan(precision)
    area, precision = ranking.area_and_precision(x, np.ones(3, np.uint8))
    assert np.isnan(area) and precision == 1
    x[1] = np.nan
    assert np.isnan(ranking.area_and_precision(x, np.array([0, 1, 1], np.uint8))[0])


def test_classes_are_ranked_in_parts(world, monkeypatch):
    net, store = classifier(), labelled()
    expected = dl.evaluate(net, store, world=world, metrics="roc-auc").metrics
    monkeypatch.setattr(ranking, "GATHERED", 5 * 75 * 3)
    result = dl.evaluate(net, store, world=world, metrics="roc-auc").metrics
    assert np.array_equal(result.per_class["roc-auc"], expected.per_class["roc-auc"])


def test_the_confusion_matrix_has_the_same_scores(world):
    evaluation = dl.evaluate(
        classifier(),
        labelled(),
        world=world,
        metrics=["f1", "iou", "balanced-accuracy"],
        confusion=True,
    )
    table, result = evaluation.confusion, evaluation.metrics
    assert np.array_equal(table.f1, result.per_class["f1"], equal_nan=True)
    assert np.array_equal(table.iou, result.per_class["iou"], equal_nan=True)
    assert table.balanced_accuracy == result["balanced-accuracy"]
    assert (
        np.isnan(dl.confusion_matrix([], np.zeros(0, int), ["a"]).balanced_accuracy) if 0 else True
    )


def test_the_table(world, tmp_path):
    result = dl.evaluate(classifier(2), labelled(2), world=world, metrics="f1,roc-auc").metrics
    rows = result.rows()
    assert rows[0] == ["class", "f1", "roc-auc"]
    assert [row[0] for row in rows[1:]] == ["0", "1", "all"]
    assert rows[3][1:] == [f"{result['f1']:.4f}", f"{result['roc-auc']:.4f}"]
    assert "roc-auc" in str(result) and "<th>roc-auc</th>" in result._repr_html_()
    assert (
        repr(result)
        == f"ClassMetrics(2 classes, f1={result['f1']:.6g}, roc-auc={result['roc-auc']:.6g})"
    )
    result.save(tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text().splitlines()[0] == "class,f1,roc-auc"


@pytest.mark.parametrize(
    ("net", "store", "loss", "names", "message"),
    [
        (classifier, labelled, "crossentropy", "f2", "metrics: expected all or some of"),
        (classifier, labelled, "crossentropy", "roc_auc", "did you mean roc-auc"),
        (classifier, labelled, "crossentropy", "f1-micro", "the loss binary-"),
        (classifier, with_targets, LABELS, "balanced-accuracy", "one class per image or pixel"),
        (
            pixel_classifier,
            with_pixel_labels,
            "crossentropy",
            "roc-auc",
            "not per pixel",
        ),
        (classifier, lambda: with_targets(), "mse", "f1", "no class metrics"),
    ],
)
def test_unusable_names_are_refused(world, net, store, loss, names, message):
    store = store()
    if loss == "mse":
        store = ReadArrays(store.images, store._targets.astype(np.float32))
    with pytest.raises(UserError, match=message):
        dl.evaluate(net(), store, world=world, loss=loss, metrics=names)
