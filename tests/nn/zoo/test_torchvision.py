"""Test torchvision's networks: numbers of learnables and shapes."""

import numpy as np
import pytest

from mpidl.core import keyed
from mpidl.nn import zoo
from mpidl.nn.zoo import torchvision

# numbers of learnables for 224x224 images of 1000 classes, from torchvision's documentation
LEARNABLES = {
    "alexnet_torchvision": 61_100_840,
    "vgg11": 132_863_336,
    "vgg11_bn": 132_868_840,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "vgg19": 143_667_240,
    "vgg19_bn": 143_678_248,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "squeezenet1_1": 1_235_496,
    "mobilenet_v2": 3_504_872,
    "mobilenet_v3_large": 5_483_032,
    "efficientnet_b0": 5_288_548,
    "convnext_tiny": 28_589_128,
    "densenet121": 7_978_856,
    "inception_v3": 23_834_568,
    "shufflenet_v2_x1_0": 2_278_604,
    "deeplabv3_resnet50": 39_638_869,
}
FAST = {"resnet18", "squeezenet1_1"}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow("ranks")] * (name not in FAST))
    for name in LEARNABLES
]


@pytest.fixture
def undrawn(monkeypatch):
    """Make all initial weights 0, because drawing a hundred million numbers takes seconds."""
    monkeypatch.setattr(keyed, "uniform", lambda seed, key, count: np.zeros(count, np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_learnables_and_shapes(name, undrawn):
    """Build networks for small images. For 224x224 images, count the learnables from the shapes."""
    is_small = name not in zoo.PIXEL_NETWORKS  # their layers depend on the size of the images
    net = zoo.NETWORKS[name]((3, 96, 96) if is_small else (3, 224, 224))
    shapes, learnables = {"images": (3, 224, 224)}, 0
    for layer, reads in zip(net.layers, net.reads, strict=True):
        inputs = tuple(shapes[read] for read in reads)
        built = layer.build(inputs if len(inputs) > 1 else inputs[0])
        shapes[layer.name] = built.output_shape
        learnables += sum(int(np.prod(shape)) for shape, _ in built.learnables.values())
    assert learnables == LEARNABLES[name]
    output = (1000,) if is_small else (21, 224, 224)
    assert net.output_shape == shapes[net.layer_names[-1]] == output
    maps = {
        "vgg16": ("features_30", (512, 7, 7)),
        "vgg19_bn": ("features_52", (512, 7, 7)),
        "alexnet_torchvision": ("features_12", (256, 6, 6)),
        "resnet50": ("layer4_2_relu", (2048, 7, 7)),
        "squeezenet1_1": ("features_12", (512, 13, 13)),
        "mobilenet_v2": ("features_17_conv_3", (320, 7, 7)),
        "deeplabv3_resnet50": ("backbone_layer4_2_relu", (2048, 28, 28)),
    }
    if name in maps:
        layer, shape = maps[name]
        assert shapes[layer] == shape


def test_every_network_is_listed():
    assert set(torchvision.NETWORKS) == set(LEARNABLES)
    assert zoo.vgg16_bn.__name__ == "vgg16_bn" and "batch norm" in zoo.vgg16_bn.__doc__
    assert zoo.RECIPES["resnet50"]["learning_rate"] == 0.1
    assert zoo.RECIPES["vgg16"]["learning_rate"] == 0.01


def test_images_of_other_sizes_and_channels():
    net = zoo.squeezenet1_1((1, 60, 47), 3)
    shapes = dict(zip(net.layer_names, net.output_shapes, strict=True))
    assert shapes["features_0"] == (64, 29, 23)
    # windows may end outside the image: ceil((29 - 3) / 2) + 1 = 14, and so on
    assert [shapes[f"features_{i}"][1:] for i in (2, 5, 8)] == [(14, 11), (7, 5), (3, 2)]
    assert zoo.resnet18((1, 40, 33), 5).output_shape == (5,)
