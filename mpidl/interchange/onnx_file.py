"""Read an ONNX file: check the graph, load arrays, and compute constant results.

A file may be damaged or malicious. protobuf checks lengths during parsing. External data must be in
files in the folder of the ONNX file, and arrays must not extend past the end of such a file.
Constants are computed only with operators whose result sizes are known in advance.
"""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from mpidl.errors import UserError
from mpidl.files import check_regular, unreadable
from mpidl.interchange.weights import library
from mpidl.text import printable

OLDEST_OPSET = 7
BATCH = -(1 << 62)  # placeholder for the mini-batch size in computed shapes
FLOAT = 1  # ONNX's code for the type float32
LARGE = 1024  # number of elements; ONNX needs only smaller constants to infer shapes
MAX_ELEMENTS = (4 << 30) // 8  # of all computed constants together: 4 GiB, 8 bytes an element
LARGEST = 1 << 16  # maximum accepted number of channels, rows or columns of an image
CHANNELS_LAST = (1, 2, 0)
BEFORE_RECURRENT = ("Add", "Cast", "Div", "Dropout", "Gelu", "Identity", "LayerNormalization")
BEFORE_RECURRENT += ("LeakyRelu", "MatMul", "Mul", "Relu", "Sigmoid", "Sub", "Tanh")
BEFORE_TRANSPOSE = ("Add", "Cast", "Div", "Identity", "Mul", "Pad", "Sub")
FOLDABLE = frozenset(
    """
    Add Cast Ceil Concat ConstantOfShape Div Equal Expand Floor Gather Identity Max Min Mul Neg
    ReduceProd Reshape Shape Size Slice Sqrt Squeeze Sub Transpose Unsqueeze Where
    """.split()
)


class Model(NamedTuple):
    """An ONNX graph with one image input."""

    nodes: list[Any]  # the nodes on which the output depends, in topological order
    # {name: array} of the initializers, and of the results that `compute_constant` adds.
    constants: dict[str, np.ndarray]
    images: str
    image_shape: tuple[int, ...]  # shape (C, H, W) of an image
    # (1, 2, 0) if the input is (N, H, W, C) and the graph transposes it first. Empty otherwise.
    order: tuple[int, ...]
    # Letters of the axes of an image for each axis of an input with 3 axes (see `Value.layout`):
    # (N, steps, features) or (steps, N, features). Empty for images.
    layout: tuple[str, ...]
    batch: int  # number of images in a mini-batch, or 0 if the file does not fix this number
    output: str
    shapes: dict[str, str]  # {name: text} of the shapes that ONNX infers, for messages
    opset: int  # version of ONNX's operators
    description: dict[str, str]  # metadata of the file, {key: text}
    producer: str  # name of the program that wrote the file, as the file states it
    computed: list[int]  # number of elements of each constant that `compute_constant` has computed


def read(path: str | os.PathLike[str], input_shape: tuple[int, ...] | None = None) -> Model:
    """Read and check an ONNX file.

    Raises UserError if the file is unreadable, damaged, older than opset 7, or not a network with
    one image input and one output. `input_shape` (C, H, W) is required if the file does not fix it.
    """
    onnx = library("onnx", path, "onnx")
    try:
        check_regular(os.stat(path))
        proto = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise unreadable(path, error) from None
    except Exception as error:  # DecodeError or, for some kinds of damage, other types
        raise _not_onnx(path, error) from None
    opsets = {opset.domain: opset.version for opset in proto.opset_import}
    opset = opsets.get("", opsets.get("ai.onnx", 0))
    if opset < OLDEST_OPSET:
        raise UserError(
            f"{printable(path)}: expected operators of opset {OLDEST_OPSET} or later, found "
            f"{opset or 'none'}"
        )
    constants = {}
    try:
        for tensor in list(proto.graph.initializer):
            constants[tensor.name] = _array(onnx, tensor, path)
            is_external = tensor.data_location == onnx.TensorProto.EXTERNAL
            if is_external or constants[tensor.name].size > LARGE:
                _declare_as_input(onnx, proto.graph, tensor)
        onnx.checker.check_graph(proto.graph, _context(onnx, proto))
        shapes = _inferred_shapes(onnx, proto)
    except UserError:
        raise
    except Exception as error:
        raise _not_onnx(path, error) from None
    if len(proto.graph.output) != 1:
        names = ", ".join(printable(output.name) for output in proto.graph.output)
        raise UserError(f"{printable(path)}: expected a network with one output, found {names}")
    output = proto.graph.output[0].name
    nodes = _ancestors(proto.graph.node, output)
    images, (batch, *image_shape), order, layout = _image_input(
        proto.graph, nodes, constants, input_shape, path
    )
    return Model(
        nodes=nodes,
        constants=constants,
        images=images,
        image_shape=tuple(image_shape),
        order=order,
        layout=layout,
        batch=batch,
        output=output,
        shapes=shapes,
        opset=opset,
        description={entry.key: entry.value for entry in proto.metadata_props},
        producer=proto.producer_name,
        computed=[],
    )


