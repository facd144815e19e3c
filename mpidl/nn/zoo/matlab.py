"""Networks from MATLAB's examples, and a recipe (training options) for each network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidl import nn
from mpidl.nn.zoo.sections import builds_network


@builds_network
def digits(
    input_shape: Sequence[int] = (1, 28, 28), classes: int = 10, seed: int = 0
) -> nn.Network:
    """Return a small network with three convolutions, for images of digits.

    Each convolution is followed by batch normalization and ReLU. The last layer is fully connected.
    The network has 123,090 learnables for 28x28 gray images of 10 classes.

    Notes
    -----
    This is the network in MATLAB's "Train Network in Parallel with Custom Training Loop".
    """
    layers: list[nn.Layer] = []
    for size, padding in ((5, 0), (3, 1), (3, 1)):
        layers += [nn.Conv2D(size, 20, padding=padding), nn.BatchNorm(), nn.ReLU()]
    return nn.Network([*layers, nn.Dense(classes)], input_shape, seed=seed)


@builds_network
def cifar(input_shape: Sequence[int] = (3, 32, 32), classes: int = 10, seed: int = 0) -> nn.Network:
    """Return a network with twelve convolutions, for small images such as CIFAR-10.

    The network has three stages and a fully connected layer. Each stage repeats 3x3 convolution,
    batch normalization and ReLU four times and ends with pooling. The stages have 32, 64 and 128
    filters. The first two stages end with 2x2 max pooling, and the last stage ends with 8x8 average
    pooling. The network has 677,610 learnables for 32x32 colour images of 10 classes.

    Notes
    -----
    The network and its recipe come from MATLAB's documentation on training with several GPUs. In
    training, images are mirrored at random and shifted by up to 4 pixels. MATLAB's network has 43
    layers: the 40 layers of this network, and layers for image input, softmax and classification
    output. In mpidl, the mini-batch queue and the loss replace these three layers.
    """
    layers: list[nn.Layer] = []
    for filters, pool in ((32, nn.MaxPool2D(2)), (64, nn.MaxPool2D(2)), (128, nn.AveragePool2D(8))):
        for _ in range(4):
            layers += [nn.Conv2D(3, filters, padding=1), nn.BatchNorm(), nn.ReLU()]
        layers.append(pool)
    return nn.Network([*layers, nn.Dense(classes)], input_shape, seed=seed)


@builds_network
def resnet(
    input_shape: Sequence[int] = (3, 32, 32), classes: int = 10, seed: int = 0
) -> nn.Network:
    """Return a residual network with 20 layers for small images.

    The network consists of a 3x3 convolution, three stages, global average pooling and a fully
    connected layer. Each stage has three residual blocks, and each block has two 3x3 convolutions.
    The stages have 16, 32 and 64 filters. The second and third stages halve the rows and columns.
    If a block changes the shape, a 1x1 convolution with batch normalization converts the block's
    input (option B in the paper). Convolutions have biases, and initial weights are Glorot uniform.
    The network has 273,258 learnables for 32x32 colour images of 10 classes.

    Notes
    -----
    See He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2016, section 4.2.
    The recipe comes from MATLAB's "Train Residual Network for Image Classification". In training,
    images are mirrored at random and shifted by up to 4 pixels.
    """
    layers: list[nn.Layer] = [
        nn.Conv2D(3, 16, padding=1, name="conv1"),
        nn.BatchNorm(name="norm1"),
        nn.ReLU(name="relu1"),
    ]
    block, before, filters = 0, "relu1", 16
    for stage in range(3):
        for _ in range(3):
            block += 1
            prefix, block_filters = f"block{block}", 16 << stage
            same_shape = block_filters == filters
            stride, shortcut = (1, before) if same_shape else (2, f"{prefix}_shortcut_norm")
            layers += [
                nn.Conv2D(3, block_filters, stride=stride, padding=1, name=f"{prefix}_conv1"),
                nn.BatchNorm(name=f"{prefix}_norm1"),
                nn.ReLU(name=f"{prefix}_relu1"),
                nn.Conv2D(3, block_filters, padding=1, name=f"{prefix}_conv2"),
                nn.BatchNorm(name=f"{prefix}_norm2"),
            ]
            if not same_shape:
                projection = f"{prefix}_shortcut"
                layers += [
                    nn.Conv2D(1, block_filters, stride=stride, name=projection, after=before),
                    nn.BatchNorm(name=shortcut),
                ]
            before, filters = f"{prefix}_relu2", block_filters
            layers += [
                nn.Add(inputs=(f"{prefix}_norm2", shortcut), name=f"{prefix}_add"),
                nn.ReLU(name=before),
            ]
    layers += [nn.GlobalAveragePool2D(name="pool"), nn.Dense(classes, name="dense1")]
    return nn.Network(layers, input_shape, seed=seed)


@builds_network
def alexnet(
    input_shape: Sequence[int] = (3, 227, 227), classes: int = 1000, seed: int = 0
) -> nn.Network:
    """Return AlexNet, with 60,965,224 learnables for 227x227 colour images of 1000 classes.

    AlexNet has five convolutions. The second, fourth and fifth convolutions have two groups.
    Cross-channel normalization follows the first two convolutions. Overlapping max pooling follows
    the first two convolutions and the last convolution. The network ends with three fully connected
    layers, with dropout between them. Initial weights are Glorot uniform, and biases are zero.

    Notes
    -----
    See Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural
    networks", 2012. The layer names and k = 1 in the normalization are taken from the models of
    MATLAB and Caffe; the paper uses k = 2. The recipe comes from MATLAB's "Deep Learning with
    MATLAB and Multiple GPUs", which starts from a pretrained AlexNet. The learning rate of the
    recipe is low for a network without pretraining.
    """
    layers: list[nn.Layer] = [
        nn.Conv2D(11, 96, stride=4, name="conv1"),
        nn.ReLU(name="relu1"),
        nn.CrossChannelNorm(5, k=1.0, name="norm1"),
        nn.MaxPool2D(3, stride=2, name="pool1"),
        nn.Conv2D(5, 256, padding=2, groups=2, name="conv2"),
        nn.ReLU(name="relu2"),
        nn.CrossChannelNorm(5, k=1.0, name="norm2"),
        nn.MaxPool2D(3, stride=2, name="pool2"),
        nn.Conv2D(3, 384, padding=1, name="conv3"),
        nn.ReLU(name="relu3"),
        nn.Conv2D(3, 384, padding=1, groups=2, name="conv4"),
        nn.ReLU(name="relu4"),
        nn.Conv2D(3, 256, padding=1, groups=2, name="conv5"),
        nn.ReLU(name="relu5"),
        nn.MaxPool2D(3, stride=2, name="pool5"),
        nn.Dense(4096, name="fc6"),
        nn.ReLU(name="relu6"),
        nn.Dropout(0.5, name="drop6"),
        nn.Dense(4096, name="fc7"),
        nn.ReLU(name="relu7"),
        nn.Dropout(0.5, name="drop7"),
        nn.Dense(classes, name="fc8"),
    ]
    return nn.Network(layers, input_shape, seed=seed)


NETWORKS: dict[str, Callable[..., Any]] = {
    "digits": digits,
    "cifar": cifar,
    "resnet": resnet,
    "alexnet": alexnet,
}

# SGD with momentum. The learning rate is divided by 10 every learn_rate_drop_period epochs.
_STEPS: dict[str, Any] = {
    "learn_rate_schedule": "piecewise",
    "learn_rate_drop_factor": 0.1,
    "momentum": 0.9,
    "shuffle": "every-epoch",
}
_MOVED: dict[str, Any] = {"flip": "x", "translate": 4, "validation_frequency": 0}

RECIPES: dict[str, dict[str, Any]] = {
    "digits": {
        "epochs": 20,
        "batch_size": 128,
        "learning_rate": 0.01,
        "momentum": 0.9,
        "l2": 0.0,
        "shuffle": "every-epoch",
        "batchnorm_statistics": "moving",
    },
    "cifar": {
        **_STEPS,
        **_MOVED,
        "epochs": 50,
        "batch_size": 256,
        "learning_rate": 0.1,
        "scale_rate": 256,
        "learn_rate_drop_period": 45,
        "l2": 1e-10,
    },
    "resnet": {
        **_STEPS,
        **_MOVED,
        "epochs": 80,
        "batch_size": 128,
        "learning_rate": 0.1,
        "scale_rate": 128,
        "learn_rate_drop_period": 60,
        "l2": 1e-4,
    },
    "alexnet": {
        **_STEPS,
        "epochs": 30,
        "batch_size": 250,
        "learning_rate": 0.00125,
        "scale_rate": 250,
        "learn_rate_drop_period": 20,
        "l2": 1e-4,
    },
}
