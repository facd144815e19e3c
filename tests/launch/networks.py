"""Define networks for `--network FILE.py:FUNCTION`: small networks, and faulty networks."""

import itertools
import sys
import time

import mpidl as dl
from mpidl.ranks import failure


def small(input_shape, classes):
    """Return a network with all kinds of layers that communicate, and about 1000 learnables."""
    return [dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(classes)]


def varied(input_shape, classes):
    """Return a network with all kinds of layers and all of the kernels' convolution algorithms."""
    return [
        dl.Conv2D(3, 32, padding=1),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.MaxPool2D(2),
        dl.CrossChannelNorm(5),
        dl.Conv2D(3, 33, padding="same"),  # uses Winograd's algorithm forward and backward
        dl.BatchNorm(),
        dl.ReLU(),
        dl.CrossChannelNorm(4, beta=0.6),
        dl.Conv2D(5, 6, padding=2),
        dl.PReLU(),
        dl.LeakyReLU(name="leaky"),
        dl.TransposedConv2D(4, 6, stride=2, cropping="same"),
        dl.GELU(),
        dl.Tanh(),
        dl.MaxPool2D(2, name="second_pool"),
        dl.Add(inputs=("leaky", "second_pool"), name="sum"),
        dl.Dropout(0.2),
        dl.Concat(inputs=("sum", "second_pool", "dropout1")),
        dl.MaxPool2D(3, stride=2, padding=1),
        dl.Conv2D(3, 8, stride=2, padding=1, groups=2),
        dl.Conv2D(1, 9),
        dl.ReLU(),
        dl.Pad2D(1),
        dl.ChannelShuffle(3),
        dl.ChannelSlice(1, 8),
        dl.Resize2D(scale=1.5, mode="bilinear"),
        dl.AdaptiveAveragePool2D(4),
        dl.Resize2D((5, 6)),
        dl.Clip(0, 6),
        dl.AveragePool2D(2, padding=1, count_padding=False),
        dl.HardSwish(name="value"),
        dl.GlobalAveragePool2D(),
        dl.Conv2D(1, 7),
        dl.HardSigmoid(name="gate"),
        dl.Multiply(inputs=("value", "gate")),
        dl.Scale(0.5),
        dl.StochasticDepth(0.2, name="depth"),
        dl.Add(inputs=("value", "depth")),
        dl.Dense(37),
        dl.PReLU(shared=True),
        dl.Swish(),
        dl.Sigmoid(),
        dl.Dense(classes),
    ]


