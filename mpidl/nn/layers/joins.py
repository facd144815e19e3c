"""Layers with several inputs: addition and concatenation."""

from __future__ import annotations

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer, LayerContext, Shape, Value, layer_class

__all__ = ["Add", "Concat"]


@layer_class
class Add(Layer):
    """Sum of the outputs of two or more layers, which must have equal shapes.

    Parameters
    ----------
    inputs
        Names of the layers whose outputs are added.
    """

    advice = "`inputs` is one tuple of names"

    inputs: tuple[str, ...] = ()

    def build(self, shape: tuple[Shape, ...]) -> Built:
        if len(shape) < 2 or any(other != shape[0] for other in shape):
            raise ValueError(f"{self.name}: expected two or more inputs of one shape, got {shape}")
        return Built(shape[0])

    def forward(self, x: tuple[Value, ...], context: LayerContext) -> Value:
        total: Value = x[0]
        for value in x[1:]:
            total = ops.add(total, value)
        return total


@layer_class
class Concat(Layer):
    """Concatenation of the outputs of two or more layers along the channels.

    Parameters
    ----------
    inputs
        Names of the layers whose outputs are concatenated. The shapes of the outputs may differ
        only in the number of channels.
    """

    advice = "`inputs` is one tuple of names"

    inputs: tuple[str, ...] = ()

    def build(self, shape: tuple[Shape, ...]) -> Built:
        if len(shape) < 2 or any(other[1:] != shape[0][1:] for other in shape):
            raise ValueError(
                f"{self.name}: expected two or more inputs that differ only in their channels, "
                f"got {shape}"
            )
        return Built((sum(channels for channels, *_ in shape), *shape[0][1:]))

    def forward(self, x: tuple[Value, ...], context: LayerContext) -> Value:
        return ops.concat(*x)
