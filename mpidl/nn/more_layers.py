"""Further layers: activations, dropout, cross-channel normalization, transposed convolution, and
those that take several values (`inputs` names the layers they come from)."""

import math
from dataclasses import dataclass

from mpidl import ops
from mpidl.nn.layers import Built, Layer, Weighted, glorot_uniform
from mpidl.ops import check
from mpidl.ops.activation import check_scale
from mpidl.ops.lrn import check_window
from mpidl.ops.transposed import crops
from mpidl.shapes import transposed_conv2d_shape


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


@dataclass
class GlobalAveragePool2D(Layer):
    """The mean of each channel over all of its pixels: (C, H, W) to (C, 1, 1)."""

    name: str | None = None

    def build(self, shape):
        if len(shape) != 3:
            raise ValueError(f"{self.name}: expected images (C, H, W), got {shape}")
        return Built((shape[0], 1, 1))

    def forward(self, x, at):
        return ops.global_average_pool2d(x)


@dataclass
class CrossChannelNorm(Layer):
    """Cross-channel (local response) normalization, as `ops.cross_channel_norm`.

    window: how many channels a sum of squares goes over.
    """

    window: int
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 2.0
    name: str | None = None

    def build(self, shape):
        check_window(self.name, self.window, self.alpha, self.beta, self.k)
        return Built(shape)

    def forward(self, x, at):
        return ops.cross_channel_norm(x, self.window, alpha=self.alpha, beta=self.beta, k=self.k)


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


@dataclass
class TransposedConv2D(Weighted):
    """Transposed convolution with `filters` filters of `size` (an integer or (rows, columns)).

    stride, cropping as in `ops.transposed_conv2d`. Glorot uniform weights, zero bias; their
    factors: see `Weighted`.
    """

    size: int | tuple[int, int]
    filters: int
    stride: int | tuple[int, int] = 1
    cropping: int | str | tuple = 0
    name: str | None = None

    def build(self, shape):
        if len(shape) != 3:
            raise ValueError(f"{self.name}: expected images (C, H, W), got {shape}")
        r, s = check.pair("TransposedConv2D", "size", self.size, 1)
        check.whole(self.name, "filters", self.filters)
        stride = check.pair("TransposedConv2D", "stride", self.stride, 1)
        cropping = crops("TransposedConv2D", self.cropping, (r, s), stride)
        weight = (shape[0], self.filters, r, s)
        output = transposed_conv2d_shape(shape, weight, stride, cropping)
        if min(output) < 1:
            raise ValueError(f"{self.name}: cropping {cropping} leaves nothing of images {shape}")
        initial = glorot_uniform(shape[0] * r * s, self.filters * r * s)
        return Built(output, {"weight": (weight, initial), "bias": ((self.filters,), 0.0)})

    def forward(self, x, at):
        return ops.transposed_conv2d(
            x, at["weight"], at["bias"], stride=self.stride, cropping=self.cropping
        )

    def multiply_adds(self, shape, output_shape):
        r, s = check.pair("TransposedConv2D", "size", self.size, 1)
        return math.prod(shape) * self.filters * r * s


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
