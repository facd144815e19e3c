"""What every layer is made of: the base classes, what a layer needs, initial weights."""

from dataclasses import dataclass, field, fields

import numpy as np

from mpidl import keyed


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
