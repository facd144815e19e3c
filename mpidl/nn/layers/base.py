"""The base classes of layers, their learnables and state, and initial weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np

from mpidl import keyed
from mpidl.autodiff import Var
from mpidl.blocks import Blocked

Value: TypeAlias = Blocked | Var  # a value per image, or one that is being differentiated
Shape: TypeAlias = tuple[int, ...]
Initial: TypeAlias = float | Callable[[int, str, Shape], np.ndarray]  # f(seed, key, shape)


@dataclass
class Built:
    """The requirements of a layer for images of a shape.

    Attributes
    ----------
    output_shape
        Shape of the output for one image.
    learnables, state
        {name: (shape, initial value)}. The initial value is a number or a function
        f(seed, key, shape) that returns an array.
    """

    output_shape: Shape
    learnables: dict[str, tuple[Shape, Initial]] = field(default_factory=dict)
    state: dict[str, tuple[Shape, Initial]] = field(default_factory=dict)


class LayerContext:
    """The arrays and the mode that a layer's `forward` runs with; `context["weight"]` is an array.

    Attributes
    ----------
    name
        The name of the layer.
    parameters
        Learnables of the network, {"conv1.weight": array or Var}.
    state
        State of the network, {"batchnorm1.mean": array}. A layer may assign new arrays.
    training
        Whether the layer trains. False in prediction and for a frozen layer.
    batchnorm
        "global" or "local": the scope of batch normalization.
    """

    def __init__(
        self,
        layer: Layer,
        parameters: dict[str, np.ndarray],
        state: dict[str, np.ndarray],
        training: bool,
        batchnorm: str,
    ) -> None:
        self.name, self.parameters, self.state = layer.name, parameters, state
        self.training, self.batchnorm = training, batchnorm

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the layer's learnable of a name; while it is differentiated, a Var of it."""
        return self.parameters[f"{self.name}.{name}"]


@dataclass
class Layer:
    """Base of all layers. The network names a layer whose `name` is None.

    Parameters
    ----------
    after
        The name of the layer whose output this layer reads, or "images" for the input of the
        network. By default the layer before it in the list. A layer with several inputs has a field
        `inputs` instead, a tuple of such names; its `build` and `forward` get tuples.
    trainable
        False freezes the layer. Its learnables are not differentiated, and it runs as in
        prediction: a frozen batch normalization uses its running state, which does not change.
    """

    name = None  # type: str | None  # each layer declares the field itself, as its last positional one

    after: str | None = field(default=None, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    def spec(self) -> dict[str, Any]:
        """Return the type and the arguments of the layer for JSON in model files.

        Keyword-only arguments with their default are left out, so a new argument does not change
        the files of networks that do not use it.
        """
        arguments = {"type": type(self).__name__}
        for f in fields(self):
            value = getattr(self, f.name)
            if not (f.kw_only and value == f.default):
                arguments[f.name] = value
        return arguments

    def build(self, shape: Any) -> Built:
        """Return the output shape, the learnables and the state for an input of a shape.

        Parameters
        ----------
        shape
            Shape of one image's input; a tuple of shapes for a layer with several inputs.

        Raises
        ------
        ValueError
            If the layer does not take images of the shape.
        """
        return Built(shape)

    def forward(self, x: Any, context: LayerContext) -> Value:
        """Return the output of the layer.

        Parameters
        ----------
        x
            A Blocked value or a Var of one; a tuple of values for a layer with several inputs.
        context
            The layer's arrays and the mode.
        """
        raise TypeError(f"layer {type(self).__name__} has no forward method")

    def factors(self, learnable: str) -> tuple[float, float]:
        """Return the learning-rate factor and the L2 factor of a learnable.

        The learning-rate factor of a frozen layer is 0.
        """
        rate = getattr(self, f"{learnable}_learn_rate_factor", 1.0)
        decay = getattr(self, f"{learnable}_l2_factor", 1.0 if learnable == "weight" else 0.0)
        return (rate if self.trainable else 0.0), decay

    def multiply_adds(self, shape: Shape, output_shape: Shape) -> int:
        """Return the number of products that forward adds up for one image.

        Other arithmetic is not counted.

        Parameters
        ----------
        shape, output_shape
            Shapes of the input, as `build` gets it, and of the output.
        """
        return 0


def glorot_uniform(fan_in: int, fan_out: int) -> Initial:
    """Return a function of initial weights, uniform in +-sqrt(6 / (fan_in + fan_out)).

    The numbers are keyed by the seed and the name of the learnable.

    Notes
    -----
    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    2010, equation 16.
    """
    bound = np.sqrt(6.0 / (fan_in + fan_out))

    def values(seed, key, shape):
        uniform = keyed.uniform(seed, f"initial {key}", int(np.prod(shape)))
        return ((2 * uniform - 1) * bound).reshape(shape)

    return values


@dataclass
class Weighted(Layer):
    """Base of the layers with a weight and a bias.

    Parameters
    ----------
    weight_learn_rate_factor, bias_learn_rate_factor
        Factors of the optimizer's learning rate. A learnable with a factor of 0 is not
        differentiated.
    weight_l2_factor, bias_l2_factor
        Factors of the optimizer's L2 regularization.
    """

    weight_learn_rate_factor: float = field(default=1.0, kw_only=True)
    bias_learn_rate_factor: float = field(default=1.0, kw_only=True)
    weight_l2_factor: float = field(default=1.0, kw_only=True)
    bias_l2_factor: float = field(default=0.0, kw_only=True)
