"""Create a network from an ONNX file.

OPERATORS maps each ONNX operator to a function that adds layers to a `Builder`. Shapes are those of
one image: they lack the first dimension, the mini-batch.
"""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpidl.data.transforms.normalize import Normalization, no_normalization
from mpidl.errors import UserError
from mpidl.interchange import onnx_export, onnx_file
from mpidl.interchange.weights import library
from mpidl.nn import Network, construction, graph
from mpidl.nn import layers as nn
from mpidl.shapes import same_padding
from mpidl.text import printable

BATCH = -(1 << 62)  # placeholder for the mini-batch size in computed shapes
UNIT_VARIANCE = {"epsilon": 1e-5, "variance": 1 - 1e-5}  # their sum is 1


# Exceptions that attributes with wrong types, sizes or lengths cause.
DAMAGES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


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


OPERATORS: dict[str, Callable[[Node, Builder], Any]] = {}


def operator(*names: str) -> Callable[[Callable[[Node, Builder], Any]], Any]:
    """Return a decorator that registers a function for some operators."""

    def register(function):
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def _spatial(node, builder, x, size, transposed=False):
    """Return (stride, padding, dilation) of a convolution or pooling node."""
    if len(x.shape) != 3 or len(size) != 2:
        raise Unsupported("only images (N, C, H, W) are supported")
    stride, dilation = (tuple(node.get(name, [1, 1])) for name in ("strides", "dilations"))
    auto_pad = node.get("auto_pad", "NOTSET")
    if auto_pad in ("NOTSET", "VALID"):
        top, left, bottom, right = node.get("pads", [0] * 4) if auto_pad == "NOTSET" else [0] * 4
        return stride, ((top, bottom), (left, right)), dilation
    if transposed:
        raise Unsupported(f"auto_pad is {auto_pad}")
    padding = same_padding(x.shape[1:], size, stride, dilation)
    if auto_pad == "SAME_LOWER":  # the extra pixel is at the top or on the left
        padding = tuple(side[::-1] for side in padding)
    return stride, padding, dilation


@operator("Conv")
def _conv(node, builder):
    x, weight, bias = node.value(), node.constant(1), node.input(2)
    stride, padding, dilation = _spatial(node, builder, x, weight.shape[2:])
    layer = nn.Conv2D(
        *(weight.shape[2:], len(weight), stride, padding, dilation, node.get("group", 1)),
        bias=bias is not None,
    )
    arrays = {} if bias is None else {"bias": node.constant(2)}
    return builder.add(node, layer, [x], weight=weight, **arrays)


@operator("ConvTranspose")
def _transposed_conv(node, builder):
    x, weight, bias = node.value(), node.constant(1), node.input(2)
    node.require(group=1, dilations=[1, 1], output_padding=[0, 0])
    if "output_shape" in node.attributes:
        raise Unsupported("it has an output_shape")
    stride, cropping, _ = _spatial(node, builder, x, weight.shape[2:], transposed=True)
    size = weight.shape[2:], weight.shape[1]
    layer = nn.TransposedConv2D(*size, stride, cropping, bias=bias is not None)
    arrays = {} if bias is None else {"bias": node.constant(2)}
    return builder.add(node, layer, [x], weight=weight, **arrays)


@operator("BatchNormalization")
def _batchnorm(node, builder):
    node.require(training_mode=0, spatial=1)
    if any(node.proto.output[1:]):
        raise Unsupported("it also computes the statistics of a mini-batch")
    names = ("gamma", "beta", "mean", "variance")
    arrays = {name: node.constant(i) for i, name in enumerate(names, 1)}
    layer = nn.BatchNorm(node.get("epsilon", 1e-5), round(1 - node.get("momentum", 0.9), 6))
    return builder.add(node, layer, [node.value()], **arrays)


@operator("LRN")
def _cross_channel_norm(node, builder):
    constants = node.get("alpha", 1e-4), node.get("beta", 0.75), node.get("bias", 1.0)
    return builder.add(node, nn.CrossChannelNorm(node["size"], *constants), [node.value()])


