"""Layers: what a network is a list of.

A layer is a frozen set of arguments. It says what learnables and state it needs for images of a
shape (`build`) and applies its op (`forward`); the arrays belong to the network.
"""

import math
from dataclasses import dataclass, field, fields

import numpy as np

from mpidl import backends, keyed, ops
from mpidl.ops import check
from mpidl.ops.pool import PLACES, windows
from mpidl.shapes import conv2d_shape


@dataclass
class Built:
    """What a layer needs: shape of its output for one image, learnables and state by name.

    Each of the latter is (shape, initial value), the value a number or function(seed, key).
    """

    output_shape: tuple
    learnables: dict = field(default_factory=dict)
    state: dict = field(default_factory=dict)


class At:
    """A layer's place in a running network: its learnables, its state, and how it runs."""

    def __init__(self, layer, parameters, state, training, batchnorm):
        self.name, self.parameters, self.state = layer.name, parameters, state
        self.training, self.batchnorm = training, batchnorm

    def __getitem__(self, name):
        return self.parameters[f"{self.name}.{name}"]


@dataclass
class Layer:
    """Base of all layers. `name` is given by the network where it is None.

    after: the name of the layer whose output this one reads, or "images", what the network is
    given; None: the layer before it in the list. A layer of several inputs has a field `inputs`
    instead, a tuple of such names; its `build` and `forward` get tuples.

    trainable: False freezes the layer. Its learnables are not differentiated and it runs as in
    prediction: a frozen batch normalization uses its running state, which stays as it is.
    """

    name = None  # a field of every layer, each of which puts it last

    after: str | None = field(default=None, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    def spec(self):
        """The layer as JSON-able arguments, for model files.

        What can be given by name alone is left out where it has its default, so that a file says no
        more than it did before there was such an argument.
        """
        arguments = {"type": type(self).__name__}
        for f in fields(self):
            value = getattr(self, f.name)
            if not (f.kw_only and value == f.default):
                arguments[f.name] = value
        return arguments

    def build(self, shape):
        """Built for images of `shape`."""
        return Built(shape)

    def forward(self, x, at):
        """The layer's output for x, a Blocked value or a Var of one."""
        raise TypeError(f"layer {type(self).__name__} has no forward method")

    def factors(self, learnable):
        """(learning-rate factor, L2 factor) of one of its learnables, from the layer's fields.

        The learning-rate factor is 0 where the layer is frozen.
        """
        rate = getattr(self, f"{learnable}_learn_rate_factor", 1.0)
        decay = getattr(self, f"{learnable}_l2_factor", 1.0 if learnable == "weight" else 0.0)
        return (rate if self.trainable else 0.0), decay

    def multiply_adds(self, shape, output_shape):
        """How many products forward adds up for one image; arithmetic of another kind is not
        counted. `shape`: of its input, as `build` gets it."""
        return 0


def glorot_uniform(fan_in, fan_out):
    """Uniform in +-sqrt(6 / (fan_in + fan_out)), keyed by seed and name.

    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    2010, equation 16.
    """
    bound = np.sqrt(6.0 / (fan_in + fan_out))

    def values(seed, key, shape):
        drawn = keyed.uniform(seed, f"initial {key}", int(np.prod(shape)))
        return ((2 * drawn - 1) * bound).reshape(shape)

    return values


@dataclass
class Weighted(Layer):
    """Base of the layers with a weight and a bias.

    The learning rate and the L2 regularization of each are those of the optimizer times a factor;
    one of learning rate 0 is not differentiated.
    """

    weight_learn_rate_factor: float = field(default=1.0, kw_only=True)
    bias_learn_rate_factor: float = field(default=1.0, kw_only=True)
    weight_l2_factor: float = field(default=1.0, kw_only=True)
    bias_l2_factor: float = field(default=0.0, kw_only=True)


@dataclass
class Conv2D(Weighted):
    """Convolution with `filters` filters of `size` (an integer or (rows, columns)).

    stride, padding, dilation, groups as in `ops.conv2d`. Glorot uniform weights, zero bias; their
    factors: see `Weighted`.
    """

    size: int | tuple[int, int]
    filters: int
    stride: int | tuple[int, int] = 1
    padding: int | str | tuple = 0
    dilation: int | tuple[int, int] = 1
    groups: int = 1
    name: str | None = None

    def build(self, shape):
        if len(shape) != 3:
            raise ValueError(f"{self.name}: expected images (C, H, W), got {shape}")
        r, s = check.pair("Conv2D", "size", self.size, 1)
        check.whole(self.name, "filters", self.filters)
        check.whole(self.name, "groups", self.groups)
        if shape[0] % self.groups or self.filters % self.groups:
            raise ValueError(
                f"{self.name}: {shape[0]} channels and {self.filters} filters do not divide into "
                f"{self.groups} groups"
            )
        weight = (self.filters, shape[0] // self.groups, r, s)
        stride = check.pair("Conv2D", "stride", self.stride, 1)
        dilation = check.pair("Conv2D", "dilation", self.dilation, 1)
        padding = check.same_or_pads("Conv2D", self.padding, shape[1:], (r, s), stride, dilation)
        output = conv2d_shape(shape, weight, stride, padding, dilation)
        if min(output) < 1:
            raise ValueError(f"{self.name}: filters {weight} leave nothing of images {shape}")
        fans = weight[1] * r * s, self.filters // self.groups * r * s
        return Built(
            output, {"weight": (weight, glorot_uniform(*fans)), "bias": ((self.filters,), 0.0)}
        )

    def forward(self, x, at):
        return ops.conv2d(
            x,
            at["weight"],
            at["bias"],
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )

    def multiply_adds(self, shape, output_shape):
        r, s = check.pair("Conv2D", "size", self.size, 1)
        return math.prod(output_shape) * (shape[0] // self.groups) * r * s


@dataclass
class BatchNorm(Layer):
    """Batch normalization; `decay` is the weight of a new mini-batch in the running state.

    The learning rate and the L2 regularization of gamma (the scale) and beta (the offset) are those
    of the optimizer times the factors; with learning rates of 0 they are not differentiated, and
    the mini-batch goes on to normalize by its own statistics.
    """

    epsilon: float = 1e-5
    decay: float = 0.1
    name: str | None = None

    scale_learn_rate_factor: float = field(default=1.0, kw_only=True)
    offset_learn_rate_factor: float = field(default=1.0, kw_only=True)
    scale_l2_factor: float = field(default=0.0, kw_only=True)
    offset_l2_factor: float = field(default=0.0, kw_only=True)

    def factors(self, learnable):
        return super().factors({"gamma": "scale", "beta": "offset"}[learnable])

    def build(self, shape):
        numbers = check.are_numbers(self.epsilon, self.decay)
        if not (numbers and self.epsilon > 0 and 0 <= self.decay <= 1):
            raise ValueError(
                f"{self.name}: expected epsilon > 0 and a decay from 0 to 1, got {self.epsilon!r} "
                f"and {self.decay!r}"
            )
        c = (shape[0],)
        return Built(
            shape, {"gamma": (c, 1.0), "beta": (c, 0.0)}, {"mean": (c, 0.0), "variance": (c, 1.0)}
        )

    def _keys(self):
        return f"{self.name}.mean", f"{self.name}.variance"

    def running(self, at):
        """The running mean and variance."""
        return tuple(at.state[key] for key in self._keys())

    def recorder(self, at):
        """What takes a mini-batch's mean and variance into the running state."""

        def record(*statistics):
            keys = self._keys()
            olds = [at.state[key] for key in keys]
            news = backends.of_array(olds[0]).running(olds, statistics, self.decay)
            at.state.update(zip(keys, news, strict=True))

        return record

    def forward(self, x, at):
        if not at.training:
            return ops.batchnorm_predict(
                x, *self.running(at), at["gamma"], at["beta"], epsilon=self.epsilon
            )
        return ops.batchnorm(
            x,
            at["gamma"],
            at["beta"],
            epsilon=self.epsilon,
            scope=at.batchnorm,
            record=self.recorder(at),
        )


@dataclass
class ReLU(Layer):
    """max(x, 0)."""

    name: str | None = None

    def forward(self, x, at):
        return ops.relu(x)


@dataclass
class MaxPool2D(Layer):
    """The largest of each window of `size` pixels (an integer or (rows, columns)).

    stride (the size where None), padding (a number of pixels, or "same") as in `ops.max_pool2d`.
    """

    size: int | tuple[int, int]
    stride: int | tuple[int, int] | None = None
    padding: int | str | tuple = 0
    name: str | None = None

    def build(self, shape):
        return Built(windows(self.name, shape, self.size, self.stride, self.padding, PLACES).shape)

    def forward(self, x, at):
        return ops.max_pool2d(x, self.size, stride=self.stride, padding=self.padding)


@dataclass
class AveragePool2D(Layer):
    """The mean of each window of `size` pixels (an integer or (rows, columns)), in which padding
    counts as zeros.

    stride (the size where None), padding (a number of pixels, or "same") as in
    `ops.average_pool2d`.
    """

    size: int | tuple[int, int]
    stride: int | tuple[int, int] | None = None
    padding: int | str | tuple = 0
    name: str | None = None

    def build(self, shape):
        return Built(windows(self.name, shape, self.size, self.stride, self.padding).shape)

    def forward(self, x, at):
        return ops.average_pool2d(x, self.size, stride=self.stride, padding=self.padding)


@dataclass
class Flatten(Layer):
    """(C, H, W) to C*H*W features."""

    name: str | None = None

    def build(self, shape):
        return Built((int(np.prod(shape)),))

    def forward(self, x, at):
        return ops.flatten(x)


@dataclass
class Dense(Weighted):
    """Fully connected: `outputs` numbers of all features of an image (flattened if need be).

    Glorot uniform weights, zero bias; their factors: see `Weighted`.
    """

    outputs: int
    name: str | None = None

    def build(self, shape):
        features = int(np.prod(shape))
        check.whole(self.name, "outputs", self.outputs)
        return Built(
            (self.outputs,),
            {
                "weight": ((self.outputs, features), glorot_uniform(features, self.outputs)),
                "bias": ((self.outputs,), 0.0),
            },
        )

    def forward(self, x, at):
        x = ops.flatten(x) if len(x.shape) > 2 else x
        return ops.dense(x, at["weight"], at["bias"])

    def multiply_adds(self, shape, output_shape):
        return math.prod(shape) * self.outputs
