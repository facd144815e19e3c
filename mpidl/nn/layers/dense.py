"""Fully connected layers."""

from __future__ import annotations

import math

import numpy as np

from mpidl import ops
from mpidl.nn.layers.base import (
    Built,
    LayerContext,
    Shape,
    Value,
    Weighted,
    glorot_uniform,
    layer_class,
)
from mpidl.ops import check

__all__ = ["Dense"]


@layer_class
class Dense(Weighted):
    """Fully connected layer with Glorot uniform initial weights and zero bias.

    Images are flattened first.

    Parameters
    ----------
    outputs
        Number of outputs per image.

    Notes
    -----
    `Weighted` describes `bias` and the factors of the learning rate and of L2 regularization.
    """

    outputs: int

    def build(self, shape: Shape) -> Built:
        features = int(np.prod(shape))
        check.integer(self.name, "outputs", self.outputs)
        weight, initial = (self.outputs, features), glorot_uniform(features, self.outputs)
        return Built((self.outputs,), self.learnables(weight, initial, self.outputs))

    def forward(self, x: Value, context: LayerContext) -> Value:
        x = ops.flatten(x) if len(x.shape) > 2 else x
        return ops.dense(x, context["weight"], self.bias_of(context))

    def multiply_adds(self, shape: Shape, output_shape: Shape) -> int:
        return math.prod(shape) * self.outputs
