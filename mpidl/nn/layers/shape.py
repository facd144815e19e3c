"""Layers that change the shape of an image, or select and reorder its channels."""

from __future__ import annotations

import numpy as np

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer, LayerContext, Shape, Value, layer_class
from mpidl.ops.channels import check_groups, check_slice
from mpidl.ops.pad import check_sides, check_value

__all__ = ["ChannelShuffle", "ChannelSlice", "Flatten", "Pad2D"]


@layer_class
class Flatten(Layer):
    """Flattening of images (C, H, W) to C*H*W features."""

    def build(self, shape: Shape) -> Built:
        return Built((int(np.prod(shape)),))

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.flatten(x)


@layer_class
class Pad2D(Layer):
    """Padding, which surrounds images with pixels of a constant value, or removes pixels.

    Parameters
    ----------
    padding
        Number of pixels to add at each side: an integer, (down, across) or
        ((top, bottom), (left, right)). A negative number removes pixels.
    value
        Value of the new pixels.
    """

    padding: int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]]
    value: float = 0.0

    def build(self, shape: Shape) -> Built:
        if len(shape) != 3:
            raise ValueError(f"{self.name}: expected images (C, H, W), got {shape}")
        check_value(str(self.name), self.value)
        rows, columns = check_sides(str(self.name), self.padding, shape)
        return Built((shape[0], shape[1] + sum(rows), shape[2] + sum(columns)))

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.pad2d(x, self.padding, value=self.value)


@layer_class
class ChannelShuffle(Layer):
    """Interleaving of groups of channels; see `ops.channel_shuffle`.

    Parameters
    ----------
    groups
        Number of groups, a divisor of the number of channels.
    """

    groups: int

    def build(self, shape: Shape) -> Built:
        check_groups(str(self.name), self.groups, shape[0])
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.channel_shuffle(x, self.groups)


@layer_class
class ChannelSlice(Layer):
    """Selection of adjacent channels.

    Parameters
    ----------
    start, stop
        The first channel, and the channel after the last.
    """

    start: int
    stop: int

    def build(self, shape: Shape) -> Built:
        check_slice(str(self.name), self.start, self.stop, shape[0])
        return Built((self.stop - self.start, *shape[1:]))

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.channel_slice(x, self.start, self.stop)
