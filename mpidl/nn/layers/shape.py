"""Layers that change the shape of an image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer, LayerContext, Shape, Value

__all__ = ["Flatten"]


@dataclass
class Flatten(Layer):
    """Flatten images (C, H, W) to C*H*W features."""

    name: str | None = None

    def build(self, shape: Shape) -> Built:
        return Built((int(np.prod(shape)),))

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.flatten(x)
