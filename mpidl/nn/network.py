"""The class `Network`: layers with their learnables and state.

Learnables are the arrays that training changes, such as weights. The state consists of the arrays
that layers update, such as running means.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

from mpidl import numerics, ops
from mpidl.core.blocks import Blocked, OneRank, from_images, share
from mpidl.core.tape import Var, value_of
from mpidl.matlab_names import missing_attribute
from mpidl.nn import construction, editing, fusion, graph, placement, trained_images
from mpidl.nn.layers import Conv2D, Layer, LayerContext, Softmax
from mpidl.nn.layers.base import Value
from mpidl.nn.plan import Plan
from mpidl.nn.summary import Analysis, layer_table, times
from mpidl.ops import check
from mpidl.text import did_you_mean

if TYPE_CHECKING:
    from mpidl.backends.gpu.cuda_device import CudaDevice

# {"conv1.weight": array}. On a GPU, the arrays are GPU arrays. `value_and_grad` uses Vars.
Arrays: TypeAlias = dict[str, np.ndarray]


class Network:
    """A network of layers.

    Each layer reads the output of the layer before it, or of earlier layers that it names.

    Parameters
    ----------
    layers
        The layers, which the network copies. The last layer computes the network's output.
    input_shape
        Shape (C, H, W) of an image.
    seed
        Seed of the initial learnables. For given shapes, the initial learnables depend only on the
        seed and the names of the layers. If the seed is None, all learnables are 0, which is useful
        if weights are loaded later.
    batchnorm
        Scope of batch normalization in training, "global" or "local" (see `ops.batchnorm`).
        `dl.train` sets the scope to the training option `batchnorm`.

    Attributes
    ----------
    layers
        The layers, each with a name. `net["conv1"]` returns the layer named "conv1".
    parameters, state
        The learnables and the state, {"conv1.weight": float32 array, ...}, in the order of the
        layers. To change the arrays, assign a new dict.
    training
        Whether the network runs in training mode. `value_and_grad` passes such a network to the
        function that it differentiates with respect to the learnables.
    reads, output_shapes
        For each layer, the names of the outputs that it reads, and the shape of its output for one
        image.
    normalization, crop, preprocess
        The transforms of images in training: a `Normalization`, the size (P, Q) to which larger
        images are cropped, and a `Preprocess`. If `normalization` is None, uint8 pixels are divided
        by 255. `dl.train` and the commands set these attributes, model files store them, and
        evaluation applies the transforms. A custom loop sets `normalization` if its queue has one.
    classes
        A tuple with the names of the K classes, for outputs of shape (K, ...). The tuple is empty
        for a regression network. `classes` is None if the names are unknown. `dl.train` and the
        commands set `classes`, and model files store it.
    loss
        The loss of the training, such as {"name": "dice", "ignore_label": 255}, or None if the loss
        is unknown or a function. `dl.train` sets `loss`, model files store it, and `mpidl.predict`
        evaluates the network with it.
    input_function
        Name of the `function` of the `MinibatchQueue` whose mini-batches trained the network, or
        None. Training sets it. Evaluation warns if it does not apply this function.
    trained_precision
        The precision of the training if it is not "fp32", else None. `dl.train` sets it, and model
        files store it. It does not change how the network computes; see `dl.configure`.
    numerics, mpidl_version
        The version of the arithmetic, and of mpidl, that trained the network or drew its initial
        weights; None in a network from a file that does not contain them. `dl.train` sets them, and
        model files store them.
    fuse
        Whether neighbouring convolution, batch normalization and ReLU layers run as one op. On
        CPUs in float32, this does not change the results. In bfloat16, one op rounds fewer values,
        and on GPUs, it adds up statistics in another order.

    Raises
    ------
    ValueError
        If a layer reads an output that no earlier layer produces, or does not accept the shape of
        its input. Also raised if no layer reads the output of a layer before the last one.
    TypeError
        If `layers` is not a list of layers.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        input_shape: Sequence[int],
        seed: int | None = 0,
        batchnorm: str = "global",
    ) -> None:
        self.layers: list[Layer] = construction.name_layers(layers)
        if isinstance(input_shape, int):
            raise TypeError(f"expected input_shape=(C, H, W), got {input_shape}")
        self.input_shape: tuple[int, ...] = tuple(int(n) for n in input_shape)
        self.seed: int = seed or 0
        self.batchnorm = batchnorm
        self.training: bool = False
        self.fuse: bool = True
        self.reads: list[tuple[str, ...]] = graph.edges(self.layers)
        self._parameters: Arrays = {}
        self._state: Arrays = {}
        shapes = {graph.IMAGES: self.input_shape}
        for layer, names in zip(self.layers, self.reads, strict=True):
            built = construction.build_layer(layer, [(name, shapes[name]) for name in names])
            self._parameters |= construction.initial_arrays(layer, built.learnables, seed)
            self._state |= construction.initial_arrays(layer, built.state, seed)
            shapes[layer.name] = built.output_shape
        self.output_shapes: list[tuple[int, ...]] = [shapes[layer.name] for layer in self.layers]
        self._initial_filters: Arrays = {}  # {name: initial weight} of layers to whiten
        self.unwhitened = [
            str(layer.name)
            for layer in self.layers
            if isinstance(layer, Conv2D) and layer.weight_initializer == "whitening"
        ]
        self.normalization: Any = None
        self.crop: tuple[int, int] | None = None
        self.preprocess: Any = None
        self.classes: tuple[str, ...] | None = None
        self.loss: dict[str, str | int] | None = None
        self.input_function: str | None = None
        self.trained_precision: str | None = None
        self.numerics: int | None = None
        self.mpidl_version: str | None = None
        self.set_origin()
        self._trains: Network | None = None  # the network of which this is a copy to train it
        self.plan_runs()

    def set_origin(self) -> None:
        """Record that this version of mpidl computes the weights; see `numerics`."""
        origin = numerics.current()
        self.numerics, self.mpidl_version = origin["numerics"], origin["mpidl_version"]

    def plan_runs(self) -> None:
        """Determine again which layers run as one op. Call this after a change of the layers."""
        self._plan = Plan(self.layers, self.reads)

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers, in the order of the list."""
        return [layer.name for layer in self.layers]

    if not TYPE_CHECKING:  # type checkers must report unknown attributes

        def __getattr__(self, name):
            missing_attribute(self, name)

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.layers)

    def __getitem__(self, name: str) -> Layer:
        """Return the layer named `name`. Raise KeyError if no layer has this name."""
        return self.layers[self.layer_number(name)]

    def layer_number(self, name: str) -> int:
        """Return the index of a layer in the list. Raise KeyError if the name is unknown.

        Parameters
        ----------
        name : str
            Name of a layer.

        Returns
        -------
        int
            Index from 0.
        """
        if not isinstance(name, str):
            raise KeyError(f"expected the name of a layer, got {name!r}; net.layers is a list")
        if name not in self.layer_names:
            last = f": the last layers are {', '.join(self.layer_names[-5:])}"
            raise KeyError(f"no layer {name}{did_you_mean(name, self.layer_names) or last}")
        return self.layer_names.index(name)

    @property
    def parameters(self) -> Arrays:
        """The learnables, {"conv1.weight": array, ...}."""
        return self._parameters

    @parameters.setter
    def parameters(self, values: Mapping[str, np.ndarray]) -> None:
        self._parameters = construction.checked_arrays("parameters", self._parameters, values)

    @property
    def state(self) -> Arrays:
        """The state, {"batchnorm1.mean": array, ...}."""
        return self._state

    @state.setter
    def state(self, values: Mapping[str, np.ndarray]) -> None:
        self._state = construction.checked_arrays("state", self._state, values)

    @property
    def unwhitened(self) -> list[str]:
        """Names of the layers with `weight_initializer="whitening"` without computed filters.

        `dl.train` and `whiten` compute the filters of these layers. A layer leaves the list if its
        weights change, or if a new list is assigned. For example, `net.unwhitened = []` keeps the
        weights of all layers. Model files store the list. On a GPU, the list is empty.
        """
        return [
            name
            for name, initial in self._initial_filters.items()
            if isinstance(weight := self._parameters[f"{name}.weight"], np.ndarray)
            and np.array_equal(weight, initial)
        ]

    @unwhitened.setter
    def unwhitened(self, names: Iterable[str]) -> None:
        weights = {name: self._parameters[f"{name}.weight"] for name in names}
        self._initial_filters = {name: np.array(weight) for name, weight in weights.items()}

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output for one image: (classes,) for a classifier."""
        return self.output_shapes[-1]

    def to(self, device: CudaDevice | None) -> Network:
        """Move the learnables and the state to a GPU or to host memory, and return the network.

        Parameters
        ----------
        device
            A GPU (the `device` of a world), or None for host memory. The images that the network
            reads must be on the same device.

        Returns
        -------
        Network
            This network.
        """
        placement.move(self, device)
        return self

    @property
    def on_device(self) -> bool:
        """Whether the learnables and the state are on a GPU."""
        arrays = [*self._parameters.values(), *self._state.values()]
        return bool(arrays) and not isinstance(arrays[0], np.ndarray)

    def on(self, device: CudaDevice | None) -> Network:
        """Return this network if it is on the device, or a copy that is on the device; see `to`.

        Parameters
        ----------
        device : device or None
            A GPU (the `device` of a world), or None for host memory.

        Returns
        -------
        Network
            This network or the copy.
        """
        return self if self.on_device == (device is not None) else copy.copy(self).to(device)

    @property
    def trainable(self) -> Arrays:
        """The learnables for which gradients are computed.

        Learnables of frozen layers and learnables with a learning-rate factor of 0 are left out.
        """
        rates = self.factors["learning_rate_factors"]
        return {name: value for name, value in self._parameters.items() if rates[name]}

    @property
    def factors(self) -> dict[str, dict[str, float]]:
        """Learning-rate and L2 factors of all learnables, as keyword arguments of an optimizer.

        For example, create an optimizer with dl.SGDM(0.01, **net.factors).
        """
        layers = {layer.name: layer for layer in self.layers}
        pairs = (key.rsplit(".", 1) for key in self._parameters)
        factors = {f"{layer}.{name}": layers[layer].factors(name) for layer, name in pairs}
        return {
            "learning_rate_factors": {name: rate for name, (rate, _) in factors.items()},
            "l2_factors": {name: decay for name, (_, decay) in factors.items()},
        }

    def freeze(self, *names: str) -> Network:
        """Freeze the layers with these names, and return the network.

        The learnables and the state of a frozen layer do not change. Its gradients are
        not computed, and the layer runs as in prediction: batch normalization uses its running
        state. The backward pass ends at the earliest trained layer.

        Parameters
        ----------
        *names : str
            Names of layers.

        Returns
        -------
        Network
            This network.

        Raises
        ------
        KeyError
            If a name is unknown.
        """
        return editing.set_trainable(self, names, False)

    def unfreeze(self, *names: str) -> Network:
        """Make the layers with these names trainable again, and return the network.

        Parameters
        ----------
        *names : str
            Names of layers.

        Returns
        -------
        Network
            This network.
        """
        return editing.set_trainable(self, names, True)

    def replace_layers(self, layers: Mapping[str, Layer], seed: int | None = None) -> Network:
        """Return a new network with some layers replaced.

        The other layers keep their learnables and state, byte for byte. The new network is in host
        memory. It has the same `classes` if the number of outputs is the same.

        Parameters
        ----------
        layers
            {name of the old layer: new layer}, such as {"dense1": dl.Dense(5)}. By default, a new
            layer has the name and the inputs of the old layer.
        seed
            Seed of the initial learnables of the new layers; by default the seed of this network.

        Returns
        -------
        Network
            The new network.

        Raises
        ------
        KeyError
            If a name is unknown.
        TypeError
            If a value is not a layer.
        ValueError
            If the learnables or the state of another layer would need another shape.
        """
        return editing.replace_layers(self, layers, seed)

    def append_layer(self, layer: Layer) -> Network:
        """Return a new network with one more layer at the end, such as `Sigmoid`.

        Both networks share the learnables and the state.

        Parameters
        ----------
        layer : Layer
            A layer without learnables or state.

        Returns
        -------
        Network
            The new network.
        """
        return editing.append_layer(self, layer)

    def up_to(self, name: str) -> Network:
        """Return a network whose output is the output of the layer `name` of this network.

        The new network consists of the layer `name` and the layers on which this layer depends.
        Both networks share the arrays of these layers.

        Parameters
        ----------
        name : str
            Name of a layer.

        Returns
        -------
        Network
            The part of the network that computes this layer.

        Raises
        ------
        KeyError
            If the name is unknown.
        """
        return editing.up_to(self, name)

    def bind(self, learnables: Mapping[str, Any]) -> Network:
        """Return a copy in training mode with new values for some or all learnables.

        Changes to the state of the copy do not change this network.

        Parameters
        ----------
        learnables : dict
            {"conv1.weight": array or Var, ...}. Learnables that are missing keep their values.

        Returns
        -------
        Network
            The copy.
        """
        bound = copy.copy(self)
        bound._parameters, bound.training = self._parameters | dict(learnables), True
        bound._state, bound._trains = dict(self._state), self
        return bound

    def with_layers(self, layers: Iterable[Layer]) -> Network:
        """Return a copy with the same arrays and different settings of the layers.

        Parameters
        ----------
        layers
            The new layers. Each layer has the class, name and inputs of the layer that it replaces.

        Returns
        -------
        Network
            The copy, which shares the arrays.
        """
        return editing.set_layers(copy.copy(self), list(layers))

    @overload
    def __call__(self, images: Blocked) -> Blocked: ...
    @overload
    def __call__(self, images: Var) -> Var: ...
    def __call__(self, images: Value) -> Value:
        """Return the output of the last layer, (N, *output_shape).

        Parameters
        ----------
        images
            Images (N, *input_shape), a Blocked value or a Var of a Blocked value.

        Returns
        -------
        Blocked or Var
            The output. It is a Var if gradients of a learnable or of the images are being computed.
            Inside `value_and_grad`, the output for Blocked images is therefore a Var, although the
            type hint is Blocked.
        """
        if images.shape[1:] != self.input_shape:
            raise ValueError(f"expected images of shape {self.input_shape}, got {images.shape[1:]}")
        return self._output(self.layers[-1].name, images)

    @overload
    def logits(self, images: Blocked, activation: type[Layer] = ...) -> Blocked: ...
    @overload
    def logits(self, images: Var, activation: type[Layer] = ...) -> Var: ...
    def logits(self, images: Value, activation: type[Layer] = Softmax) -> Value:
        """Return the scores that the losses expect.

        The scores are the network's output or, if the last layer is a Softmax, the input of this
        layer, because the losses include the softmax.

        Parameters
        ----------
        images : Blocked or Var
            Normalized images (N, C, H, W).
        activation : type
            Class of a last layer to leave out. Use `Sigmoid` for networks with independent labels.

        Returns
        -------
        Blocked or Var
            Scores, usually (N, K).
        """
        if not isinstance(self.layers[-1], activation):
            return self(images)
        return self._output(self.reads[-1][0], images)

    def _output(self, name, images):
        check.images("a network", value_of(images))
        if self._trains is not None and self.training:
            trained_images.note(self._trains, value_of(images))
        return self._plan.output(name, images, self.fuse, self._context)

    def _context(self, layer):
        training = self.training and layer.trainable
        return LayerContext(layer, self._parameters, self._state, training, self.batchnorm)

    @overload
    def predict(self, images: Blocked) -> Blocked: ...
    @overload
    def predict(self, images: np.ndarray) -> np.ndarray: ...
    def predict(self, images: Blocked | np.ndarray) -> Blocked | np.ndarray:
        """Return the class probabilities: the softmax of the logits.

        Parameters
        ----------
        images
            A Blocked value, or an array (n, C, H, W). An array is normalized as in training. If
            `normalization` is None, uint8 pixels are divided by 255, and floats are not changed.

        Returns
        -------
        Blocked or np.ndarray
            Probabilities: a Blocked value if `images` is one, else an array (n, K).

        Raises
        ------
        TypeError
            If `images` is an array and the network is on a GPU, or if the dtype of the array is not
            a real number type.
        """
        if isinstance(images, Blocked):
            return ops.softmax(self.logits(images))
        if self.on_device:
            raise TypeError("predict expects the network in host memory: call net.to(None) first")
        if not hasattr(images, "__array__") and not isinstance(images, list | tuple):
            raise TypeError(
                f"net.predict expects an array of images, got {type(images).__name__}; "
                "dl.predict(net, images) accepts data sets"
            )
        pixels = np.asarray(images)
        if not (pixels.dtype == np.uint8 or pixels.dtype.kind == "f"):
            raise TypeError(f"predict expects uint8 or float images, got {pixels.dtype}")
        if self.normalization is not None:
            pixels = self.normalization(pixels)
        pixels = pixels / np.float32(255) if pixels.dtype == np.uint8 else pixels
        batch = share(len(pixels), OneRank())
        return ops.softmax(self.logits(from_images(pixels.astype(np.float32), batch))).local()

    def input_transform(self) -> dict[str, Any]:
        """Return the arguments that make a `MinibatchQueue` transform images as in training.

        Returns
        -------
        dict
            Keyword arguments of `MinibatchQueue`.
        """
        return {"normalization": self.normalization, "crop": self.crop}

    def takes(self, shape: Sequence[int]) -> bool:
        """Return whether images of shape (C, H, W) are valid inputs for evaluation.

        A network that was trained on crops of larger images also accepts larger images.

        Parameters
        ----------
        shape : tuple of int
            Shape (C, H, W) of an image.

        Returns
        -------
        bool
            True if the network accepts such images.
        """
        (c, *size), (channels, *input_size) = shape, self.input_shape
        larger = all(n >= m for n, m in zip(size, input_size, strict=True))
        return c == channels and (size == input_size or (self.crop is not None and larger))

    def spec(self) -> list[dict[str, Any]]:
        """Return a description of the layers for JSON. `from_spec` builds a network from it.

        Returns
        -------
        list of dict
            The result of `Layer.spec` for each layer.
        """
        return [layer.spec() for layer in self.layers]

    @classmethod
    def from_spec(
        cls,
        specs: Iterable[Mapping[str, Any]],
        input_shape: Sequence[int],
        layer_types: Iterable[type[Layer]] = (),
        **options: Any,
    ) -> Network:
        """Build a network with initial learnables from the layers in a model file.

        Parameters
        ----------
        specs
            The list that `spec` returned.
        input_shape, options
            Arguments of Network.
        layer_types
            Custom layer classes that occur in `specs`.

        Returns
        -------
        Network
            The network, with initial learnables.

        Raises
        ------
        ValueError
            If the class of a layer is unknown.
        """
        return cls(construction.layers_of_spec(specs, layer_types), input_shape, **options)

    def table(self, kind: str = "parameters") -> list[tuple[str, str, tuple[int, ...], int]]:
        """Return a row (layer, name, shape, number of elements) for each array.

        Parameters
        ----------
        kind
            "parameters" for the learnables, or "state" for the state.

        Returns
        -------
        list of tuple
            Rows (layer, name, shape, number of elements).
        """
        arrays = {"parameters": self._parameters, "state": self._state}[kind]
        names = (key.rsplit(".", 1) for key in arrays)
        rows = zip(names, arrays.values(), strict=True)
        return [(layer, name, a.shape, int(np.prod(a.shape))) for (layer, name), a in rows]

    def stored_layers(self) -> set[str]:
        """Return the names of the layers whose outputs a training step stores.

        Layers that run as one op store only the output of the convolution.

        Returns
        -------
        set of str
            Names of layers.
        """
        runs = self._plan.runs[fusion.RUNS if self.fuse else ()]
        return {run.stored for run in runs}

    def analyze(self, batch_size: int = 128) -> Analysis:
        """Return an `Analysis` of the layers: shapes, learnables, memory and operations.

        Parameters
        ----------
        batch_size : int
            Number of images for which the memory of the layers' outputs is computed.

        Returns
        -------
        Analysis
            A table of the layers, which can be printed.
        """
        return Analysis(self, batch_size)

    def __str__(self) -> str:
        return layer_table(self)

    def __repr__(self) -> str:
        learnables = sum(count for *_, count in self.table())
        return (
            f"{type(self).__name__}({len(self.layers)} layers, input {times(self.input_shape)}, "
            f"output {times(self.output_shape)}, {learnables:,} learnables)"
        )

    def _repr_html_(self) -> str:
        return self.analyze()._repr_html_()
