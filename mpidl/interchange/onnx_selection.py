"""Convert ONNX operators that select or join channels, rows, columns, and states of layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidl.interchange.onnx_builder import RECURRENT, Builder, Node, operator
from mpidl.interchange.onnx_file import BATCH
from mpidl.interchange.onnx_shapes import settled
from mpidl.interchange.onnx_values import Unsupported, Value, with_layout
from mpidl.nn import layers as nn


def cropped(node: Node, builder: Builder, x: Value, axis: int, start: int, stop: int) -> Value:
    """Add the layer that removes all channels (axis 0), rows (1) or columns (2) but a range."""
    if x.image:
        raise Unsupported("its input is a transposed image, flattened")
    if axis == 0:
        y = builder.add(node, nn.ChannelSlice(start, stop), [x])
    else:
        sides = -start, stop - x.shape[axis]
        padding = (sides, (0, 0)) if axis == 1 else ((0, 0), sides)
        y = builder.add(node, nn.Pad2D(padding), [x])
    return with_layout(y, x.letters())


def _rows(node, builder, x, start, stop):
    """Select rows. If they are the last step of a recurrent layer, it returns only this step."""
    layer, rows = builder.layer_of(x), x.shape[1]
    is_last = isinstance(layer, RECURRENT) and (start, stop) == (
        (0, 1) if layer.reverse else (rows - 1, rows)
    )
    is_read = any(x.layer == value.layer for reads in builder.reads.values() for value in reads)
    if not is_last or is_read or not builder.is_read_once(x):
        return cropped(node, builder, x, 1, start, stop)
    layer.returns = "last"
    letters = [axis.replace("H", "") for axis in x.letters()]
    return with_layout(x._replace(shape=x.shape[:1]), letters)


def _selected(node, builder, x, n, start, stop):
    """Select a range of axis n in the graph."""
    letters = x.letters()
    size = x.size(letters[n])
    if letters[n] == "N":
        raise Unsupported("it selects images")
    if not 0 <= start < stop <= size:
        raise Unsupported(f"it selects {start} to {stop} of {size}")
    if (start, stop) == (0, size):
        return x
    if letters[n] == "D":
        return stacked(node, builder, _parts(builder, x)[start:stop], letters, n)
    if letters[n] not in ("C", "H", "W"):
        raise Unsupported(f"it selects a part of axis {n} of {x.text()}")
    if letters[n] == "H":
        return _rows(node, builder, x, start, stop)
    return cropped(node, builder, x, "CHW".index(letters[n]), start, stop)


@operator("Slice")
def _slice(node, builder):
    x = node.value(any_order=True, any_groups=True)
    if builder.opset < 10:
        starts, ends = list(node["starts"]), list(node["ends"])
        axes, steps = node.get("axes", None), None
    else:
        starts, ends = node.constant(1).tolist(), node.constant(2).tolist()
        axes, steps = (None if v is None else v.tolist() for v in map(node.input, (3, 4)))
    axes = list(range(len(starts))) if axes is None else axes
    if len(starts) != len(ends) or len(starts) != len(axes) or set(steps or ()) - {1}:
        raise Unsupported(f"starts are {starts}, ends {ends}, axes {axes}, steps {steps}")
    for axis, start, end in zip(axes, starts, ends, strict=True):
        shape = x.full_shape(BATCH)
        n = _axis(x, axis)
        if shape[n] == BATCH and start == 0 and end >= -BATCH:
            continue  # all images
        size = 1 if shape[n] == BATCH else shape[n]
        start, stop, _ = slice(start, end).indices(size)
        x = _selected(node, builder, x, n, start, stop)
    return x


@operator("Gather")
def _gather(node, builder):
    """Select one step, part or number, such as the last step of a sequence."""
    x, indices = node.value(any_order=True, any_groups=True), node.constant(1)
    n = _axis(x, node.get("axis", 0))
    size = x.full_shape(BATCH)[n]
    if indices.size != 1 or size == BATCH:
        raise Unsupported(f"it selects {indices.size} indices of axis {n} of {x.text()}")
    index = int(indices.item())
    index += size if index < 0 else 0
    y = _selected(node, builder, x, n, index, index + 1)
    letters = list(y.letters())
    letters[n : n + 1] = [""] * indices.ndim
    return settled(node, builder, y, letters)


def _axis(x, axis):
    count = len(x.full_shape(1))
    if not -count <= axis < count:
        raise Unsupported(f"axis is {axis} of {x.text()}")
    return axis % count


@operator("Split")
def _split(node, builder):
    x, outputs = node.value(any_order=True), node.proto.output
    if x.axes([node.get("axis", 0)]) != [0]:
        raise Unsupported(f"axis is {node.get('axis', 0)}, expected the channels")
    sizes = node.get("split", None) if node.input(1) is None else node.constant(1).tolist()
    if sizes is None:
        size = -(-x.shape[0] // len(outputs))
        sizes = [size] * (len(outputs) - 1)
        sizes.append(x.shape[0] - sum(sizes))
    if len(sizes) != len(outputs) or sum(sizes) != x.shape[0]:
        raise Unsupported(f"it splits {x.shape[0]} channels into {list(sizes)}")
    stops = np.cumsum(sizes).tolist()
    return [
        cropped(node, builder, x, 0, stop - size, stop) if builder.readers[name] else None
        for name, size, stop in zip(outputs, sizes, stops, strict=True)
    ]


def joined(node: Node, builder: Builder, values: Sequence[Value], axis: int) -> Value:
    """Join values with any layouts: channels, or the states of layers along an axis before them."""
    n = _axis(values[0], axis)
    layouts = [list(value.letters()) for value in values]
    axes = [layout[n : n + 1] for layout in layouts]
    rests = {(*layout[:n], None, *layout[n + 1 :]) for layout in layouts}
    pairs = list(zip(axes, values, strict=True))
    if all(a == ["C"] or (a == [""] and v.shape[0] == 1) for a, v in pairs) and len(rests) == 1:
        y = builder.add(node, nn.Concat(), list(values)) if len(values) > 1 else values[0]
        return with_layout(y, [*layouts[0][:n], "C", *layouts[0][n + 1 :]])
    parts = [part for value in values for part in _parts(builder, value)]
    if not all(a in ([""], ["D"]) and len(v.shape) == 1 for a, v in pairs):
        raise Unsupported(f"axis is {axis}, expected the channels")
    return stacked(node, builder, parts, layouts[0], n)


def _parts(builder, x):
    """Return the values that `stacked` joined, or x itself."""
    if not x.groups:
        return [x]
    if not isinstance(builder.layer_of(x), nn.Concat):
        raise Unsupported(f"it selects a part of {x.text()}")
    return builder.reads[x.layer]


def stacked(
    node: Node, builder: Builder, parts: Sequence[Value], layout: Sequence[str], n: int
) -> Value:
    """Join values of the same shape along a new axis n of the graph.

    `layout` has letters for all axes; those of axis n are ignored. A single value is not joined,
    and the axis then has the size 1.
    """
    rest = [axis.replace("U", "C") for axis in layout]
    if len({part.shape for part in parts}) > 1 or any("D" in a for a in rest[:n] + rest[n + 1 :]):
        raise Unsupported("it joins states of different shapes")
    if len(parts) == 1:
        (part,) = parts
        return with_layout(Value(part.layer, part.shape), [*rest[:n], "", *rest[n + 1 :]])
    values = [Value(part.layer, part.shape) for part in parts]
    y = builder.add(node, nn.Concat(), values)._replace(groups=(len(parts), parts[0].shape[0]))
    units = [axis.replace("C", "U") for axis in rest]
    return with_layout(y, [*units[:n], "D", *units[n + 1 :]])
