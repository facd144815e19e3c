"""Fused layers: the numbers of the separate ones, whoever reads what is not stored."""

import numpy as np
import pytest
from cpu_builds import needs_kernels

import mpidl as dl
from mpidl import ops
from mpidl.blocks import Blocked, DeferredActivation
from mpidl.nn import fusion

pytestmark = needs_kernels

LAYERS = {
    "digits": dl.nn.zoo.digits((1, 12, 12), 3).layers,
    "pools": [
        dl.Conv2D(3, 8, padding=1),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.MaxPool2D(3, stride=2),
        dl.Conv2D(3, 40, padding=1),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.AveragePool2D(2),
        dl.Dense(3),
    ],
    "strides and groups": [
        dl.Conv2D(3, 8, stride=2),
        dl.BatchNorm(epsilon=1e-3, decay=0.5),
        dl.ReLU(),
        dl.Conv2D(3, 8, groups=4, dilation=2, padding=2),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.Flatten(),
        dl.Dense(3),
    ],
    "read by what stores": [
        dl.Conv2D(3, 6),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.ReLU(),
        dl.BatchNorm(),
        dl.Conv2D(3, 6),
        dl.ReLU(),
        dl.Conv2D(1, 4),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.Dense(3),
    ],
}


@dl.op
def doubled(x):
    return 2 * x, lambda dy: (2 * dy,)


def mini_batch(world, count=41, shape=(1, 12, 12)):
    rng = np.random.default_rng(2)
    images = rng.standard_normal((count, *shape), np.float32)
    labels = rng.integers(0, 3, count, dtype=np.int32)
    batch = dl.share(count, world)
    mine = slice(*batch.images)
    return dl.from_images(images[mine], batch), dl.from_images(labels[mine], batch)


def loss_of(net, images, labels):
    return dl.softmax_cross_entropy(net(images), labels)


def step(world, net, f=loss_of, count=41):
    """The bytes of the loss, the gradients and the new state."""
    found = dl.value_and_grad(f, reduce=world)(net, *mini_batch(world, count))
    loss, gradients, *state = found
    tables = [gradients, *state]
    return [loss.tobytes()] + [{k: v.tobytes() for k, v in t.items()} for t in tables]


@pytest.mark.parametrize("count", [41, 16, 3])
@pytest.mark.parametrize("scope", ["global", "local"])
@pytest.mark.parametrize("name", LAYERS)
def test_training_has_the_bytes_of_the_separate_layers(name, scope, count, world):
    found = []
    for fuse in (True, False):
        net = dl.Network(LAYERS[name], (1, 12, 12), batchnorm=scope)
        net.fuse = fuse
        found.append(step(world, net, count=count))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", LAYERS)
def test_prediction_has_the_bytes_of_the_separate_layers(name, world):
    images, _ = mini_batch(world)
    net = dl.Network(LAYERS[name], (1, 12, 12))
    scores = net(images).lanes
    net.fuse = False
    assert net(images).lanes.tobytes() == scores.tobytes()


def test_only_the_convolutions_output_is_stored(world):
    images, _ = mini_batch(world)
    net = dl.Network(LAYERS["digits"][:3], (1, 12, 12))
    value = net(images)
    assert isinstance(value, DeferredActivation) and value.shape == (41, 20, 8, 8)
    assert type(value.stored()) is Blocked and (value.lanes >= 0).all()
    net = dl.nn.zoo.digits()
    assert [len(run) for run in fusion.find_runs(net.layers, net.reads)] == [3, 3, 3, 1]


def branches(fused):
    """A loss that reads one activation four ways: stored, through an op of ours and one of a
    user's, and by a convolution."""

    def f(p, images, labels):
        arguments = images, p["w1"], p["b1"], p["gamma"], p["beta"]
        if fused:
            a = ops.conv2d_batchnorm_relu(*arguments, padding=1)
        else:
            a = dl.relu(dl.batchnorm(dl.conv2d(*arguments[:3], padding=1), *arguments[3:]))
        b = dl.conv2d(a, p["w2"], p["b2"], padding=1)
        return dl.softmax_cross_entropy(
            dl.dense(dl.flatten(a + b + doubled(a)), p["w3"], p["b3"]), labels
        )

    return f


def test_a_value_that_several_read(world):
    rng = np.random.default_rng(3)
    shapes = {"w1": (5, 1, 3, 3), "b1": (5,), "gamma": (5,), "beta": (5,)}
    shapes |= {"w2": (5, 5, 3, 3), "b2": (5,), "w3": (3, 5 * 144), "b3": (3,)}
    p = {k: rng.standard_normal(shape, np.float32) for k, shape in shapes.items()}
    assert step(world, p, branches(True)) == step(world, p, branches(False))


def test_float64_is_not_fused(world):
    images, _ = mini_batch(world)
    net = dl.Network(LAYERS["digits"][:3], (1, 12, 12))
    net.parameters = {k: v.astype(np.float64) for k, v in net.parameters.items()}
    tall = dl.from_images(images.local().astype(np.float64), images.batch)
    assert type(net(tall)) is Blocked
