"""Pooling."""

from dataclasses import dataclass

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer
from mpidl.ops.pool import PLACES, windows


@dataclass
class MaxPool2D(Layer):
    """The largest of each window of `size` pixels (an integer or (rows, columns)).

    stride (the size where None), padding (a number of pixels, or "same") as in `ops.max_pool2d`.
    """

    size: int | tuple[int, int]
    stride: int | tuple[int, int] | None = None
    padding: int | str | tuple = 0
    name: str | None = None

    def build(self, shape):
        return Built(windows(self.name, shape, self.size, self.stride, self.padding, PLACES).shape)

    def forward(self, x, at):
        return ops.max_pool2d(x, self.size, stride=self.stride, padding=self.padding)


@dataclass
class AveragePool2D(Layer):
    """The mean of each window of `size` pixels (an integer or (rows, columns)), in which padding
    counts as zeros.

    stride (the size where None), padding (a number of pixels, or "same") as in
    `ops.average_pool2d`.
    """

    size: int | tuple[int, int]
    stride: int | tuple[int, int] | None = None
    padding: int | str | tuple = 0
    name: str | None = None

    def build(self, shape):
        return Built(windows(self.name, shape, self.size, self.stride, self.padding).shape)

    def forward(self, x, at):
        return ops.average_pool2d(x, self.size, stride=self.stride, padding=self.padding)


@dataclass
class GlobalAveragePool2D(Layer):
    """The mean of each channel over all of its pixels: (C, H, W) to (C, 1, 1)."""

    name: str | None = None

    def build(self, shape):
        if len(shape) != 3:
            raise ValueError(f"{self.name}: expected images (C, H, W), got {shape}")
        return Built((shape[0], 1, 1))

    def forward(self, x, at):
        return ops.global_average_pool2d(x)
