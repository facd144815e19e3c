"""ResNets, with torchvision's shapes and layer names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidl import nn
from mpidl.nn.zoo.sections import builds_network
from mpidl.nn.zoo.torchvision.recipe import RECIPE, SHAPE


def _resnet(
    block_counts: Sequence[int], bottleneck: bool, input_shape: Sequence[int], classes: int, seed
) -> nn.Network:
    layers: list[nn.Layer] = [
        nn.Conv2D(7, 64, stride=2, padding=3, bias=False, name="conv1"),
        nn.BatchNorm(name="bn1"),
        nn.ReLU(name="relu"),
        nn.MaxPool2D(3, stride=2, padding=1, name="maxpool"),
    ]
    before, channels = "maxpool", 64
    for stage, count in enumerate(block_counts):
        width = 64 << stage
        for i in range(count):
            prefix, stride = f"layer{stage + 1}_{i}", 2 if stage and not i else 1
            if bottleneck:  # the 3x3 convolution has the stride, as in torchvision
                convolutions = [(1, width, 1), (3, width, stride), (1, 4 * width, 1)]
            else:
                convolutions = [(3, width, stride), (3, width, 1)]
            layers += _residual_block(prefix, before, channels, convolutions)
            before, channels = f"{prefix}_relu", convolutions[-1][1]
    layers += [nn.GlobalAveragePool2D(name="avgpool"), nn.Dense(classes, name="fc")]
    return nn.Network(layers, input_shape, seed=seed)


def _residual_block(
    prefix: str, before: str, channels: int, convolutions: Sequence[tuple[int, int, int]]
) -> list[nn.Layer]:
    """Return the layers of a residual block.

    The block reads the layer `before` with `channels` outputs. `convolutions` has the size, filters
    and stride of each. If the input and output shapes of the block differ, a 1x1 convolution
    projects the input to the output shape.
    """
    layers: list[nn.Layer] = []
    shortcut, total_stride = before, 1
    for i, (size, filters, stride) in enumerate(convolutions, 1):
        conv = nn.Conv2D(
            size, filters, stride=stride, padding=size // 2, bias=False, name=f"{prefix}_conv{i}"
        )
        conv.after = before if i == 1 else None
        layers += [conv, nn.BatchNorm(name=f"{prefix}_bn{i}")]
        if i < len(convolutions):
            layers.append(nn.ReLU(name=f"{prefix}_relu{i}"))
        total_stride *= stride
    filters = convolutions[-1][1]
    if total_stride > 1 or channels != filters:
        shortcut = f"{prefix}_downsample_1"
        conv = nn.Conv2D(1, filters, stride=total_stride, bias=False, name=f"{prefix}_downsample_0")
        conv.after = before
        layers += [conv, nn.BatchNorm(name=shortcut)]
    add = nn.Add(inputs=(f"{prefix}_bn{len(convolutions)}", shortcut), name=f"{prefix}_add")
    return [*layers, add, nn.ReLU(name=f"{prefix}_relu")]


@builds_network
def resnet18(input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0) -> nn.Network:
    """Return ResNet-18, with 11,689,512 learnables for 1000 classes.

    The network has a 7x7 convolution and four stages of residual blocks. Each block has two 3x3
    convolutions. The convolutions have no bias.

    Notes
    -----
    See He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2016, table 1.
    """
    return _resnet((2, 2, 2, 2), False, input_shape, classes, seed)


@builds_network
def resnet34(input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0) -> nn.Network:
    """Return ResNet-34, with 21,797,672 learnables for 1000 classes; see `resnet18`."""
    return _resnet((3, 4, 6, 3), False, input_shape, classes, seed)


@builds_network
def resnet50(input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0) -> nn.Network:
    """Return ResNet-50, with 25,557,032 learnables for 1000 classes; see `resnet18`.

    A residual block has a 1x1, a 3x3 and another 1x1 convolution. As in torchvision, the 3x3
    convolution halves the rows and columns. In the paper, the first convolution halves them.
    """
    return _resnet((3, 4, 6, 3), True, input_shape, classes, seed)


NETWORKS: dict[str, Callable[..., nn.Network]] = {
    create.__name__: create for create in (resnet18, resnet34, resnet50)
}
RECIPES: dict[str, dict[str, Any]] = {name: RECIPE | {"learning_rate": 0.1} for name in NETWORKS}
