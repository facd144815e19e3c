"""Test `dl.transfer`: new last layer, learning rate, frozen layers, and errors."""

import numpy as np
import pytest
from image_sets import refusal
from network_steps import conv_norm_relu
from single_rank import numbers

import mpidl as dl
from mpidl.data.transforms.normalize import Normalization
from mpidl.nn import zoo

SHAPE = (2, 7, 6)
NAMES = ("ant", "bee", "cow")


def network(*tail, classes=5, **keywords):
    """Return a network whose learnables and state differ from the initial arrays."""
    layers = [*conv_norm_relu(3, 4), dl.Dropout(0.5), *conv_norm_relu(3, 5, padding=1)]
    net = dl.Network([*layers, dl.Dense(classes, **keywords), *tail], SHAPE, seed=3)
    for table in ("parameters", "state"):
        arrays = getattr(net, table)
        moved = {
            name: a + numbers(name, *a.shape, low=0.1, high=0.3, dtype=np.float32)
            for name, a in arrays.items()
        }
        setattr(net, table, moved)
    net.classes = tuple("pqrst"[:classes])
    net.normalization = Normalization("zscore", np.float32([90, 100]), np.float32([40, 50]))
    return net


def pictures(count=41, classes=3):
    images = (numbers("transfer", count, *SHAPE, low=0) * 255).astype(np.uint8)
    return dl.ArrayDatastore(images, np.arange(count) * 5 % classes, NAMES[:classes])


def table_of(net):
    return {name: array.tobytes() for name, array in (net.parameters | net.state).items()}


def test_only_the_last_layer_is_new():
    old, seed = network(), 7
    before = table_of(old)
    net = dl.transfer(old, NAMES, new_layer_factor=20, seed=seed)
    after = table_of(net)
    assert list(after) == list(before)
    assert {name for name in after if after[name] != before[name]} == {
        "dense1.weight",
        "dense1.bias",
    }
    fresh = dl.Network([layer for layer in net.layers], SHAPE, seed=seed).parameters
    assert after["dense1.weight"] == fresh["dense1.weight"].tobytes()
    other = dl.transfer(old, NAMES, seed=8)
    assert table_of(other)["dense1.weight"] != after["dense1.weight"]
    assert not net.parameters["dense1.bias"].any()
    assert net.classes == NAMES and net.output_shape == (3,)
    assert net.normalization is old.normalization
    rates = net.factors["learning_rate_factors"]
    assert {name: rate for name, rate in rates.items() if rate != 1} == {
        "dense1.weight": 20,
        "dense1.bias": 20,
    }
    assert table_of(old) == before and old.classes == tuple("pqrst")


def test_a_network_with_the_same_classes_keeps_its_last_layer():
    old = network(weight_learn_rate_factor=9.0)
    net = dl.transfer(old, list("pqrst"), new_layer_factor=20, freeze_up_to="relu1")
    assert table_of(net) == table_of(old)
    assert net.factors["learning_rate_factors"]["dense1.weight"] == 1
    assert old.factors["learning_rate_factors"]["dense1.weight"] == 9 and old["conv1"].trainable
    for classes in ("pqrsT", "tsrqp"):
        assert table_of(dl.transfer(old, list(classes))) != table_of(old)
    # a number of outputs keeps the last layer only if the old network has no classes
    assert table_of(dl.transfer(old, 5)) != table_of(old)
    assert dl.transfer(old, 5).classes is None
    old.classes = ()
    assert table_of(dl.transfer(old, 5)) == table_of(old)


def test_a_pointwise_convolution_in_front_of_pooling():
    old = dl.nn.zoo.squeezenet1_1((3, 48, 48), 6, seed=2)
    net = dl.transfer(old, NAMES, new_layer_factor=10)
    assert net["classifier_1"].filters == 3 and net.output_shape == (3,)
    before, after = table_of(old), table_of(net)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"classifier_1.weight", "classifier_1.bias"}
    assert net.factors["learning_rate_factors"]["classifier_1.bias"] == 10
    without_bias = dl.Network([dl.Dense(4, bias=False), dl.Softmax()], SHAPE)
    assert list(dl.transfer(without_bias, 2).parameters) == ["dense1.weight"]


def test_outputs_that_are_not_classes_have_no_softmax():
    old, names = network(dl.Softmax()), network().layer_names
    assert dl.transfer(old, NAMES).layer_names == old.layer_names == [*names, "softmax1"]
    net = dl.transfer(old, 2, freeze_up_to="relu1", seed=7)
    assert net.layer_names == names and net.output_shape == (2,)
    assert table_of(net) == table_of(dl.transfer(network(), 2, seed=7))
    assert net.normalization is old.normalization and not net["relu1"].trainable
    assert dl.transfer(network(dl.Sigmoid()), 2).layer_names[-1] == "sigmoid1"


