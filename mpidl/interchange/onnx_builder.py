"""Build the layers of a network from the nodes of an ONNX graph.

For each ONNX operator, a function reads a `Node`, adds layers to a `Builder` and returns the Value
that the node computes. The function raises Unsupported if mpidl has no layers for the node. The
functions are in `onnx_operators`, `onnx_elementwise` and `onnx_shapes`. All shapes refer to one
image, without the mini-batch dimension.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidl.interchange import onnx_file
from mpidl.nn import construction, graph
from mpidl.nn import layers as nn

BATCH = -(1 << 62)  # placeholder for the mini-batch size in computed shapes
MAX_VALUES = 1 << 28  # maximum number of values that a layer may compute from an image
UNIT_VARIANCE = {"epsilon": 1e-5, "variance": 1 - 1e-5}  # epsilon + variance is 1: no scaling


class Unsupported(Exception):
    """Raised for a node that mpidl has no layers for. The message states the reason."""


class Value(NamedTuple):
    """A value in the graph that depends on the images."""

    layer: str  # name of the layer that computes the value, and shape of the layer's output
    shape: tuple[int, ...]
    # Order of the axes in the graph, if it differs from the layer's order: (1, 2, 0) if the
    # graph's value has axes (H, W, C) and the layer's output has axes (C, H, W). Empty if the
    # orders agree.
    order: tuple[int, ...] = ()
    # Shape (C, H, W) before flattening, if the value is a vector and `order` is not empty.
    image: tuple[int, ...] = ()
    # Whether the value is (C, 1, 1) in the graph, and the layer's output has the shape (C,). Only
    # products accept this, as gates of channels.
    is_unsqueezed: bool = False
    # (groups, channels per group) if the channels are two axes in the graph, or (groups, numbers
    # per group) if these two axes are all axes of an image.
    groups: tuple[int, ...] = ()

    def graph_shape(self) -> tuple[int, ...]:
        """Return the shape of the value with the graph's order of axes."""
        if self.groups:
            pixels = self.shape[1:] if math.prod(self.groups) == self.shape[0] else ()
            return *self.groups, *pixels
        return tuple(self.shape[i] for i in self.order) if self.is_permuted() else self.shape

    def is_permuted(self) -> bool:
        """Return whether the value is an image with another order of axes in the graph."""
        return bool(self.order) and not self.image

    def axes(self, numbers: Sequence[int]) -> list[int]:
        """Map axes in the graph, where 0 is the mini-batch, to axes of the layer's output, from 0.

        Raise Unsupported for the mini-batch axis.
        """
        count = 1 + len(self.shape)
        axes = [int(n) % count - 1 for n in numbers if -count <= n < count]
        if len(axes) < len(numbers) or min(axes, default=0) < 0:
            raise Unsupported(f"axes are {list(numbers)} of {('N', *self.graph_shape())}")
        return [self.order[a] if self.is_permuted() else a for a in axes]

    def to_layer(self, values: np.ndarray) -> np.ndarray:
        """Reorder the last axes of an array from the graph's order to the layer's order."""
        if not self.order:
            return values
        inverse = [self.order.index(i) for i in range(3)]
        if self.is_permuted():
            lead = values.ndim - 3
            return values.transpose(*range(lead), *(lead + i for i in inverse))
        lead_shape = values.shape[:-1]
        lead = len(lead_shape)
        images = values.reshape(*lead_shape, *(self.image[i] for i in self.order))
        images = images.transpose(*range(lead), *(lead + i for i in inverse))
        return images.reshape(values.shape)


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

        Unless `any_order` is True, the axes of the input must also have the order (C, H, W). Unless
        `any_groups` is True, the channels must be one axis.
        """
        value = self.input(i)
        if not isinstance(value, Value):
            raise Unsupported(f"input {i} is constant")
        if value.order and not any_order:
            raise Unsupported(f"input {i} is transposed")
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
        """Return whether a value is read exactly once, counting reads under all of its names."""
        names = self.tensors[x.layer]
        return sum(self.readers[name] for name in names) - (len(names) - 1) == 1

    def add_bias(self, x: Value, bias: np.ndarray) -> Value | None:
        """Add a bias to the layer that computes x, and return x.

        Return None instead if x is read more than once, or if the layer is not the last layer,
        already has a bias or cannot have a bias.
        """
        layer = self.layers[-1] if self.layers else None
        if layer is None or layer.name != x.layer or not self.is_read_once(x):
            return None
        if not isinstance(layer, nn.Weighted) or layer.bias:
            return None
        layer.bias = True
        self.arrays[f"{layer.name}.bias"] = per_channel(bias, x).astype(np.float32)
        return x


def _broadcast(values, x):
    """Reorder constants, which must broadcast to x in the graph, to the layer's order of axes.

    The result is float64 and has the same number of axes as the layer's output.
    """
    values, shape = np.asarray(values, np.float64), x.graph_shape()
    sizes = (1,) * (1 + len(shape) - values.ndim) + values.shape
    fits = len(sizes) == 1 + len(shape) and sizes[0] == 1
    if not fits or any(n not in (1, m) for n, m in zip(sizes[1:], shape, strict=True)):
        raise Unsupported(f"constants of shape {values.shape} for a value of {('N', *shape)}")
    if (abs(values) >= -BATCH / 2).any():
        raise Unsupported("it computes with the number of images, or with enormous constants")
    values = values.reshape(sizes[1:])
    return values if values.size == 1 else x.to_layer(values)


def per_channel(values: np.ndarray, x: Value) -> np.ndarray:
    """Convert constants, which must broadcast to x in the graph, to one float64 per channel."""
    numbers = _broadcast(values, x)
    if numbers.size > 1 and numbers.size != len(numbers):
        raise Unsupported(
            f"constants of shape {np.shape(values)} for a value of {('N', *x.graph_shape())}: "
            "expected a number per channel"
        )
    return np.array(np.broadcast_to(numbers.ravel(), x.shape[:1]))


OPERATORS: dict[str, Callable[[Node, Builder], Any]] = {}


def operator(*names: str) -> Callable[[Callable[[Node, Builder], Any]], Any]:
    """Return a decorator that registers a function for the named operators."""

    def register(function):
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register
