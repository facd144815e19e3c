"""Layers with several inputs."""

from dataclasses import dataclass

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer


@dataclass
class Add(Layer):
    """The sum of the outputs of two or more layers, of one shape.

    inputs: the names of those layers. `build` takes the tuple of their shapes, `forward` the tuple
    of their values.
    """

    inputs: tuple[str, ...] = ()
    name: str | None = None

    def build(self, shape):
        if len(shape) < 2 or any(one != shape[0] for one in shape):
            raise ValueError(f"{self.name}: expected two or more inputs of one shape, got {shape}")
        return Built(shape[0])

    def forward(self, x, at):
        total = x[0]
        for value in x[1:]:
            total = ops.add(total, value)
        return total


@dataclass
class Concat(Layer):
    """The outputs of two or more layers one behind the other: along the channels.

    inputs: as in `Add`; shapes differ in the first axis alone.
    """

    inputs: tuple[str, ...] = ()
    name: str | None = None

    def build(self, shape):
        if len(shape) < 2 or any(one[1:] != shape[0][1:] for one in shape):
            raise ValueError(
                f"{self.name}: expected two or more inputs that differ in their channels alone, "
                f"got {shape}"
            )
        return Built((sum(one[0] for one in shape), *shape[0][1:]))

    def forward(self, x, at):
        return ops.concat(*x)
