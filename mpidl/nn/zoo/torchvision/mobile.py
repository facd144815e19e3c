"""Networks for phones, with torchvision's shapes and layer names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidl import nn
from mpidl.nn.zoo.sections import builds_network
from mpidl.nn.zoo.torchvision.recipe import RECIPE, SHAPE

# (expansion, filters, blocks, stride of the first block) of each stage of MobileNetV2
MOBILENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _conv_norm(
    prefix: str, size: int, filters: int, stride: int = 1, groups: int = 1, norm: str = ""
) -> list[nn.Layer]:
    """Return a convolution and a batch normalization, which is named `norm` or else PREFIX_1."""
    conv = nn.Conv2D(size, filters, stride=stride, padding=size // 2, groups=groups, bias=False)
    conv.name = prefix if norm else f"{prefix}_0"
    return [conv, nn.BatchNorm(name=norm or f"{prefix}_1")]


def _inverted_residual(
    prefix: str, before: str, channels: int, expansion: int, filters: int, stride: int
) -> list[nn.Layer]:
    """Return the layers of an inverted residual block of MobileNetV2.

    The addition at the end has the name `prefix`. The block expands the channels by `expansion`,
    and its 3x3 convolution with the stride filters each channel separately.
    """
    hidden = channels * expansion
    sizes = [(1, 1, 1)] * (expansion > 1) + [(3, stride, hidden)]  # (size, stride, groups)
    layers: list[nn.Layer] = []
    for i, (size, step, groups) in enumerate(sizes):
        layers += _conv_norm(f"{prefix}_conv_{i}", size, hidden, step, groups)
        layers.append(nn.Clip(0, 6, name=f"{prefix}_conv_{i}_2"))
    i = len(sizes)
    is_residual = stride == 1 and channels == filters
    norm = f"{prefix}_conv_{i + 1}"
    layers += _conv_norm(f"{prefix}_conv_{i}", 1, filters, norm=norm)
    return [*layers, nn.Add(inputs=(before, norm), name=prefix)] if is_residual else layers


@builds_network
def mobilenet_v2(
    input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0
) -> nn.Network:
    """Return MobileNetV2, with 3,504,872 learnables for 1000 classes.

    The network consists of inverted residual blocks. A 1x1 convolution expands the channels, a 3x3
    convolution filters each channel separately, and another 1x1 convolution reduces the channels.
    Activations are clipped to the range from 0 to 6.

    Notes
    -----
    See Sandler, Howard, Zhu, Zhmoginov and Chen, "MobileNetV2: Inverted residuals and linear
    bottlenecks", 2018, table 2.
    """
    layers = [*_conv_norm("features_0", 3, 32, 2), nn.Clip(0, 6, name="features_0_2")]
    channels, number = 32, 1
    for expansion, filters, blocks, stride in MOBILENET_STAGES:
        for i in range(blocks):
            before, step = str(layers[-1].name), 1 if i else stride
            layers += _inverted_residual(
                f"features_{number}", before, channels, expansion, filters, step
            )
            channels, number = filters, number + 1
    layers += _conv_norm(f"features_{number}", 1, 1280)
    layers += [
        nn.Clip(0, 6, name=f"features_{number}_2"),
        nn.GlobalAveragePool2D(name="avgpool"),
        nn.Dropout(0.2, name="classifier_0"),
        nn.Dense(classes, name="classifier_1"),
    ]
    return nn.Network(layers, input_shape, seed=seed)


SHUFFLENET_STAGES = ((116, 4), (232, 8), (464, 4))  # (channels, blocks) of ShuffleNetV2 x1.0


def _branch(
    prefix: str, first: int, channels: int, *, stride: int | None = None, after: str | None = None
) -> list[nn.Layer]:
    """Return a convolution PREFIX_FIRST and its batch normalization.

    With a stride, it is a 3x3 convolution of each channel. Otherwise, it is a 1x1 convolution, and
    a ReLU follows.
    """
    if stride is None:
        conv, activation = nn.Conv2D(1, channels), [nn.ReLU(name=f"{prefix}_{first + 2}")]
    else:
        conv, activation = nn.Conv2D(3, channels, padding=1, groups=channels, stride=stride), []
    conv.name, conv.bias, conv.after = f"{prefix}_{first}", False, after
    return [conv, nn.BatchNorm(name=f"{prefix}_{first + 1}"), *activation]


def _shuffle_block(
    prefix: str, before: str, channels: int, inputs: int, halves: bool
) -> list[nn.Layer]:
    """Return a block of ShuffleNetV2, which reads the layer `before` with `inputs` channels.

    If the block halves the rows and columns, both branches read all channels. Otherwise, the first
    half of the channels passes unchanged.
    """
    half, stride, branch = channels // 2, 2 if halves else 1, f"{prefix}_branch2"
    if halves:
        other = f"{prefix}_branch1"
        layers = _branch(other, 0, inputs, stride=stride, after=before) + _branch(other, 2, half)
        layers += _branch(branch, 0, half, after=before)
        passed = f"{other}_4"
    else:
        passed = f"{prefix}_unchanged"
        layers = [
            nn.ChannelSlice(0, half, name=passed, after=before),
            nn.ChannelSlice(half, channels, name=f"{prefix}_changed", after=before),
            *_branch(branch, 0, half),
        ]
    layers += _branch(branch, 3, half, stride=stride) + _branch(branch, 5, half)
    layers.append(nn.Concat(inputs=(passed, f"{branch}_7"), name=f"{prefix}_concat"))
    return [*layers, nn.ChannelShuffle(2, name=prefix)]


@builds_network
def shufflenet_v2_x1_0(
    input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0
) -> nn.Network:
    """Return ShuffleNetV2 x1.0, with 2,278,604 learnables for 1000 classes.

    A block convolves half of the channels, and concatenates them with the other half. Then the
    channels are shuffled, so that the next block convolves both halves.

    Notes
    -----
    See Ma, Zhang, Zheng and Sun, "ShuffleNet V2: practical guidelines for efficient CNN
    architecture design", 2018, table 5.
    """
    inputs = 24
    layers: list[nn.Layer] = [
        nn.Conv2D(3, inputs, stride=2, padding=1, bias=False, name="conv1_0"),
        nn.BatchNorm(name="conv1_1"),
        nn.ReLU(name="conv1_2"),
        nn.MaxPool2D(3, stride=2, padding=1, name="maxpool"),
    ]
    for stage, (channels, blocks) in enumerate(SHUFFLENET_STAGES, 2):
        for i in range(blocks):
            before = str(layers[-1].name)
            layers += _shuffle_block(f"stage{stage}_{i}", before, channels, inputs, i == 0)
            inputs = channels
    layers += [*_branch("conv5", 0, 1024), nn.GlobalAveragePool2D(), nn.Dense(classes, name="fc")]
    return nn.Network(layers, input_shape, seed=seed)


NETWORKS: dict[str, Callable[..., nn.Network]] = {
    create.__name__: create for create in (mobilenet_v2, shufflenet_v2_x1_0)
}
RECIPES: dict[str, dict[str, Any]] = {
    "mobilenet_v2": RECIPE
    | {
        "learning_rate": 0.045,
        "learn_rate_drop_factor": 0.98,
        "learn_rate_drop_period": 1,
        "l2": 4e-5,
        "epochs": 300,
    },
    "shufflenet_v2_x1_0": RECIPE
    | {
        "learning_rate": 0.5,
        "learn_rate_schedule": "cosine",
        "warmup_epochs": 5,
        "label_smoothing": 0.1,
        "batch_size": 1024,
        "scale_rate": 1024,
        "l2": 2e-5,
        "epochs": 300,
    },
}
