"""Pooling layers."""

from __future__ import annotations

from dataclasses import field

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer, LayerContext, Shape, Value, layer_class
from mpidl.ops import check
from mpidl.ops.pool import PLACES, windows

__all__ = ["AdaptiveAveragePool2D", "AveragePool2D", "GlobalAveragePool2D", "MaxPool2D"]


@layer_class
class MaxPool2D(Layer):
    """Max pooling, which returns the largest pixel of each window.

    Parameters
    ----------
    size
        Size of the windows, an integer or (rows, columns).
    stride, padding
        As in `ops.max_pool2d`. The default stride is the size.
    """

    size: int | tuple[int, int]
    stride: int | tuple[int, int] | None = None
    padding: check.PaddingArgument = 0

    def build(self, shape: Shape) -> Built:
        return Built(windows(self.name, shape, self.size, self.stride, self.padding, PLACES)[1])

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.max_pool2d(x, self.size, stride=self.stride, padding=self.padding)


@layer_class
class AveragePool2D(Layer):
    """Average pooling, which returns the mean of each window.

    Parameters
    ----------
    size
        Size of the windows, an integer or (rows, columns).
    stride, padding
        As in `ops.average_pool2d`. The default stride is the size.
    count_padding
        Whether padding counts as zeros. If False, the mean is only over the pixels of the image.
    """

    size: int | tuple[int, int]
    stride: int | tuple[int, int] | None = None
    padding: check.PaddingArgument = 0
    count_padding: bool = field(default=True, kw_only=True)

    def build(self, shape: Shape) -> Built:
        if not isinstance(self.count_padding, bool):
            raise ValueError(f"{self.name}: count_padding must be True or False")
        return Built(windows(self.name, shape, self.size, self.stride, self.padding)[1])

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.average_pool2d(
            x,
            self.size,
            stride=self.stride,
            padding=self.padding,
            count_padding=self.count_padding,
        )


@layer_class
class GlobalAveragePool2D(Layer):
    """Global average pooling, which returns the mean of each channel, (C, 1, 1)."""

    def build(self, shape: Shape) -> Built:
        if len(shape) != 3:
            raise ValueError(f"{self.name}: expected images (C, H, W), got {shape}")
        return Built((shape[0], 1, 1))

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.global_average_pool2d(x)


@layer_class
class AdaptiveAveragePool2D(Layer):
    """Average pooling to a fixed size, whatever the size of the images.

    Parameters
    ----------
    size
        Size of the output, an integer or (rows, columns). `ops.adaptive_average_pool2d` documents
        the windows.
    """

    size: int | tuple[int, int]

    def build(self, shape: Shape) -> Built:
        if len(shape) != 3:
            raise ValueError(f"{self.name}: expected images (C, H, W), got {shape}")
        return Built((shape[0], *check.pair(str(self.name), "size", self.size, 1)))

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.adaptive_average_pool2d(x, self.size)