ACTIVATIONS = {"Relu": nn.ReLU, "Sigmoid": nn.Sigmoid, "Tanh": nn.Tanh}


@operator(*ACTIVATIONS)
def _activation(node, builder):
    return builder.add(node, ACTIVATIONS[node.type](), [node.value()])


@operator("LeakyRelu")
def _leaky_relu(node, builder):
    return builder.add(node, nn.LeakyReLU(node.get("alpha", 0.01)), [node.value()])


@operator("Gelu")
def _gelu(node, builder):
    return builder.add(node, nn.GELU(node.get("approximate", "none")), [node.value()])


@operator("Softmax")
def _softmax(node, builder):
    x = node.value()
    axis = node.get("axis", -1 if builder.opset >= 13 else 1)
    # before opset 13, the softmax is over this axis and all later axes together
    is_vector = int(np.prod(x.shape)) == x.shape[0]
    if axis % (1 + len(x.shape)) != 1 or (builder.opset < 13 and not is_vector):
        raise Unsupported(f"axis is {axis}, expected the channels")
    return builder.add(node, nn.Softmax(), [x])


@operator("MaxPool")
def _max_pool(node, builder):
    node.require(storage_order=0, dilations=[1, 1])
    if any(builder.readers[name] for name in node.proto.output[1:]):
        raise Unsupported("its second output is used")
    x, size = node.value(), tuple(node["kernel_shape"])
    stride, padding, _ = _spatial(node, builder, x, size)
    return builder.add(node, nn.MaxPool2D(size, stride, _ceil(node, x, size, stride, padding)), [x])


@operator("AveragePool")
def _average_pool(node, builder):
    node.require(dilations=[1, 1])
    x, size = node.value(), tuple(node["kernel_shape"])
    stride, padding, _ = _spatial(node, builder, x, size)
    is_padded = any(side for sides in padding for side in sides)
    if is_padded and not node.get("count_include_pad", 0):
        raise Unsupported("count_include_pad is 0 and there is padding")
    if _ceil(node, x, size, stride, padding) != padding:
        raise Unsupported("ceil_mode is 1 and windows end outside the image")
    return builder.add(node, nn.AveragePool2D(size, stride, padding), [x])


