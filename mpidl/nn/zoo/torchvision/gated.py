"""MobileNetV3 and EfficientNet, with torchvision's shapes and layer names.

Both consist of inverted residual blocks with gates. A 1x1 convolution expands the channels, a
convolution filters each channel separately, a gate multiplies each channel by a number, and another
1x1 convolution reduces the channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from mpidl import nn
from mpidl.nn.zoo.sections import builds_network
from mpidl.nn.zoo.torchvision.recipe import RECIPE, SHAPE

Activation: TypeAlias = Callable[..., nn.Layer]


class Style(NamedTuple):
    """What all blocks of a network share."""

    gate: tuple[Activation, Activation]  # activations after the two convolutions of a gate
    norm: dict[str, Any]  # arguments of the batch normalizations


class Block(NamedTuple):
    """An inverted residual block."""

    size: int  # of the filters of the depthwise convolution
    hidden: int  # channels of the depthwise convolution
    filters: int  # channels of the output
    stride: int
    activation: Activation
    squeezed: int  # channels inside the gate; 0: no gate
    drop: float = 0.0  # probability that training leaves out the block for an image


MOBILENET = Style(gate=(nn.ReLU, nn.HardSigmoid), norm={"epsilon": 0.001, "decay": 0.01})
EFFICIENTNET = Style(gate=(nn.Swish, nn.Sigmoid), norm={})


def _rounded(channels: float) -> int:
    """Return the nearest multiple of 8, or the next one if it is more than 10 % smaller."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


# (size, hidden, filters, stride, activation, whether there is a gate) of MobileNetV3-Large
MOBILENET_V3_LARGE = tuple(
    Block(size, hidden, filters, stride, activation, _rounded(hidden / 4) if has_gate else 0)
    for size, hidden, filters, stride, activation, has_gate in (
        (3, 16, 16, 1, nn.ReLU, False),
        (3, 64, 24, 2, nn.ReLU, False),
        (3, 72, 24, 1, nn.ReLU, False),
        (5, 72, 40, 2, nn.ReLU, True),
        (5, 120, 40, 1, nn.ReLU, True),
        (5, 120, 40, 1, nn.ReLU, True),
        (3, 240, 80, 2, nn.HardSwish, False),
        (3, 200, 80, 1, nn.HardSwish, False),
        (3, 184, 80, 1, nn.HardSwish, False),
        (3, 184, 80, 1, nn.HardSwish, False),
        (3, 480, 112, 1, nn.HardSwish, True),
        (3, 672, 112, 1, nn.HardSwish, True),
        (5, 672, 160, 2, nn.HardSwish, True),
        (5, 960, 160, 1, nn.HardSwish, True),
        (5, 960, 160, 1, nn.HardSwish, True),
    )
)
# (expansion, size, stride of the first block, filters, blocks) of each stage of EfficientNet-B0
EFFICIENTNET_B0 = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
DROP = 0.2  # probability of leaving out the block after the last one of EfficientNet-B0


def _convolution(
    prefix: str, conv: nn.Conv2D, style: Style, activation: Activation | None = None
) -> list[nn.Layer]:
    """Return PREFIX_0, a convolution, PREFIX_1, its normalization, and PREFIX_2, an activation."""
    conv.name = f"{prefix}_0"
    layers: list[nn.Layer] = [conv, nn.BatchNorm(name=f"{prefix}_1", **style.norm)]
    return layers if activation is None else [*layers, activation(name=f"{prefix}_2")]


def _gate(prefix: str, before: str, channels: int, squeezed: int, style: Style) -> list[nn.Layer]:
    """Return a squeeze-and-excitation gate: the product PREFIX of `before` and a number a channel.

    Two 1x1 convolutions compute the numbers of an image from the means of its channels.
    """
    first, last = style.gate
    return [
        nn.GlobalAveragePool2D(name=f"{prefix}_avgpool"),
        nn.Conv2D(1, squeezed, name=f"{prefix}_fc1"),
        first(name=f"{prefix}_activation"),
        nn.Conv2D(1, channels, name=f"{prefix}_fc2"),
        last(name=f"{prefix}_scale_activation"),
        nn.Multiply(inputs=(before, f"{prefix}_scale_activation"), name=prefix),
    ]


