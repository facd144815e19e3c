"""Golden hashes: short trainings, and the weights that each arithmetic gives.

golden_hashes.toml lists the trainings of one version of the arithmetic (`numerics.VERSION`). If a
machine finds other weights, it computes differently, or the installed mpidl does. docs/numerics.md
has the policy; `python tests/training/test_golden.py` writes the hashes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mpidl import losses, nn, numerics
from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.data import registry
from mpidl.data.array_datastore import ArrayDatastore
from mpidl.data.transforms.preprocess import Preprocess, preprocessed
from mpidl.errors import Fault, UserError
from mpidl.files import read_toml
from mpidl.nn import Network, zoo
from mpidl.options.declaration import check_value, flag, rule_of
from mpidl.ranks import serial
from mpidl.ranks.world import World
from mpidl.text import did_you_mean
from mpidl.training import input_pipeline
from mpidl.training.files import model_file
from mpidl.training.options import configuration
from mpidl.training.train import train

PATH = os.path.join(os.path.dirname(__file__), "golden_hashes.toml")
FUSED, UNFUSED = "fused", "unfused"  # with and without fused multiply-adds
ARITHMETICS = (FUSED, UNFUSED)
SMALL = 200  # images of the sets that only the table has


class Training(NamedTuple):
    """A training of the table.

    Attributes
    ----------
    name : str
        Its name.
    arguments : str
        Its options and inputs, as on the command line of `train`. `NETWORKS` and `SETS` have a few
        networks and sets more than the command.
    hashes : dict
        {arithmetic: `dl.weights_sha256` of the trained network}.
    """

    name: str
    arguments: str
    hashes: dict[str, str]


class Table(NamedTuple):
    """The trainings, and the version of the arithmetic that their hashes belong to."""

    numerics: int
    trainings: list[Training]


class Outcome(NamedTuple):
    """The hash of a training in the table, and the hash that this machine computes."""

    name: str
    expected: str
    actual: str


@functools.cache
def table() -> Table:
    """Return the contents of golden_hashes.toml."""
    values = read_toml(PATH, PATH)
    trainings = [
        Training(row["name"], row["arguments"], {a: row[a] for a in ARITHMETICS if a in row})
        for row in values["training"]
    ]
    return Table(values["numerics"], trainings)


def arithmetic() -> str:
    """Return the arithmetic of this process, one of `ARITHMETICS`.

    Raises
    ------
    UserError
        If the table has no hashes of it.
    """
    problem = None
    if settings.on_gpu:
        problem = "a GPU, whose hashes have not been measured yet"
    elif (build := builds.running()) == "numpy":
        problem = "NumPy, whose weights depend on its BLAS"
    if problem is not None:
        raise UserError(f"golden hashes: expected compiled kernels on a CPU, found {problem}")
    is_fused = build != "generic" or platform.machine() in ("aarch64", "arm64")
    return FUSED if is_fused else UNFUSED


def check(names: Iterable[str] | None = None, world: World | None = None) -> list[Outcome]:
    """Train the trainings of the table, and return their hashes.

    A rank of a job may call this function alone: it changes neither the world nor the settings of
    the job. With `world`, the function is collective.

    Parameters
    ----------
    names : iterable of str, optional
        The trainings. The default is all of them.
    world : World, optional
        The ranks that train together. By default, this rank trains alone.

    Returns
    -------
    list of Outcome
        Tuples (name, expected, actual). They are equal if this machine computes with the arithmetic
        of the table.

    Raises
    ------
    UserError
        If a name is unknown, or if the table has no hashes of the arithmetic of this process.
    Fault
        If a signal interrupts a training, or if the table belongs to another version of the
        arithmetic than this mpidl.
    """
    return list(outcomes(names, world))


def outcomes(names: Iterable[str] | None = None, world: World | None = None) -> Iterator[Outcome]:
    """Yield the results of `check` one after the other."""
    kind, contents = arithmetic(), table()
    if contents.numerics != numerics.VERSION:
        raise Fault(
            f"{PATH}: expected hashes of numerics {numerics.VERSION}, found hashes of numerics "
            f"{contents.numerics}"
        )
    trainings = {training.name: training for training in contents.trainings}
    for name in trainings if names is None else names:
        if name not in trainings:
            raise UserError(f"golden hashes: no training {name}{did_you_mean(name, trainings)}")
        training = trainings[name]
        yield Outcome(name, training.hashes[kind], weights_of(training.arguments, world))


def weights_of(arguments: str, world: World | None = None) -> str:
    """Train with arguments of the command line on CPUs, and return the hash of the weights.

    Collective over `world`; without it, this rank trains alone.
    """
    world = _single_rank() if world is None else world
    resolved = configuration.resolve(_typed(arguments))
    name = resolved.run["data"]
    images = SETS[name]() if name in SETS else registry.open_sets(name, world).train
    images = preprocessed(images, Preprocess.of_options(resolved.run))
    options = replace(resolved.options, device="cpu", verbose="off", plots="none")
    shape = input_pipeline.image_shape(options, images.image_shape)
    net = _network(resolved.run["network"], shape, images, options)
    with _own_settings():
        result = train(net, images, options, world=world)
    if result.stopped is not None:
        raise Fault(f"{result.stopped}: a golden training was interrupted")
    return model_file.weights_sha256(net)


@functools.cache
def _single_rank():
    """Return the world of this rank alone. It stays open, as an error's handler may use it."""
    return World(serial.load().COMM_SELF, threads=None)


