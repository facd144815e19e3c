"""Networks from the package torchvision, with the same shapes and corresponding layer names.

The name of a layer is the name of torchvision's module with "_" instead of ".", so
`dl.load_weights(..., names="torchvision")` can load torchvision's published weights, which expect
RGB images with the normalization "imagenet". For image sizes other than 224x224, torchvision pools
the feature map adaptively to a fixed size before the fully connected layers. Here, these layers
read the whole feature map, so the shape of their weights depends on the image size. Initial weights
are Glorot uniform, and biases are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpidl import nn
from mpidl.nn.zoo.sections import builds_network

SHAPE = (3, 224, 224)


def _sequential(prefix: str, layers: Iterable[nn.Layer]) -> list[nn.Layer]:
    """Name layers by numbers, as torch.nn.Sequential does: features_0, features_1, ..."""
    copies: list[Any] = list(layers)
    for i, layer in enumerate(copies):
        layer.name = f"{prefix}_{i}"
    return copies


@builds_network
def alexnet_torchvision(
    input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0
) -> nn.Network:
    """Return torchvision's AlexNet, with 61,100,840 learnables for 224x224 images of 1000 classes.

    The network has five convolutions without groups, three fully connected layers, and no
    normalization. `alexnet` is a different network, with groups and cross-channel normalization.

    Notes
    -----
    See Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
    """
    features = [
        nn.Conv2D(11, 64, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2D(3, stride=2),
        nn.Conv2D(5, 192, padding=2),
        nn.ReLU(),
        nn.MaxPool2D(3, stride=2),
        nn.Conv2D(3, 384, padding=1),
        nn.ReLU(),
        nn.Conv2D(3, 256, padding=1),
        nn.ReLU(),
        nn.Conv2D(3, 256, padding=1),
        nn.ReLU(),
        nn.MaxPool2D(3, stride=2),
    ]
    classifier = [
        nn.Dropout(),
        nn.Dense(4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Dense(4096),
        nn.ReLU(),
        nn.Dense(classes),
    ]
    layers = _sequential("features", features) + _sequential("classifier", classifier)
    return nn.Network(layers, input_shape, seed=seed)


# {depth: number of convolutions in each of the five stages of VGG}. Stages end with max pooling.
VGG_STAGES = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def _vgg(depth: int, normalized: bool) -> Callable[..., nn.Network]:
    """Return a function that creates a VGG network with `depth` convolutional and dense layers."""
    name = f"vgg{depth}{'_bn' if normalized else ''}"

    def create(
        input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0
    ) -> nn.Network:
        features: list[nn.Layer] = []
        for convolutions, filters in zip(VGG_STAGES[depth], (64, 128, 256, 512, 512), strict=True):
            for _ in range(convolutions):
                features.append(nn.Conv2D(3, filters, padding=1))
                features += [nn.BatchNorm(), nn.ReLU()] if normalized else [nn.ReLU()]
            features.append(nn.MaxPool2D(2))
        classifier: list[nn.Layer] = []
        for _ in range(2):
            classifier += [nn.Dense(4096), nn.ReLU(), nn.Dropout()]
        classifier.append(nn.Dense(classes))
        layers = _sequential("features", features) + _sequential("classifier", classifier)
        return nn.Network(layers, input_shape, seed=seed)

    create.__name__ = create.__qualname__ = name
    normalization = " and batch normalization" if normalized else ""
    create.__doc__ = f"""Return VGG-{depth}: {depth - 3} 3x3 convolutions with ReLU{normalization}.

    Each of the five stages of convolutions ends with 2x2 max pooling. Three fully connected layers
    with dropout between them follow.

    Notes
    -----
    See Simonyan and Zisserman, "Very deep convolutional networks for large-scale image
    recognition", 2015, table 1.
    """
    return builds_network(create)


vgg11, vgg16, vgg19 = (_vgg(depth, False) for depth in VGG_STAGES)
vgg11_bn, vgg16_bn, vgg19_bn = (_vgg(depth, True) for depth in VGG_STAGES)


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


@builds_network
def squeezenet1_1(
    input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0
) -> nn.Network:
    """Return SqueezeNet 1.1, with 1,235,496 learnables for 1000 classes.

    A 3x3 convolution is followed by eight fire modules. A fire module reduces the channels of its
    input by a 1x1 convolution, and concatenates a 1x1 and a 3x3 convolution of the result. The
    network ends with a 1x1 convolution and global average pooling.

    Notes
    -----
    See Iandola et al., "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters and <0.5MB
    model size", 2016. Version 1.1, published in the repository of the authors, pools earlier.
    """
    sizes = [(int(n) - 3) // 2 + 1 for n in input_shape[1:]]
    layers: list[nn.Layer] = [
        nn.Conv2D(3, 64, stride=2, name="features_0"),
        nn.ReLU(name="features_1"),
    ]
    fires = [(16, 64), (16, 64), None, (32, 128), (32, 128), None]  # None stands for max pooling
    fires += [(48, 192), (48, 192), (64, 256), (64, 256)]
    for i, fire in enumerate([None, *fires], 2):
        name = f"features_{i}"
        if fire is None:  # windows may extend beyond the image, as with ceil_mode in PyTorch
            bottom, right = ((n - 3) % 2 for n in sizes)
            sizes = [(n - 2) // 2 + 1 for n in sizes]
            layers.append(nn.MaxPool2D(3, 2, ((0, bottom), (0, right)), name=name))
            continue
        squeeze, expand = fire
        branches = f"{name}_expand1x1_activation", f"{name}_expand3x3_activation"
        layers += [
            nn.Conv2D(1, squeeze, name=f"{name}_squeeze"),
            nn.ReLU(name=f"{name}_squeeze_activation"),
            nn.Conv2D(1, expand, name=f"{name}_expand1x1"),
            nn.ReLU(name=branches[0]),
            nn.Conv2D(
                3, expand, padding=1, name=f"{name}_expand3x3", after=f"{name}_squeeze_activation"
            ),
            nn.ReLU(name=branches[1]),
            nn.Concat(inputs=branches, name=name),
        ]
    layers += [
        nn.Dropout(name="classifier_0"),
        nn.Conv2D(1, classes, name="classifier_1"),
        nn.ReLU(name="classifier_2"),
        nn.GlobalAveragePool2D(name="classifier_3"),
        nn.Flatten(),
    ]
    return nn.Network(layers, input_shape, seed=seed)


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


NETWORKS: dict[str, Callable[..., nn.Network]] = {
    create.__name__: create
    for create in (
        alexnet_torchvision,
        vgg11,
        vgg11_bn,
        vgg16,
        vgg16_bn,
        vgg19,
        vgg19_bn,
        resnet18,
        resnet34,
        resnet50,
        squeezenet1_1,
        mobilenet_v2,
    )
}

# Training options from torchvision's reference scripts: SGD with momentum, and a learning rate that
# is divided by 10 every 30 epochs. The learning rate of MobileNetV2 drops by 2 % every epoch.
_RECIPE: dict[str, Any] = {
    "learn_rate_schedule": "piecewise",
    "learn_rate_drop_factor": 0.1,
    "learn_rate_drop_period": 30,
    "momentum": 0.9,
    "shuffle": "every-epoch",
    "epochs": 90,
    "batch_size": 256,
    "scale_rate": 256,
    "l2": 1e-4,
    "flip": "x",
    "batchnorm_statistics": "moving",
}
RECIPES: dict[str, dict[str, Any]] = {
    name: _RECIPE | {"learning_rate": 0.1 if name.startswith("resnet") else 0.01}
    for name in NETWORKS
}
RECIPES["mobilenet_v2"] |= {
    "learning_rate": 0.045,
    "learn_rate_drop_factor": 0.98,
    "learn_rate_drop_period": 1,
    "l2": 4e-5,
    "epochs": 300,
}
