"""ResNets, with torchvision's shapes and layer names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpidl import nn
from mpidl.nn.zoo.sections import builds_network
from mpidl.nn.zoo.torchvision.recipe import RECIPE, SHAPE


class Convolution(NamedTuple):
    """A convolution of a residual block, padded so that only the stride changes the size."""

    size: int
    filters: int
    stride: int = 1
    dilation: int = 1


def layers_before_pooling(
    block_counts: Sequence[int], *, is_bottleneck: bool, prefix: str = "", dilated: int = 0
) -> list[nn.Layer]:
    """Return the layers of a ResNet up to its last residual block.

    Their names begin with `prefix`. `block_counts` are the blocks of each stage. The last `dilated`
    stages do not halve the rows and columns. Instead, their 3x3 convolutions have holes, so the
    filters cover the same area.
    """
    layers: list[nn.Layer] = [
        nn.Conv2D(7, 64, stride=2, padding=3, bias=False, name=f"{prefix}conv1"),
        nn.BatchNorm(name=f"{prefix}bn1"),
        nn.ReLU(name=f"{prefix}relu"),
        nn.MaxPool2D(3, stride=2, padding=1, name=f"{prefix}maxpool"),
    ]
    channels, dilation = 64, 1
    for stage, count in enumerate(block_counts):
        width, is_dilated = 64 << stage, stage >= len(block_counts) - dilated
        for i in range(count):
            halves = stage > 0 and i == 0 and not is_dilated
            middle = Convolution(3, width, 2 if halves else 1, dilation)
            convolutions = [middle, Convolution(3, width)]
            if is_bottleneck:  # the 3x3 convolution has the stride, as in torchvision
                convolutions = [Convolution(1, width), middle, Convolution(1, 4 * width)]
            name = f"{prefix}layer{stage + 1}_{i}"
            layers += _residual_block(name, str(layers[-1].name), channels, convolutions)
            channels = convolutions[-1].filters
            if is_dilated and i == 0:
                dilation *= 2
    return layers


def _residual_block(
    prefix: str, before: str, channels: int, convolutions: Sequence[Convolution]
) -> list[nn.Layer]:
    """Return the layers of a residual block that reads the layer `before` with `channels` outputs.

    If the input and output shapes of the block differ, a 1x1 convolution projects the input to the
    output shape.
    """
    layers: list[nn.Layer] = []
    shortcut, total_stride = before, 1
    for i, (size, filters, stride, dilation) in enumerate(convolutions, 1):
        conv = nn.Conv2D(size, filters, stride=stride, bias=False, name=f"{prefix}_conv{i}")
        conv.padding, conv.dilation = size // 2 * dilation, dilation if size > 1 else 1
        conv.after = before if i == 1 else None
        layers += [conv, nn.BatchNorm(name=f"{prefix}_bn{i}")]
        if i < len(convolutions):
            layers.append(nn.ReLU(name=f"{prefix}_relu{i}"))
        total_stride *= stride
    filters = convolutions[-1].filters
    if total_stride > 1 or channels != filters:
        shortcut = f"{prefix}_downsample_1"
        conv = nn.Conv2D(1, filters, stride=total_stride, bias=False, name=f"{prefix}_downsample_0")
        conv.after = before
        layers += [conv, nn.BatchNorm(name=shortcut)]
    add = nn.Add(inputs=(f"{prefix}_bn{len(convolutions)}", shortcut), name=f"{prefix}_add")
    return [*layers, add, nn.ReLU(name=f"{prefix}_relu")]


def _resnet(
    block_counts: Sequence[int], is_bottleneck: bool, input_shape: Sequence[int], classes: int, seed
) -> nn.Network:
    layers = layers_before_pooling(block_counts, is_bottleneck=is_bottleneck)
    layers += [nn.GlobalAveragePool2D(name="avgpool"), nn.Dense(classes, name="fc")]
    return nn.Network(layers, input_shape, seed=seed)


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