def test_frozen_layers():
    net = dl.transfer(network(), NAMES, freeze_up_to="conv2")
    frozen = [layer.name for layer in net.layers if not layer.trainable]
    assert frozen == ["conv1", "batchnorm1", "relu1", "dropout1", "conv2"]
    second = dl.transfer(net, ["x", "y"])  # frozen layers stay frozen
    assert [layer.name for layer in second.layers if not layer.trainable] == frozen
    old = network().freeze("dense1")
    assert dl.transfer(old, NAMES)["dense1"].trainable
    assert dl.transfer(old, list("pqrst"))["dense1"].trainable  # the layer is kept and trained


def test_refused_arguments():
    net = network()
    text = refusal(dl.transfer, net, NAMES, freeze_up_to="conv9")
    assert text == (
        "freeze_up_to (--freeze-up-to) conv9: no layer conv9: did you mean conv2? the layers with "
        "weights before dense1 are, in order, conv1, conv2"
    )
    text = refusal(dl.transfer, zoo.alexnet_torchvision(seed=None), NAMES, freeze_up_to="conv5")
    assert text == (
        "freeze_up_to (--freeze-up-to) conv5: no layer conv5; the layers with weights before "
        "classifier_6 are, in order, features_0, features_3, features_6, features_8, features_10, "
        "classifier_1, classifier_4"
    )
    text = refusal(dl.transfer, net, NAMES, freeze_up_to="dense1")
    assert text.endswith("dense1: expected a layer before dense1, which must be trained")
    for factor in (0, -1, np.inf, np.nan, "2"):
        assert "expected a number above 0" in refusal(
            dl.transfer, net, NAMES, new_layer_factor=factor
        )
    for classes in ("abc", [], 0, True, None, 2.5):
        assert refusal(dl.transfer, net, classes).startswith("transfer: expected ")


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([dl.ReLU()], "expected a network with learnables, found none"),
        ([dl.Conv2D(3, 4), dl.GlobalAveragePool2D()], "conv1: expected Dense or a 1x1 Conv2D as"),
        ([dl.Dense(4), dl.BatchNorm(name="last")], "last: expected Dense or a 1x1 Conv2D as the"),
        ([dl.Conv2D(1, 4)], "conv1: expected a network with a vector of 4 outputs, which its"),
        (
            [dl.ReLU(), dl.Dense(84), dl.Flatten(name="f", after="relu1")]
            + [dl.Add(inputs=("dense1", "f"))],
            "f: expected only layers with one input after dense1, the last layer with learnables, "
            "found one that reads relu1",
        ),
    ],
)
def test_refused_networks(layers, text):
    assert f"transfer: {text}" in refusal(dl.transfer, dl.Network(layers, SHAPE), 3)


def trained(world, net, store, batch_size=41, **options):
    """Train without momentum and regularization, by default for a single step."""
    options = {"epochs": 1, "momentum": 0.0, "l2": 0.0, "learning_rate": 0.003} | options
    options |= {"normalization": "zscore", "batch_size": batch_size, "verbose": "off"}
    dl.train(net, store, dl.TrainingOptions(**options), world=world)
    return net


def test_the_first_step_of_the_new_layer(world):
    """The step is -20 * learning rate * gradient, where NumPy computes the gradient in float64."""
    store, rate = pictures(), 0.003
    net = dl.transfer(network(), NAMES, new_layer_factor=20, freeze_up_to="relu2")
    before, frozen = dict(net.parameters), table_of(net)
    images = net.normalization(store.images)
    features = net.up_to("relu2")
    batch = dl.share(len(images), dl.OneRank())
    x = features(dl.from_images(images, batch)).local().reshape(len(images), -1)
    x, weight = x.astype(np.float64), before["dense1.weight"].astype(np.float64)
    scores = np.exp(x @ weight.T + before["dense1.bias"])
    errors = scores / scores.sum(axis=1, keepdims=True) - np.eye(3)[store.labels]
    trained(world, net, store)
    for name, gradient in (("weight", errors.T @ x), ("bias", errors.sum(axis=0))):
        step = net.parameters[f"dense1.{name}"].astype(np.float64) - before[f"dense1.{name}"]
        expected = -20 * rate * gradient / len(images)
        np.testing.assert_allclose(step, expected, rtol=1e-4, atol=1e-6 * abs(expected).max())
    after = table_of(net)
    assert {name for name in after if after[name] != frozen[name]} == {
        "dense1.weight",
        "dense1.bias",
    }


def test_frozen_layers_keep_their_bytes_in_training(world):
    """A frozen batch normalization keeps its statistics. The next normalization updates them."""
    net = dl.transfer(network(), NAMES, new_layer_factor=2, freeze_up_to="conv2")
    before = table_of(net)
    trained(world, net, pictures(), batch_size=18, epochs=2)
    after = table_of(net)
    unchanged = {name for name in after if after[name] == before[name]}
    assert unchanged == {name for name in after if name.split(".")[0] in net.layer_names[:5]}


def test_the_weights_keep_their_normalization(world):
    """Images are normalized with the old statistics, unless the old normalization is removed."""
    net = trained(world, dl.transfer(network(), NAMES), pictures())
    assert net.normalization.centre.tolist() == [90, 100]
    assert net.normalization.divisor.tolist() == [40, 50]
    net.normalization = None
    trained(world, net, pictures())
    assert net.normalization.centre.tolist() != [90, 100]
