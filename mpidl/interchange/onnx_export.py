"""Write a network as an ONNX file.

The graph computes the network's output in prediction for any number of images. Arrays in the file
have the names of the network's learnables and state. The metadata describe the layers, so
`load_onnx` can restore the same network if the graph is unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mpidl.data.transforms import normalize
from mpidl.data.transforms.normalize import Normalization
from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.interchange import input_pixels
from mpidl.interchange.input_pixels import Scaling
from mpidl.interchange.onnx_file import Model
from mpidl.interchange.onnx_gates import from_onnx, to_onnx
from mpidl.interchange.weights import DAMAGES, library
from mpidl.nn import Network
from mpidl.nn import layers as nn
from mpidl.ops import check
from mpidl.ops.pool import pooling_matrix
from mpidl.ops.resize import checked_rule
from mpidl.ops.transposed import same_or_crops
from mpidl.text import printable
from mpidl.training.files import model_file

PRODUCER = "mpidl"
OPSET = 20  # the first operator set with Gelu
KEY = "mpidl"  # key of the network's description in the metadata
IMAGES, CENTRE, DIVISOR = "images", "normalization.centre", "normalization.divisor"

Shape = tuple[int, ...]


def _sides(padding):
    """Convert ((top, bottom), (left, right)) to the order of ONNX's attribute "pads"."""
    (top, bottom), (left, right) = padding
    return [top, left, bottom, right]


def _window(layer, shape):
    """Return the attributes of a pooling layer."""
    size = check.pair(layer.name, "size", layer.size, 1)
    stride = check.pair(layer.name, "stride", size if layer.stride is None else layer.stride, 1)
    padding = check.same_or_pads(layer.name, layer.padding, shape[1:], size, stride)
    return {"kernel_shape": size, "strides": stride, "pads": _sides(padding)}


def _conv(layer, shape):
    size, stride, dilation = (
        check.pair(layer.name, name, getattr(layer, name), 1)
        for name in ("size", "stride", "dilation")
    )
    padding = check.same_or_pads(layer.name, layer.padding, shape[1:], size, stride, dilation)
    return "Conv", {
        "kernel_shape": size,
        "strides": stride,
        "dilations": dilation,
        "group": layer.groups,
        "pads": _sides(padding),
    }


def _transposed_conv(layer, shape):
    size, stride = (
        check.pair(layer.name, name, getattr(layer, name), 1) for name in ("size", "stride")
    )
    pads = _sides(same_or_crops(layer.name, layer.cropping, size, stride))
    return "ConvTranspose", {"kernel_shape": size, "strides": stride, "pads": pads}


def _cross_channel_norm(layer, shape):
    constants = {"alpha": layer.alpha, "beta": layer.beta, "bias": layer.k}
    return "LRN", {"size": layer.window, **{k: float(v) for k, v in constants.items()}}


def _layer_norm(layer, shape):
    if _is_of_pixels(layer, shape):
        return "Transpose", {"perm": [0, 3, 1, 2]}  # after another one; see FIRST_NODES
    return "LayerNormalization", {"axis": 1, "epsilon": float(layer.epsilon)}


def _is_of_pixels(layer, shape):
    return layer.over == "channels" and len(shape) == 3


def _recurrent(layer, shape):
    if layer.returns == "last":
        return "Squeeze", {}  # after the node that computes the last state; see FIRST_NODES
    return "Transpose", {"perm": [2, 3, 0, 1]}


def _resize(layer, shape):
    rule = checked_rule(layer.name, layer.mode, layer.coordinates, layer.rounding)
    return "Resize", {
        "mode": "linear" if rule.mode == "bilinear" else rule.mode,
        "coordinate_transformation_mode": rule.coordinates,
        "nearest_mode": rule.rounding,
        "axes": [2, 3],
    }


