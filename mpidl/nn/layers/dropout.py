"""Dropout."""

from dataclasses import dataclass

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer


@dataclass
class Dropout(Layer):
    """In training each element becomes 0 with this probability, and what is left is scaled up so
    that the expectation stays; in prediction nothing happens. See `ops.dropout`."""

    probability: float = 0.5
    name: str | None = None

    def build(self, shape):
        ops.dropout_threshold(self.name, self.probability)
        return Built(shape)

    def forward(self, x, at):
        return ops.dropout(x, self.probability, key=self.name) if at.training else x
