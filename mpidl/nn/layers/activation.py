"""Activations."""

from dataclasses import dataclass

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer
from mpidl.ops.activation import check_scale


@dataclass
class ReLU(Layer):
    """max(x, 0)."""

    name: str | None = None

    def forward(self, x, at):
        return ops.relu(x)


@dataclass
class LeakyReLU(Layer):
    """x where it is > 0, else scale * x; scale >= 0."""

    scale: float = 0.01
    name: str | None = None

    def build(self, shape):
        check_scale(self.name, self.scale)
        return Built(shape)

    def forward(self, x, at):
        return ops.leaky_relu(x, self.scale)


@dataclass
class Tanh(Layer):
    """Hyperbolic tangent."""

    name: str | None = None

    def forward(self, x, at):
        return ops.tanh(x)


@dataclass
class Sigmoid(Layer):
    """1 / (1 + exp(-x))."""

    name: str | None = None

    def forward(self, x, at):
        return ops.sigmoid(x)


@dataclass
class Softmax(Layer):
    """exp(x) / sum of exp(x) over the K features of an image, or the channels of each pixel of
    (K, H, W)."""

    name: str | None = None

    def forward(self, x, at):
        return ops.softmax(x)
