"""Check that fused and separate layers give the same bytes, whichever op reads the activation."""

import numpy as np
import pytest
from cpu_builds import needs_kernels
from network_steps import conv_norm_relu, fused_and_separate, step_bytes
from single_rank import blocked

import mpidl as dl
from mpidl import ops
from mpidl.backends import CPU
from mpidl.backends.deferred import DeferredActivation
from mpidl.core.blocks import Blocked
from mpidl.nn import fusion

pytestmark = needs_kernels

LAYERS = {
    "digits": dl.nn.zoo.digits((1, 12, 12), 3).layers,
    "pools": [
        *conv_norm_relu(3, 8, padding=1),
        dl.MaxPool2D(3, stride=2),
        *conv_norm_relu(3, 40, padding=1),
        dl.AveragePool2D(2),
        dl.Dense(3),
    ],
    "resizing": [
        *(*conv_norm_relu(3, 8, padding=1), dl.Resize2D(scale=1.5, mode="bilinear")),
        *(*conv_norm_relu(3, 6, stride=2), dl.Resize2D((7, 9)), dl.Conv2D(1, 4), dl.BatchNorm()),
        *(dl.Clip(-0.5, 1), dl.AdaptiveAveragePool2D(4), dl.ChannelShuffle(2), dl.Dense(3)),
    ],
    "strides and groups": [
        *(dl.Conv2D(3, 8, stride=2), dl.BatchNorm(epsilon=1e-3, decay=0.5), dl.ReLU()),
        *conv_norm_relu(3, 8, groups=4, dilation=2, padding=2),
        *(dl.Flatten(), dl.Dense(3)),
    ],
    "without normalization": [
        *(dl.Conv2D(3, 8, stride=2, padding=1, name="first"), dl.ReLU(name="r")),
        *(dl.Conv2D(3, 32, padding=1), dl.BatchNorm(), dl.ReLU(name="left")),
        *(dl.Conv2D(3, 32, padding=1, after="r"), dl.Add(inputs=("conv3", "left")), dl.ReLU()),
        *(dl.Conv2D(3, 32, padding=1, name="c"), dl.Add(inputs=("relu3", "c")), dl.ReLU()),
        dl.Dense(3),
    ],
    "cross-channel normalization": [
        *(dl.Conv2D(3, 8, padding=1), dl.ReLU(), dl.CrossChannelNorm(5, alpha=2.0, k=1.0)),
        dl.MaxPool2D(3, stride=2),
        *(dl.Conv2D(3, 6, padding=1, groups=2), dl.ReLU(), dl.CrossChannelNorm(4, beta=0.6)),
        dl.MaxPool2D(2, padding=1),
        *(dl.Conv2D(1, 3), dl.ReLU(), dl.CrossChannelNorm(9, alpha=0.5)),
        *(dl.MaxPool2D(2, stride=1), dl.Dense(3)),
    ],
    "residual": [
        *(dl.Conv2D(3, 16, padding=1), dl.BatchNorm(), dl.ReLU(name="a")),
        *conv_norm_relu(3, 16, padding=1),
        *(dl.Conv2D(3, 16, padding=1), dl.BatchNorm(name="n")),
        dl.Add(inputs=("n", "a"), name="s"),
        *(dl.Conv2D(1, 32, stride=2), dl.BatchNorm(name="left")),
        *(dl.Conv2D(1, 32, stride=2, after="s"), dl.BatchNorm(name="right")),
        *(dl.Add(inputs=("left", "right")), dl.ReLU(name="joined")),
        *(dl.Conv2D(1, 32), dl.BatchNorm(name="m"), dl.Add(inputs=("m", "joined")), dl.ReLU()),
        dl.Dense(3),
    ],
    "concatenation": [
        *(dl.Conv2D(3, 16, padding=1, name="a"), dl.ReLU(name="r")),
        *(dl.MaxPool2D(2), dl.TransposedConv2D(2, 8, stride=2, name="up")),
        *(dl.Concat(inputs=("up", "r")), dl.Conv2D(3, 16, padding=1), dl.ReLU(name="s")),
        *(dl.Concat(inputs=("s", "a")), dl.Conv2D(1, 6), dl.ReLU(name="t")),
        *(dl.Conv2D(3, 5, padding=1), dl.BatchNorm(), dl.ReLU(name="n")),
        *(dl.Concat(inputs=("n", "t")), dl.Conv2D(3, 4, stride=2), dl.ReLU(name="u")),
        *(dl.Concat(inputs=("u", "u")), dl.Conv2D(3, 4, dilation=2), dl.ReLU()),
        dl.Dense(3),
    ],
    "clips": [
        *(dl.Conv2D(3, 8, padding=1, name="c"), dl.BatchNorm(), dl.Clip(0, 1.5, name="a")),
        *(dl.Conv2D(3, 8, padding=1, groups=8), dl.BatchNorm(), dl.Clip(-0.5, 1, name="b")),
        *(dl.MaxPool2D(2), dl.Conv2D(5, 8, padding=1, stride=2, groups=8, bias=False)),
        *(dl.BatchNorm(), dl.Clip(0, 6), dl.Conv2D(1, 4), dl.BatchNorm(), dl.Clip(0.1, 2)),
        *(dl.Dense(5), dl.Clip(0, 6, name="d")),
        *(dl.Conv2D(3, 8, after="a"), dl.BatchNorm(), dl.Clip(-1, 1, name="e")),
        *(dl.Conv2D(1, 3), dl.BatchNorm(name="n"), dl.Conv2D(3, 3, padding=1, groups=3)),
        *(dl.BatchNorm(name="m"), dl.Add(inputs=("n", "m")), dl.Conv2D(1, 4), dl.BatchNorm()),
        *(dl.Conv2D(1, 2, name="h"), dl.Concat(inputs=("e", "h")), dl.AveragePool2D(2)),
        dl.Dense(5, name="f"),
        *(dl.Add(inputs=("d", "f")), dl.Dense(3)),
    ],
    "functions": [
        *(dl.Conv2D(3, 8, padding=1), dl.BatchNorm(), dl.Swish(name="a")),
        *(dl.Conv2D(3, 8, padding=1, groups=8), dl.BatchNorm(), dl.HardSwish(), dl.Conv2D(1, 5)),
        *(dl.BatchNorm(name="n"), dl.GELU(), dl.Conv2D(3, 8), dl.BatchNorm(), dl.Tanh()),
        *(dl.Conv2D(1, 6), dl.BatchNorm(), dl.LeakyReLU(), dl.Conv2D(1, 6), dl.BatchNorm()),
        *(dl.HardSigmoid(), dl.MaxPool2D(2), dl.Dense(5), dl.BatchNorm(), dl.Sigmoid(name="d")),
        *(dl.Sigmoid(after="n", name="s"), dl.Multiply(inputs=("s", "n")), dl.Dense(5, name="f")),
        *(dl.Add(inputs=("d", "f")), dl.Dense(3)),
    ],
    "read by layers that store": [
        *conv_norm_relu(3, 6),
        *(dl.ReLU(), dl.BatchNorm(), dl.Conv2D(3, 6), dl.ReLU()),
        *conv_norm_relu(1, 4),
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
    return blocked(world, images, labels)


@pytest.mark.slow_on_ranks
@pytest.mark.parametrize("count", [41, 16, 3])
@pytest.mark.parametrize("scope", ["global", "local"])
@pytest.mark.parametrize("name", LAYERS)
def test_training_has_the_bytes_of_the_separate_layers(name, scope, count, world):
    fused, separate = (
        step_bytes(world, net, mini_batch(world, count))
        for net in fused_and_separate(
            lambda: dl.Network(LAYERS[name], (1, 12, 12), batchnorm=scope)
        )
    )
    assert fused == separate


@pytest.mark.parametrize("name", LAYERS)
def test_prediction_has_the_bytes_of_the_separate_layers(name, world):
    images, _ = mini_batch(world)
    fused, separate = fused_and_separate(lambda: dl.Network(LAYERS[name], (1, 12, 12)))
    assert fused(images).lanes.tobytes() == separate(images).lanes.tobytes()


def test_only_the_convolutions_output_is_stored(world):
    images, _ = mini_batch(world)
    net = dl.Network(LAYERS["digits"][:3], (1, 12, 12))
    value = net(images)
    assert isinstance(value, DeferredActivation) and value.shape == (41, 20, 8, 8)
    assert type(value.stored()) is Blocked and (value.lanes >= 0).all()
    net = dl.nn.zoo.digits()
    assert [len(run) for run in fusion.find_runs(net.layers, net.reads)] == [3, 3, 3, 1]


def runs(layers):
    net = dl.Network(layers, (1, 8, 8))
    return [len(run) for run in fusion.find_runs(net.layers, net.reads)]


def test_which_layers_are_one_run():
    conv, relu = dl.Conv2D(3, 4, padding=1, name="c"), dl.ReLU()
    start = [dl.Conv2D(1, 4, name="x"), dl.ReLU(name="r")]
    assert runs(LAYERS["without normalization"]) == [2, 3, 3, 3, 1]
    assert runs([*start, conv, dl.Add(inputs=("r", "c")), relu]) == [2, 3]
    twice = dl.Add(inputs=("c", "c"))
    assert runs([*start, conv, twice, relu]) == [2, 1, 2]
    several = dl.Add(inputs=("c", "r", "r"))
    assert runs([*start, conv, several, relu]) == [2, 1, 1, 1]
    read_again = [dl.Add(inputs=("c", "r"), name="s"), dl.ReLU(name="t")]
    assert runs([*start, conv, *read_again, dl.Add(inputs=("t", "c"))]) == [2, 1, 2, 1]
    assert runs([*start, conv, *read_again, dl.Add(inputs=("t", "s"))]) == [2, 1, 1, 1, 1]
    assert runs([conv, dl.ReLU(name="t"), dl.Add(inputs=("t", "c"))]) == [1, 1, 1]
    assert runs(LAYERS["cross-channel normalization"]) == [4, 4, 4, 1]
    norms = [dl.CrossChannelNorm(5, name="n"), dl.MaxPool2D(2, name="p")]
    assert runs([*start, norms[0]]) == [2, 1]
    assert runs([*start, norms[0], dl.AveragePool2D(2)]) == [2, 1, 1]
    for read_again in ("n", "r"):
        join = [dl.MaxPool2D(2, after=read_again, name="q"), dl.Add(inputs=("p", "q"))]
        assert runs([*start, *norms, *join]) == [2, 1, 1, 1, 1]
    norm, add = dl.BatchNorm(name="n"), dl.Add(inputs=("n", "r"))
    assert runs([*start, conv, norm, add, relu]) == [2, 2, 2]
    assert runs([*start, conv, norm, dl.Add(inputs=("n", "n")), relu]) == [2, 2, 2]
    assert runs([*start, conv, norm, dl.Add(inputs=("n", "r", "r")), relu]) == [2, 2, 1, 1]
    assert runs([*start, conv, norm, dl.PReLU(), dl.Add(inputs=("n", "prelu1"))]) == [2, 1, 1, 1, 1]
    assert runs([*start, conv, norm, dl.Tanh(), dl.Add(inputs=("n", "tanh1"))]) == [2, 2, 1, 1]
    assert runs([*start, conv, norm]) == [2, 1, 1]


def test_a_residual_block_stores_only_what_its_convolutions_read(world, monkeypatch):
    images, _ = mini_batch(world)
    layers = [*conv_norm_relu(3, 16, padding=1), dl.Conv2D(3, 16, padding=1), dl.BatchNorm()]
    layers += [dl.Add(inputs=("batchnorm2", "relu1")), dl.ReLU()]
    calls = []
    for name in ("batchnorm", "relu", "activation", "moments"):
        function = getattr(CPU, name)
        monkeypatch.setattr(CPU, name, lambda *a, n=name, f=function: calls.append(n) or f(*a))
    value = dl.Network(layers, (1, 12, 12))(images)
    assert type(value) is Blocked and (value.lanes >= 0).all() and calls == []


def test_a_function_of_a_normalization_is_computed_in_one_pass(world, monkeypatch):
    """A training step stores neither the normalized values nor their gradients."""
    calls = []
    for name in ("batchnorm", "moments", "batchnorm_dx"):
        function = getattr(CPU, name)
        monkeypatch.setattr(CPU, name, lambda *a, n=name, f=function: calls.append(n) or f(*a))
    layers = [dl.Conv2D(3, 8), dl.BatchNorm(), dl.Swish(), dl.Dense(3)]
    fused, separate = fused_and_separate(lambda: dl.Network(layers, (1, 12, 12)))
    step_bytes(world, fused, mini_batch(world))
    assert calls == []
    step_bytes(world, separate, mini_batch(world))
    assert calls == ["moments", "batchnorm", "batchnorm_dx"]


def test_normalized_pixels_are_not_stored(world, monkeypatch):
    """A training step calls none of the separate functions of normalization and pooling."""
    names = "cross_channel_norm", "max_pool2d", "relu"
    calls = []
    for name in (*names, *(name + "_dx" for name in names)):
        function = getattr(CPU, name)
        monkeypatch.setattr(CPU, name, lambda *a, n=name, f=function: calls.append(n) or f(*a))
    fused, separate = fused_and_separate(
        lambda: dl.Network(LAYERS["cross-channel normalization"], (1, 12, 12))
    )
    step_bytes(world, fused, mini_batch(world))
    assert calls == []
    step_bytes(world, separate, mini_batch(world))
    assert set(calls) == {*names, *(name + "_dx" for name in names)}


def branches(fused):
    """Return a loss in which built-in ops and a custom op read the same activation.

    If `fused`, one op computes convolution, batch normalization and ReLU.
    """

    def loss(p, images, labels):
        arguments = images, p["w1"], p["b1"], p["gamma"], p["beta"]
        if fused:
            a = ops.conv2d_batchnorm(*arguments, padding=1, limits=(0.0, np.inf))
        else:
            a = dl.relu(dl.batchnorm(dl.conv2d(*arguments[:3], padding=1), *arguments[3:]))
        b = dl.conv2d(a, p["w2"], p["b2"], padding=1)
        return dl.softmax_cross_entropy(
            dl.dense(dl.flatten(a + b + doubled(a)), p["w3"], p["b3"]), labels
        )

    return loss


def test_an_activation_with_several_readers(world):
    rng = np.random.default_rng(3)
    shapes = {"w1": (5, 1, 3, 3), "b1": (5,), "gamma": (5,), "beta": (5,)}
    shapes |= {"w2": (5, 5, 3, 3), "b2": (5,), "w3": (3, 5 * 144), "b3": (3,)}
    p = {k: rng.standard_normal(shape, np.float32) for k, shape in shapes.items()}
    fused, separate = (
        step_bytes(world, p, mini_batch(world), branches(is_fused)) for is_fused in (True, False)
    )
    assert fused == separate


def test_float64_is_not_fused(world):
    images, _ = mini_batch(world)
    net = dl.Network(LAYERS["digits"][:3], (1, 12, 12))
    net.parameters = {k: v.astype(np.float64) for k, v in net.parameters.items()}
    doubles = dl.from_images(images.local().astype(np.float64), images.batch)
    assert type(net(doubles)) is Blocked
