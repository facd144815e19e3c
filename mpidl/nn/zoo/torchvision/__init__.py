"""Networks from the package torchvision, with the same shapes and corresponding layer names.

The name of a layer is the name of torchvision's module with "_" instead of ".", so
`dl.load_weights(..., names="torchvision")` can load torchvision's published weights, which expect
RGB images with the normalization "imagenet". For image sizes other than 224x224, torchvision pools
the feature maps of AlexNet and VGG adaptively to a fixed size before the fully connected layers.
Here, these layers read the whole feature map, so the shape of their weights depends on the image
size. Initial weights are Glorot uniform, and biases are zero.
"""

from collections.abc import Callable
from typing import Any

from mpidl.nn.zoo.torchvision import (
    classic,
    convnext,
    deeplab,
    densenet,
    gated,
    inception,
    mobile,
    resnet,
)

_FAMILIES = (classic, resnet, mobile, gated, densenet, inception, convnext, deeplab)
NETWORKS: dict[str, Callable[..., Any]] = {
    name: create for family in _FAMILIES for name, create in family.NETWORKS.items()
}
RECIPES: dict[str, dict[str, Any]] = {
    name: recipe for family in _FAMILIES for name, recipe in family.RECIPES.items()
}
