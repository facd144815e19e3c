"""Add the layers that compute ONNX operators: OPERATORS has a function per operator.

A function reads a `Node`, adds layers to a `Builder` and returns the Value that the node computes.
It raises Unsupported if mpidl has no layers for the node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpidl.interchange.onnx_builder import BATCH, Builder, Node, Unsupported, Value
from mpidl.nn import layers as nn
from mpidl.shapes import same_padding

OPERATORS: dict[str, Callable[[Node, Builder], Any]] = {}


def operator(*names: str) -> Callable[[Callable[[Node, Builder], Any]], Any]:
    """Return a decorator that registers a function for some operators."""

    def register(function):
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def _spatial(node, x, size, transposed=False):
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
    stride, padding, dilation = _spatial(node, x, weight.shape[2:])
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
    stride, cropping, _ = _spatial(node, x, weight.shape[2:], transposed=True)
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
    stride, padding, _ = _spatial(node, x, size)
    return builder.add(node, nn.MaxPool2D(size, stride, _ceil(node, x, size, stride, padding)), [x])


@operator("AveragePool")
def _average_pool(node, builder):
    node.require(dilations=[1, 1])
    x, size = node.value(), tuple(node["kernel_shape"])
    stride, padding, _ = _spatial(node, x, size)
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
