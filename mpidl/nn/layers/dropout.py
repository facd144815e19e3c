"""The dropout layer."""

from __future__ import annotations

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer, LayerContext, Shape, Value, layer_class

__all__ = ["Dropout"]


@layer_class
class Dropout(Layer):
    """Dropout: sets each element to 0 with the given probability in training; see `ops.dropout`.

    The other elements are scaled up, so the expected value stays the same. In prediction, the
    output equals the input.

    Parameters
    ----------
    probability
        Probability with which an element becomes 0.
    """

    probability: float = 0.5

    def build(self, shape: Shape) -> Built:
        ops.dropout_threshold(self.name, self.probability)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.dropout(x, self.probability, key=self.name) if context.training else x
