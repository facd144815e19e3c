"""Networks whose outputs are images: class scores of each pixel, or pixels of another image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidl import nn


def unet(
    input_shape: Sequence[int] = (1, 64, 64),
    classes: int = 2,
    seed: int = 0,
    *,
    depth: int = 3,
    filters: int = 16,
) -> nn.Network:
    """Return a U-Net, with 483,170 learnables for gray images with two classes of pixels.

    The encoder has `depth` stages. Each stage has two 3x3 convolutions with batch normalization and
    ReLU, and ends with 2x2 max pooling. Two more such convolutions follow. The decoder also has
    `depth` stages. Each stage doubles the rows and columns by a transposed convolution, and appends
    the channels of the encoder stage of the same size (before pooling). Two convolutions follow.
    The last layer is a 1x1 convolution. Convolutions are padded, so outputs have the images' size.

    Parameters
    ----------
    input_shape : tuple of int
        Shape (C, H, W) of an image; H and W must be multiples of 2**depth.
    classes : int
        Number of output channels: classes of pixels, or channels of target images.
    seed : int
        Seed of the initial weights.
    depth : int
        Number of stages of the encoder and of the decoder.
    filters : int
        Number of filters in the first stage. The number doubles after each pooling.

    Returns
    -------
    Network
        The network, with initial weights. The output has the shape (classes, H, W).

    Raises
    ------
    ValueError
        If the images cannot be halved `depth` times.

    Notes
    -----
    See Ronneberger, Fischer and Brox, "U-Net: convolutional networks for biomedical image
    segmentation", 2015. The network of the paper and MATLAB's `unet` have depth 4, 64 filters and
    no batch normalization. The paper uses no padding. The recipe mirrors images in both directions.
    """
    if depth < 1 or any(side % 2**depth for side in input_shape[1:]):
        raise ValueError(
            f"unet: expected images whose sides are multiples of {2**depth}, got "
            f"{input_shape[1]}x{input_shape[2]}"
        )

    def convolutions(prefix: str, count: int) -> list[nn.Layer]:
        layers: list[nn.Layer] = []
        for i in (1, 2):
            layers += [
                nn.Conv2D(3, count, padding=1, name=f"{prefix}_conv{i}"),
                nn.BatchNorm(name=f"{prefix}_norm{i}"),
                nn.ReLU(name=f"{prefix}_relu{i}"),
            ]
        return layers

    layers: list[nn.Layer] = []
    for stage in range(depth):
        prefix = f"encoder{stage + 1}"
        layers += [*convolutions(prefix, filters << stage), nn.MaxPool2D(2, name=f"{prefix}_pool")]
    layers += convolutions("bridge", filters << depth)
    for stage in reversed(range(depth)):
        prefix, count = f"decoder{stage + 1}", filters << stage
        layers += [
            nn.TransposedConv2D(2, count, stride=2, name=f"{prefix}_up"),
            nn.Concat(
                inputs=(f"encoder{stage + 1}_relu2", f"{prefix}_up"), name=f"{prefix}_concat"
            ),
            *convolutions(prefix, count),
        ]
    return nn.Network([*layers, nn.Conv2D(1, classes, name="scores")], input_shape, seed=seed)


NETWORKS: dict[str, Callable[..., Any]] = {"unet": unet}

RECIPES: dict[str, dict[str, Any]] = {
    "unet": {
        "epochs": 8,
        "batch_size": 16,
        "solver": "adam",
        "learning_rate": 0.002,
        "learn_rate_schedule": "cosine",
        "shuffle": "every-epoch",
        "flip": "xy",
        "validation_frequency": 0,
    },
}
