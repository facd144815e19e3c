"""Build the layers of a network from the nodes of an ONNX graph.

For each ONNX operator, a function reads a `Node`, adds layers to a `Builder` and returns the Value
that the node computes. The function raises Unsupported if mpidl has no layers for the node. The
functions are in `onnx_operators` and in modules of other families. All shapes refer to one image,
without the mini-batch dimension.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpidl.interchange import onnx_file
from mpidl.interchange.onnx_file import BATCH
from mpidl.interchange.onnx_values import Unsupported, Value
from mpidl.nn import construction, graph
from mpidl.nn import layers as nn

MAX_VALUES = 1 << 28  # maximum number of values that a layer may compute from an image
RECURRENT = nn.LSTM | nn.GRU
UNIT_VARIANCE = {"epsilon": 1e-5, "variance": 1 - 1e-5}  # epsilon + variance is 1: no scaling


class Node:
    """A node of the graph with its attributes and inputs.

    If the node has no name, it has the name of its first output.
    """

    def __init__(self, proto: Any, onnx: Any, values: Mapping[str, Any]) -> None:
        self.proto, self.type = proto, proto.op_type
        self.name: str = proto.name or proto.output[0]
        self.attributes = {a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute}
        for name in proto.input:
            if name and name not in values:
                raise Unsupported(f"it reads {name}, an output that no layer computes")
        # One entry per input: a Value, an array for a constant, or None for an omitted
        # input.
        self.inputs: list[Any] = [values[name] if name else None for name in proto.input]

    def __getitem__(self, name: str) -> Any:
        """Return an attribute. Raise Unsupported if the attribute is missing."""
        if name not in self.attributes:
            raise Unsupported(f"it has no attribute {name}")
        return self.attributes[name]

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute, or `default` if it is missing. Strings are decoded."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def input(self, i: int) -> Any:
        """Return input i, or None if the node has no such input."""
        return self.inputs[i] if i < len(self.inputs) else None

    def value(self, i: int = 0, any_order: bool = False, any_groups: bool = False) -> Value:
        """Return input i. Raise Unsupported unless the input depends on the images.

        Unless `any_order` is True, the axes of the input must also be (N, C, H, W). Unless
        `any_groups` is True, the channels must be one axis.
        """
        value = self.input(i)
        if not isinstance(value, Value):
            raise Unsupported(f"input {i} is constant")
        if value.order and not any_order:
            raise Unsupported(f"input {i} is transposed")
        if value.layout and not any_order:
            raise Unsupported(f"input {i} has the shape {value.text()}, expected images")
        if value.groups and not any_groups:
            raise Unsupported(f"input {i} has two axes of channels")
        return value

    def constant(self, i: int) -> np.ndarray:
        """Return input i. Raise Unsupported unless the input is constant."""
        value = self.input(i)
        if not isinstance(value, np.ndarray):
            raise Unsupported(f"input {i} is not constant")
        return value

    def require(self, **expected: Any) -> None:
        """Raise Unsupported if an attribute differs from its expected value."""
        for name, value in expected.items():
            if self.get(name, value) != value:
                raise Unsupported(f"{name} is {self.get(name, value)}, expected {value}")


class Builder:
    """Builder of a network, to which operators add layers and weights.

    `batch` is 0 if the file does not fix the size of a mini-batch.
    """

    def __init__(self, model: onnx_file.Model) -> None:
        self.layers: list[Any] = []
        # Learnables and state: {"conv1.weight": array, ...}.
        self.arrays: dict[str, np.ndarray] = {}
        # (centre, divisor) if the graph begins with a normalization of the images, and None
        # otherwise.
        self.scaling: tuple[np.ndarray, np.ndarray] | None = None
        self.opset, self.batch, self.output = model.opset, model.batch, model.output
        self.reads: dict[str, list[Value]] = {}  # {layer name: values that the layer reads}
        # {layer name: names of the layer's output in the graph}. Nodes that compute
        # nothing, such as Identity, add further names.
        self.tensors: dict[str, list[str]] = {graph.IMAGES: [model.images]}
        self._used_names, self._last_numbers = {graph.IMAGES}, collections.Counter[str]()
        self.readers = collections.Counter(n for node in model.nodes for n in node.input)
        self.readers[model.output] += 1
        shapes = (node for node in model.nodes if node.op_type == "Shape")
        self._measured = collections.Counter(name for node in shapes for name in node.input)

    def add(self, node: Node, layer: Any, reads: list[Value], **arrays: np.ndarray) -> Value:
        """Add a layer with its arrays, and return its output with the same order as its input.

        If the axes of the input do not have the order (C, H, W), the layer must preserve the axes.
        """
        if not isinstance(layer, nn.Multiply) and any(value.is_unsqueezed for value in reads):
            raise Unsupported("it reads features as images of one pixel")
        layer.name = self._unique_name(node.name)
        if isinstance(layer, nn.Add | nn.Concat | nn.Multiply):
            layer.inputs = tuple(value.layer for value in reads)
        elif reads[0].layer != (self.layers[-1].name if self.layers else graph.IMAGES):
            layer.after = reads[0].layer
        try:
            built = construction.build_layer(layer, [(v.layer, v.shape) for v in reads])
        except (TypeError, ValueError) as error:
            raise Unsupported(str(error)) from None
        if math.prod(built.output_shape) > MAX_VALUES:
            raise Unsupported(f"it computes more than {MAX_VALUES} values per image")
        for name, (shape, _) in {**built.learnables, **built.state}.items():
            array = np.asarray(arrays[name], np.float32)
            if array.shape != shape:
                raise Unsupported(f"its {name} has the shape {array.shape}, expected {shape}")
            self.arrays[f"{layer.name}.{name}"] = array
        self.layers.append(layer)
        self.reads[layer.name] = reads
        output = reads[0]._replace(layer=layer.name, shape=built.output_shape)
        return output._replace(is_unsqueezed=False)

    def remove(self, x: Value, *types: type[nn.Layer]) -> Value | None:
        """Remove the layer that computes x, so that the caller can add another layer instead, and
        return the value that it reads. If x is read more than once, or if the layer is not the last
        layer or not of the given types, nothing is removed, and the result is None.
        """
        layer: Any = self.layers[-1] if self.layers else None
        if layer is None or layer.name != x.layer or not self.is_read_once(x):
            return None
        if not isinstance(layer, types):
            return None
        self.layers.pop()
        return self.reads.pop(x.layer)[0]

    def remove_unread(self, output: Value) -> None:
        """Remove the layers on which the output does not depend.

        Operators of recurrent layers add layers for outputs of which the graph may read a part.
        """
        names, layers = {output.layer}, []
        for layer in reversed(self.layers):
            if layer.name in names:
                names.update(value.layer for value in self.reads[layer.name])
                layers.append(layer)
        if len(layers) == len(self.layers):
            return
        self.layers = layers[::-1]
        for before, layer in zip([None, *self.layers], self.layers, strict=False):
            if graph.input_names(layer) is None:
                (value,) = self.reads[layer.name]
                is_next = value.layer == (before.name if before else graph.IMAGES)
                layer.after = None if is_next else value.layer

    def layer_of(self, x: Value) -> Any:
        """Return the layer that computes x, or None for the images."""
        return next((layer for layer in self.layers if layer.name == x.layer), None)

    def _unique_name(self, name):
        name = re.sub(r"[^0-9A-Za-z]+", "_", name).strip("_") or "layer"
        unique = name
        while unique in self._used_names:
            self._last_numbers[name] += 1
            unique = f"{name}_{self._last_numbers[name] + 1}"
        self._used_names.add(unique)
        return unique

    def affine(self, node: Node, x: Value, scale: np.ndarray, shift: np.ndarray) -> Value:
        """Add x * scale + shift, where scale and shift have one element, or one per channel.

        Before the first layer, the operation becomes the normalization of the images. In this case,
        scale and shift may also have one element per pixel. After a normalization within images,
        it changes gamma and beta. After another layer, factors of channels become a Scale layer,
        and other operations a frozen batch normalization.
        """
        channels, of_channels = x.shape[0], np.size(scale) > 1 and not np.any(shift)
        if x.layer == graph.IMAGES and not self.layers and self.is_read_once(x):
            scale, shift = (_broadcast(v, x) for v in (scale, shift))
            if not scale.all():
                raise Unsupported("a factor is 0 or not finite")
            centre, divisor = self.scaling or (np.zeros((1, 1, 1)), np.ones((1, 1, 1)))
            self.scaling = centre - shift * divisor / scale, divisor / scale
            return x
        scale, shift = (per_channel(v, x) for v in (scale, shift))
        if self._has_factors(x):
            self._change_factors(x, scale, shift)
            return x
        if of_channels:
            return self.add(node, nn.Scale(), [x], scale=scale)
        layer = nn.BatchNorm(epsilon=UNIT_VARIANCE["epsilon"], trainable=False)
        zeros, ones = np.zeros(channels), np.ones(channels)
        variance = ones * UNIT_VARIANCE["variance"]
        arrays = {"gamma": scale, "beta": shift, "mean": zeros, "variance": variance}
        return self.add(node, layer, [x], **arrays)

    def _has_factors(self, x: Value) -> bool:
        """Return whether x is the output of the last layer, a norm whose factors may change."""
        kinds = nn.GroupNorm | nn.InstanceNorm | nn.LayerNorm
        layer = self.layers[-1] if self.layers else None
        return isinstance(layer, kinds) and layer.name == x.layer and self.is_read_once(x)

    def _change_factors(self, x: Value, scale: np.ndarray, shift: np.ndarray) -> None:
        """Multiply gamma and beta of the layer that computes x by scale, and add shift to beta."""
        for name, offset in (("gamma", np.zeros(1)), ("beta", shift)):
            old = self.arrays[f"{x.layer}.{name}"]
            axes = (-1, *(1,) * (old.ndim - 1))
            new = old * scale.reshape(axes) + offset.reshape(axes)
            self.arrays[f"{x.layer}.{name}"] = new.astype(np.float32)

    def is_read_once(self, x: Value) -> bool:
        """Return whether a value is read exactly once, counting reads under all of its names.

        A node that computes only the shape of the value does not count.
        """
        names = self.tensors[x.layer]
        reads = sum(self.readers[name] - self._measured[name] for name in names)
        return reads - (len(names) - 1) == 1

    def add_bias(self, x: Value, bias: np.ndarray) -> Value | None:
        """Add a bias to the layer that computes x, and return x.

        Return None instead if x is read more than once, or if the layer is not the last layer,
        already has a bias or cannot have a bias.
        """
        layer = self.layers[-1] if self.layers else None
        if layer is None or layer.name != x.layer or not self.is_read_once(x):
            return None
        if not isinstance(layer, nn.Weighted) or isinstance(layer, RECURRENT) or layer.bias:
            return None
        layer.bias = True
        self.arrays[f"{layer.name}.bias"] = per_channel(bias, x).astype(np.float32)
        return x


def _broadcast(values, x):
    """Reorder constants, which must broadcast to x in the graph, to the layer's order of axes.

    The result is float64 and has the same number of axes as the layer's output.
    """
    values, shape = np.asarray(values, np.float64), x.full_shape(1)
    sizes = (1,) * (len(shape) - values.ndim) + values.shape
    if len(sizes) != len(shape) or any(n not in (1, m) for n, m in zip(sizes, shape, strict=True)):
        raise Unsupported(f"constants of shape {values.shape} for a value of {x.text()}")
    if (abs(values) >= -BATCH / 2).any():
        raise Unsupported("it computes with the number of images, or with enormous constants")
    if x.layout:
        return _by_letters(values.reshape(sizes), x)
    values = values.reshape(sizes[1:])
    return values if values.size == 1 else x.to_layer(values)


def _by_letters(values, x):
    """Reorder constants, one axis per axis of the graph, to the axes of the layer's output."""
    shape = [
        x.size(letter) if size > 1 else 1
        for axis, size in zip(x.layout, values.shape, strict=True)
        for letter in axis
    ]
    letters = "".join(x.layout)
    if any(letter not in "NCHW" for letter in letters):
        raise Unsupported(f"constants of shape {values.shape} for a value of {x.text()}")
    values = values.reshape(shape)
    values = values.transpose([letters.index(letter) for letter in "NCHW" if letter in letters])
    numbers = dict(zip([a for a in "NCHW" if a in letters], values.shape, strict=True))
    return values.reshape([numbers.get(letter, 1) for letter in "CHW"[: len(x.shape)]])


def per_channel(values: np.ndarray, x: Value) -> np.ndarray:
    """Convert constants, which must broadcast to x in the graph, to one float64 per channel."""
    numbers = _broadcast(values, x)
    if numbers.size > 1 and numbers.size != len(numbers):
        raise Unsupported(
            f"constants of shape {np.shape(values)} for a value of {x.text()}: expected a number "
            "per channel"
        )
    return np.array(np.broadcast_to(numbers.ravel(), x.shape[:1]))


OPERATORS: dict[str, Callable[[Node, Builder], Any]] = {}


def operator(*names: str) -> Callable[[Callable[[Node, Builder], Any]], Any]:
    """Return a decorator that registers a function for the named operators."""

    def register(function):
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register