def _residual(
    prefix: str, before: str, channels: int, block: Block, style: Style
) -> list[nn.Layer]:
    """Return the layers of a block that reads the layer `before` with this number of channels."""
    hidden, layers, i = block.hidden, [], 0
    if hidden != channels:
        expand = nn.Conv2D(1, hidden, bias=False)
        layers += _convolution(f"{prefix}_block_0", expand, style, block.activation)
        i = 1
    padding = block.size // 2
    depthwise = nn.Conv2D(
        block.size, hidden, stride=block.stride, padding=padding, groups=hidden, bias=False
    )
    layers += _convolution(f"{prefix}_block_{i}", depthwise, style, block.activation)
    if block.squeezed:
        i += 1
        gated = str(layers[-1].name)
        layers += _gate(f"{prefix}_block_{i}", gated, hidden, block.squeezed, style)
    project = nn.Conv2D(1, block.filters, bias=False)
    layers += _convolution(f"{prefix}_block_{i + 1}", project, style)
    if block.stride > 1 or channels != block.filters:
        return layers
    if block.drop:
        layers.append(nn.StochasticDepth(block.drop, name=f"{prefix}_stochastic_depth"))
    return [*layers, nn.Add(inputs=(before, str(layers[-1].name)), name=prefix)]


@builds_network
def mobilenet_v3_large(
    input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0
) -> nn.Network:
    """Return MobileNetV3-Large, with 5,483,032 learnables for 1000 classes.

    Its inverted residual blocks have ReLU, or x * HardSigmoid(x) in the second half of the network.
    Eight of them have a gate.

    Notes
    -----
    See Howard et al., "Searching for MobileNetV3", 2019, table 1.
    """
    style, channels = MOBILENET, 16
    stem = nn.Conv2D(3, channels, stride=2, padding=1, bias=False)
    layers = _convolution("features_0", stem, style, nn.HardSwish)
    for i, block in enumerate(MOBILENET_V3_LARGE, 1):
        layers += _residual(f"features_{i}", str(layers[-1].name), channels, block, style)
        channels = block.filters
    head = nn.Conv2D(1, 6 * channels, bias=False)
    layers += _convolution(f"features_{i + 1}", head, style, nn.HardSwish)
    layers += [
        nn.GlobalAveragePool2D(name="avgpool"),
        nn.Dense(1280, name="classifier_0"),
        nn.HardSwish(name="classifier_1"),
        nn.Dropout(0.2, name="classifier_2"),
        nn.Dense(classes, name="classifier_3"),
    ]
    return nn.Network(layers, input_shape, seed=seed)


@builds_network
def efficientnet_b0(
    input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0
) -> nn.Network:
    """Return EfficientNet-B0, with 5,288,548 learnables for 1000 classes.

    Its inverted residual blocks have the activation x * Sigmoid(x), and a gate. In training, blocks
    are left out at random, later blocks more often.

    Notes
    -----
    See Tan and Le, "EfficientNet: rethinking model scaling for convolutional neural networks",
    2019, table 1.
    """
    style, channels = EFFICIENTNET, 32
    stem = nn.Conv2D(3, channels, stride=2, padding=1, bias=False)
    layers = _convolution("features_0", stem, style, nn.Swish)
    number, total = 0, sum(blocks for *_, blocks in EFFICIENTNET_B0)
    for stage, (expansion, size, stride, filters, blocks) in enumerate(EFFICIENTNET_B0, 1):
        for i in range(blocks):
            block = Block(
                size=size,
                hidden=expansion * channels,
                filters=filters,
                stride=1 if i else stride,
                activation=nn.Swish,
                squeezed=max(1, channels // 4),
                drop=DROP * number / total,
            )
            before = str(layers[-1].name)
            layers += _residual(f"features_{stage}_{i}", before, channels, block, style)
            channels, number = filters, number + 1
    head = nn.Conv2D(1, 4 * channels, bias=False)
    layers += _convolution(f"features_{stage + 1}", head, style, nn.Swish)
    layers += [
        nn.GlobalAveragePool2D(name="avgpool"),
        nn.Dropout(0.2, name="classifier_0"),
        nn.Dense(classes, name="classifier_1"),
    ]
    return nn.Network(layers, input_shape, seed=seed)


NETWORKS: dict[str, Callable[..., nn.Network]] = {
    create.__name__: create for create in (mobilenet_v3_large, efficientnet_b0)
}
# The networks were published with weights trained by RMSProp with momentum, for 350 and 600 epochs.
# Here, the optimizer is the one of the other networks, with a cosine for the learning rate.
_RECIPE: dict[str, Any] = RECIPE | {
    "learn_rate_schedule": "cosine",
    "warmup_epochs": 5,
    "learning_rate": 0.1,
    "epochs": 350,
    "l2": 2e-5,
    "average": "ema",
    "average_decay": 0.9999,
}
RECIPES: dict[str, dict[str, Any]] = dict.fromkeys(NETWORKS, _RECIPE)
