"""Convert ONNX operators to convolution, pooling, normalization, dense and join layers."""

from __future__ import annotations

import numpy as np

from mpidl.backends.shapes import same_padding
from mpidl.interchange.onnx_builder import operator
from mpidl.interchange.onnx_elementwise import same_order
from mpidl.interchange.onnx_selection import joined
from mpidl.interchange.onnx_shapes import settled
from mpidl.interchange.onnx_values import Unsupported, Value, row_filters, with_layout
from mpidl.nn import layers as nn
from mpidl.ops import check
from mpidl.ops.pool import pooling_matrix


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


def _with_zeros_before(builder, x, padding, limits=(float("inf"),) * 2):
    """Merge a Pad2D layer that computes x into a layer's padding; return (value to read, padding).

    The Pad2D layer is kept if its value is not 0, if other nodes read its output, or if the merged
    padding would reach the limit (vertical, horizontal) on any side.
    """
    pad = builder.layers[-1] if builder.layers else None
    if not isinstance(pad, nn.Pad2D) or pad.name != x.layer or pad.value != 0:
        return x, padding
    sides = check.pads(x.layer, pad.padding, minimum=None)
    if min(sides[0] + sides[1]) < 0:
        return x, padding
    sums = tuple(
        (inner[0] + zeros[0], inner[1] + zeros[1])
        for inner, zeros in zip(padding, sides, strict=True)
    )
    if any(side >= limit for sides, limit in zip(sums, limits, strict=True) for side in sides):
        return x, padding
    before = builder.remove(x, nn.Pad2D)
    if before is None:
        return x, padding
    return x._replace(layer=before.layer, shape=before.shape), sums


