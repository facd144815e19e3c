"""Create a network from an ONNX file."""

from __future__ import annotations

import collections
import math
import os
from typing import Any

import numpy as np

from mpidl.errors import UserError
from mpidl.interchange import input_pixels, onnx_export, onnx_file, onnx_patterns
from mpidl.interchange import onnx_elementwise as onnx_elementwise
from mpidl.interchange import onnx_norms as onnx_norms
from mpidl.interchange import onnx_operators as onnx_operators
from mpidl.interchange import onnx_recurrent as onnx_recurrent
from mpidl.interchange import onnx_resize as onnx_resize
from mpidl.interchange import onnx_selection as onnx_selection
from mpidl.interchange import onnx_shapes as onnx_shapes
from mpidl.interchange.input_pixels import Choice
from mpidl.interchange.onnx_builder import MAX_VALUES, OPERATORS, Builder, Node
from mpidl.interchange.onnx_values import Unsupported, Value, with_layout
from mpidl.interchange.weights import library
from mpidl.nn import Network, graph
from mpidl.text import printable

DOMAINS = ("", "ai.onnx")  # names of the domain of ONNX's standard operators
# Exceptions that attributes of wrong types, sizes or lengths cause.
DAMAGES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def load_onnx(
    path: str | os.PathLike[str],
    input_shape: tuple[int, int, int] | None = None,
    graph_alone: bool = False,
    normalization: Choice = None,
) -> Network:
    """Create a network with its weights from an ONNX file.

    For a file that `save_onnx` wrote, the result is the saved network with its normalization and
    class names. For other files, initial subtractions and divisions of the images by constants
    become `net.normalization`. If a file has no such operations, and its names do not identify a
    published network, the caller must choose the normalization: without it, every use of the
    network for images raises a UserError that lists the choices.

    Parameters
    ----------
    path : path
        An .onnx file of opset 7 or later with one output. The input is a mini-batch of images (N,
        C, H, W). The input may also be (N, H, W, C) if the graph transposes it first. The network
        takes images (N, C, H, W) in both cases. Sequences (N, T, F) or (T, N, F) that an LSTM or
        GRU reads become images (1, T, F).
    input_shape : (C, H, W), optional
        Shape of an image. Required if the file does not fix it.
    graph_alone : bool
        Whether to ignore the description of the network that `save_onnx` adds to a file.
    normalization : str or Normalization, optional
        How to normalize images for the network: "none", "rescale-zero-one", "rescale-symmetric",
        "imagenet", "caffe", MEAN/STD of pixels from 0 to 1 such as "0.1307/0.3081", or an object.
        It replaces the normalization that `save_onnx` stored. If the graph of another library
        begins with a normalization, the choice applies before it.

    Returns
    -------
    Network
        The network, in host memory. Layers are named after the nodes, with "_" instead of
        characters other than letters and digits.

    Raises
    ------
    UserError
        If the file is unreadable or damaged, if it has nodes that mpidl has no layers for, or if
        the normalization is invalid. The message lists all unsupported nodes.
    """
    model = onnx_file.read(path, input_shape)
    nodes, arrays = [node.name for node in model.nodes], dict(model.constants)
    net, scaling = None if graph_alone else onnx_export.restored(model), None
    stored = None if net is None else net.normalization
    if net is None or max(map(math.prod, net.output_shapes)) > MAX_VALUES:
        net, scaling = _network(model, path)
        stored = onnx_export.stored_normalization(model, scaling)
    net.normalization = input_pixels.of_file(
        path, net, arrays, choice=normalization, stored=stored, scaling=scaling, nodes=nodes
    )
    return net


def _network(model, path):
    """Return the network of a graph, and the Scaling with which the graph begins or None."""
    builder, output = _build(model, path)
    builder.remove_unread(output)
    if not builder.layers or output.layer != builder.layers[-1].name:
        raise UserError(f"{printable(path)}: expected a network whose last node is its output")
    try:
        net = Network(builder.layers, model.image_shape, seed=None)
    except ValueError as error:
        raise UserError(f"{printable(path)}: its network cannot be built: {error}") from None
    net.parameters = {name: builder.arrays[name] for name in net.parameters}
    net.state = {name: builder.arrays[name] for name in net.state}
    return net, input_pixels.scaling_of(builder.scaling, model.image_shape[0])


def _build(model, path):
    """Return a Builder with all layers of the graph, and the Value of the graph's output."""
    onnx = library("onnx", path, "onnx")
    nodes = [
        node
        for node in model.nodes
        if not (node.domain in DOMAINS and onnx_file.compute_constant(node, model, path))
    ]
    nodes = onnx_patterns.replace(onnx, nodes, model.constants, model.output)
    builder = Builder(model._replace(nodes=nodes))
    images = Value(graph.IMAGES, model.image_shape, model.order)
    images = with_layout(images, model.layout) if model.layout else images
    values: dict[str, Any] = {model.images: images}
    problems, unknown = [], set()
    for proto in nodes:
        if proto.domain in DOMAINS and onnx_file.compute_constant(proto, model, path):
            continue
        name = f"{printable(proto.op_type)} {printable(proto.name or proto.output[0])}"
        shape = model.shapes.get(proto.output[0], "of unknown shape")
        try:
            if proto.domain not in DOMAINS or proto.op_type not in OPERATORS:
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
            continue
        for output, value in zip(proto.output, _listed(result), strict=False):
            if value is not None:
                values[output] = value
                builder.tensors.setdefault(value.layer, []).append(output)
    if problems:
        raise UserError(f"{printable(path)}: unsupported nodes: {'; '.join(problems)}")
    output = values.get(model.output)
    if not isinstance(output, Value):
        raise UserError(f"{printable(path)}: expected an output that depends on the images")
    if output.image or any(len(axis) > 1 for axis in output.layout):
        raise UserError(f"{printable(path)}: the output is a transposed image, flattened")
    is_of_steps = len(output.layout) == 3 and output.layout[:2] in (("H", "N"), ("", "N"))
    if output.layout and output.layout[0] != "N" and not is_of_steps:
        raise UserError(
            f"{printable(path)}: expected an output whose first axis is the mini-batch, found "
            f"{output.text()}"
        )
    if output.groups:
        raise UserError(f"{printable(path)}: the output has two axes of channels")
    return builder, output


def _listed(result):
    return result if isinstance(result, list) else [result]
