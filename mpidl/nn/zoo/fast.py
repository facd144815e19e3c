"""Networks that learn to classify small images in few epochs, with recipes from speed records.

The recipes use a one-cycle learning rate, Nesterov momentum, label smoothing and a moving average
of the weights. At test time, scores are averaged over each image and its mirror image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidl import nn
from mpidl.nn.zoo.sections import builds_network


def _block(prefix: str, filters: int) -> list[nn.Layer]:
    """Return a 3x3 convolution, batch normalization and ReLU, which are computed by one op."""
    return [
        nn.Conv2D(3, filters, padding=1, bias=False, name=f"{prefix}_conv"),
        nn.BatchNorm(name=f"{prefix}_norm"),
        nn.ReLU(name=f"{prefix}_relu"),
    ]


def _residual(input_shape: Sequence[int], classes: int, seed: int, filters: int) -> nn.Network:
    """Return the network that `cifar_fast` describes."""
    channels, *size = input_shape
    side = 2 if channels > 1 else 3
    layers: list[nn.Layer] = [
        nn.Conv2D(
            side,
            2 * channels * side**2,
            padding="same",
            trainable=False,
            weight_initializer="whitening",
            name="whiten",
        ),
        nn.ReLU(name="whiten_relu"),
    ]
    for stage in range(3):
        prefix, count = f"stage{stage + 1}", filters << stage
        pool = f"{prefix}_pool"
        layers += [
            *_block(prefix, count),
            nn.MaxPool2D(2, padding="same", name=pool),
            *_block(f"{prefix}_1", count),
            *_block(f"{prefix}_2", count),
            nn.Add(inputs=(pool, f"{prefix}_2_relu"), name=f"{prefix}_add"),
        ]
        size = [(n + 1) // 2 for n in size]
    layers += [nn.MaxPool2D((size[0], size[1]), name="pool"), nn.Dense(classes, name="dense1")]
    return nn.Network(layers, input_shape, seed=seed)


@builds_network
def fashion(
    input_shape: Sequence[int] = (1, 28, 28), classes: int = 10, seed: int = 0
) -> nn.Network:
    """Return `cifar_fast` with 32 filters, for images such as Fashion-MNIST.

    For 28x28 gray images of 10 classes, there are 487,230 learnables, and 180 of these are frozen.

    Notes
    -----
    In training, images are mirrored alternately, shifted by up to 2 pixels, and partly erased.
    """
    return _residual(input_shape, classes, seed, 32)


def cifar_fast(
    input_shape: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    seed: int = 0,
    *,
    filters: int = 48,
) -> nn.Network:
    """Return a small residual network that learns data such as CIFAR-10 in few epochs.

    The first convolution is frozen: it whitens patches of the images, and is computed from the
    training images (see `whiten`). Its filters are 2x2 for colour images and 3x3 for gray images.
    Three stages follow. A stage has a 3x3 convolution with batch normalization and ReLU, max
    pooling by 2, and a residual block of two such convolutions. Each stage doubles the number of
    filters. Global max pooling and a fully connected layer end the network. For 32x32 colour images
    of 10 classes, there are 1,092,898 learnables, and 312 of these are frozen.

    Parameters
    ----------
    input_shape : tuple of int
        Shape (C, H, W) of an image.
    classes : int
        Number of outputs.
    seed : int
        Seed of the initial weights.
    filters : int
        Number of filters in the first stage.

    Returns
    -------
    Network
        The network, with initial weights.

    Notes
    -----
    The network is similar to the ResNet-9 in Page, "How to train your ResNet", 2019. Its recipe
    has alternating flips, as in Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024.
    """
    return _residual(input_shape, classes, seed, filters)


NETWORKS: dict[str, Callable[..., Any]] = {"fashion": fashion, "cifar-fast": cifar_fast}

# SGD with Nesterov momentum. The learning rate first rises, and then falls to 0 (one cycle).
_ONE_CYCLE: dict[str, Any] = {
    "batch_size": 128,
    "learning_rate": 0.1,
    "scale_rate": 128,
    "momentum": 0.9,
    "nesterov": "on",
    "l2": 5e-4,
    "learn_rate_schedule": "cosine",
    "shuffle": "every-epoch",
    "label_smoothing": 0.1,
    "average": "ema",
    "average_decay": 0.998,
    "normalization": "zscore",
    "flip": "x",
    "flip_mode": "alternate",
    "translate": 2,
    "test_flips": "x",
    "validation_frequency": 0,
}
RECIPES: dict[str, dict[str, Any]] = {
    "fashion": {**_ONE_CYCLE, "epochs": 12, "warmup_epochs": 2, "erase": 0.25},
    "cifar-fast": {**_ONE_CYCLE, "epochs": 20, "warmup_epochs": 4},
}
