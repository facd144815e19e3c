"""DeepLabV3, with torchvision's shapes and layer names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidl import nn
from mpidl.nn.zoo.sections import builds_network
from mpidl.nn.zoo.torchvision.recipe import RECIPE, SHAPE
from mpidl.nn.zoo.torchvision.resnet import layers_before_pooling

RATES = (12, 24, 36)  # dilations of the 3x3 convolutions that read the last feature map
FILTERS = 256


def _convolution(
    prefix: str, size: int = 1, *, dilation: int = 1, after: str | None = None, first: int = 0
) -> list[nn.Layer]:
    """Return a convolution, PREFIX_FIRST, its batch normalization and its ReLU."""
    padding = size // 2 * dilation
    conv = nn.Conv2D(size, FILTERS, padding=padding, dilation=dilation, bias=False)
    conv.name, conv.after = f"{prefix}_{first}", after
    return [
        conv,
        nn.BatchNorm(name=f"{prefix}_{first + 1}"),
        nn.ReLU(name=f"{prefix}_{first + 2}"),
    ]


@builds_network
def deeplabv3_resnet50(
    input_shape: Sequence[int] = SHAPE, classes: int = 21, seed: int = 0
) -> nn.Network:
    """Return DeepLabV3 on ResNet-50, with 39,638,869 learnables for 21 classes of pixels.

    The last two stages of the ResNet keep the rows and columns, an eighth of those of the images.
    Five branches read them: a 1x1 convolution, three 3x3 convolutions with holes, and the mean of
    the feature map. The scores of their concatenation are enlarged to the size of the images.
    The auxiliary classifier, which torchvision's network has in training, is left out.

    Notes
    -----
    See Chen, Papandreou, Schroff and Adam, "Rethinking atrous convolution for semantic image
    segmentation", 2017.
    """
    layers = layers_before_pooling((3, 4, 6, 3), is_bottleneck=True, prefix="backbone_", dilated=2)
    before = str(layers[-1].name)
    branches = "classifier_0_convs"
    layers += _convolution(f"{branches}_0", after=before)
    for i, rate in enumerate(RATES, 1):
        layers += _convolution(f"{branches}_{i}", 3, dilation=rate, after=before)
    rows, columns = (-(-side // 8) for side in input_shape[1:])
    layers += [
        nn.GlobalAveragePool2D(name=f"{branches}_4_0", after=before),
        *_convolution(f"{branches}_4", first=1),
        nn.Resize2D((rows, columns), mode="bilinear", name=f"{branches}_4"),
        nn.Concat(
            inputs=(*(f"{branches}_{i}_2" for i in range(4)), f"{branches}_4"), name="classifier_0"
        ),
        *_convolution("classifier_0_project"),
        nn.Dropout(name="classifier_0_project_3"),
        *_convolution("classifier", 3, first=1),
        nn.Conv2D(1, classes, name="classifier_4"),
        nn.Resize2D((input_shape[1], input_shape[2]), mode="bilinear", name="out"),
    ]
    return nn.Network(layers, input_shape, seed=seed)


NETWORKS: dict[str, Callable[..., nn.Network]] = {"deeplabv3_resnet50": deeplabv3_resnet50}
# torchvision's script trains for 30 epochs with a rate that falls to 0 as a power.
RECIPES: dict[str, dict[str, Any]] = {
    "deeplabv3_resnet50": RECIPE
    | {
        "learn_rate_schedule": "polynomial",
        "learn_rate_power": 0.9,
        "learning_rate": 0.02,
        "epochs": 30,
        "batch_size": 32,
        "scale_rate": 32,
    }
}
