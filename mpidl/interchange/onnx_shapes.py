"""Convert ONNX operators that flatten, reshape, transpose and pad values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpidl.interchange.onnx_builder import Builder, Node, operator
from mpidl.interchange.onnx_file import BATCH
from mpidl.interchange.onnx_values import Unsupported, Value, regrouped, with_layout
from mpidl.nn import layers as nn


def flat(node: Node, builder: Builder, x: Value) -> Value:
    """Flatten x if it is an image, and return a vector."""
    x = _in_order(x) if x.layout else x._replace(groups=())
    if len(x.shape) == 1:
        return x
    y = builder.add(node, nn.Flatten(), [Value(x.layer, x.shape)])
    features = np.arange(y.shape[0])
    vector = y._replace(order=x.order, image=x.shape if x.order else ())
    return y if np.array_equal(vector.to_layer(features), features) else vector


def _in_order(x):
    """Replace the layout of a value that is flattened by the order of the layer's axes."""
    letters = "".join(x.layout[1:]).replace("DU", "C")
    if x.layout[0] != "N" or any(letter not in "CHW" for letter in letters):
        raise Unsupported(f"it flattens {x.text()}")
    missing = [letter for letter in "CHW"[: len(x.shape)] if letter not in letters]
    axes = ["CHW".index(letter) for letter in letters]
    if axes == sorted(axes):
        return Value(x.layer, x.shape)
    return Value(x.layer, x.shape, (*axes, *("CHW".index(letter) for letter in missing)))


def settled(node: Node, builder: Builder, x: Value, layout: Sequence[str]) -> Value:
    """Return x with other axes in the graph, and flatten it if it becomes a vector."""
    y = with_layout(x, layout)
    is_vector = len(layout) == 2 and layout[0] == "N"
    return flat(node, builder, y) if is_vector else y


@operator("Flatten")
def _flatten(node, builder):
    x = node.value(any_order=True, any_groups=True)
    if node.get("axis", 1) % len(x.full_shape(BATCH)) != 1:
        raise Unsupported(f"axis is {node.get('axis', 1)}, expected 1")
    return flat(node, builder, x)


@operator("Squeeze")
def _squeeze(node, builder):
    x = node.value(any_order=True, any_groups=True)
    axes = node.get("axes", None) if node.input(1) is None else node.constant(1).tolist()
    letters, shape = x.letters(), x.full_shape(BATCH)
    if axes is None or any(not -len(shape) <= n < len(shape) or shape[n] != 1 for n in axes):
        raise Unsupported(f"axes are {axes} of {x.text()}, expected axes of size 1")
    removed = {n % len(shape) for n in axes}
    layout = [axis for n, axis in enumerate(letters) if n not in removed]
    return settled(node, builder, x, layout)


@operator("Unsqueeze")
def _unsqueeze(node, builder):
    x = node.value(any_order=True, any_groups=True)
    axes = node.get("axes", None) if node.input(1) is None else node.constant(1).tolist()
    if axes is None:
        raise Unsupported(f"axes are {axes}")
    layout = list(x.letters())
    count = len(layout) + len(axes)
    for n in sorted(n % count for n in axes):
        layout.insert(n, "")
    return settled(node, builder, x, layout)


@operator("Reshape")
def _reshape(node, builder):
    x = node.value(any_order=True, any_groups=True)
    sizes = node.constant(1).ravel().tolist()
    if x.layout:
        return _regrouped(node, builder, x, sizes)
    sizes, original = _without_placeholders(sizes, x.graph_shape()), (x, sizes)
    x, features = x._replace(groups=()), int(np.prod(x.shape))
    counts = {BATCH, 0, -1} | ({builder.batch} if builder.batch else set())
    is_batch = bool(sizes) and sizes[0] in counts
    if len(sizes) == 2 and is_batch and sizes[1] in (features, -1) and sizes != [-1, -1]:
        return flat(node, builder, x)
    if is_batch and tuple(sizes[1:]) == x.graph_shape():
        return x
    if is_batch and len(x.shape) == 1 and not x.order and sizes[1:] == [features, 1, 1]:
        return x._replace(shape=(features, 1, 1), is_unsqueezed=True)
    groups, pixels = tuple(sizes[1:3]), tuple(sizes[3:])
    if is_batch and not x.order and (int(np.prod(groups)), *pixels) == x.shape:
        return x._replace(groups=groups)
    are_groups = len(sizes) == 3 and groups[0] > 0 and x.shape[0] % groups[0] == 0
    if is_batch and not x.order and are_groups and int(np.prod(groups)) == features:
        return x._replace(groups=groups)
    return _regrouped(node, builder, *original)


def _regrouped(node, builder, x, sizes):
    shape = x.full_shape(BATCH)
    sizes = [n or (shape[i] if i < len(shape) else 0) for i, n in enumerate(sizes)]
    return settled(node, builder, x, regrouped(x, sizes, builder.batch))


def _without_placeholders(sizes, shape):
    """Replace 0, which copies a size, and -1, which stands for the rest, except for images."""
    batch, *rest = sizes or [0]
    rest = [n or (shape[i] if i < len(shape) else 0) for i, n in enumerate(rest)]
    product = int(np.prod([n for n in rest if n != -1]))
    if len(rest) > 1 and rest.count(-1) == 1 and batch != -1 and product > 0:
        rest[rest.index(-1)] = int(np.prod(shape)) // product
    return [batch, *rest]


@operator("Shape")
def _shape(node, builder):
    shape = node.value(any_order=True, any_groups=True).full_shape(BATCH)
    start, end = node.get("start", 0), node.get("end", None)
    return np.array(shape, np.int64)[start:end]


@operator("Transpose")
def _transpose(node, builder):
    x = node.value(any_order=True, any_groups=True)
    count = len(x.full_shape(BATCH))
    permutation = list(node.get("perm", range(count - 1, -1, -1)))
    if sorted(permutation) != list(range(count)):
        raise Unsupported(f"perm is {permutation} of {x.text()}")
    if permutation == list(range(count)):
        return x
    if not x.layout and math.prod(x.groups or (0,)) == x.shape[0]:
        if permutation != [0, 2, 1, *range(3, count)]:
            raise Unsupported(f"perm is {permutation} of {x.text()}")
        y = builder.add(node, nn.ChannelShuffle(x.groups[0]), [x])
        return y._replace(groups=x.groups[::-1])
    letters = x.letters()
    return with_layout(x, [letters[axis] for axis in permutation])


@operator("Pad")
def _pad(node, builder):
    node.require(mode="constant")
    x = node.value(any_order=True)
    if builder.opset < 11:
        pads, value = list(node["pads"]), node.get("value", 0.0)
    else:
        pads = node.constant(1).ravel().tolist()
        value = 0.0 if node.input(2) is None else float(node.constant(2).item())
    count = len(x.full_shape(BATCH))
    axes = list(range(count)) if node.input(3) is None else node.constant(3).ravel().tolist()
    if len(pads) != 2 * len(axes):
        raise Unsupported(f"it has {len(pads)} pads for {len(axes)} axes")
    sides = {}
    for i, axis in enumerate(axes):
        before, after = pads[i], pads[len(axes) + i]
        if before or after:
            (own_axis,) = x.axes([axis])
            sides[own_axis] = int(before), int(after)
    if not sides:
        return x
    if len(x.shape) != 3 or 0 in sides:
        raise Unsupported(f"pads are {pads}, expected rows and columns")
    layer = nn.Pad2D((sides.get(1, (0, 0)), sides.get(2, (0, 0))), value)
    return builder.add(node, layer, [x])
