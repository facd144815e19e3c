"""Check that evaluation and prediction on a GPU give about the same results as on the CPU."""

import numpy as np
import pytest
from image_sets import ReadArrays
from single_rank import numbers

import mpidl as dl

SHAPE = (1, 8, 8)


def small(last=3):
    layers = [dl.Conv2D(3, 5, padding=1), dl.BatchNorm(), dl.ReLU(), dl.MaxPool2D(2)]
    layers += [] if last is None else [dl.Dense(last)]
    return dl.Network(layers, SHAPE, seed=1)


def dataset(shape=None):
    """Return 37 images with targets of the given shape, or with labels if `shape` is None."""
    images = numbers("gpu evaluation", 37, *SHAPE, low=0, high=256).astype(np.uint8)
    if shape is None:
        return ReadArrays(images, labels=np.arange(37) % 3)
    return ReadArrays(images, numbers("gpu targets", 37, *shape, dtype=np.float32))


def on_gpu_and_cpu(world, function):
    """Return the results of function(world) on the GPU and on the CPU."""
    on_gpu = function(world)
    device, counts, world.device, world.counts = world.device, world.counts, None, None
    on_cpu = function(world)
    world.device, world.counts = device, counts
    return on_gpu, on_cpu


def test_scores_and_activations_agree_with_the_cpu(world):
    net, store = small(), dataset()
    for function in (
        lambda w: dl.predict(net, store, world=w, batch_size=20),
        *(
            lambda w, layer=layer: dl.activations(net, store, layer, world=w, batch_size=20)
            for layer in net.layer_names
        ),
    ):
        values, expected = on_gpu_and_cpu(world, function)
        assert values.dtype == np.float32 and values.shape == expected.shape
        np.testing.assert_allclose(values, expected, atol=2e-5)
    classes, expected = on_gpu_and_cpu(
        world, lambda w: dl.classify(net, store, world=w, batch_size=20)
    )
    assert np.array_equal(classes, expected)
    assert not net.on_device  # the network itself was not moved


def test_activations_of_a_layer_before_all_learnables(world):
    layers = [dl.MaxPool2D(2), dl.Dense(3)]
    net, store = dl.Network(layers, SHAPE), dataset()
    values, expected = on_gpu_and_cpu(
        world, lambda w: dl.activations(net, store, "maxpool1", world=w)
    )
    assert np.array_equal(values, expected)


def test_evaluation_agrees_with_the_cpu(world):
    net, store = small(), dataset()
    options = {"batch_size": 20, "top_k": 2, "confusion": True}
    result, expected = on_gpu_and_cpu(world, lambda w: dl.evaluate(net, store, world=w, **options))
    assert result.loss == pytest.approx(expected.loss, abs=1e-5)
    for name in ("accuracy", "images", "top_k"):
        assert getattr(result, name) == getattr(expected, name)
    assert np.array_equal(result.confusion.counts, expected.confusion.counts)


@pytest.mark.parametrize(("last", "shape"), [(None, (5, 4, 4)), (3, (3,))])
def test_regression_errors_agree_with_the_cpu(last, shape, world):
    net, store = small(last), dataset(shape)
    errors, expected = on_gpu_and_cpu(
        world, lambda w: dl.regression_errors(net, store, world=w, batch_size=20)
    )
    assert errors.images == expected.images == 37
    np.testing.assert_allclose(errors[:2], expected[:2], rtol=1e-5)
