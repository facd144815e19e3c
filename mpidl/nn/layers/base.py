"""Base classes of layers, and the random initialization of weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from mpidl.core import keyed
from mpidl.core.blocks import Blocked
from mpidl.core.tape import Var
from mpidl.matlab_names import explain_arguments
from mpidl.ops import check

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda decorator: decorator


Value: TypeAlias = Blocked | Var  # a Var contains a Blocked value that is being differentiated
Shape: TypeAlias = tuple[int, ...]
STORED = {"stored": True}  # metadata of an argument that model files store even by default
Initial: TypeAlias = float | Callable[[int, str, Shape], np.ndarray]  # f(seed, key, shape)


@dataclass
class Built:
    """The result of `Layer.build`: the output shape and the arrays that the layer needs.

    Attributes
    ----------
    output_shape
        Shape of the output for one image.
    learnables, state
        {name: (shape, initial value)}. The initial value is a number or a function
        f(seed, key, shape) that returns an array. `key` is a string such as "conv1.weight".
    """

    output_shape: Shape
    learnables: dict[str, tuple[Shape, Initial]] = field(default_factory=dict)
    state: dict[str, tuple[Shape, Initial]] = field(default_factory=dict)


class LayerContext:
    """The arrays and settings that a layer's `forward` uses.

    `context["weight"]` is the layer's learnable named "weight".

    Parameters
    ----------
    layer : Layer
        The layer that the context belongs to.

    Attributes
    ----------
    name
        Name of the layer.
    parameters
        Learnables of the network, {"conv1.weight": array or Var, ...}.
    state
        State of the network, {"batchnorm1.mean": array, ...}. A layer may assign new arrays.
    training
        Whether the layer is being trained. False in prediction and for a frozen layer.
    batchnorm
        Scope of the statistics of batch normalization: "global" for the images of all ranks, or
        "local" for the images of this rank.
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
        """Return the layer's learnable `name`, which is a Var during differentiation."""
        return self.parameters[f"{self.name}.{name}"]


