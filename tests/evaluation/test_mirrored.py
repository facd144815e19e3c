"""Compare scores averaged over mirror images with averages of separate predictions."""

import numpy as np
import pytest
from image_sets import pixels_of, refusal
from op_references import softmax_reference

import mpidl as dl

TURNS = {
    "x": [(1, 1), (1, -1)],
    "y": [(1, 1), (-1, 1)],
    "xy": [(1, 1), (1, -1), (-1, 1), (-1, -1)],
}


def network(kind):
    layers = [dl.Conv2D(3, 4, padding=1), dl.BatchNorm(), dl.ReLU()]
    ends = {
        "classes": [dl.Dense(3)],
        "softmax": [dl.Dense(3), dl.Softmax()],
        "pixels": [dl.Conv2D(3, 3, padding=1)],
    }
    return dl.Network([*layers, *ends[kind]], (2, 9, 11), seed=2)


def mean_scores(net, images, flips, kind):
    """Average the scores of flipped arrays in float64."""
    total = 0
    for rows, columns in TURNS[flips]:
        turned = np.ascontiguousarray(images[:, :, ::rows, ::columns])
        scores = dl.predict(net, turned, softmax=False).astype(np.float64)
        total = total + (scores[:, :, ::rows, ::columns] if kind == "pixels" else scores)
    return total / len(TURNS[flips])


@pytest.mark.parametrize("flips", TURNS)
@pytest.mark.parametrize("kind", ["classes", "pixels"])
def test_predictions(world, flips, kind):
    net, images = network(kind), pixels_of(3, 37, 2, 9, 11)
    expected = mean_scores(net, images, flips, kind)
    scores = dl.predict(net, images, world=world, softmax=False, test_flips=flips)
    assert abs(scores - expected).max() < 1e-5
    classes = dl.classify(net, images, world=world, test_flips=flips)
    assert np.array_equal(classes, scores.argmax(axis=1))
    if kind == "classes":
        probabilities = dl.predict(net, images, world=world, test_flips=flips)
        assert abs(probabilities - softmax_reference(expected)).max() < 1e-5
    assert not np.array_equal(scores, dl.predict(net, images, world=world, softmax=False))


@pytest.mark.parametrize("kind", ["classes", "softmax", "pixels"])
def test_evaluation(world, kind):
    net, images, shape = network(kind), pixels_of(4, 50, 2, 9, 11), (50, 9, 11)
    labels = np.arange(np.prod(shape)).reshape(shape) % 3 if kind == "pixels" else np.arange(50) % 3
    if kind == "pixels":
        store = dl.data.combined(dl.ArrayDatastore(images), labels)
    else:
        store = dl.ArrayDatastore(images, labels)
    evaluation = dl.evaluate(net, store, world=world, confusion=True, test_flips="xy")
    inner = net.up_to("dense1") if kind == "softmax" else net
    scores = mean_scores(inner, images, "xy", kind)
    assert evaluation.accuracy == (scores.argmax(axis=1) == labels).mean()
    assert evaluation.confusion.accuracy == evaluation.accuracy
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    label_p = np.take_along_axis(p, labels[:, None], axis=1)
    assert evaluation.loss == pytest.approx(-np.log(label_p).mean(), rel=1e-5)
    assert evaluation.loss != dl.evaluate(net, store, world=world).loss


def test_none_changes_no_byte(world):
    net, images = network("classes"), pixels_of(3, 20, 2, 9, 11)
    scores = dl.predict(net, images, world=world)
    assert np.array_equal(dl.predict(net, images, world=world, test_flips="none"), scores)


def test_symmetric_images_keep_their_scores(world):
    images = pixels_of(3, 20, 2, 9, 11)
    images = np.maximum(images, images[..., ::-1])
    scores = [
        dl.predict(network("classes"), images, world=world, softmax=False, test_flips=flips)
        for flips in ("none", "x")
    ]
    assert np.array_equal(*scores)


def test_unknown_flips_are_refused():
    text = refusal(dl.predict, network("classes"), pixels_of(0, 2, 2, 9, 11), test_flips="z")
    assert text == "test_flips must be none, x, y, xy, got z"
