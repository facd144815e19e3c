"""Convert ONNX's LSTM and GRU. Both directions of a bidirectional node become a layer each."""

from __future__ import annotations

from mpidl.interchange.onnx_builder import operator
from mpidl.interchange.onnx_gates import from_onnx
from mpidl.interchange.onnx_selection import cropped, stacked
from mpidl.interchange.onnx_shapes import settled
from mpidl.interchange.onnx_values import Unsupported, Value, row_filters, with_layout
from mpidl.nn import layers as nn

LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU}
ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"]}
# {direction: whether each layer is in reverse}
DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def _check(node, builder):
    """Raise Unsupported for attributes and inputs that mpidl's layers do not have."""
    if node.get("direction", "forward") not in DIRECTIONS:
        raise Unsupported(f"direction is {node.get('direction', '')}")
    if "clip" in node.attributes:
        raise Unsupported(f"clip is {node['clip']:g}, expected none")
    activations = [a.decode().lower() for a in node.get("activations", [])]
    directions = len(DIRECTIONS[node.get("direction", "forward")])
    if activations not in ([], ACTIVATIONS[node.type] * directions):
        raise Unsupported(f"activations are {', '.join(activations)}, expected the default ones")
    node.require(input_forget=0)
    if node.type == "GRU" and not node.get("linear_before_reset", 0):
        raise Unsupported("linear_before_reset is 0, expected 1")
    if node.input(4) is not None:
        raise Unsupported("it has the input sequence_lens")
    for i, name in ((5, "initial_h"), (6, "initial_c"), (7, "P")):
        if node.input(i) is not None and node.constant(i).any():
            raise Unsupported(f"its input {name} is not 0")
    if any(builder.readers[name] for name in node.proto.output[2:3] if name):
        raise Unsupported("its output Y_c, the last cell state, is used")


def _features(node, x):
    """Return the letters of the numbers of a step, which a row of the images must contain."""
    layout = list(with_layout(x, x.letters()).letters())
    if node.get("layout", 0):
        layout[:2] = layout[1::-1]
    if len(layout) != 3 or layout[1] != "N" or len(x.shape) != 3:
        raise Unsupported(f"it reads {x.text()}, expected the rows of images")
    steps, _, features = layout
    if steps not in ("H", "") or set(features) - set("CW") or (not steps and x.shape[1] > 1):
        raise Unsupported(f"it reads {x.text()}, whose steps are not the rows of images {x.shape}")
    return features


def _last(node, builder, y):
    """Add the layers that select the last step of a sequence (U, H, 1)."""
    steps = y.shape[1]
    start = 0 if builder.layer_of(y).reverse else steps - 1
    x = cropped(node, builder, y, 1, start, start + 1) if steps > 1 else y
    return settled(node, builder, x, ["N", "C"])


@operator("LSTM", "GRU")
def _recurrent(node, builder):
    """Add a layer per direction. It returns the last step if the graph reads only that one.

    If the graph reads both, the last step is selected from the sequence.
    """
    _check(node, builder)
    x = node.value(any_order=True)
    letters, directions = _features(node, x), DIRECTIONS[node.get("direction", "forward")]
    weights, recurrent, biases = node.constant(1), node.constant(2), None
    if node.input(3) is not None:
        biases = node.constant(3)
    reads_sequence, reads_state = (
        any(builder.readers[name] for name in node.proto.output[i : i + 1] if name) for i in (0, 1)
    )
    values = []
    for i, reverse in enumerate(directions):
        layer = LAYERS[node.type](
            node.get("hidden_size", recurrent.shape[-1]),
            bias=biases is not None,
            returns="sequence" if reads_sequence else "last",
            reverse=reverse,
        )
        bias = None if biases is None else biases[i]
        arrays = from_onnx(layer, weights[i], recurrent[i], bias)
        arrays["weight"] = row_filters(x, letters, arrays["weight"])
        values.append(builder.add(node, layer, [Value(x.layer, x.shape)], **arrays))
    is_batch_first = node.get("layout", 0)
    sequence = state = None
    if reads_sequence:
        axes = ["N", "H", "D", "C"] if is_batch_first else ["H", "D", "N", "C"]
        sequence = stacked(node, builder, values, axes, axes.index("D"))
    if reads_state:
        states = [_last(node, builder, y) for y in values] if reads_sequence else values
        axes = ["N", "D", "C"] if is_batch_first else ["D", "N", "C"]
        state = stacked(node, builder, states, axes, axes.index("D"))
    return [sequence, state]