@contextlib.contextmanager
def _own_settings():
    """Within the block, a training may change the settings of the backends."""
    before = dict(vars(settings))
    try:
        yield
    finally:
        vars(settings).update(before)


def _typed(arguments):
    """Return {name: value} of a command line whose flags all have values."""
    words, declared = shlex.split(arguments), configuration.DECLARED
    names = {flag(name): name for name in declared}
    return {
        names[word]: check_value(rule_of(declared[names[word]]), text, word, text=True)
        for word, text in zip(words[::2], words[1::2], strict=True)
    }


def _network(name, shape, images, options):
    outputs = len(images.classes) or int(np.prod(images.targets_shape))
    if name in NETWORKS:
        net = Network(NETWORKS[name](outputs), shape, seed=options.seed)
    else:
        net = zoo.NETWORKS[name](shape, outputs, options.seed)
    return net.append_layer(nn.Sigmoid()) if losses.has_label_scores(options.loss) else net


def _digits():
    """Return (images, labels) of a few digits."""
    digits = registry.open_sets("digits").train
    return digits.read(range(SMALL)), np.asarray(digits.labels)[:SMALL]


def _numbers():
    """Return images of digits with their mean pixel as the target."""
    images = _digits()[0]
    sums = images.sum(axis=(1, 2, 3), dtype=np.int64)  # exact in any order
    return ArrayDatastore(images, targets=(sums / images[0].size / 255).astype(np.float32))


def _labels():
    """Return images of digits with three labels: below 5, even, and a prime number."""
    images, digits = _digits()
    labels = digits < 5, digits % 2 == 0, np.isin(digits, (2, 3, 5, 7))
    return ArrayDatastore(images, targets=np.stack(labels, axis=1).astype(np.uint8))


SETS = {"numbers": _numbers, "labels": _labels}


def _many_layers(outputs):
    """Return the kinds of layers and of convolutions that no named network has."""
    return [
        nn.Conv2D(7, 16, stride=2, padding=3),
        nn.BatchNorm(),
        nn.GELU(name="stem"),
        nn.Conv2D(3, 33, stride=2, padding=1),
        nn.PReLU(),
        nn.CrossChannelNorm(5),
        nn.TransposedConv2D(4, 16, stride=2, cropping="same"),
        nn.Tanh(name="up"),
        nn.Add(inputs=("up", "stem")),
        nn.LeakyReLU(),
        nn.Conv2D(5, 32, padding=2, groups=2, name="grouped"),
        nn.Swish(),
        nn.MaxPool2D(3, stride=2, padding=1, name="pool"),
        nn.Conv2D(5, 32, padding=2, groups=32),
        nn.BatchNorm(),
        nn.HardSwish(),
        nn.Concat(inputs=("hardswish1", "pool")),
        nn.Conv2D(3, 16, padding="same", dilation=2),
        nn.Sigmoid(),
        nn.Pad2D(1),
        nn.AveragePool2D(2, padding=1, count_padding=False),
        nn.Dropout(0.2),
        nn.Dense(37),
        nn.PReLU(shared=True),
        nn.Dense(outputs),
    ]


def _large_filters(outputs):
    """Return a network with the kinds of layers of AlexNet."""
    return [
        nn.Conv2D(11, 24, stride=4, padding=4),
        nn.ReLU(),
        nn.CrossChannelNorm(5),
        nn.MaxPool2D(3, stride=2, padding=1),
        nn.Conv2D(5, 32, padding=2, groups=2),
        nn.ReLU(),
        nn.CrossChannelNorm(5),
        nn.MaxPool2D(2),
        nn.Dense(65),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Dense(outputs),
    ]


def _resizing(outputs):
    """Return a network with layers that change the size of images, or the order of channels."""
    return [
        nn.Conv2D(3, 8, stride=2, padding=1, name="stem"),
        nn.BatchNorm(),
        nn.ReLU(name="large"),
        nn.ChannelShuffle(2),
        nn.ChannelSlice(2, 6),
        nn.AdaptiveAveragePool2D((5, 6)),
        nn.Conv2D(3, 8, padding=1),
        nn.ReLU(),
        nn.Resize2D(scale=2, mode="bilinear"),
        nn.Resize2D((14, 14), name="resized"),
        nn.Add(inputs=("large", "resized")),
        nn.AdaptiveAveragePool2D(4),
        nn.Dense(outputs),
    ]


def _image_normalized(outputs):
    """Return a network that normalizes within images, like ConvNeXt."""
    return [
        nn.Conv2D(4, 24, stride=4),
        nn.LayerNorm(epsilon=1e-6),
        nn.Conv2D(3, 24, padding=1, groups=24),
        nn.LayerNorm("image"),
        nn.Conv2D(1, 20),
        nn.GELU(),
        nn.GroupNorm(5),
        nn.Conv2D(3, 9, padding=1, bias=False),
        nn.InstanceNorm(),
        nn.ReLU(),
        nn.Dense(11),
        nn.LayerNorm(),
        nn.Dense(outputs),
    ]


def _recurrent(outputs):
    """Return a network that reads the rows of images as sequences."""
    return [
        nn.LSTM(24, truncate=10),
        nn.GRU(33, reverse=True),
        nn.LSTM(20, returns="last"),
        nn.Dense(outputs),
    ]


NETWORKS = {
    "image-normalized": _image_normalized,
    "many-layers": _many_layers,
    "large-filters": _large_filters,
    "recurrent": _recurrent,
    "resizing": _resizing,
}