def _not_onnx(path, error):
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = "".join(c if c.isprintable() else " " for c in lines[0])
    return UserError(f"{printable(path)}: not an ONNX file that can be read: {text:.300}")


def _context(onnx, proto):
    context = onnx.checker.C.CheckerContext()
    context.ir_version = proto.ir_version
    context.opset_imports = {opset.domain: opset.version for opset in proto.opset_import}
    return context


def _array(onnx, tensor, path):
    """Return an initializer as an array. Read external data if the location is allowed."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return _external_array(onnx, tensor, path)
    if min(tensor.dims, default=0) < 0:
        raise ValueError(f"{tensor.name} has a negative size")
    return onnx.numpy_helper.to_array(tensor)


def _external_array(onnx, tensor, path):
    place = {entry.key: entry.value for entry in tensor.external_data}
    folder = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    target = os.path.realpath(os.path.join(folder, place.get("location", "")))
    text = f"{printable(path)}: {printable(tensor.name)}"
    if os.path.commonpath([folder, target]) != folder or target == folder:
        raise UserError(
            f"{text}: expected its data in a file in the folder of the ONNX file, found "
            f"{printable(place.get('location', ''))}"
        )
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    count = math.prod(tensor.dims)
    try:
        offset = int(place.get("offset", 0))
        length = int(place.get("length", count * dtype.itemsize))
        size = os.path.getsize(target)
        if min([0, offset, *tensor.dims]) < 0 or length != count * dtype.itemsize:
            raise ValueError(f"{length} bytes at {offset} for {count} numbers of {dtype}")
        if offset + length > size:
            raise ValueError(f"bytes {offset} to {offset + length} of a file of {size} bytes")
        return np.fromfile(target, dtype, count, offset=offset).reshape(tuple(tensor.dims))
    except OSError as error:
        raise unreadable(target, error) from None
    except ValueError as error:
        raise UserError(f"{text}: its data cannot be read: {error}") from None


def _declare_as_input(onnx, graph, tensor):
    """Declare an initializer as an input, so that ONNX's checker does not copy the data.

    Otherwise, the checker would also look for external data in the wrong folder.
    """
    info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    if tensor.name not in {value.name for value in graph.input}:
        graph.input.append(info)
    graph.initializer.remove(tensor)


def _inferred_shapes(onnx, proto):
    """Return the shapes that ONNX infers, as {name: text}."""
    inferred = onnx.shape_inference.infer_shapes(proto)
    shapes = {}
    for info in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output):
        if info.type.tensor_type.HasField("shape"):
            dims = info.type.tensor_type.shape.dim
            sizes = [str(d.dim_value) if d.HasField("dim_value") else d.dim_param for d in dims]
            shapes[info.name] = f"({', '.join(size or '?' for size in sizes)})"
    return shapes


def _image_input(graph, nodes, constants, input_shape, path):
    """Return the name and shape (N or 0, C, H, W) of the only input that is not constant.

    The third and the fourth result are the order and the layout of the input's axes (see `Model`).
    """
    inputs = [value for value in graph.input if value.name not in constants]
    if len(inputs) != 1:
        names = ", ".join(printable(value.name) for value in inputs) or "none"
        raise UserError(f"{printable(path)}: expected a network with one input, found {names}")
    if inputs[0].type.tensor_type.elem_type != FLOAT:
        raise UserError(
            f"{printable(path)}: expected an input of float32 images, found another type"
        )
    batch, *sizes = [dim.dim_value for dim in inputs[0].type.tensor_type.shape.dim] or [0]
    layout = _sequence_layout(nodes, inputs[0].name) if len(sizes) == 2 else ()
    if layout:  # a sequence of T steps with F features becomes an image (1, T, F)
        batch, steps = (batch, sizes[0]) if layout[0] == "N" else (sizes[0], batch)
        sizes = [1, steps, sizes[1]]
    order = CHANNELS_LAST if _is_transposed_first(nodes, inputs[0].name) else ()
    if order and len(sizes) == 3:
        sizes = [sizes[2], *sizes[:2]]
    if input_shape is not None:
        matches = len(sizes) == 3 and all(
            size in (0, expected) for size, expected in zip(sizes, input_shape, strict=False)
        )
        if not matches or len(input_shape) != 3:
            raise UserError(
                f"{printable(path)}: input_shape {tuple(input_shape)}: the file has images of "
                f"shape {tuple(sizes)} (0: any)"
            )
        sizes = list(input_shape)
    if len(sizes) != 3 or min(sizes) < 1:
        raise UserError(
            f"{printable(path)}: expected an input of images (N, C, H, W), found "
            f"{printable(inputs[0].name)} of shape ({', '.join(['N', *map(str, sizes)])}); "
            "input_shape=(C, H, W), or --input-shape of mpidl.convert, sets sizes that the file "
            "leaves open"
        )
    if max(sizes) > LARGEST:
        raise UserError(
            f"{printable(path)}: images of shape {tuple(sizes)}: expected sizes up to {LARGEST}"
        )
    return inputs[0].name, (batch, *sizes), order, layout


def _sequence_layout(nodes, name):
    """Return the layout of an input with 3 axes that an LSTM or GRU reads, or () otherwise.

    The node may read the input after transpositions and operators that preserve the axes.
    """
    permutations = {name: (0, 1, 2)}  # {value: axes of the input}
    for node in nodes:
        axes = permutations.get(node.input[0]) if node.input else None
        if axes is None:
            continue
        attributes = {a.name: list(a.ints) or a.i for a in node.attribute}
        if node.op_type in ("GRU", "LSTM"):
            is_batch_first = attributes.get("layout", 0)
            position = axes[0] if is_batch_first else axes[1]
            return {0: ("N", "H", "W"), 1: ("H", "N", "W")}.get(position, ())
        perm = attributes.get("perm", [2, 1, 0])
        if node.op_type == "Transpose" and sorted(perm) == [0, 1, 2]:
            permutations[node.output[0]] = tuple(axes[i] for i in perm)
        elif node.op_type in BEFORE_RECURRENT:
            permutations[node.output[0]] = axes
    return ()


def _is_transposed_first(nodes, name):
    """Return whether the graph transposes images (N, H, W, C) first or after normalizing them."""
    readers = collections.defaultdict(list)
    for node in nodes:
        for read in set(node.input):
            readers[read].append(node)
    steps = readers[name]
    while len(steps) == 1 and steps[0].op_type in BEFORE_TRANSPOSE:
        steps = readers[steps[0].output[0]]
    permutations = [
        [list(a.ints) for a in node.attribute if a.name == "perm"]
        for node in steps
        if node.op_type != "Shape"
    ]
    return bool(permutations) and all(p == [[0, 3, 1, 2]] for p in permutations)


def compute_constant(node: Any, model: Model, path: str | os.PathLike[str]) -> bool:
    """Compute a node that reads only constants, and add its results to the model's constants.

    Raises UserError if a result cannot be computed or would be too large. Returns whether the
    results were added.
    """
    onnx, constants = library("onnx", path, "onnx"), model.constants
    names = list(dict.fromkeys(name for name in node.input if name))
    is_foldable = node.op_type in FOLDABLE and names and all(name in constants for name in names)
    if not is_foldable and node.op_type != "Constant":
        return False
    try:
        if node.op_type == "Constant":
            constants[node.output[0]] = _constant(onnx, node, path)
            return True
        arrays = {name: constants[name] for name in names}
        if node.op_type in ("ConstantOfShape", "Expand"):
            # All images have the same constants: broadcasting repeats those of one image.
            sizes = arrays[names[-1]]
            arrays[names[-1]] = np.where(sizes == BATCH, 1, sizes)
        count = _size(node, [arrays[name] for name in node.input if name])
        model.computed.append(count)
        if count < 0 or sum(model.computed) > MAX_ELEMENTS:
            raise ValueError(
                f"it would have {count} numbers; all computed constants together may have "
                f"{MAX_ELEMENTS}"
            )
        infos = [onnx.helper.make_empty_tensor_value_info(name) for name in names]
        results = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output]
        graph = onnx.helper.make_graph([node], "constant", infos, results)
        opsets = [onnx.helper.make_opsetid("", model.opset)]
        single = onnx.helper.make_model(graph, opset_imports=opsets)
        evaluator = library("onnx.reference", path, "onnx").ReferenceEvaluator(single)
        values = evaluator.run(None, arrays)
    except UserError:
        raise
    except Exception as error:
        is_clear = str(error) and not isinstance(error, LookupError)
        reason = (str(error) if is_clear else repr(error)).splitlines()[0]
        raise UserError(
            f"{printable(path)}: {node.op_type} {printable(node.output[0])}: the constant cannot "
            f"be computed: {reason:.200}"
        ) from None
    constants.update(zip(node.output, map(np.asarray, values), strict=False))
    return True


def _constant(onnx, node, path):
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if attribute.name == "value":
            return _array(onnx, value, path)
        if attribute.name in ("value_float", "value_floats"):
            return np.array(value, np.float32)
        if attribute.name in ("value_int", "value_ints"):
            return np.array(value, np.int64)
    return np.zeros(0, np.float32)


def _size(node, arrays):
    """Return an upper bound on the number of elements in the result of a node."""
    if node.op_type == "ConstantOfShape":
        return math.prod(int(n) for n in arrays[0].ravel())
    if node.op_type == "Expand":
        return math.prod(np.broadcast_shapes(arrays[0].shape, tuple(map(int, arrays[1].ravel()))))
    if node.op_type in ("Add", "Div", "Equal", "Max", "Min", "Mul", "Sub", "Where"):
        return math.prod(np.broadcast_shapes(*(array.shape for array in arrays)))
    if node.op_type == "Gather":
        return arrays[0].size * max(arrays[1].size, 1)
    return sum(array.size for array in arrays)


def _ancestors(nodes: Iterable[Any], output: str) -> list[Any]:
    """Return the nodes on which the output depends, in the order of `nodes`."""
    names, ancestors = {output}, []
    for node in reversed(list(nodes)):
        if names.intersection(node.output):
            names.update(node.input)
            ancestors.append(node)
    return ancestors[::-1]
