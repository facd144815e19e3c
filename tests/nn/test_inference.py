"""Check that including batch normalizations in the weights does not change predictions."""

import numpy as np
import pytest
from cpu_builds import needs_kernels

import mpidl as dl
from mpidl import backends
from mpidl.backends import settings
from mpidl.nn.inference import fold_batchnorm


def with_drawn_arrays(net, dtype=np.float32):
    """Give a network random statistics, scales, offsets and biases that affect the scores."""
    rng = np.random.default_rng(1)
    for table in ("state", "parameters"):
        arrays = getattr(net, table)
        drawn = {k: rng.uniform(0.3, 1.7, v.shape).astype(dtype) for k, v in arrays.items()}
        keep = {k: v.astype(dtype) for k, v in arrays.items() if k.endswith(".weight")}
        setattr(net, table, drawn | keep)
    return net


def mini_batch(world, net, dtype=np.float32, count=19):
    images = np.random.default_rng(2).random((count, *net.input_shape)).astype(dtype)
    return dl.from_images(images[slice(*(batch := dl.share(count, world)).images)], batch)


LAYERS = [
    *(dl.Conv2D(3, 8, padding=1, bias=False), dl.BatchNorm(epsilon=1e-3), dl.ReLU(name="r")),
    *(dl.TransposedConv2D(2, 6, stride=2, name="up"), dl.BatchNorm(name="n"), dl.ReLU()),
    *(dl.Conv2D(2, 8, stride=2, groups=2), dl.BatchNorm(), dl.Add(inputs=("batchnorm3", "r"))),
    *(dl.ReLU(), dl.Dense(7), dl.BatchNorm(name="last")),
]


def test_scores_in_float64(world):
    """Up to rounding, the folded network computes the same scores."""
    net = with_drawn_arrays(dl.Network(LAYERS, (2, 6, 6)), np.float64)
    folded = fold_batchnorm(net)
    assert folded.layer_names == ["conv1", "r", "up", "relu2", "conv2", "add1", "relu3", "dense1"]
    assert folded.state == {} and set(folded.parameters) == {
        f"{name}.{kind}"
        for name in ("conv1", "up", "conv2", "dense1")
        for kind in ("weight", "bias")
    }
    images = mini_batch(world, net, np.float64)
    expected = net(images).local()
    np.testing.assert_allclose(folded(images).local(), expected, rtol=1e-12, atol=1e-12)
    net.state = {k: v + 0.1 for k, v in net.state.items()}  # negative control
    if len(expected):
        assert np.abs(net(images).local() - expected).max() > 1e-3


def test_the_network_keeps_its_arrays():
    net = with_drawn_arrays(dl.Network(LAYERS, (2, 6, 6)))
    digest = dl.weights_sha256(net)
    folded = fold_batchnorm(net)
    assert folded is not net and dl.weights_sha256(net) == digest
    assert [layer.bias for layer in net.layers if isinstance(layer, dl.Conv2D)] == [False, True]
    assert fold_batchnorm(folded) is folded


def test_what_is_not_folded():
    """A normalization stays if other layers read its convolution, or if there is no convolution."""
    layers = [
        *(dl.Conv2D(1, 3, name="c"), dl.BatchNorm(), dl.Add(inputs=("c", "batchnorm1"))),
        *(dl.ReLU(), dl.BatchNorm(), dl.Conv2D(1, 3, name="d"), dl.ReLU()),
        dl.BatchNorm(after="d"),
        dl.Add(inputs=("relu2", "batchnorm3")),
    ]
    net = dl.Network(layers, (2, 4, 4))
    assert fold_batchnorm(net) is net


SIDES = {"resnet18": 64, "alexnet": 99}  # images that are smaller than the network's usual images


@needs_kernels
@pytest.mark.parametrize("name", ["digits", "cifar", "resnet", "resnet18", "alexnet"])
def test_predictions_agree_with_direct_convolution(name):
    """Folded weights and Winograd's F(4x4) change scores by at most 1e-5 of the largest score.

    AlexNet has 5x5 filters, and 11x11 filters with stride 4.
    """
    make = getattr(dl.nn.zoo, name)
    net = with_drawn_arrays(make((3, SIDES[name], SIDES[name])) if name in SIDES else make())
    images = np.random.default_rng(0).random((17, *net.input_shape), np.float32)
    predicted = dl.predict(net, images, softmax=False)
    backends.configure(winograd="off")
    try:
        with backends.fast_convolutions():
            assert settings.winograd == "off"
        direct = net(dl.from_images(images, dl.share(17, dl.World(plain=True)))).local()
    finally:
        backends.configure(winograd="auto")
    error = np.abs(predicted - direct).max() / np.abs(direct).max()
    assert 0 < error < 1e-5
