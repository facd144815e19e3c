"""Layers that scale values: products of layers, a factor per channel, and stochastic depth."""

from __future__ import annotations

from dataclasses import field

from mpidl import ops
from mpidl.nn.layers.base import STORED, Built, Layer, LayerContext, Shape, Value, layer_class
from mpidl.ops import check
from mpidl.ops.gates import product_shape

__all__ = ["Multiply", "Scale", "StochasticDepth"]


@layer_class
class Multiply(Layer):
    """Elementwise product of the outputs of two layers, such as an image and its gate.

    Axes of size 1 broadcast: a gate may have the shape (C, 1, 1), (1, H, W) or (C,), one number for
    each channel.

    Parameters
    ----------
    inputs
        Names of the two layers.
    """

    advice = "`inputs` is one tuple of names"

    inputs: tuple[str, ...] = ()

    def build(self, shape: tuple[Shape, ...]) -> Built:
        output = product_shape(*shape) if len(shape) == 2 else None
        if output is None:
            raise ValueError(
                f"{self.name}: expected two inputs, of equal shapes or with axes of size 1, got "
                f"{shape}"
            )
        return Built(output)

    def forward(self, x: tuple[Value, ...], context: LayerContext) -> Value:
        return ops.multiply(x[0], x[1])


@layer_class
class Scale(Layer):
    """Multiplication of each channel by a learnable factor (layer scale).

    Parameters
    ----------
    initial
        Initial value of the factors.
    scale_learn_rate_factor, scale_l2_factor
        Factors by which the optimizer's learning rate and L2 regularization are multiplied for the
        factors of the channels.
    """

    initial: float = field(default=1e-6, metadata=STORED)
    scale_learn_rate_factor: float = field(default=1.0, kw_only=True)
    scale_l2_factor: float = field(default=0.0, kw_only=True)

    def build(self, shape: Shape) -> Built:
        if not check.are_numbers(self.initial) or not abs(self.initial) < float("inf"):
            raise ValueError(f"{self.name}: initial must be a finite number, got {self.initial!r}")
        return Built(shape, {"scale": ((shape[0],), float(self.initial))})

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.scale(x, context["scale"])


@layer_class
class StochasticDepth(Layer):
    """Dropout of whole images: in training, an image becomes 0 with the given probability.

    The other images are divided by 1 - probability. In prediction, the output equals the input. At
    the end of a residual branch, the layer skips the branch for a random part of the images.

    Parameters
    ----------
    probability
        Probability with which an image becomes 0.
    """

    probability: float

    def build(self, shape: Shape) -> Built:
        ops.dropout_threshold(self.name, self.probability)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        if not context.training or ops.dropout_threshold(self.name, self.probability) == 0:
            return x
        return ops.dropout(x, self.probability, key=self.name, whole_images=True)
