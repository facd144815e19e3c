"""DenseNet, with torchvision's shapes and layer names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidl import nn
from mpidl.nn.zoo.sections import builds_network
from mpidl.nn.zoo.torchvision.recipe import RECIPE, SHAPE

GROWTH = 32  # channels that a dense layer adds
BOTTLENECK = 4 * GROWTH  # filters of the 1x1 convolution in a dense layer
BLOCKS = (6, 12, 24, 16)  # dense layers in each block of DenseNet-121


@builds_network
def densenet121(
    input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0
) -> nn.Network:
    """Return DenseNet-121, with 7,978,856 learnables for 1000 classes.

    A dense layer reads the outputs of all earlier layers of its block, and adds 32 channels to
    them. It has a 1x1 and a 3x3 convolution, each after a batch normalization and a ReLU. Between
    the four blocks, a 1x1 convolution halves the channels, and average pooling the rows and
    columns. The convolutions have no bias.

    Notes
    -----
    See Huang, Liu, van der Maaten and Weinberger, "Densely connected convolutional networks", 2017,
    table 1.
    """
    channels = 2 * GROWTH
    layers: list[nn.Layer] = [
        nn.Conv2D(7, channels, stride=2, padding=3, bias=False, name="features_conv0"),
        nn.BatchNorm(name="features_norm0"),
        nn.ReLU(name="features_relu0"),
        nn.MaxPool2D(3, stride=2, padding=1, name="features_pool0"),
    ]
    for block, count in enumerate(BLOCKS, 1):
        for i in range(1, count + 1):
            layers += _dense_layer(f"features_denseblock{block}_denselayer{i}", layers[-1].name)
        channels += count * GROWTH
        if block < len(BLOCKS):
            channels //= 2
            layers += _transition(f"features_transition{block}", channels)
    layers += [
        nn.BatchNorm(name="features_norm5"),
        nn.ReLU(name="features_relu5"),
        nn.GlobalAveragePool2D(name="avgpool"),
        nn.Dense(classes, name="classifier"),
    ]
    return nn.Network(layers, input_shape, seed=seed)


def _dense_layer(prefix: str, before: str) -> list[nn.Layer]:
    """Return the layers of a dense layer that reads `before`; the last has the name `prefix`."""
    return [
        nn.BatchNorm(name=f"{prefix}_norm1"),
        nn.ReLU(name=f"{prefix}_relu1"),
        nn.Conv2D(1, BOTTLENECK, bias=False, name=f"{prefix}_conv1"),
        nn.BatchNorm(name=f"{prefix}_norm2"),
        nn.ReLU(name=f"{prefix}_relu2"),
        nn.Conv2D(3, GROWTH, padding=1, bias=False, name=f"{prefix}_conv2"),
        nn.Concat(inputs=(before, f"{prefix}_conv2"), name=prefix),
    ]


def _transition(prefix: str, filters: int) -> list[nn.Layer]:
    return [
        nn.BatchNorm(name=f"{prefix}_norm"),
        nn.ReLU(name=f"{prefix}_relu"),
        nn.Conv2D(1, filters, bias=False, name=f"{prefix}_conv"),
        nn.AveragePool2D(2, name=f"{prefix}_pool"),
    ]


NETWORKS: dict[str, Callable[..., nn.Network]] = {"densenet121": densenet121}
RECIPES: dict[str, dict[str, Any]] = {"densenet121": RECIPE | {"learning_rate": 0.1}}
