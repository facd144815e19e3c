"""Dropout."""

from __future__ import annotations

from dataclasses import dataclass

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer, LayerContext, Shape, Value

__all__ = ["Dropout"]


@dataclass
class Dropout(Layer):
    """Dropout: in training, each element becomes 0 with a probability.

    The other elements are scaled up, so the expectation stays the same. Prediction returns the
    input. See `ops.dropout`.
    """

    probability: float = 0.5
    name: str | None = None

    def build(self, shape: Shape) -> Built:
        ops.dropout_threshold(self.name, self.probability)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.dropout(x, self.probability, key=self.name) if context.training else x