def _adaptive_pool(layer, shape):
    size = check.pair(layer.name, "size", layer.size, 1)
    if size == (1, 1):
        return "GlobalAveragePool", {}
    windows = [n // m for n, m in zip(shape[1:], size, strict=True)]
    if _has_equal_windows(layer, shape):
        return "AveragePool", {"kernel_shape": windows, "strides": windows}
    return "MatMul", {}  # after another one; see FIRST_NODES


def _has_equal_windows(layer, shape):
    size = check.pair(layer.name, "size", layer.size, 1)
    return all(n % m == 0 for n, m in zip(shape[1:], size, strict=True))


def _hard_sigmoid(layer, shape):
    return "HardSigmoid", {"alpha": float(layer.alpha), "beta": float(layer.beta)}


# {layer class: function(layer, shape of the layer's first input) -> (operator, attributes)}
OPERATORS: dict[type[nn.Layer], Callable[[Any, Shape], tuple[str, dict[str, Any]]]] = {
    nn.Conv2D: _conv,
    nn.TransposedConv2D: _transposed_conv,
    nn.BatchNorm: lambda layer, shape: (
        "BatchNormalization",
        {"epsilon": float(layer.epsilon), "momentum": 1.0 - layer.decay},
    ),
    nn.CrossChannelNorm: _cross_channel_norm,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: lambda layer, shape: ("Add" if layer.affine else "Reshape", {}),
    nn.InstanceNorm: lambda layer, shape: (
        "InstanceNormalization",
        {"epsilon": float(layer.epsilon)},
    ),
    nn.ReLU: lambda layer, shape: ("Relu", {}),
    nn.LeakyReLU: lambda layer, shape: ("LeakyRelu", {"alpha": float(layer.scale)}),
    nn.PReLU: lambda layer, shape: ("PRelu", {}),
    nn.Clip: lambda layer, shape: ("Clip", {}),
    nn.HardSigmoid: _hard_sigmoid,
    nn.HardSwish: lambda layer, shape: ("HardSwish", {}),
    nn.Swish: lambda layer, shape: ("Mul", {}),  # Mul of x and its sigmoid
    nn.Tanh: lambda layer, shape: ("Tanh", {}),
    nn.Sigmoid: lambda layer, shape: ("Sigmoid", {}),
    nn.GELU: lambda layer, shape: ("Gelu", {"approximate": layer.approximate}),
    nn.Softmax: lambda layer, shape: ("Softmax", {"axis": 1}),
    nn.LSTM: _recurrent,
    nn.GRU: _recurrent,
    nn.MaxPool2D: lambda layer, shape: ("MaxPool", _window(layer, shape)),
    nn.AveragePool2D: lambda layer, shape: (
        "AveragePool",
        {**_window(layer, shape), "count_include_pad": int(layer.count_padding)},
    ),
    nn.GlobalAveragePool2D: lambda layer, shape: ("GlobalAveragePool", {}),
    nn.AdaptiveAveragePool2D: _adaptive_pool,
    nn.Resize2D: _resize,
    nn.ChannelShuffle: lambda layer, shape: ("Reshape", {}),  # after Reshape and Transpose
    nn.ChannelSlice: lambda layer, shape: ("Slice", {}),
    nn.Dropout: lambda layer, shape: ("Dropout", {}),
    nn.Flatten: lambda layer, shape: ("Flatten", {"axis": 1}),
    nn.Pad2D: lambda layer, shape: ("Pad", {}),
    nn.Dense: lambda layer, shape: ("Gemm", {"transB": 1}),
    nn.Multiply: lambda layer, shape: ("Mul", {}),
    nn.Scale: lambda layer, shape: ("Mul", {}),
    nn.StochasticDepth: lambda layer, shape: ("Identity", {}),
    nn.Add: lambda layer, shape: ("Sum", {}),
    nn.Concat: lambda layer, shape: ("Concat", {"axis": 1}),
}


def _pads(layer, shape):
    top, left, bottom, right = _sides(check.pads(layer.name, layer.padding, minimum=None))
    pads = np.array([0, 0, top, left, 0, 0, bottom, right])
    return {"pads": pads, "value": np.float32(layer.value)}


def _clip_limits(layer, shape):
    limits = {"low": np.float32(layer.low), "high": np.float32(layer.high)}
    return {name: limit if np.isfinite(limit) else None for name, limit in limits.items()}


def _steps(layer, shape):
    sizes = {"steps": np.array([0, 0, shape[0] * shape[2]], np.int64)}
    return sizes | ({"direction": np.array([0], np.int64)} if layer.returns == "last" else {})


def _sizes(layer, shape):
    before = {"roi": None, "scales": None}
    if layer.size is None:
        return before | {"scales": np.array(check.as_pair(layer.scale), np.float32)}
    return before | {"sizes": np.array(check.as_pair(layer.size), np.int64)}


def _pooling_matrices(layer, shape):
    if _has_equal_windows(layer, shape):
        return {}
    sizes = zip(shape[1:], check.as_pair(layer.size), strict=True)
    rows, columns = (pooling_matrix(n, m) for n, m in sizes)
    return {"rows": rows, "columns": np.ascontiguousarray(columns.T)}


def _groups(layer, shape):
    channels, *pixels = shape
    groups = np.array([0, layer.groups, channels // layer.groups, *pixels], np.int64)
    return {"groups": groups, "shape": np.array([0, *shape], np.int64)}


def _grouped(layer, shape):
    ones, zeros = (np.full(layer.groups, number, np.float32) for number in (1, 0))
    groups = {"groups": np.array([0, layer.groups, -1], np.int64), "ones": ones, "zeros": zeros}
    return groups | {"shape": np.array([0, *shape], np.int64)}


def _unit_factors(layer, shape):
    """Return gamma and beta for a layer without them. Beta is omitted if it is optional."""
    if layer.affine:
        return {}
    if isinstance(layer, nn.LayerNorm):
        return {"ones": np.ones(shape if layer.over == "image" else shape[:1], np.float32)}
    return {"ones": np.ones(shape[:1], np.float32), "zeros": np.zeros(shape[:1], np.float32)}


def _channel_range(layer, shape):
    numbers = {"start": layer.start, "stop": layer.stop, "axis": 1}
    return {name: np.array([number], np.int64) for name, number in numbers.items()}


# {layer class: function(layer, shape of the layer's first input) -> {name: constant}}. The
# constants are further inputs of the operator. An input that is None is omitted.
CONSTANTS: dict[type[nn.Layer], Callable[[Any, Shape], dict[str, Any]]] = {
    nn.AdaptiveAveragePool2D: _pooling_matrices,
    nn.Dropout: lambda layer, shape: {"ratio": np.float32(layer.probability)},
    nn.ChannelShuffle: _groups,
    nn.ChannelSlice: _channel_range,
    nn.Clip: _clip_limits,
    nn.GroupNorm: _grouped,
    nn.GRU: _steps,
    nn.InstanceNorm: _unit_factors,
    nn.LayerNorm: _unit_factors,
    nn.LSTM: _steps,
    nn.Pad2D: _pads,
    nn.Resize2D: _sizes,
}


def _constants(layer, shape):
    """Return the constants of a layer, {layer name.name: array, or None if omitted}."""
    values = CONSTANTS.get(type(layer), lambda layer, shape: {})(layer, shape)
    return {f"{layer.name}.{name}": value for name, value in values.items()}


def _input_shapes(net):
    """Return [(layer, shape of its first input), ...]."""
    shapes = {IMAGES: net.input_shape} | dict(zip(net.layer_names, net.output_shapes, strict=True))
    return [(layer, shapes[reads[0]]) for layer, reads in zip(net.layers, net.reads, strict=True)]


def _before_pooling(layer, shape, inputs, add):
    if len(inputs) == 1:
        return inputs
    x, rows, columns = inputs
    return [add("MatMul", [rows, x], f"{layer.name}.rows_pooled"), columns]


def _before_shuffle(layer, shape, inputs, add):
    x, groups, joined = inputs
    x = add("Reshape", [x, groups], f"{layer.name}.grouped")
    permutation = [0, 2, 1, *range(3, 2 + len(shape))]
    return [add("Transpose", [x], f"{layer.name}.exchanged", perm=permutation), joined]


def _before_channels_first(layer, shape, inputs, add):
    if not _is_of_pixels(layer, shape):
        return inputs
    x, *factors = inputs
    x = add("Transpose", [x], f"{layer.name}.channels_last", perm=[0, 2, 3, 1])
    attributes = {"axis": -1, "epsilon": float(layer.epsilon)}
    return [add("LayerNormalization", [x, *factors], f"{layer.name}.normalized", **attributes)]


def _before_offset(layer, shape, inputs, add):
    """Normalize groups as PyTorch does, because GroupNormalization differs between opsets."""
    x, *factors, groups, ones, zeros, image = inputs
    x, epsilon = add("Reshape", [x, groups], f"{layer.name}.grouped"), float(layer.epsilon)
    x = add("InstanceNormalization", [x, ones, zeros], f"{layer.name}.normalized", epsilon=epsilon)
    if not layer.affine:
        return [x, image]
    gamma, beta = factors
    x = add("Reshape", [x, image], f"{layer.name}.image")
    return [add("Mul", [x, gamma], f"{layer.name}.scaled"), beta]


def _before_images(layer, shape, inputs, add):
    """Add the recurrent node, between the nodes that move the steps before the mini-batch and back.

    Its input is (steps, N, C*W). Its outputs are all states (steps, 1, N, units), and the last one.
    """
    x, weight, recurrent_weight, *biases, steps = inputs[: len(inputs) - (layer.returns == "last")]
    x = add("Transpose", [x], f"{layer.name}.steps_first", perm=[2, 0, 1, 3])
    x = add("Reshape", [x, steps], f"{layer.name}.rows")
    attributes = {"hidden_size": layer.units}
    attributes |= {"direction": "reverse"} if layer.reverse else {}
    attributes |= {"linear_before_reset": 1} if isinstance(layer, nn.GRU) else {}
    operator, weights = type(layer).__name__, [weight, recurrent_weight, *biases[:1]]
    if layer.returns == "last":
        y = add(operator, [x, *weights], f"{layer.name}.last", omitted=1, **attributes)
        return [y, inputs[-1]]
    return [add(operator, [x, *weights], f"{layer.name}.states", **attributes)]


def _before_product(layer, shape, inputs, add):
    return [*inputs, add("Sigmoid", inputs, f"{layer.name}.sigmoid")]


# {layer class: function(layer, shape of its first input, inputs, add) -> inputs of its last node},
# for layers of several nodes. `add` adds a node and returns the name of its output. Its argument
# `omitted` is the number of outputs before it.
FIRST_NODES: dict[type[nn.Layer], Callable[..., list[str]]] = {
    nn.AdaptiveAveragePool2D: _before_pooling,
    nn.ChannelShuffle: _before_shuffle,
    nn.GroupNorm: _before_offset,
    nn.GRU: _before_images,
    nn.LayerNorm: _before_channels_first,
    nn.LSTM: _before_images,
    nn.Swish: _before_product,
}


def save_onnx(net: Network, path: str | os.PathLike[str], normalize_images: bool = True) -> None:
    """Write a network to an ONNX file (opset 20).

    The input is "images", float32 (N, C, H, W) with any N. The output has the name of the last
    layer. Resizing and cropping of images are not part of the graph.

    Parameters
    ----------
    net : Network
        The network. Dropout layers have no effect in the file, as in prediction.
    path : path
        The .onnx file to write.
    normalize_images : bool
        Whether the graph begins with the normalization of the images. If True, the input is pixels,
        from 0 to 255 for 8-bit images. If False, the input is normalized pixels. The file stores
        the normalization in both cases, and `load_onnx` returns it with the network. If the
        normalization is not known, it is not part of the graph.

    Raises
    ------
    UserError
        If a layer has no ONNX operator, the network is larger than 2 GiB, or the file cannot be
        written.
    """
    if not os.fspath(path).lower().endswith(".onnx"):
        raise UserError(f"{printable(path)}: expected a name that ends with .onnx")
    onnx = library("onnx", path, "onnx")
    unknown = [
        f"{layer.name} ({type(layer).__name__})"
        for layer in net.layers
        if type(layer) not in OPERATORS
    ]
    if unknown:
        raise UserError(f"{printable(path)}: ONNX has no operator for {', '.join(unknown)}")
    net = net.on(None)
    if net.normalization is not None and not net.normalization.is_known:
        normalize_images = False
    arrays = _file_arrays(net, net.parameters) | net.state
    arrays |= _scaling(net) if normalize_images else {}
    if sum(array.nbytes for array in arrays.values()) >= 1 << 31:
        raise UserError(f"{printable(path)}: expected a network of less than 2 GiB")
    tensors = [onnx.numpy_helper.from_array(np.ascontiguousarray(a), n) for n, a in arrays.items()]
    tensors += [
        onnx.numpy_helper.from_array(value, name)
        for layer, shape in _input_shapes(net)
        for name, value in _constants(layer, shape).items()
        if value is not None
    ]
    float32 = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        _nodes(onnx, net, normalize_images),
        "mpidl",
        [onnx.helper.make_tensor_value_info(IMAGES, float32, ["N", *net.input_shape])],
        [
            onnx.helper.make_tensor_value_info(
                net.layer_names[-1], float32, ["N", *net.output_shape]
            )
        ],
        tensors,
    )
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    proto = onnx.helper.make_model(
        graph, opset_imports=opsets, producer_name=PRODUCER, ir_version=9
    )
    onnx.helper.set_model_props(proto, {KEY: json.dumps(_description(net, normalize_images))})
    write_whole(path, proto.SerializeToString(deterministic=True))


def _scaling(net):
    """Return the arrays of the normalization in shapes that ONNX can broadcast."""
    arrays = {} if net.normalization is None else net.normalization.arrays()
    if not arrays:
        return {DIVISOR: np.float32(255)}
    centre, divisor = arrays.values()
    shape = (1, *centre.shape) if centre.ndim == 3 else (1, -1, 1, 1)
    return {CENTRE: centre.reshape(shape), DIVISOR: divisor.reshape(shape)}


# {layer class: its learnables with a number per channel that elementwise operators read}
OF_CHANNELS: dict[type[nn.Layer], tuple[str, ...]] = {
    nn.PReLU: ("slope",),
    nn.Scale: ("scale",),
    nn.GroupNorm: ("gamma", "beta"),
}


def _file_arrays(net, arrays):
    """Return the learnables as the file has them.

    Learnables of channels are reshaped to (C, 1, 1), so that ONNX can broadcast them. Those of
    recurrent layers are W, R and B of ONNX.
    """
    shapes, converted = dict(zip(net.layer_names, net.output_shapes, strict=True)), dict(arrays)
    for layer in net.layers:
        names = OF_CHANNELS.get(type(layer), ())
        for name in (f"{layer.name}.{name}" for name in names):
            if name in converted:
                axes_after = len(shapes[layer.name]) - 1
                converted[name] = converted[name].reshape(-1, *(1,) * axes_after)
        if isinstance(layer, nn.LSTM | nn.GRU):
            prefix = f"{layer.name}."
            learnables = {
                name.removeprefix(prefix): converted.pop(name)
                for name in arrays
                if name.startswith(prefix)
            }
            written = to_onnx(layer, learnables)
            converted |= {prefix + name: array for name, array in written.items()}
    return converted


def _learnables(net, arrays):
    """Return the learnables, given the arrays of the file; see `_file_arrays`."""
    learnables = dict(arrays)
    for layer in net.layers:
        if isinstance(layer, nn.LSTM | nn.GRU):
            names = [f"{layer.name}.{n}" for n in ("weight", "recurrent_weight", "bias")]
            weight, recurrent, *bias = (arrays[n][0] for n in names if n in net.parameters)
            written = from_onnx(layer, weight, recurrent, bias[0] if bias else None)
            learnables |= {f"{layer.name}.{name}": array for name, array in written.items()}
    return {
        name: _float32(learnables[name]).reshape(value.shape)
        for name, value in net.parameters.items()
    }


def _factors(layer, ranks, inputs, add):
    """Return the inputs of a product, with features (C,) as (C, 1, 1) if the other has images."""
    factors = list(inputs)
    for i in range(2):
        if ranks[i] < ranks[1 - i]:
            prefix, axes = f"{layer.name}.{i}", list(range(2, 1 + ranks[1 - i]))
            constant = add("Constant", [], f"{prefix}.axes", value_ints=axes)
            factors[i] = add("Unsqueeze", [inputs[i], constant], f"{prefix}.images")
    return factors


def _nodes(onnx, net, normalize_images):
    """Return the nodes of the graph."""
    nodes, names = [], {IMAGES: IMAGES}

    def add(operator, inputs, output, omitted=0, **attributes):
        outputs = [*[""] * omitted, output]
        nodes.append(onnx.helper.make_node(operator, inputs, outputs, output, **attributes))
        return output

    if normalize_images:
        for array in _scaling(net):
            operator = "Sub" if array == CENTRE else "Div"
            names[IMAGES] = add(operator, [names[IMAGES], array], f"{array}d")
    arrays = list(net.parameters | net.state)
    shapes = {IMAGES: net.input_shape} | dict(zip(net.layer_names, net.output_shapes, strict=True))
    for (layer, shape), reads in zip(_input_shapes(net), net.reads, strict=True):
        inputs = [names[read] for read in reads]
        if isinstance(layer, nn.Dense) and len(shape) > 1:
            inputs = [add("Flatten", inputs, f"{layer.name}.images", axis=1)]
        if isinstance(layer, nn.Multiply):
            ranks = [len(shapes[read]) for read in reads]
            inputs = _factors(layer, ranks, inputs, add)
        inputs += [name for name in arrays if name.rpartition(".")[0] == layer.name]
        constants = _constants(layer, shape)
        inputs += ["" if constants[name] is None else name for name in constants]
        if type(layer) in FIRST_NODES:
            inputs = FIRST_NODES[type(layer)](layer, shape, inputs, add)
        operator, attributes = OPERATORS[type(layer)](layer, shape)
        names[layer.name] = add(operator, inputs, layer.name, **attributes)
    return nodes


def _description(net, normalize_images):
    description = model_file.description_of(net) | {"normalize_images": normalize_images}
    normalization = net.normalization or Normalization()
    if not normalize_images and normalization.is_known:
        arrays = normalization.arrays()
        description["scaling"] = {name: array.tolist() for name, array in arrays.items()}
    return description


def stored_normalization(model: Model, scaling: Scaling | None) -> Normalization | None:
    """Return the normalization that `save_onnx` stored, or None for other files.

    `scaling` is the normalization at the beginning of the graph, or None if there is none.
    """
    if model.producer != PRODUCER:
        return None
    if scaling is not None:
        pixels = normalize.no_normalization(model.image_shape[0])
        return replace(scaling.after(pixels), name="zscore", reason=normalize.DESCRIBED)
    try:
        attributes = json.loads(model.description[KEY])
        texts = {"normalization": json.dumps(attributes.get("scaling", {}))}
        return input_pixels.described(texts, attributes["normalization"], model.image_shape)
    except DAMAGES:
        return None


def _float32(array):
    if array.dtype.kind != "f":
        raise TypeError(f"expected floats, found {array.dtype}")
    return np.ascontiguousarray(array, np.float32)


def restored(model: Model) -> Network | None:
    """Return the network of a file that `save_onnx` wrote, or None for any other file.

    If the file does not describe the normalization, `net.normalization` is None. The graph in the
    file must equal the graph that `save_onnx` writes for the described layers.
    """
    try:
        attributes = json.loads(model.description[KEY])
        arrays, names = model.constants, {"centre": CENTRE, "divisor": DIVISOR}
        scaling = {key: arrays[name] for key, name in names.items() if CENTRE in arrays}
        scaling = {k: v[0] if v.shape[2:] != (1, 1) else v.ravel() for k, v in scaling.items()}
        description, is_normalized = (
            model_file.described(attributes),
            attributes["normalize_images"],
        )
        if not is_normalized:
            description["normalization"] = "none"
        net = model_file.network_of(description, scaling)
        if not is_normalized:
            net.normalization = stored_normalization(model, None)
        if net.input_shape != model.image_shape:
            return None
        shapes = {k: v.shape for k, v in _file_arrays(net, net.parameters).items()}
        if any(arrays[name].shape != shape for name, shape in shapes.items()):
            return None
        net.parameters = _learnables(net, arrays)
        net.state = {name: _float32(arrays[name]) for name in net.state}
        net.unwhitened = description.get("unwhitened", [])
        expected = _nodes(library("onnx", "", "onnx"), net, is_normalized)
    except DAMAGES:
        return None
    graphs = [
        [node.SerializeToString(deterministic=True) for node in nodes]
        for nodes in (expected, model.nodes)
    ]
    return net if graphs[0] == graphs[1] else None
