"""Define torchvision's networks with torch.nn, using torchvision's module names.

These networks are the reference for `mpidl.nn.zoo.torchvision`, because a CPU build of torchvision
is not available everywhere.
"""

import torch
from torch import nn

from benchmarks.torch_mobilenet import MobileNetV2


def sequential(*modules):
    return nn.Sequential(*modules)


def classifier(features, classes, dropout_first):
    hidden = []
    for inputs in (features, 4096):
        part = [nn.Linear(inputs, 4096), nn.ReLU()]
        hidden += [nn.Dropout(), *part] if dropout_first else [*part, nn.Dropout()]
    return sequential(*hidden, nn.Linear(4096, classes))


class Stacked(nn.Module):
    """AlexNet or VGG: features, adaptive pooling, classifier."""

    def __init__(self, features, size, last):
        super().__init__()
        self.features, self.avgpool, self.classifier = features, nn.AdaptiveAvgPool2d(size), last

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def alexnet_torchvision(classes):
    features = sequential(
        *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU(), nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(3, 2)),
    )
    return Stacked(features, 6, classifier(256 * 36, classes, dropout_first=True))


VGG = {
    "vgg11": "64 M 128 M 256 256 M 512 512 M 512 512 M",
    "vgg16": "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M",
    "vgg19": "64 64 M 128 128 M 256 256 256 256 M 512 512 512 512 M 512 512 512 512 M",
}


def vgg(name, classes):
    modules, channels = [], 3
    for part in VGG[name.removesuffix("_bn")].split():
        if part == "M":
            modules.append(nn.MaxPool2d(2, 2))
            continue
        filters = int(part)
        modules.append(nn.Conv2d(channels, filters, 3, padding=1))
        modules += [nn.BatchNorm2d(filters)] * name.endswith("_bn") + [nn.ReLU()]
        channels = filters
    return Stacked(sequential(*modules), 7, classifier(512 * 49, classes, dropout_first=False))


class Block(nn.Module):
    """A residual block; `sizes` has (kernel size, filters, stride) of each convolution."""

    def __init__(self, channels, sizes):
        super().__init__()
        self.count, self.downsample, inputs, stride = len(sizes), None, channels, 1
        for i, (size, filters, step) in enumerate(sizes, 1):
            conv = nn.Conv2d(inputs, filters, size, step, size // 2, bias=False)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"bn{i}", nn.BatchNorm2d(filters))
            inputs, stride = filters, stride * step
        if stride != 1 or inputs != channels:
            conv = nn.Conv2d(channels, inputs, 1, stride, bias=False)
            self.downsample = sequential(conv, nn.BatchNorm2d(inputs))

    def forward(self, x):
        y = x
        for i in range(1, self.count + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            y = y.relu() if i < self.count else y
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class ResNet(nn.Module):
    def __init__(self, counts, expansion, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1, self.maxpool = nn.BatchNorm2d(64), nn.MaxPool2d(3, 2, 1)
        channels = 64
        for stage, count in enumerate(counts, 1):
            blocks, width = [], 32 << stage
            for i in range(count):
                step = 2 if stage > 1 and i == 0 else 1
                sizes = [(3, width, step), (3, width, 1)]
                if expansion == 4:
                    sizes = [(1, width, 1), (3, width, step), (1, 4 * width, 1)]
                blocks.append(Block(channels, sizes))
                channels = expansion * width
            self.add_module(f"layer{stage}", sequential(*blocks))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x):
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class Fire(nn.Module):
    def __init__(self, channels, squeeze, expand):
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeeze, 1)
        self.expand1x1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3x3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x):
        x = self.squeeze(x).relu()
        return torch.cat([self.expand1x1(x).relu(), self.expand3x3(x).relu()], 1)


class SqueezeNet(nn.Module):
    def __init__(self, classes):
        super().__init__()

        def pool():
            return nn.MaxPool2d(3, 2, ceil_mode=True)

        self.features = sequential(
            *(nn.Conv2d(3, 64, 3, 2), nn.ReLU(), pool(), Fire(64, 16, 64), Fire(128, 16, 64)),
            *(pool(), Fire(128, 32, 128), Fire(256, 32, 128), pool(), Fire(256, 48, 192)),
            *(Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256)),
        )
        self.classifier = sequential(
            nn.Dropout(), nn.Conv2d(512, classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )

    def forward(self, x):
        return torch.flatten(self.classifier(self.features(x)), 1)


def create(name, classes=1000):
    """Return a network in evaluation mode whose weights and statistics are random."""
    if name.startswith("vgg"):
        net = vgg(name, classes)
    elif name.startswith("resnet"):
        counts = (2, 2, 2, 2) if name == "resnet18" else (3, 4, 6, 3)
        net = ResNet(counts, 4 if name == "resnet50" else 1, classes)
    else:
        makers = {"alexnet_torchvision": alexnet_torchvision, "squeezenet1_1": SqueezeNet}
        makers["mobilenet_v2"] = MobileNetV2
        net = makers[name](classes)
    generator = torch.Generator().manual_seed(1)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                for array, low, high in (
                    (module.weight, 0.5, 1.5),
                    (module.bias, -0.2, 0.2),
                    (module.running_mean, -0.2, 0.2),
                    (module.running_var, 0.5, 1.5),
                ):
                    array.uniform_(low, high, generator=generator)
    return net.eval()