@operator("Conv")
def _conv(node, builder):
    x, weight, bias = node.value(), node.constant(1), node.input(2)
    stride, padding, dilation = _spatial(node, x, weight.shape[2:])
    if node.get("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
        x, padding = _with_zeros_before(builder, x, padding)
    layer = nn.Conv2D(
        size=weight.shape[2:],
        filters=len(weight),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=node.get("group", 1),
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
    layer = nn.TransposedConv2D(
        size=weight.shape[2:],
        filters=weight.shape[1],
        stride=stride,
        cropping=cropping,
        bias=bias is not None,
    )
    arrays = {} if bias is None else {"bias": node.constant(2)}
    return builder.add(node, layer, [x], weight=weight, **arrays)


@operator("BatchNormalization")
def _batchnorm(node, builder):
    node.require(training_mode=0, spatial=1)
    if any(node.proto.output[1:]):
        raise Unsupported("it also computes the statistics of a mini-batch")
    names = ("gamma", "beta", "mean", "variance")
    arrays = {name: node.constant(i) for i, name in enumerate(names, 1)}
    decay = round(1 - node.get("momentum", 0.9), 6)
    layer = nn.BatchNorm(epsilon=node.get("epsilon", 1e-5), decay=decay)
    return builder.add(node, layer, [node.value()], **arrays)


@operator("LRN")
def _cross_channel_norm(node, builder):
    constants = node.get("alpha", 1e-4), node.get("beta", 0.75), node.get("bias", 1.0)
    return builder.add(node, nn.CrossChannelNorm(node["size"], *constants), [node.value()])


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
    enlarged = _ceil(node, x, size, stride, padding)
    counts, is_padded = node.get("count_include_pad", 0), _is_any(padding)
    if enlarged != padding:  # windows never count pixels outside the padded image
        if counts and is_padded:
            x = builder.add(node, nn.Pad2D(padding), [x])
            enlarged = tuple(
                (0, bottom - inner)
                for (_, bottom), (_, inner) in zip(enlarged, padding, strict=True)
            )
        counts, padding = False, enlarged
    elif counts or not is_padded:
        x, padding = _with_zeros_before(builder, x, padding, size)
        counts = True
    layer = nn.AveragePool2D(size, stride, padding, count_padding=bool(counts))
    return builder.add(node, layer, [x])


def _is_any(padding):
    return any(side for sides in padding for side in sides)


def _ceil(node, x, size, stride, padding):
    """Return the padding, enlarged at the bottom and on the right if ceil_mode is set."""
    if not node.get("ceil_mode", 0):
        return padding
    sides = []
    for pixels, window, step, (before, after) in zip(
        x.shape[1:], size, stride, padding, strict=True
    ):
        outputs = -(-(pixels + before + after - window) // step) + 1
        if (outputs - 1) * step >= pixels + before:  # no window may start in the padding at the end
            outputs -= 1
        sides.append((before, max(after, (outputs - 1) * step + window - pixels - before)))
    return tuple(sides)


@operator("GlobalAveragePool")
def _global_average_pool(node, builder):
    return builder.add(node, nn.GlobalAveragePool2D(), [node.value()])


@operator("ReduceMean")
def _mean(node, builder):
    x = node.value(any_order=True)
    axes = node.get("axes", None) if node.input(1) is None else node.constant(1).tolist()
    means = set() if axes is None or len(x.shape) != 3 else set(x.axes(axes))
    if not means or 0 in means:
        raise Unsupported(f"axes are {axes}, expected rows and columns")
    size = 1 if 1 in means else x.shape[1], 1 if 2 in means else x.shape[2]
    layer = nn.GlobalAveragePool2D() if size == (1, 1) else nn.AdaptiveAveragePool2D(size)
    y, letters = builder.add(node, layer, [x]), list(x.letters())
    for axis in sorted((axis % len(letters) for axis in axes), reverse=True):
        letters[axis : axis + 1] = [""] if node.get("keepdims", 1) else []
    return settled(node, builder, y, letters)


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
    is_from_left = isinstance(node.input(0), np.ndarray)
    x = node.value(int(is_from_left), any_order=True)
    if x.layout and len(x.shape) == 1 and not is_from_left:
        return _dense(node, builder, node.constant(1).T, None)
    if (x.layout or x.is_permuted()) and not is_from_left:
        return _dense_of_pixels(node, builder, x)
    if len(x.shape) == 3:
        return _adaptive_pool(node, builder, node.value(int(is_from_left)), is_from_left)
    return _dense(node, builder, node.constant(1).T, None)


def _dense_of_pixels(node, builder, x):
    """Add the convolution that computes a dense layer of the channels of each pixel.

    If the last axis in the graph also contains the columns, a filter has the size of a row.
    """
    weight, (*axes, last) = node.constant(1).T, x.letters()
    is_of_pixels = last == "C" or (not last and x.shape[0] == 1)
    is_of_rows = set("".join(axes)) <= set("NH") and set(last) <= set("CW")
    if not (is_of_pixels or is_of_rows):
        raise Unsupported(f"it multiplies {x.text()} by {weight.shape[::-1]}")
    filters = row_filters(x, "C" if is_of_pixels else last, weight)
    layer = nn.Conv2D(filters.shape[2:], len(filters), bias=False)
    y = builder.add(node, layer, [x], weight=filters)
    return with_layout(y, [*axes, "C"])


def _adaptive_pool(node, builder, x, is_of_rows):
    """Add adaptive pooling of the rows or columns, if the constants are its weights."""
    matrix, axis = (node.constant(0), 0) if is_of_rows else (node.constant(1).T, 1)
    pixels = x.shape[1 + axis]
    expected = pooling_matrix(pixels, len(matrix)) if matrix.ndim == 2 and len(matrix) else None
    if expected is None or matrix.shape != expected.shape or abs(matrix - expected).max() > 1e-6:
        raise Unsupported(f"it multiplies {x.text()} by constants of {matrix.shape}")
    size = list(x.shape[1:])
    size[axis] = len(matrix)
    (read,) = builder.reads.get(x.layer, [x])
    if read.shape[1 + axis] == pixels:  # a pooling layer before this one pools the other axis
        x = builder.remove(x, nn.AdaptiveAveragePool2D) or x
    return builder.add(node, nn.AdaptiveAveragePool2D(tuple(size)), [x])


def _dense(node, builder, weight, bias):
    x = node.value(any_order=True)
    if len(x.shape) != 1 or weight.ndim != 2 or (x.layout and x.layout[-1] == "N"):
        raise Unsupported(f"it multiplies {x.text()} by {weight.shape[::-1]}")
    layer = nn.Dense(len(weight), bias=bias is not None)
    arrays = {} if bias is None else {"bias": bias}
    if weight.shape[1:] == x.shape and not x.layout:
        weight = x.to_layer(weight)
    x = Value(x.layer, x.shape, layout=x.layout)
    return builder.add(node, layer, [x], weight=np.ascontiguousarray(weight), **arrays)


@operator("Concat")
def _concat(node, builder):
    count = range(len(node.inputs))
    values = [node.value(i, any_order=True, any_groups=True) for i in count]
    if any(value.layout or value.groups for value in values):
        return joined(node, builder, values, node["axis"])
    values = same_order(values)
    if values[0].axes([node["axis"]]) != [0] or values[0].image:
        raise Unsupported(f"axis is {node['axis']}, expected the channels")
    return values[0] if len(values) == 1 else builder.add(node, nn.Concat(), values)
