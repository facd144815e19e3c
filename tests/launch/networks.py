"""Networks for `--network FILE.py:FUNCTION`: a small one, and ones that misbehave."""

import time

import mpidl as dl


def small(input_shape, classes):
    """About a thousand learnables, with every kind of layer that exchanges something."""
    return [dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(classes)]


def varied(input_shape, classes):
    """Every kind of layer, and convolutions by each of the kernels' algorithms."""
    return [
        dl.Conv2D(3, 32, padding=1),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.MaxPool2D(2),
        dl.CrossChannelNorm(5),
        dl.Conv2D(3, 33, padding="same"),  # by Winograd's algorithm both ways
        dl.BatchNorm(),
        dl.ReLU(),
        dl.CrossChannelNorm(4, beta=0.6),
        dl.Conv2D(5, 6, padding=2),
        dl.LeakyReLU(name="leaky"),
        dl.TransposedConv2D(4, 6, 2, "same"),
        dl.GELU(),
        dl.Tanh(),
        dl.MaxPool2D(2, name="again"),
        dl.Add(inputs=("leaky", "again"), name="sum"),
        dl.Dropout(0.2),
        dl.Concat(inputs=("sum", "again", "dropout1")),
        dl.MaxPool2D(3, stride=2, padding=1),
        dl.Conv2D(3, 8, stride=2, padding=1, groups=2),
        dl.Conv2D(1, 9),
        dl.ReLU(),
        dl.AveragePool2D(2),
        dl.Dense(37),
        dl.Sigmoid(),
        dl.Dense(classes),
    ]


def wide(input_shape, classes):
    """Without batch normalization, so that images of one share do not touch the others."""
    return [dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(classes)]


def one_output(input_shape, classes):
    """Of the wrong output size."""
    return [dl.Dense(1)]


def slow(input_shape, classes):
    """Takes a minute for its first step, and says when it starts on it."""
    return [Sleep(), *small(input_shape, classes)]


def late(input_shape, classes):
    """Takes a second to build, and says when it starts."""
    print("building", flush=True)
    time.sleep(1)
    return small(input_shape, classes)


def slow_test(input_shape, classes):
    """Takes half a second for each mini-batch of a test, and says so."""
    return [SleepInTest(), *small(input_shape, classes)]


def raises_on_rank_1(input_shape, classes):
    """One rank of several raises in its first step."""
    return [Break(), *small(input_shape, classes)]


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
    """A small one for emulated GPUs, with pooling, so that each kind of sum is there."""
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
    """Images for images."""
    channels, _, _ = input_shape
    assert classes == input_shape, "the shape of the targets"
    return [dl.Conv2D(3, 4, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Conv2D(1, channels)]


def pixels(input_shape, classes):
    """A score for each of three classes at each pixel."""
    return [dl.Conv2D(3, 4, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Conv2D(1, 3)]
