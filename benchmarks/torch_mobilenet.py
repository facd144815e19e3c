"""Define PyTorch's MobileNetV2 for published weights. Importing this module needs torch."""

from torch import nn


def conv_norm(channels, filters, size=1, stride=1, groups=1):
    """Return torchvision's Conv2dNormActivation with ReLU6."""
    conv = nn.Conv2d(channels, filters, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(filters), nn.ReLU6())


class InvertedResidual(nn.Module):
    """A 1x1 convolution, a 3x3 convolution per channel and a 1x1 convolution, with a shortcut."""

    def __init__(self, channels, filters, stride, expansion):
        super().__init__()
        hidden = channels * expansion
        self.is_residual = stride == 1 and channels == filters
        self.conv = nn.Sequential(
            *([conv_norm(channels, hidden)] if expansion > 1 else []),
            conv_norm(hidden, hidden, 3, stride, hidden),
            *(nn.Conv2d(hidden, filters, 1, bias=False), nn.BatchNorm2d(filters)),
        )

    def forward(self, x):
        return x + self.conv(x) if self.is_residual else self.conv(x)


class MobileNetV2(nn.Module):
    """MobileNetV2 with torchvision's module names."""

    def __init__(self, classes):
        super().__init__()
        blocks, channels = [conv_norm(3, 32, 3, 2)], 32
        for filters, count, stride in (
            *((16, 1, 1), (24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1)),
        ):
            for i in range(count):
                expansion = 1 if filters == 16 else 6
                step = stride if i == 0 else 1
                blocks.append(InvertedResidual(channels, filters, step, expansion))
                channels = filters
        self.features = nn.Sequential(*blocks, conv_norm(320, 1280))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))
