"""Test explanations without C kernels, and in bfloat16."""

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.backends.cpu import builds
from mpidl.explanations.methods import METHODS

SHAPE, COUNT = (3, 8, 8), 21
OPTIONS = {"occlusion": {"window": 4}, "integrated-gradients": {"steps": 3}}


@pytest.fixture
def images():
    return numbers("devices", COUNT, *SHAPE, dtype=np.float32)


def network():
    layers = [
        *(dl.Conv2D(3, 8, padding=1, name="conv"), dl.BatchNorm(), dl.ReLU(), dl.MaxPool2D(2)),
        *(dl.Conv2D(3, 8, padding=1), dl.ReLU(name="relu"), dl.Dense(4), dl.Softmax()),
    ]
    net = dl.Network(layers, SHAPE, seed=3)
    net.state = {
        name: numbers(name, *a.shape, low=0.5, dtype=np.float32) for name, a in net.state.items()
    }
    return net


def explained(images, method, **options):
    return dl.explain(network(), images, method=method, **OPTIONS.get(method, {}), **options)


def assert_close(result, expected, limit):
    assert np.array_equal(result.classes, expected.classes)
    difference = np.abs(result.maps - expected.maps).max()
    assert difference <= limit * np.abs(expected.maps).max()


@pytest.mark.parametrize("method", METHODS)
def test_numpy(images, method, monkeypatch):
    """Without C kernels, NumPy gives the same maps, up to rounding."""
    if builds.kernels() is None:
        pytest.skip("the C kernels are not compiled: python kernels/build.py")
    expected = explained(images, method)
    monkeypatch.setattr(builds, "kernels", lambda: None)
    assert_close(explained(images, method), expected, 1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16(images, method):
    """Activations and gradients have 8 significant bits; the maps are float32."""
    expected = explained(images, method)
    dl.configure(precision="bf16")
    result = explained(images, method, target=expected.classes)
    assert result.maps.dtype == np.float32
    similarity = np.corrcoef(result.maps.ravel(), expected.maps.ravel())[0, 1]
    assert 0.99 < similarity < 1