def bottlenecks(input_shape, classes):
    """Return a small residual network with 1x1 convolutions before and after its 3x3 filters."""
    layers = [
        dl.Conv2D(7, 16, stride=2, padding=3),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.MaxPool2D(3, stride=2, padding=1, name="stem"),
    ]
    before = "stem"
    for name, filters, stride in (("first", 32, 1), ("second", 32, 1), ("third", 48, 2)):
        layers += [
            dl.Conv2D(1, filters // 4),
            dl.BatchNorm(),
            dl.ReLU(),
            dl.Conv2D(3, filters // 4, stride=stride, padding=1),
            dl.BatchNorm(),
            dl.ReLU(),
            dl.Conv2D(1, filters),
            dl.BatchNorm(name=f"{name}_norm"),
        ]
        shortcut = before
        if name != "second":
            shortcut, projection = f"{name}_shortcut", dl.Conv2D(1, filters, stride=stride)
            projection.after = before
            layers += [projection, dl.BatchNorm(name=shortcut)]
        layers += [dl.Add(inputs=(f"{name}_norm", shortcut)), dl.ReLU(name=name)]
        before = name
    return [*layers, dl.GlobalAveragePool2D(), dl.Dense(classes)]


def inverted(input_shape, classes):
    """Return a small network with depthwise convolutions between 1x1 convolutions."""
    layers = [dl.Conv2D(3, 16, stride=2, padding=1), dl.BatchNorm(), dl.Clip(0, 6, name="stem")]
    before = "stem"
    for name, hidden, stride in (("first", 48, 1), ("second", 64, 2), ("third", 33, 1)):
        layers += [
            dl.Conv2D(1, hidden),
            dl.BatchNorm(),
            dl.Clip(0, 6),
            dl.Conv2D(3, hidden, stride=stride, padding=1, groups=hidden),
            dl.BatchNorm(),
            dl.Clip(0, 6),
            dl.Conv2D(1, 16),
            dl.BatchNorm(name=f"{name}_norm"),
        ]
        if stride == 1:
            layers.append(dl.Add(inputs=(f"{name}_norm", before), name=name))
        before = name if stride == 1 else f"{name}_norm"
    return [*layers, dl.GlobalAveragePool2D(), dl.Dense(classes)]


def alexnet(input_shape, classes):
    """Return a small network with the kinds of layers of AlexNet."""
    return [
        dl.Conv2D(11, 24, stride=4, padding=4),
        dl.ReLU(),
        dl.CrossChannelNorm(5),
        dl.MaxPool2D(3, stride=2, padding=1),
        dl.Conv2D(5, 32, padding=2, groups=2),
        dl.ReLU(),
        dl.CrossChannelNorm(5),
        dl.MaxPool2D(2),
        dl.Conv2D(3, 33, padding=1),
        dl.ReLU(),
        dl.Dense(65),
        dl.ReLU(),
        dl.Dropout(0.5),
        dl.Dense(classes),
    ]


def image_normalized(input_shape, classes):
    """Return a small network that normalizes within images, like ConvNeXt."""
    return [
        dl.Conv2D(4, 24, stride=4),
        dl.LayerNorm(epsilon=1e-6, name="stem"),
        dl.Conv2D(3, 24, padding=1, groups=24),
        dl.LayerNorm(epsilon=1e-6),
        dl.Conv2D(1, 32),
        dl.GELU(),
        dl.Conv2D(1, 24),
        dl.Add(inputs=("stem", "conv4")),
        dl.GroupNorm(4),
        dl.Conv2D(3, 16, padding=1, bias=False),
        dl.InstanceNorm(),
        dl.ReLU(),
        dl.LayerNorm("image"),
        dl.GlobalAveragePool2D(),
        dl.Flatten(),
        dl.LayerNorm(),
        dl.Dense(classes),
    ]


def recurrent(input_shape, classes):
    """Return a network that reads the rows of images as sequences, with truncated gradients."""
    return [
        dl.LSTM(24, truncate=10),
        dl.GRU(33, reverse=True),
        dl.LSTM(20, returns="last"),
        dl.Dense(classes),
    ]


def unet(input_shape, classes):
    """Return a small U-Net, whose outputs are scores of each pixel."""
    return dl.nn.zoo.unet(input_shape, classes, depth=2).layers


def wide(input_shape, classes):
    """Return a network without batch normalization, so that images do not affect each other."""
    return [dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(classes)]


def one_output(input_shape, classes):
    """Return a network with the wrong output size."""
    return [dl.Dense(1)]


def slow(input_shape, classes):
    """Return a network that prints a line and sleeps for a minute in the first step."""
    return [Sleep(), *small(input_shape, classes)]


def late(input_shape, classes):
    """Print a line, wait half a second, and return a network."""
    print("building", flush=True)
    time.sleep(0.5)
    return small(input_shape, classes)


def slow_test(input_shape, classes):
    """Return a network that prints a line and waits half a second per test mini-batch."""
    return [SleepInTest(), *small(input_shape, classes)]


def raises_on_rank_1(input_shape, classes):
    """Return a network that raises an error in the first step on rank 1."""
    return [Break(), *small(input_shape, classes)]


def breaks_on_odd_ranks(input_shape, classes):
    """Return a network that raises an error in the first step on odd ranks of the job."""
    return [BreakOnOddRanks(), *small(input_shape, classes)]


def hangs_on_even_ranks(input_shape, classes):
    """Raise an error on odd ranks of the job, and sleep on the other ranks."""
    if failure.launched_rank() % 2:
        raise ArithmeticError("this network is not built on odd ranks")
    time.sleep(600)


def exits(input_shape, classes):
    """End the program."""
    sys.exit("enough")


def late_on_rank_1(input_shape, classes):
    """Return a network that takes a tenth of a second longer per step on rank 1."""
    return [Late(), *small(input_shape, classes)]


class Late(dl.ReLU):
    def forward(self, x, context):
        time.sleep(0.1 if failure.launched_rank() == 1 else 0)
        return super().forward(x, context)


def infinite_once(input_shape, classes):
    """Return a network with infinite outputs in the 6th step."""
    Overflow.steps = itertools.count(1)
    return [Overflow(), *small(input_shape, classes)]


class Overflow(dl.ReLU):
    def forward(self, x, context):
        y = super().forward(x, context)
        return y * float("inf") if context.training and next(self.steps) == 6 else y


class BreakOnOddRanks(dl.ReLU):
    def forward(self, x, context):
        if failure.launched_rank() % 2:
            raise ArithmeticError("this network breaks on odd ranks")
        return super().forward(x, context)


class Sleep(dl.ReLU):
    def forward(self, x, context):
        print("in the first step", flush=True)
        time.sleep(60)
        return super().forward(x, context)


class SleepInTest(dl.ReLU):
    def forward(self, x, context):
        if not context.training:
            print("testing", flush=True)
            time.sleep(0.5)
        return super().forward(x, context)


class Break(dl.ReLU):
    def forward(self, x, context):
        if dl.World().rank == 1:
            raise ArithmeticError("this network breaks on rank 1")
        return super().forward(x, context)


def convolutions(input_shape, classes):
    """Return a small network for emulated GPUs, with pooling and every kind of sum over ranks."""
    return [
        dl.Conv2D(3, 4, stride=2),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.MaxPool2D(2, stride=1),
        dl.Conv2D(3, 8, padding=1),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.Dense(classes),
    ]


def shades(input_shape, classes):
    """Return a network that maps images to images."""
    channels, _, _ = input_shape
    assert classes == input_shape, "the shape of the targets"
    return [dl.Conv2D(3, 4, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Conv2D(1, channels)]


def pixels(input_shape, classes):
    """Return a network with scores of three classes at each pixel."""
    return [dl.Conv2D(3, 4, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Conv2D(1, 3)]
