"""Convert ONNX operators for flattening, padding and transposition."""

from __future__ import annotations

import numpy as np

from mpidl.interchange.onnx_builder import BATCH, Builder, Node, Unsupported, Value, operator
from mpidl.nn import layers as nn


def flat(node: Node, builder: Builder, x: Value) -> Value:
    """Flatten x if it is an image, and return a vector."""
    if len(x.shape) == 1:
        return x
    y = builder.add(node, nn.Flatten(), [Value(x.layer, x.shape)])
    features = np.arange(y.shape[0])
    vector = y._replace(order=x.order, image=x.shape if x.order else ())
    return y if np.array_equal(vector.to_layer(features), features) else vector


@operator("Flatten")
def _flatten(node, builder):
    x = node.value(any_order=True)
    if node.get("axis", 1) % (1 + len(x.shape)) != 1:
        raise Unsupported(f"axis is {node.get('axis', 1)}, expected 1")
    return flat(node, builder, x)


@operator("Squeeze")
def _squeeze(node, builder):
    x = node.value(any_order=True)
    axes = node.get("axes", None) if node.input(1) is None else node.constant(1).tolist()
    if axes is None or len(x.shape) != 3 or sorted(x.axes(axes)) != [1, 2] or x.shape[1:] != (1, 1):
        raise Unsupported(f"axes are {axes}")
    return flat(node, builder, x)


@operator("Unsqueeze")
def _unsqueeze(node, builder):
    x = node.value()
    axes = node.get("axes", None) if node.input(1) is None else node.constant(1).tolist()
    if axes is None or len(x.shape) != 1 or sorted(n % 4 for n in axes) != [2, 3]:
        raise Unsupported(f"axes are {axes}")
    return x._replace(shape=(*x.shape, 1, 1), is_unsqueezed=True)


@operator("Reshape")
def _reshape(node, builder):
    x = node.value(any_order=True, any_groups=True)
    sizes = _without_placeholders(node.constant(1).ravel().tolist(), x.graph_shape())
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
    raise Unsupported(f"it reshapes {('N', *x.graph_shape())} to {sizes}")


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
    shape = node.value(any_order=True, any_groups=True).graph_shape()
    start, end = node.get("start", 0), node.get("end", None)
    return np.array([BATCH, *shape], np.int64)[start:end]


@operator("Transpose")
def _transpose(node, builder):
    x = node.value(any_order=True, any_groups=True)
    if x.groups:
        return _shuffle(node, builder, x)
    permutation = list(node.get("perm", range(len(x.shape), -1, -1)))
    if sorted(permutation) != list(range(1 + len(x.shape))) or permutation[0] != 0:
        raise Unsupported(f"perm is {permutation}, expected the mini-batch first")
    if len(x.shape) == 1:
        return x
    order = tuple((x.order or (0, 1, 2))[axis - 1] for axis in permutation[1:])
    return x._replace(order=() if order == (0, 1, 2) else order)


def _shuffle(node, builder, x):
    """Exchange the two axes of channels."""
    permutation = list(node.get("perm", []))
    if permutation != [0, 2, 1, *range(3, 2 + len(x.shape))]:
        raise Unsupported(f"perm is {permutation} of {('N', *x.graph_shape())}")
    y = builder.add(node, nn.ChannelShuffle(x.groups[0]), [x])
    return y._replace(groups=x.groups[::-1])


@operator("Pad")
def _pad(node, builder):
    node.require(mode="constant")
    x = node.value(any_order=True)
    if builder.opset < 11:
        pads, value = list(node["pads"]), node.get("value", 0.0)
    else:
        pads = node.constant(1).ravel().tolist()
        value = 0.0 if node.input(2) is None else float(node.constant(2).item())
    count = 1 + len(x.shape)
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
    if len(x.shape) != 3 or 0 in sides or min(n for pair in sides.values() for n in pair) < 0:
        raise Unsupported(f"pads are {pads}, expected rows and columns to add")
    layer = nn.Pad2D((sides.get(1, (0, 0)), sides.get(2, (0, 0))), value)
    return builder.add(node, layer, [x])