def _ceil(node, x, size, stride, padding):
    """Return the padding, enlarged at the bottom and on the right as ceil_mode requires."""
    if not node.get("ceil_mode", 0):
        return padding
    sides = []
    for pixels, window, step, (before, after) in zip(
        x.shape[1:], size, stride, padding, strict=True
    ):
        outputs = -(-(pixels + before + after - window) // step) + 1
        if (outputs - 1) * step >= pixels + before:  # no window starts in the padding at the end
            outputs -= 1
        sides.append((before, max(after, (outputs - 1) * step + window - pixels - before)))
    return tuple(sides)


@operator("GlobalAveragePool")
def _global_average_pool(node, builder):
    return builder.add(node, nn.GlobalAveragePool2D(), [node.value()])


@operator("ReduceMean")
def _mean(node, builder):
    x = node.value()
    axes = node.get("axes", None) if node.input(1) is None else node.constant(1).tolist()
    if axes is None or len(x.shape) != 3 or sorted(a % 4 for a in axes) != [2, 3]:
        raise Unsupported(f"axes are {axes}, expected rows and columns")
    y = builder.add(node, nn.GlobalAveragePool2D(), [x])
    return y if node.get("keepdims", 1) else _flat(node, builder, y)


@operator("Dropout")
def _dropout(node, builder):
    if node.input(2) is not None and node.constant(2).any():
        raise Unsupported("training_mode is true")
    ratio = node.get("ratio", 0.5) if node.input(1) is None else float(node.constant(1))
    return builder.add(node, nn.Dropout(float(np.float32(ratio))), [node.value()])


@operator("Identity")
def _identity(node, builder):
    return node.value()


@operator("Cast")
def _cast(node, builder):
    if node["to"] != 1:
        raise Unsupported("it casts to another type than float32")
    return node.value()


def _flat(node, builder, x):
    return x if len(x.shape) == 1 else builder.add(node, nn.Flatten(), [x])


@operator("Flatten")
def _flatten(node, builder):
    x = node.value()
    if node.get("axis", 1) % (1 + len(x.shape)) != 1:
        raise Unsupported(f"axis is {node.get('axis', 1)}, expected 1")
    return _flat(node, builder, x)


@operator("Squeeze")
def _squeeze(node, builder):
    x = node.value()
    axes = node.get("axes", None) if node.input(1) is None else node.constant(1).tolist()
    spatial = axes is not None and sorted(a % (1 + len(x.shape)) for a in axes) == [2, 3]
    if not spatial or x.shape[1:] != (1, 1):
        raise Unsupported(f"axes are {axes}")
    return _flat(node, builder, x)


@operator("Reshape")
def _reshape(node, builder):
    x, sizes = node.value(), [int(n) for n in node.constant(1).ravel()]
    features = int(np.prod(x.shape))
    counts = {BATCH, 0, -1} | ({builder.batch} if builder.batch else set())
    is_batch = bool(sizes) and sizes[0] in counts
    if len(sizes) == 2 and is_batch and sizes[1] in (features, -1) and sizes != [-1, -1]:
        return _flat(node, builder, x)
    if is_batch and tuple(sizes[1:]) == x.shape:
        return x
    raise Unsupported(f"it reshapes {('N', *x.shape)} to {sizes}")


@operator("Shape")
def _shape(node, builder):
    start, end = node.get("start", 0), node.get("end", None)
    return np.array([BATCH, *node.value().shape], np.int64)[start:end]


@operator("Gemm")
def _gemm(node, builder):
    node.require(transA=0)
    weight, bias = node.constant(1), node.input(2)
    weight = weight * np.float32(node.get("alpha", 1.0)) if node.get("alpha", 1.0) != 1 else weight
    weight = weight if node.get("transB", 0) else weight.T
    if bias is not None:
        if any(n != 1 for n in node.constant(2).shape[:-1]):
            raise Unsupported(f"it adds constants of shape {node.constant(2).shape}")
        bias = np.broadcast_to(node.constant(2).ravel(), weight.shape[:1])
        bias = bias * np.float32(node.get("beta", 1.0)) if node.get("beta", 1.0) != 1 else bias
    return _dense(node, builder, weight, bias)


@operator("MatMul")
def _matmul(node, builder):
    return _dense(node, builder, node.constant(1).T, None)


def _dense(node, builder, weight, bias):
    x = node.value()
    if len(x.shape) != 1 or weight.ndim != 2:
        raise Unsupported(f"it multiplies {('N', *x.shape)} by {weight.shape[::-1]}")
    layer = nn.Dense(len(weight), bias=bias is not None)
    arrays = {} if bias is None else {"bias": bias}
    return builder.add(node, layer, [x], weight=np.ascontiguousarray(weight), **arrays)


@operator("Add", "Sum")
def _add(node, builder):
    values = [v for v in node.inputs if isinstance(v, Value)]
    constants = [v for v in node.inputs if isinstance(v, np.ndarray)]
    if not constants:
        return values[0] if len(values) == 1 else builder.add(node, nn.Add(), values)
    if len(values) == len(constants) == 1:
        biased = builder.add_bias(values[0], constants[0])
        return biased or builder.affine(node, values[0], np.ones(1), constants[0])
    raise Unsupported("it adds constants to several values")


@operator("Sub", "Mul", "Div")
def _scale(node, builder):
    if isinstance(node.input(1), Value):
        if node.type != "Mul" or isinstance(node.input(0), Value):
            raise Unsupported("it combines two values, or a constant with a value")
        x, constant = node.value(1), node.constant(0)
    else:
        x, constant = node.value(0), node.constant(1)
    constant = np.asarray(constant, np.float64)
    if node.type == "Sub":
        return builder.affine(node, x, np.ones(1), -constant)
    if not (np.isfinite(constant).all() and constant.all()):
        raise Unsupported("a factor is 0 or not finite")
    return builder.affine(node, x, 1 / constant if node.type == "Div" else constant, np.zeros(1))


@operator("Concat")
def _concat(node, builder):
    values = [node.value(i) for i in range(len(node.inputs))]
    if node["axis"] % (1 + len(values[0].shape)) != 1:
        raise Unsupported(f"axis is {node['axis']}, expected the channels")
    return values[0] if len(values) == 1 else builder.add(node, nn.Concat(), values)


def load_onnx(
    path: str | os.PathLike[str],
    input_shape: tuple[int, int, int] | None = None,
    graph_alone: bool = False,
) -> Network:
    """Create a network from an ONNX file, with its weights.

    A file that `save_onnx` wrote gives the same network, with its normalization and class names. In
    other files, subtractions and divisions of the images by constants become `net.normalization`.
    If a file has no such operations, the network does not normalize its images.

    Parameters
    ----------
    path : path
        An .onnx file of opset 7 or later. Its input is a mini-batch of images (N, C, H, W), and it
        has one output.
    input_shape : (C, H, W), optional
        Shape of an image if the file does not fix it.
    graph_alone : bool
        Whether to ignore the description that `save_onnx` adds to a file.

    Returns
    -------
    Network
        The network, in host memory. Layers are named after the nodes, with "_" in place of
        characters that are neither letters nor digits.

    Raises
    ------
    UserError
        If the file is unreadable or damaged, or if it has nodes that mpidl has no layers for. The
        message lists all of these nodes.
    """
    model = onnx_file.read(path, input_shape)
    net = None if graph_alone else onnx_export.restored(model)
    if net is not None:
        return net
    builder, output = _build(model, path)
    if not builder.layers or output.layer != builder.layers[-1].name:
        raise UserError(f"{printable(path)}: expected a network whose last node is its output")
    try:
        net = Network(builder.layers, model.image_shape, seed=None)
    except ValueError as error:
        raise UserError(f"{printable(path)}: its network cannot be built: {error}") from None
    net.parameters = {name: builder.arrays[name] for name in net.parameters}
    net.state = {name: builder.arrays[name] for name in net.state}
    net.normalization = no_normalization(model.image_shape[0])
    if builder.scaling is not None:
        arrays = np.broadcast_arrays(*builder.scaling, np.zeros((model.image_shape[0], 1, 1)))
        centre, divisor = (np.array(v, np.float32) for v in arrays[:2])
        if centre.shape[1:] == (1, 1):
            centre, divisor = centre.ravel(), divisor.ravel()
        net.normalization = Normalization("zscore", centre, divisor)
    return net


def _build(model, path):
    """Return a Builder with all layers of the graph, and the Value that the graph returns."""
    onnx, builder = library("onnx", path, "onnx"), Builder(model)
    values: dict[str, Any] = {model.images: Value(graph.IMAGES, model.image_shape)}
    problems, unknown = [], set()
    for proto in model.nodes:
        if proto.domain in ("", "ai.onnx") and onnx_file.compute_constant(proto, model, path):
            continue
        name = f"{printable(proto.op_type)} {printable(proto.name or proto.output[0])}"
        shape = model.shapes.get(proto.output[0], "of unknown shape")
        try:
            if proto.domain not in ("", "ai.onnx") or proto.op_type not in OPERATORS:
                raise Unsupported("no layer of mpidl computes it")
            if unknown.intersection(proto.input):
                unknown.update(proto.output)
                continue
            tensors = collections.ChainMap(values, model.constants)
            result = OPERATORS[proto.op_type](Node(proto, onnx, tensors), builder)
        except (Unsupported, *DAMAGES) as error:
            problems.append(f"{name} {shape}: {printable(str(error))}")
            unknown.update(proto.output)
            continue
        if isinstance(result, np.ndarray):
            model.constants[proto.output[0]] = result
        else:
            values[proto.output[0]] = result
            builder.tensors.setdefault(result.layer, []).append(proto.output[0])
    if problems:
        raise UserError(f"{printable(path)}: unsupported nodes: {'; '.join(problems)}")
    if not isinstance(values.get(model.output), Value):
        raise UserError(f"{printable(path)}: expected an output that depends on the images")
    return builder, values[model.output]
