"""Predefined networks, each with a recipe (the options for training the network).

`matlab` contains networks from MATLAB's examples. `torchvision` contains networks from the package
torchvision. `segmentation` contains networks whose outputs are images. `fast` contains networks
that learn to classify small images in few epochs.
"""

from collections.abc import Callable
from typing import Any

from mpidl.nn.zoo import fast, matlab, segmentation, torchvision
from mpidl.nn.zoo.fast import cifar_fast as cifar_fast
from mpidl.nn.zoo.fast import fashion as fashion
from mpidl.nn.zoo.matlab import alexnet as alexnet
from mpidl.nn.zoo.matlab import cifar as cifar
from mpidl.nn.zoo.matlab import digits as digits
from mpidl.nn.zoo.matlab import resnet as resnet
from mpidl.nn.zoo.segmentation import unet as unet
from mpidl.nn.zoo.torchvision.classic import alexnet_torchvision as alexnet_torchvision
from mpidl.nn.zoo.torchvision.classic import squeezenet1_1 as squeezenet1_1
from mpidl.nn.zoo.torchvision.classic import vgg11 as vgg11
from mpidl.nn.zoo.torchvision.classic import vgg11_bn as vgg11_bn
from mpidl.nn.zoo.torchvision.classic import vgg16 as vgg16
from mpidl.nn.zoo.torchvision.classic import vgg16_bn as vgg16_bn
from mpidl.nn.zoo.torchvision.classic import vgg19 as vgg19
from mpidl.nn.zoo.torchvision.classic import vgg19_bn as vgg19_bn
from mpidl.nn.zoo.torchvision.convnext import convnext_tiny as convnext_tiny
from mpidl.nn.zoo.torchvision.deeplab import deeplabv3_resnet50 as deeplabv3_resnet50
from mpidl.nn.zoo.torchvision.densenet import densenet121 as densenet121
from mpidl.nn.zoo.torchvision.gated import efficientnet_b0 as efficientnet_b0
from mpidl.nn.zoo.torchvision.gated import mobilenet_v3_large as mobilenet_v3_large
from mpidl.nn.zoo.torchvision.inception import inception_v3 as inception_v3
from mpidl.nn.zoo.torchvision.mobile import mobilenet_v2 as mobilenet_v2
from mpidl.nn.zoo.torchvision.mobile import shufflenet_v2_x1_0 as shufflenet_v2_x1_0
from mpidl.nn.zoo.torchvision.resnet import resnet18 as resnet18
from mpidl.nn.zoo.torchvision.resnet import resnet34 as resnet34
from mpidl.nn.zoo.torchvision.resnet import resnet50 as resnet50

_FAMILIES = (matlab, fast, segmentation, torchvision)
NETWORKS: dict[str, Callable[..., Any]] = {
    name: create for family in _FAMILIES for name, create in family.NETWORKS.items()
}
RECIPES: dict[str, dict[str, Any]] = {
    name: recipe for family in _FAMILIES for name, recipe in family.RECIPES.items()
}
# networks whose outputs are images
PIXEL_NETWORKS = (*segmentation.NETWORKS, *torchvision.deeplab.NETWORKS)
