"""Replace nodes that together compute an activation, such as GELU with Erf, with one node.

The nodes are evaluated on a grid of numbers, so any formula for the activation is recognized.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpidl.backends.reference import activation

# Large numbers distinguish an activation from one whose input or output is clipped.
LARGE = np.outer([-1, 1], [10, 30, 100, 1e3, 1e5, 1e7]).ravel()
GRID = np.concatenate([np.linspace(-7, 7, 57), [-0.01, 0.003, 1e-4], LARGE])
TOLERANCE = 1e-5  # largest relative difference on the grid; constants in files are float32
MAX_NODES = 16  # maximum number of nodes in a pattern

Function = Callable[..., np.ndarray]
ARITHMETIC: dict[str, Function] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Neg": np.negative,
    "Erf": np.vectorize(math.erf, otypes=[np.float64]),
    "Tanh": np.tanh,
    "Identity": np.positive,
}
ESSENTIAL = ("Erf", "Tanh", "Clip")  # each pattern contains one of these nodes
# (operator, attributes, values of the activation on the grid)
ACTIVATIONS: tuple[tuple[str, dict[str, Any], np.ndarray], ...] = (
    ("Gelu", {"approximate": "none"}, activation.gelu(GRID)),
    ("Gelu", {"approximate": "tanh"}, activation.gelu_tanh(GRID)),
    ("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}, activation.hard_sigmoid(GRID, 1 / 6, 0.5)),
    ("HardSwish", {}, activation.hard_swish(GRID)),
)


def replace(onnx: Any, nodes: list[Any], constants: Mapping[str, np.ndarray], output: str) -> list:
    """Return the nodes, in topological order, with one activation node in place of each pattern.

    `constants` are {name: array}, and `output` is the name of the graph's output.
    """
    readers = collections.defaultdict(list)
    producers = {}
    for i, node in enumerate(nodes):
        producers[node.output[0]] = i
        for name in set(node.input):
            readers[name].append(i)
    readers[output].append(len(nodes))
    nodes = list(nodes)
    for i, node in enumerate(nodes):
        if node is None or node.op_type not in ESSENTIAL or not node.input:
            continue
        for source in _sources(node, nodes, producers, constants):
            match = _match(onnx, i, source, nodes, readers, constants)
            if match is not None:
                indices, replacement = match
                for index in indices:
                    nodes[index] = None
                nodes[max(indices)] = replacement
                break
    return [node for node in nodes if node is not None]


def _sources(node, nodes, producers, constants):
    """Yield the names of values on which a node depends arithmetically, nearest first."""
    names, visited = collections.deque([node.input[0]]), set()
    while names and len(visited) < MAX_NODES:
        name = names.popleft()
        if name in visited or name in constants:
            continue
        visited.add(name)
        yield name
        producer = nodes[producers[name]] if name in producers else None
        if producer is not None and producer.op_type in ARITHMETIC:
            names.extend(producer.input)


def _match(onnx, essential, source, nodes, readers, constants):
    """Return (indices of a pattern's nodes, their replacement), or None if there is no pattern."""
    values, indices, waiting = {source: GRID}, [], sorted(readers[source][:MAX_NODES])
    longest = None
    while waiting and len(indices) < MAX_NODES:
        i = waiting.pop(0)
        if i in indices or i >= len(nodes) or nodes[i] is None:
            continue
        value = _evaluate(onnx, nodes[i], values, constants)
        if value is None:
            continue
        indices.append(i)
        name = nodes[i].output[0]
        values[name] = value
        waiting = sorted({*waiting, *readers[name][:MAX_NODES]})
        for operator, attributes, expected in ACTIVATIONS:
            is_inside = all(
                reader in indices
                for index in indices
                if index != i
                for reader in readers[nodes[index].output[0]]
            )
            if essential in indices and is_inside and _equal(value, expected):
                replacement = onnx.helper.make_node(
                    operator, [source], [name], nodes[i].name, **attributes
                )
                longest = list(indices), replacement
    return longest


def _equal(value, expected):
    if value.shape != expected.shape:
        return False
    return bool((abs(value - expected) <= TOLERANCE * np.maximum(abs(expected), 1)).all())


def _evaluate(onnx, node, values, constants):
    """Return the result of a node on the grid, or None unless the node is scalar arithmetic."""
    inputs = []
    for name in node.input:
        value = values.get(name, constants.get(name))
        if name and (value is None or (name not in values and np.size(value) != 1)):
            return None
        inputs.append(value)
    try:
        with np.errstate(all="ignore"):
            return _computed(onnx, node, inputs)
    except (ArithmeticError, LookupError, TypeError, ValueError):  # a damaged node
        return None


def _computed(onnx, node, inputs):
    if node.domain not in ("", "ai.onnx"):
        return None
    numbers: list[Any] = [
        None if v is None else np.asarray(v, np.float64).squeeze() for v in inputs
    ]
    if node.op_type in ARITHMETIC:
        return ARITHMETIC[node.op_type](*numbers)
    if node.op_type != "Clip":
        return None
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    low, high = (numbers[1:] + [None, None])[:2]
    low = attributes.get("min", -math.inf) if low is None else low
    high = attributes.get("max", math.inf) if high is None else high
    return np.minimum(np.maximum(numbers[0], low), high)
