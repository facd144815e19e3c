"""Activation layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer, LayerContext, Shape, Value
from mpidl.ops.activation import check_approximate, check_scale

__all__ = ["GELU", "LeakyReLU", "ReLU", "Sigmoid", "Softmax", "Tanh"]


@dataclass
class ReLU(Layer):
    """Rectified linear unit, max(x, 0)."""

    name: str | None = None

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.relu(x)


@dataclass
class LeakyReLU(Layer):
    """Leaky rectified linear unit: x if x > 0, else scale * x.

    Parameters
    ----------
    scale
        Slope for negative x, at least 0.
    """

    scale: float = 0.01
    name: str | None = None

    def build(self, shape: Shape) -> Built:
        check_scale(self.name, self.scale)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.leaky_relu(x, self.scale)


@dataclass
class Tanh(Layer):
    """Hyperbolic tangent."""

    name: str | None = None

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.tanh(x)


@dataclass
class Sigmoid(Layer):
    """Logistic function, 1 / (1 + exp(-x))."""

    name: str | None = None

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.sigmoid(x)


@dataclass
class GELU(Layer):
    """Gaussian error linear unit, x * Phi(x) with the normal distribution function Phi.

    Parameters
    ----------
    approximate
        "none" for the exact function, or "tanh" for its approximation by a hyperbolic tangent.
    """

    approximate: Literal["none", "tanh"] = "none"
    name: str | None = None

    def build(self, shape: Shape) -> Built:
        check_approximate(self.name, self.approximate)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.gelu(x, self.approximate)


@dataclass
class Softmax(Layer):
    """Softmax: exp(x) divided by the sum of exp(x) over the K features of an image.

    For images (K, H, W), the sum runs over the K channels of each pixel.
    """

    name: str | None = None

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.softmax(x)
