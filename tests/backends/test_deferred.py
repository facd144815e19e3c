"""Check networks whose layers read float32 and bfloat16 values, by their gradients in float64."""

from dataclasses import dataclass

import numpy as np
import pytest
from network_steps import in_float64, step
from single_rank import blocked

import mpidl as dl
from mpidl.backends import settings

SHAPE = 3, 12, 12


@dl.op
def scaled(x, factor):
    return x * factor[:, None, None], lambda dy: (
        dy * factor[:, None, None],
        (x * dy).sum(axis=(0, 2, 3)),
    )


@dataclass
class Scale(dl.Layer):
    """A custom layer, whose results are float32 in every precision."""

    def build(self, shape):
        return dl.Built(shape, {"factor": ((shape[0],), 0.7)})

    def forward(self, x, context):
        return scaled(x, context["factor"])


def conv(name=None, filters=3, after=None):
    return dl.Conv2D(3, filters, padding=1, name=name, after=after)


NETWORKS = {
    "concatenated images": [conv("c"), dl.Concat(inputs=("images", "c")), conv()],
    "added images": [conv("c"), dl.Add(inputs=("c", "images"))],
    "images in a fused sum": [conv("c"), dl.Add(inputs=("images", "c")), dl.ReLU()],
    "images and a normalization": [
        *(conv(), dl.BatchNorm(name="n"), dl.Add(inputs=("n", "images")), dl.ReLU())
    ],
    "pooled images": [
        *(dl.MaxPool2D(2, name="p"), conv(), dl.AveragePool2D(1, name="q")),
        *(dl.Add(inputs=("q", "p")), dl.ReLU()),
    ],
    "custom layer in a residual block": [
        *(conv("c"), conv(), dl.BatchNorm(), Scale(name="s")),
        *(dl.Add(inputs=("s", "c")), dl.ReLU(), conv()),
    ],
    "normalized custom layer": [
        *(conv("c"), Scale(), dl.BatchNorm(name="n")),
        *(dl.Add(inputs=("n", "c")), dl.ReLU(name="r"), dl.Concat(inputs=("r", "n"))),
    ],
    "dense features": [
        *(conv(filters=5), dl.GlobalAveragePool2D(), dl.Flatten(name="g"), dl.Dense(5, name="d")),
        dl.Concat(inputs=("g", "d")),
    ],
    "sum of dense features": [
        *(conv(filters=5), dl.GlobalAveragePool2D(), dl.Flatten(name="g"), dl.Dense(5, name="d")),
        *(dl.Add(inputs=("d", "g")), dl.ReLU()),
    ],
}


def gradients(world, layers, convert=lambda net: net):
    net = convert(dl.Network([*layers, dl.Dense(4, name="scores")], SHAPE, seed=3))
    random = np.random.default_rng(5)
    images = random.normal(size=(37, *SHAPE)).astype(net.parameters["scores.weight"].dtype)
    labels = random.integers(0, 4, 37).astype(np.int32)
    return step(world, net, blocked(world, images, labels))[1]


@pytest.mark.parametrize("layers", NETWORKS.values(), ids=NETWORKS)
def test_layers_may_read_float32_and_bfloat16_values(world, layers, monkeypatch):
    monkeypatch.setattr(settings, "precision", "bf16")
    rounded = gradients(world, layers)
    monkeypatch.setattr(settings, "precision", "fp32")
    exact = gradients(world, layers, in_float64)
    errors = [np.linalg.norm(rounded[name] - exact[name]) for name in exact]
    assert np.linalg.norm(errors) < 0.03 * np.linalg.norm([*map(np.linalg.norm, exact.values())])
