"""Scores, activations and errors where the world computes on a GPU: as on the CPU, but rounded."""

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.data.datastore import Datastore

SHAPE = (1, 8, 8)


def small(last=3):
    layers = [dl.Conv2D(3, 5, padding=1), dl.BatchNorm(), dl.ReLU(), dl.MaxPool2D(2)]
    layers += [] if last is None else [dl.Dense(last)]
    return dl.Network(layers, SHAPE, seed=1)


class Images(Datastore):
    """37 images, with labels or targets."""

    image_shape = SHAPE

    def __init__(self, shape=None):
        self.pixels = numbers("gpu evaluation", 37, *SHAPE, low=0, high=256).astype(np.uint8)
        self.targets_shape = shape
        if shape is None:
            self.labels, self.classes = np.arange(37) % 3, ["a", "b", "c"]

    def __len__(self):
        return 37

    def read(self, indices):
        return self.pixels[indices]

    def targets(self, indices):
        return numbers("gpu targets", 37, *self.targets_shape, dtype=np.float32)[indices]


def both(world, function):
    """function's results on the GPU and on the CPU."""
    found = function(world)
    device, counts, world.device, world.counts = world.device, world.counts, None, None
    expected = function(world)
    world.device, world.counts = device, counts
    return found, expected


def test_scores_and_activations(world):
    net, store = small(), Images()
    for function in (
        lambda w: dl.predict(net, store, world=w, batch_size=20),
        *(
            lambda w, layer=layer: dl.activations(net, store, layer, world=w, batch_size=20)
            for layer in net.layer_names
        ),
    ):
        found, expected = both(world, function)
        assert found.dtype == np.float32 and found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=2e-5)
    found, expected = both(world, lambda w: dl.classify(net, store, world=w, batch_size=20))
    assert np.array_equal(found, expected)
    assert not net.on_device  # the network stayed where it was


def test_a_layer_before_all_learnables(world):
    layers = [dl.MaxPool2D(2), dl.Dense(3)]
    net, store = dl.Network(layers, SHAPE), Images()
    found, expected = both(world, lambda w: dl.activations(net, store, "maxpool1", world=w))
    assert np.array_equal(found, expected)


def test_evaluation(world):
    net, store = small(), Images()
    how = {"batch_size": 20, "top_k": 2, "confusion": True}
    found, expected = both(world, lambda w: dl.evaluate(net, store, world=w, **how))
    assert found.loss == pytest.approx(expected.loss, abs=1e-5)
    assert (found.accuracy, found.images, found.top_k) == (
        expected.accuracy,
        expected.images,
        expected.top_k,
    )
    assert np.array_equal(found.confusion.counts, expected.confusion.counts)


@pytest.mark.parametrize(("last", "shape"), [(None, (5, 4, 4)), (3, (3,))])
def test_regression_errors(last, shape, world):
    net, store = small(last), Images(shape)
    found, expected = both(
        world, lambda w: dl.regression_errors(net, store, world=w, batch_size=20)
    )
    assert found.images == expected.images == 37
    np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-5)
