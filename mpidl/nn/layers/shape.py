"""Layers that change the shape of an image."""

from __future__ import annotations

import numpy as np

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer, LayerContext, Shape, Value, layer_class
from mpidl.ops import check
from mpidl.ops.pad import check_value

__all__ = ["Flatten", "Pad2D"]


@layer_class
class Flatten(Layer):
    """Flattening of images (C, H, W) to C*H*W features."""

    def build(self, shape: Shape) -> Built:
        return Built((int(np.prod(shape)),))

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.flatten(x)


@layer_class
class Pad2D(Layer):
    """Padding, which surrounds images with pixels of a constant value.

    Parameters
    ----------
    padding
        Number of pixels to add at each side: an integer, (down, across) or
        ((top, bottom), (left, right)).
    value
        Value of the new pixels.
    """

    padding: int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]]
    value: float = 0.0

    def build(self, shape: Shape) -> Built:
        if len(shape) != 3:
            raise ValueError(f"{self.name}: expected images (C, H, W), got {shape}")
        check_value(str(self.name), self.value)
        rows, columns = check.pads(str(self.name), self.padding)
        return Built((shape[0], shape[1] + sum(rows), shape[2] + sum(columns)))

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.pad2d(x, self.padding, value=self.value)