@dataclass
class Layer:
    """Base class of all layers.

    Parameters
    ----------
    after
        Name of the layer whose output this layer reads, or "images" for the input of the network.
        The default is the preceding layer in the list. A layer with several inputs instead has a
        field `inputs`, a tuple of names, and its `build` and `forward` receive tuples.
    trainable
        False freezes the layer. The learnables of a frozen layer are not differentiated, and the
        layer runs as in prediction. A frozen batch normalization uses its running statistics, which
        do not change.
    name
        Name of the layer. By default, the network creates a name from the type and a number, such
        as "conv1".

    Notes
    -----
    Layers take few arguments by position, because their order differs between libraries.
    """

    # None only until a network names the layer
    name: str = field(default=None, kw_only=True, metadata=STORED)
    after: str | None = field(default=None, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    advice = "the network infers the shape of the input"  # for the errors of `layer_class`

    def __init_subclass__(cls, **options: Any) -> None:
        """Make `name` keyword-only in a subclass that declares it again, before the own fields.

        Otherwise, the order of the fields would make `name` the first positional argument.
        """
        super().__init_subclass__(**options)
        is_dataclass = "__dataclass_fields__" in vars(cls)  # a copy of a class, with slots
        if "name" in inspect.get_annotations(cls) and not is_dataclass:
            name: Any = cls.name if isinstance(cls.name, Field) else field(default=cls.name)
            name.kw_only, name.metadata = True, STORED
            cls.name = name

    def __post_init__(self) -> None:
        """Convert NumPy numbers to Python numbers, which model files can store."""
        for f in fields(self):
            setattr(self, f.name, check.plain(getattr(self, f.name)))

    def spec(self) -> dict[str, Any]:
        """Return the type and the arguments of the layer, for the JSON in model files.

        Keyword-only arguments equal to the default are left out, unless they are declared with
        the metadata `STORED`. New arguments therefore do not change the files of networks that do
        not use them.

        Returns
        -------
        dict
            {"type": name of the class, argument: value, ...}
        """
        arguments = {"type": type(self).__name__}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.metadata.get("stored") or not (f.kw_only and value == f.default):
                arguments[f.name] = value
        return arguments

    def build(self, shape: Any) -> Built:
        """Return the output shape, the learnables and the state of the layer.

        Parameters
        ----------
        shape
            Shape of the input for one image, or a tuple of shapes for a layer with several inputs.

        Returns
        -------
        Built
            The shape of the output for one image, the learnables and the state.

        Raises
        ------
        ValueError
            If the shape or an argument of the layer is invalid.
        """
        return Built(shape)

    def forward(self, x: Any, context: LayerContext) -> Value:
        """Return the output of the layer.

        Parameters
        ----------
        x
            A Blocked value or a Var that contains a Blocked value. For a layer with several inputs,
            a tuple of such values.
        context
            The layer's arrays and settings.

        Returns
        -------
        Blocked or Var
            The output. It is a Var if a learnable or the input is a Var.
        """
        raise TypeError(f"layer {type(self).__name__} has no forward method")

    def factors(self, learnable: str) -> tuple[float, float]:
        """Return the factors of the learning rate and of L2 regularization for a learnable.

        The learning-rate factor of a frozen layer is 0.

        Parameters
        ----------
        learnable : str
            Name of the learnable in this layer, such as "weight".

        Returns
        -------
        tuple of float
            (learning-rate factor, L2 factor)
        """
        rate = getattr(self, f"{learnable}_learn_rate_factor", 1.0)
        decay = getattr(self, f"{learnable}_l2_factor", 1.0 if learnable == "weight" else 0.0)
        return (rate if self.trainable else 0.0), decay

    def multiply_adds(self, shape: Shape, output_shape: Shape) -> int:
        """Return the number of multiply-adds in the forward pass for one image.

        Other arithmetic operations are not counted.

        Parameters
        ----------
        shape, output_shape
            Shapes of the (first) input and of the output for one image.

        Returns
        -------
        int
            The number of multiply-adds.
        """
        return 0


def glorot_uniform(fan_in: int, fan_out: int) -> Initial:
    """Return a function that draws initial weights between ±sqrt(6 / (fan_in + fan_out)).

    The weights depend only on the seed, and on the name and shape of the learnable. The range is
    equation 16 of Glorot and Bengio, "Understanding the difficulty of training deep feedforward
    neural networks", 2010.
    """
    bound = np.sqrt(6.0 / (fan_in + fan_out))

    def values(seed, key, shape):
        uniform = keyed.uniform(seed, f"initial {key}", int(np.prod(shape)))
        return ((2 * uniform - 1) * bound).reshape(shape)

    return values


LayerType = TypeVar("LayerType", bound=Layer)


@dataclass_transform(field_specifiers=(field,))
def layer_class(kind: type[LayerType]) -> type[LayerType]:
    """Turn a class into a dataclass whose constructor explains the arguments of other libraries."""
    kind = dataclass(kind)
    kind.__init__ = explain_arguments(kind.__init__, kind.advice)  # type: ignore[method-assign]
    return kind


@dataclass
class Weighted(Layer):
    """Base class of layers with a weight and a bias.

    Parameters
    ----------
    bias
        Whether the layer has a bias. A bias directly before a batch normalization has no effect.
    weight_learn_rate_factor, bias_learn_rate_factor
        Factors by which the optimizer's learning rate is multiplied for the weight and the bias. A
        learnable with the factor 0 is not differentiated.
    weight_l2_factor, bias_l2_factor
        Factors by which the optimizer's L2 regularization is multiplied for the weight and the
        bias.
    """

    advice = f"{Layer.advice}, and an activation is a layer, such as dl.ReLU()"

    bias: bool = field(default=True, kw_only=True)
    weight_learn_rate_factor: float = field(default=1.0, kw_only=True)
    bias_learn_rate_factor: float = field(default=1.0, kw_only=True)
    weight_l2_factor: float = field(default=1.0, kw_only=True)
    bias_l2_factor: float = field(default=0.0, kw_only=True)

    def learnables(
        self, weight_shape: Shape, initial: Initial, outputs: int
    ) -> dict[str, tuple[Shape, Initial]]:
        """Return the argument `learnables` of `Built`: the weight, and the bias if there is one.

        Parameters
        ----------
        weight_shape : tuple of int
            Shape of the weight.
        initial : callable
            Function f(seed, key, shape) that returns the initial weight.
        outputs : int
            Length of the bias.

        Returns
        -------
        dict
            {"weight": (shape, initial), "bias": (shape, 0.0)}, without "bias" if `self.bias` is
            False.
        """
        arrays: dict[str, tuple[Shape, Initial]] = {"weight": (weight_shape, initial)}
        return {**arrays, "bias": ((outputs,), 0.0)} if self.bias else arrays

    def bias_of(self, context: LayerContext) -> np.ndarray | None:
        """Return the bias, or None if the layer has no bias.

        Parameters
        ----------
        context : LayerContext
            The layer's arrays.

        Returns
        -------
        array or None
            The bias, (outputs,), or None.
        """
        return context["bias"] if self.bias else None
