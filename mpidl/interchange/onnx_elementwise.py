"""Convert ONNX operators to activations, arithmetic with constants and elementwise layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpidl.interchange.onnx_builder import operator, per_channel
from mpidl.interchange.onnx_values import Unsupported, Value
from mpidl.nn import layers as nn

SIMPLE = {
    "Relu": nn.ReLU,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
    "HardSwish": nn.HardSwish,
}
UNBOUNDED = 3.4e38  # bounds of Clip with at least this magnitude count as infinite


def _add(node, builder, layer):
    return builder.add(node, layer, [node.value(any_order=True)])


@operator(*SIMPLE)
def _activation(node, builder):
    return _add(node, builder, SIMPLE[node.type]())


@operator("LeakyRelu")
def _leaky_relu(node, builder):
    return _add(node, builder, nn.LeakyReLU(node.get("alpha", 0.01)))


@operator("PRelu")
def _prelu(node, builder):
    x, slope = node.value(any_order=True), node.constant(1)
    slopes = per_channel(slope, x)
    if slope.size == 1:
        return builder.add(node, nn.PReLU(shared=True), [x], slope=slopes[:1])
    return builder.add(node, nn.PReLU(), [x], slope=slopes)


@operator("Gelu")
def _gelu(node, builder):
    return _add(node, builder, nn.GELU(node.get("approximate", "none")))


@operator("Swish")
def _swish(node, builder):
    node.require(alpha=1.0)
    return _add(node, builder, nn.Swish())


@operator("HardSigmoid")
def _hard_sigmoid(node, builder):
    return _add(node, builder, nn.HardSigmoid(node.get("alpha", 0.2), node.get("beta", 0.5)))


@operator("Clip")
def _clip(node, builder):
    if builder.opset < 11:
        bounds = node.get("min", -math.inf), node.get("max", math.inf)
    else:
        inputs = [None if node.input(i) is None else node.constant(i) for i in (1, 2)]
        bounds = tuple(
            default if bound is None else float(bound.item())
            for bound, default in zip(inputs, (-math.inf, math.inf), strict=True)
        )
    return _clipped(node, builder, node.value(any_order=True), *bounds)


@operator("Min", "Max")
def _bound(node, builder):
    values = [i for i, v in enumerate(node.inputs) if isinstance(v, Value)]
    if len(values) != 1 or len(node.inputs) != 2 or node.constant(1 - values[0]).size != 1:
        raise Unsupported("expected a value and a constant number")
    bound = float(node.constant(1 - values[0]).item())
    bounds = (-math.inf, bound) if node.type == "Min" else (bound, math.inf)
    return _clipped(node, builder, node.value(values[0], any_order=True), *bounds)


def _clipped(node, builder, x, low, high):
    low = -math.inf if low <= -UNBOUNDED else low
    high = math.inf if high >= UNBOUNDED else high
    if math.isinf(low) and math.isinf(high) and low < high:
        return x
    # Prefer ReLU, which fused ops support.
    layer = nn.ReLU() if (low, high) == (0, math.inf) else nn.Clip(low, high)
    return builder.add(node, layer, [x])


@operator("Softmax", "LogSoftmax")
def _softmax(node, builder):
    x = node.value(any_order=True)
    axis = node.get("axis", -1 if builder.opset >= 13 else 1)
    # Before opset 13, the softmax is over this axis and all later axes together.
    is_vector = int(np.prod(x.shape)) == x.shape[0]
    if x.axes([axis]) != [0] or (builder.opset < 13 and not is_vector):
        raise Unsupported(f"axis is {axis}, expected the channels")
    if node.type == "LogSoftmax" and node.proto.output[0] != builder.output:
        raise Unsupported("it is not the last node")
    return builder.add(node, nn.Softmax(), [x])


@operator("Dropout")
def _dropout(node, builder):
    if node.input(2) is not None and node.constant(2).any():
        raise Unsupported("training_mode is true")
    ratio = node.get("ratio", 0.5) if node.input(1) is None else float(node.constant(1))
    return _add(node, builder, nn.Dropout(float(np.float32(ratio))))


@operator("Identity")
def _identity(node, builder):
    return node.value(any_order=True)


@operator("Cast")
def _cast(node, builder):
    if node["to"] != 1:
        raise Unsupported("it casts to a type other than float32")
    return node.value(any_order=True)


def same_order(values: Sequence[Value]) -> Sequence[Value]:
    """Return the values. Raise Unsupported unless all values have the same order of axes."""
    if len({(value.order, value.image, value.layout) for value in values}) > 1:
        raise Unsupported("its inputs have different orders of axes")
    return values


@operator("Add", "Sum")
def _sum(node, builder):
    values = same_order([v for v in node.inputs if isinstance(v, Value)])
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
        if node.type == "Mul" and isinstance(node.input(0), Value):
            return _gated(node, builder)
        if node.type != "Mul":
            raise Unsupported("it combines two values, or a constant with a value")
        x, constant = node.value(1, any_order=True), node.constant(0)
    else:
        x, constant = node.value(0, any_order=True), node.constant(1)
    constant = np.asarray(constant, np.float64)
    if node.type == "Sub":
        return builder.affine(node, x, np.ones(1), -constant)
    divides_by_0 = node.type == "Div" and not constant.all()
    if divides_by_0 or not np.isfinite(constant).all():
        raise Unsupported("a factor is 0 or not finite")
    return builder.affine(node, x, 1 / constant if node.type == "Div" else constant, np.zeros(1))


def _gated(node, builder):
    """Add a product of two values, x * Sigmoid(x) or x * HardSigmoid(x) as one activation."""
    for i in (0, 1):
        x, gate = node.value(i, any_order=True), node.value(1 - i, any_order=True)
        layer = builder.layers[-1] if builder.layers else None
        if layer is None or layer.name != gate.layer or builder.reads[layer.name] != [x]:
            continue
        is_hard = isinstance(layer, nn.HardSigmoid) and np.allclose(
            (layer.alpha, layer.beta), (1 / 6, 0.5), rtol=1e-6
        )
        if (is_hard or isinstance(layer, nn.Sigmoid)) and builder.remove(gate, type(layer)):
            return builder.add(node, nn.HardSwish() if is_hard else nn.Swish(), [x])
    factors = same_order([node.value(i, any_order=True) for i in (0, 1)])
    if len(factors[0].shape) != len(factors[1].shape):
        raise Unsupported("it multiplies features by images")
    return builder.add(node, nn.Multiply(), factors)
