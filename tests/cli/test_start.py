"""Test networks, functions and modules in user files that options name."""

from dataclasses import replace

import numpy as np
import pytest
from image_sets import refusal
from single_rank import numbers

import mpidl as dl
from mpidl.cli import start, train_results

SHAPE = (1, 6, 6)
TRANSFER = """
import mpidl as dl

def transfer(input_shape, classes):
    net, _ = dl.load_model({path!r})
    return net.replace_layers({{"dense1": dl.Dense(classes)}}).freeze("conv1")

def layers(input_shape, classes):
    return [dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(classes)]

def one_layer(input_shape, classes):
    return dl.Dense(classes)

def nothing(input_shape, classes):
    layers(input_shape, classes)

def mixed(input_shape, classes):
    return [dl.ReLU(), "dense"]

def text(input_shape, classes):
    return [dl.Conv2D(3, "16"), dl.Dense(classes)]

def negative(input_shape, classes):
    return [dl.Conv2D(-3, 16), dl.Dense(classes)]
"""


@pytest.fixture
def file(tmp_path):
    """A FILE.py that loads a saved model. No seed gives this model's weights."""
    net = dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(2)], SHAPE, seed=3)
    net.parameters = {name: a + np.float32(0.125) for name, a in net.parameters.items()}
    net.state = {name: a + np.float32(2) for name, a in net.state.items()}
    dl.save_model(tmp_path / "model.h5", net, ["a", "b"])
    path = tmp_path / "own.py"
    path.write_text(TRANSFER.format(path=str(tmp_path / "model.h5")))
    return net, path


def test_a_returned_network_keeps_its_weights(file):
    old, path = file
    net = start.network(f"{path}:transfer", SHAPE, 3, seed=9)
    for table in ("parameters", "state"):
        for name, array in getattr(old, table).items():
            if not name.startswith("dense1"):
                assert getattr(net, table)[name].tobytes() == array.tobytes()
    assert net.output_shape == (3,) and not net["conv1"].trainable
    assert net.normalization.name == "rescale-zero-one"


def test_the_seed_draws_the_weights_of_returned_layers(file):
    _, path = file
    net, other = (start.network(f"{path}:layers", SHAPE, 3, seed=seed) for seed in (9, 10))
    fresh = dl.Network(net.layers, SHAPE, seed=9).parameters
    assert all(net.parameters[name].tobytes() == fresh[name].tobytes() for name in fresh)
    assert other.parameters["conv1.weight"].tobytes() != fresh["conv1.weight"].tobytes()
    zoo = [start.network("digits", (1, 28, 28), 10, seed=seed).parameters for seed in (0, 1)]
    assert zoo[0]["conv1.weight"].tobytes() != zoo[1]["conv1.weight"].tobytes()


def test_a_network_for_other_images_is_refused(file):
    _, path = file
    text = refusal(start.network, f"{path}:transfer", (1, 8, 6), 3, seed=0)
    assert (
        "network for images of shape (1, 8, 6), as " in text and "found one for (1, 6, 6)" in text
    )


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("one_layer", "expected a list of layers, got a single Dense"),
        ("nothing", "expected a list of layers, got None"),
        ("mixed", "expected a list of layers, got 'dense' in it"),
        ("text", "conv1: filters must be an integer >= 1, got '16' (conv1 reads images: 1x6x6)"),
        (
            "negative",
            "Conv2D: size must be one or two integers >= 1, got -3 (conv1 reads images: 1x6x6)",
        ),
    ],
)
def test_functions_that_return_no_network(file, function, text):
    name = f"{file[1]}:{function}"
    assert refusal(start.network, name, SHAPE, 3, seed=0) == f"--network {name}: {text}"


DECAYS = ("cosine", "polynomial")
SCHEDULE_ENDS = (
    "the end of epoch 2, where --learn-rate-schedule {} ends: there is nothing left to train"
)


@pytest.mark.parametrize(
    ("position", "options", "text"),
    [
        ((2, 5), {}, "in epoch 2"),
        ((3, 8), {}, "the end of epoch 2; increase --epochs to train further"),
        ((2, 5), {"max_iterations": 5}, "in epoch 2; increase --max-iterations to train further"),
        *(((3, 8), {"learn_rate_schedule": name}, SCHEDULE_ENDS.format(name)) for name in DECAYS),
    ],
)
def test_the_position_of_a_resumed_run_and_how_to_train_on(position, options, text):
    position = dict(zip(("epoch", "iteration"), position, strict=True))
    assert (
        train_results.describe_position(position, dl.TrainingOptions(epochs=2, **options)) == text
    )


@pytest.mark.usefixtures("world")
def test_a_network_stays_with_its_normalization(file):
    _, path = file
    name = f"{path}:transfer"
    net = start.network(name, SHAPE, 3, seed=0)
    images = numbers("start", 40, *SHAPE, low=0, high=255).astype(np.uint8)
    store = dl.ArrayDatastore(images, np.arange(40) % 3)
    world, before = dl.World(threads=1), dl.weights_sha256(net)
    zscore = dl.TrainingOptions(epochs=1, batch_size=20, normalization="zscore", verbose="off")
    for options in (zscore, replace(zscore, validation=store)):
        text = refusal(dl.train, net, store, options, world=world)
        assert "zscore: expected rescale-zero-one, " in text
        assert 'TrainingOptions(normalization="rescale-zero-one"' in text
    assert dl.weights_sha256(net) == before and net.normalization.name == "rescale-zero-one"
    net.normalization = None
    dl.train(net, store, zscore, world=world)
    assert net.normalization.name == "zscore"
    dl.train(net, store, zscore, world=world)  # a second training is accepted
