"""Layers of activation functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer, LayerContext, Shape, Value
from mpidl.ops import check
from mpidl.ops.activation import check_approximate, check_line, check_range, check_scale

__all__ = ["Clip", "GELU", "HardSigmoid", "HardSwish", "LeakyReLU", "PReLU", "ReLU", "Sigmoid"]
__all__ += ["Softmax", "Swish", "Tanh"]


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
        Slope for negative x, a number >= 0.
    """

    scale: float = 0.01
    name: str | None = None

    def build(self, shape: Shape) -> Built:
        check_scale(self.name, self.scale)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.leaky_relu(x, self.scale)


@dataclass
class PReLU(Layer):
    """Leaky rectified linear unit with learnable slopes: x if x > 0, else slope * x.

    Parameters
    ----------
    shared
        Whether all channels share one slope. By default, each channel has its own slope.
    initial
        Initial value of the slopes.
    slope_learn_rate_factor, slope_l2_factor
        Factors by which the optimizer's learning rate and L2 regularization are multiplied for the
        slopes.
    """

    shared: bool = False
    initial: float = 0.25
    name: str | None = None

    slope_learn_rate_factor: float = field(default=1.0, kw_only=True)
    slope_l2_factor: float = field(default=0.0, kw_only=True)

    def build(self, shape: Shape) -> Built:
        if not check.are_numbers(self.initial) or not abs(self.initial) < float("inf"):
            raise ValueError(f"{self.name}: initial must be a finite number, got {self.initial!r}")
        slopes = 1 if self.shared else shape[0]
        return Built(shape, {"slope": ((slopes,), float(self.initial))})

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.prelu(x, context["slope"])


@dataclass
class Clip(Layer):
    """Clipping to a range: min(max(x, low), high). `Clip(0, 6)` is ReLU6.

    Parameters
    ----------
    low, high
        Bounds of the range. One of them may be infinite.
    """

    low: float
    high: float
    name: str | None = None

    def build(self, shape: Shape) -> Built:
        check_range(self.name, self.low, self.high)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.clip(x, self.low, self.high)


@dataclass
class HardSigmoid(Layer):
    """Piecewise linear sigmoid, min(max(alpha * x + beta, 0), 1).

    Parameters
    ----------
    alpha, beta
        Slope (> 0) and offset of the line.
    """

    alpha: float = 1 / 6
    beta: float = 0.5
    name: str | None = None

    def build(self, shape: Shape) -> Built:
        check_line(self.name, self.alpha, self.beta)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.hard_sigmoid(x, self.alpha, self.beta)


@dataclass
class HardSwish(Layer):
    """Piecewise approximation of swish, x * min(max(x / 6 + 1 / 2, 0), 1)."""

    name: str | None = None

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.hard_swish(x)


@dataclass
class Swish(Layer):
    """Swish or SiLU, x / (1 + exp(-x))."""

    name: str | None = None

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.swish(x)


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
    """Gaussian error linear unit, x * Phi(x), where Phi is the normal distribution function.

    Parameters
    ----------
    approximate
        "none" for the exact function, or "tanh" for an approximation by a hyperbolic tangent.
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
