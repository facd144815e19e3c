"""AlexNet, VGG and SqueezeNet, with torchvision's shapes and layer names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpidl import nn
from mpidl.nn.zoo.sections import builds_network
from mpidl.nn.zoo.torchvision.recipe import RECIPE, SHAPE


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
        squeezenet1_1,
    )
}
RECIPES: dict[str, dict[str, Any]] = {name: RECIPE | {"learning_rate": 0.01} for name in NETWORKS}
