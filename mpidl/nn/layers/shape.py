"""Layers that change the shape of an image."""

from dataclasses import dataclass

import numpy as np

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer


@dataclass
class Flatten(Layer):
    """(C, H, W) to C*H*W features."""

    name: str | None = None

    def build(self, shape):
        return Built((int(np.prod(shape)),))

    def forward(self, x, at):
        return ops.flatten(x)
