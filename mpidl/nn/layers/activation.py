"""Layers of activation functions."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from mpidl import ops
from mpidl.nn.layers.base import STORED, Built, Layer, LayerContext, Shape, Value, layer_class
from mpidl.ops import check
from mpidl.ops.activation import check_approximate, check_line, check_range, check_scale

__all__ = ["Clip", "GELU", "HardSigmoid", "HardSwish", "LeakyReLU", "PReLU", "ReLU", "Sigmoid"]
__all__ += ["Softmax", "Swish", "Tanh"]


@layer_class
class ReLU(Layer):
    """Rectified linear unit, max(x, 0)."""

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.relu(x)


@layer_class
class LeakyReLU(Layer):
    """Leaky rectified linear unit: x if x > 0, else scale * x.

    Parameters
    ----------
    scale
        Slope for negative x, a number >= 0.
    """

    scale: float = 0.01

    def build(self, shape: Shape) -> Built:
        check_scale(self.name, self.scale)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.leaky_relu(x, self.scale)


@layer_class
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

    shared: bool = field(default=False, kw_only=True, metadata=STORED)
    initial: float = field(default=0.25, kw_only=True, metadata=STORED)
    slope_learn_rate_factor: float = field(default=1.0, kw_only=True)
    slope_l2_factor: float = field(default=0.0, kw_only=True)

    def build(self, shape: Shape) -> Built:
        if not check.are_numbers(self.initial) or not abs(self.initial) < float("inf"):
            raise ValueError(f"{self.name}: initial must be a finite number, got {self.initial!r}")
        slopes = 1 if self.shared else shape[0]
        return Built(shape, {"slope": ((slopes,), float(self.initial))})

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.prelu(x, context["slope"])


@layer_class
class Clip(Layer):
    """Clipping to a range: min(max(x, low), high). `Clip(0, 6)` is ReLU6.

    Parameters
    ----------
    low, high
        Bounds of the range. One of them may be infinite.
    """

    low: float
    high: float

    def build(self, shape: Shape) -> Built:
        check_range(self.name, self.low, self.high)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.clip(x, self.low, self.high)


@layer_class
class HardSigmoid(Layer):
    """Piecewise linear sigmoid, min(max(alpha * x + beta, 0), 1).

    Parameters
    ----------
    alpha, beta
        Slope (> 0) and offset of the line.
    """

    alpha: float = 1 / 6
    beta: float = 0.5

    def build(self, shape: Shape) -> Built:
        check_line(self.name, self.alpha, self.beta)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.hard_sigmoid(x, self.alpha, self.beta)


@layer_class
class HardSwish(Layer):
    """Piecewise approximation of swish, x * min(max(x / 6 + 1 / 2, 0), 1)."""

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.hard_swish(x)


@layer_class
class Swish(Layer):
    """Swish or SiLU, x / (1 + exp(-x))."""

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.swish(x)


@layer_class
class Tanh(Layer):
    """Hyperbolic tangent."""

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.tanh(x)


@layer_class
class Sigmoid(Layer):
    """Logistic function, 1 / (1 + exp(-x))."""

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.sigmoid(x)


@layer_class
class GELU(Layer):
    """Gaussian error linear unit, x * Phi(x), where Phi is the normal distribution function.

    Parameters
    ----------
    approximate
        "none" for the exact function, or "tanh" for an approximation by a hyperbolic tangent.
    """

    approximate: Literal["none", "tanh"] = "none"

    def build(self, shape: Shape) -> Built:
        check_approximate(self.name, self.approximate)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.gelu(x, self.approximate)


@layer_class
class Softmax(Layer):
    """Softmax: exp(x) divided by the sum of exp(x) over the K features of an image.

    For images (K, H, W), the sum runs over the K channels of each pixel.
    """

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.softmax(x)
