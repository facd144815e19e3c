"""Build the layers of a network from the nodes of an ONNX graph.

`onnx_operators` has a function per ONNX operator, which reads a `Node` and adds layers to a
`Builder`. Shapes are those of one image: they lack the first dimension, the mini-batch.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mpidl.interchange import onnx_file
from mpidl.nn import construction, graph
from mpidl.nn import layers as nn

BATCH = -(1 << 62)  # placeholder for the mini-batch size in computed shapes
UNIT_VARIANCE = {"epsilon": 1e-5, "variance": 1 - 1e-5}  # their sum is 1


class Unsupported(Exception):
    """Raised for a node that mpidl has no layers for; the message says why."""


class Value(NamedTuple):
    """A value of the graph: the name of the layer that computes it, and its shape per image."""

    layer: str
    shape: tuple[int, ...]


class Node:
    """A node of the graph with its attributes and inputs.

    Attributes
    ----------
    type, name
        The node's operator; the node's name or, if it has none, the name of its first output.
    inputs
        One entry per input: a Value, an array for a constant, or None for an omitted input.
    """

    def __init__(self, proto: Any, onnx: Any, values: Mapping[str, Any]) -> None:
        self.proto, self.type = proto, proto.op_type
        self.name: str = proto.name or proto.output[0]
        self.attributes = {a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute}
        for name in proto.input:
            if name and name not in values:
                raise Unsupported(f"it reads {name}, an output that no layer computes")
        self.inputs: list[Any] = [values[name] if name else None for name in proto.input]

    def __getitem__(self, name: str) -> Any:
        """Return an attribute; raise Unsupported if it is missing."""
        if name not in self.attributes:
            raise Unsupported(f"it has no attribute {name}")
        return self.attributes[name]

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute, or a default; strings are decoded."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def input(self, i: int) -> Any:
        """Return an input, or None if the node has no such input."""
        return self.inputs[i] if i < len(self.inputs) else None

    def value(self, i: int = 0) -> Value:
        """Return an input; raise Unsupported unless it depends on the images."""
        value = self.input(i)
        if not isinstance(value, Value):
            raise Unsupported(f"input {i} is constant")
        return value

    def constant(self, i: int) -> np.ndarray:
        """Return an input; raise Unsupported unless it is constant."""
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
    """A network under construction, to which operators add layers and weights.

    Attributes
    ----------
    layers
        The layers added so far.
    arrays
        The learnables and the state: {"conv1.weight": array, ...}.
    scaling
        (centre, divisor) if the graph begins with a normalization of the images, else None.
    opset, batch
        Version of the operator set; size of a mini-batch if the file fixes it, else 0.
    tensors
        {layer: names of the layer's output in the graph}. A node that computes nothing, such as
        Identity, adds a name.
    """

    def __init__(self, model: onnx_file.Model) -> None:
        self.layers: list[Any] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.scaling: tuple[np.ndarray, np.ndarray] | None = None
        self.opset, self.batch = model.opset, model.batch
        self.tensors: dict[str, list[str]] = {graph.IMAGES: [model.images]}
        self._used_names, self._last_numbers = {graph.IMAGES}, collections.Counter[str]()
        self.readers = collections.Counter(n for node in model.nodes for n in node.input)
        self.readers[model.output] += 1

    def add(self, node: Node, layer: Any, reads: list[Value], **arrays: np.ndarray) -> Value:
        """Add a layer with its arrays, and return its output."""
        layer.name = self._unique_name(node.name)
        if isinstance(layer, nn.Add | nn.Concat):
            layer.inputs = tuple(value.layer for value in reads)
        elif reads[0].layer != (self.layers[-1].name if self.layers else graph.IMAGES):
            layer.after = reads[0].layer
        try:
            built = construction.build_layer(layer, [(v.layer, v.shape) for v in reads])
        except (TypeError, ValueError) as error:
            raise Unsupported(str(error)) from None
        for name, (shape, _) in {**built.learnables, **built.state}.items():
            array = np.asarray(arrays[name], np.float32)
            if array.shape != shape:
                raise Unsupported(f"its {name} has the shape {array.shape}, expected {shape}")
            self.arrays[f"{layer.name}.{name}"] = array
        self.layers.append(layer)
        return Value(layer.name, built.output_shape)

    def _unique_name(self, name):
        name = re.sub(r"[^0-9A-Za-z]+", "_", name).strip("_") or "layer"
        unique = name
        while unique in self._used_names:
            self._last_numbers[name] += 1
            unique = f"{name}_{self._last_numbers[name] + 1}"
        self._used_names.add(unique)
        return unique

    def affine(self, node: Node, x: Value, scale: np.ndarray, shift: np.ndarray) -> Value:
        """Add x * scale + shift; scale and shift have one element, or one element per channel.

        Before the first layer, the operation becomes the normalization of the images. In this case,
        scale and shift may also have one element per pixel. After a layer, the operation becomes a
        frozen batch normalization.
        """
        channels = x.shape[0]
        if x.layer == graph.IMAGES and not self.layers and self.is_read_once(x):
            scale, shift = (_broadcast(v, x.shape) for v in (scale, shift))
            centre, divisor = self.scaling or (np.zeros((1, 1, 1)), np.ones((1, 1, 1)))
            self.scaling = centre - shift * divisor / scale, divisor / scale
            return x
        scale, shift = (_per_channel(v, x.shape) for v in (scale, shift))
        layer = nn.BatchNorm(epsilon=UNIT_VARIANCE["epsilon"], trainable=False)
        zeros, ones = np.zeros(channels), np.ones(channels)
        variance = ones * UNIT_VARIANCE["variance"]
        arrays = {"gamma": scale, "beta": shift, "mean": zeros, "variance": variance}
        return self.add(node, layer, [x], **arrays)

    def is_read_once(self, x: Value) -> bool:
        """Return whether a value, under all of its names, is read exactly once."""
        names = self.tensors[x.layer]
        return sum(self.readers[name] for name in names) - (len(names) - 1) == 1

    def add_bias(self, x: Value, bias: np.ndarray) -> Value | None:
        """Add a bias to the layer that computes x, and return x.

        Return None instead if this layer is not the last one, if it already has a bias or cannot
        have one, or if x is read more than once.
        """
        layer = self.layers[-1] if self.layers else None
        if layer is None or layer.name != x.layer or not self.is_read_once(x):
            return None
        if not isinstance(layer, nn.Weighted) or layer.bias:
            return None
        layer.bias = True
        self.arrays[f"{layer.name}.bias"] = _per_channel(bias, x.shape).astype(np.float32)
        return x


def _broadcast(values, shape):
    """Return constants, which must broadcast to (N, *shape), as float64 with len(shape) axes."""
    values = np.asarray(values, np.float64)
    sizes = (1,) * (1 + len(shape) - values.ndim) + values.shape
    fits = len(sizes) == 1 + len(shape) and sizes[0] == 1
    if not fits or any(n not in (1, m) for n, m in zip(sizes[1:], shape, strict=True)):
        raise Unsupported(f"constants of shape {values.shape} for a value of {('N', *shape)}")
    if (abs(values) >= -BATCH / 2).any():
        raise Unsupported("it computes with the number of images, or with enormous constants")
    return values.reshape(sizes[1:])


def _per_channel(values, shape):
    """Return constants, which must broadcast to (N, *shape), as one float64 per channel."""
    numbers = _broadcast(values, shape)
    if numbers.size > 1 and numbers.size != len(numbers):
        raise Unsupported(
            f"constants of shape {np.shape(values)} for a value of {('N', *shape)}: expected a "
            "number per channel"
        )
    return np.array(np.broadcast_to(numbers.ravel(), shape[:1]))
