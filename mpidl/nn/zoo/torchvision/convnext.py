"""ConvNeXt, with torchvision's shapes and layer names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidl import nn
from mpidl.nn.zoo.sections import builds_network
from mpidl.nn.zoo.torchvision.recipe import SHAPE

EPSILON = 1e-6  # of the layer normalizations
STAGES = ((96, 3), (192, 3), (384, 9), (768, 3))  # (channels, blocks) of ConvNeXt-Tiny
DROP = 0.1  # probability of leaving out the last block for an image


def _block(prefix: str, before: str, channels: int, drop: float) -> list[nn.Layer]:
    """Return a residual block, which reads the layer `before`; its sum has the name `prefix`.

    Where torchvision has a linear layer for each pixel, the block has a 1x1 convolution.
    """
    depthwise = nn.Conv2D(7, channels, padding=3, groups=channels, name=f"{prefix}_block_0")
    layers: list[nn.Layer] = [
        depthwise,
        nn.LayerNorm(epsilon=EPSILON, name=f"{prefix}_block_2"),
        nn.Conv2D(1, 4 * channels, name=f"{prefix}_block_3"),
        nn.GELU(name=f"{prefix}_block_4"),
        nn.Conv2D(1, channels, name=f"{prefix}_block_5"),
        nn.Scale(1e-6, name=f"{prefix}_layer_scale"),
    ]
    if drop:
        layers.append(nn.StochasticDepth(drop, name=f"{prefix}_stochastic_depth"))
    return [*layers, nn.Add(inputs=(before, str(layers[-1].name)), name=prefix)]


@builds_network
def convnext_tiny(
    input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0
) -> nn.Network:
    """Return ConvNeXt-Tiny, with 28,589,128 learnables for 1000 classes.

    A 4x4 convolution with stride 4 is followed by four stages of residual blocks. A block has a 7x7
    convolution of each channel, a layer normalization, and two 1x1 convolutions with GELU between
    them, of which the first has four times the channels. Its result is scaled per channel, and left
    out at random in training.

    Notes
    -----
    See Liu, Mao, Wu, Feichtenhofer, Darrell and Xie, "A ConvNet for the 2020s", 2022.
    """
    layers: list[nn.Layer] = [
        nn.Conv2D(4, STAGES[0][0], stride=4, name="features_0_0"),
        nn.LayerNorm(epsilon=EPSILON, name="features_0_1"),
    ]
    number, total = 0, sum(blocks for _, blocks in STAGES)
    for stage, (channels, blocks) in enumerate(STAGES):
        if stage:
            layers += [
                nn.LayerNorm(epsilon=EPSILON, name=f"features_{2 * stage}_0"),
                nn.Conv2D(2, channels, stride=2, name=f"features_{2 * stage}_1"),
            ]
        for i in range(blocks):
            drop = DROP * number / (total - 1)
            name = f"features_{2 * stage + 1}_{i}"
            layers += _block(name, str(layers[-1].name), channels, drop)
            number += 1
    layers += [
        nn.GlobalAveragePool2D(name="avgpool"),
        nn.LayerNorm(epsilon=EPSILON, name="classifier_0"),
        nn.Dense(classes, name="classifier_2"),
    ]
    return nn.Network(layers, input_shape, seed=seed)


NETWORKS: dict[str, Callable[..., nn.Network]] = {"convnext_tiny": convnext_tiny}
# The options of torchvision's script that have a counterpart; it also draws augmentations.
RECIPES: dict[str, dict[str, Any]] = {
    "convnext_tiny": {
        "solver": "adamw",
        "learning_rate": 1e-3,
        "learn_rate_schedule": "cosine",
        "warmup_epochs": 5,
        "epochs": 600,
        "batch_size": 1024,
        "scale_rate": 1024,
        "l2": 0.05,
        "label_smoothing": 0.1,
        "mixup": 0.2,
        "erase": 0.1,
        "flip": "x",
        "shuffle": "every-epoch",
        "average": "ema",
        "average_decay": 0.9999,
    },
}
