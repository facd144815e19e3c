"""Any bytes of a weight file give weights or a UserError of one line, in little memory."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import onnx
from fuzzing import FUZZ, attempt, bounded
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

import mpidl as dl
from mpidl.interchange import network_files, onnx_import

__all__ = ["bounded"]


def network():
    return dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.Dense(3, name="fc")], (2, 6, 5))


def build(input_shape, outputs):
    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.Dense(outputs, name="fc")]
    return dl.Network(layers, input_shape, seed=None)


HEADERS = st.dictionaries(
    st.sampled_from(["fc.weight", "fc.bias", "__metadata__", "x"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F64", "BF16", "I64", "F99", "C64"]),
            "shape": st.lists(st.sampled_from([0, 1, 3, 48, 2**31, 2**62]), max_size=5),
            "data_offsets": st.lists(st.sampled_from([0, 4, 576, 2**40, 2**63]), max_size=3),
        }
    ),
    max_size=3,
)


@FUZZ
@given(header=HEADERS, length=st.sampled_from([None, 0, 3, 2**40, 2**63]), data=st.binary())
def test_damaged_files(tmp_path_factory, header, length, data):
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    text = json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    attempt(dl.load_weights, network(), path)


@FUZZ
@given(data=st.data())
def test_damaged_valid_files(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    dl.save_weights(network(), path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    attempt(dl.load_weights, network(), path)
    attempt(network_files.load_into, path, build, (2, 6, 5), 3)


@functools.cache
def onnx_bytes():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.onnx"
        layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.MaxPool2D(2), dl.Dropout(), dl.Dense(3)]
        dl.save_onnx(dl.Network(layers, (2, 6, 5)), path)
        proto = onnx.load(path)
        del proto.metadata_props[:]
        return path.read_bytes(), proto.SerializeToString()


@FUZZ
@given(data=st.data())
def test_damaged_onnx_files(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "a.onnx"
    content = bytearray(data.draw(st.sampled_from(onnx_bytes())))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.sampled_from([None, len(content) // 2]))])
    attempt(dl.load_onnx, path)


OPERATORS = sorted(onnx_import.OPERATORS) + ["Constant", "ConstantOfShape"]
NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 2**31, 2**62])
ATTRIBUTES = st.dictionaries(
    st.sampled_from(
        "pads strides dilations kernel_shape group axis axes auto_pad perm to size alpha value_int "
        "epsilon ceil_mode ratio keepdims".split()
    ),
    st.one_of(
        NUMBERS, st.lists(NUMBERS, min_size=1, max_size=5), st.floats(), st.just("SAME_UPPER")
    ),
    max_size=4,
)


@FUZZ
@given(data=st.data())
def test_hostile_onnx_graphs(tmp_path_factory, data):
    """Graphs of valid operators with any attributes and inputs."""
    path, nodes, names = tmp_path_factory.mktemp("fuzz") / "a.onnx", [], ["x", "w", "n", ""]
    for i in range(data.draw(st.integers(1, 4))):
        inputs = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
        operator, attributes = data.draw(st.sampled_from(OPERATORS)), data.draw(ATTRIBUTES)
        nodes.append(helper.make_node(operator, inputs, [f"v{i}"], **attributes))
        names.append(f"v{i}")
    constants = {"w": data.draw(NUMBERS), "n": data.draw(st.lists(NUMBERS, max_size=4))}
    float32 = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", float32, ["N", 2, 5, 4])],
        [helper.make_tensor_value_info(names[-1], float32, ["N", 3])],
        [
            onnx.numpy_helper.from_array(np.full((3, 2, 2, 2), constants["w"], np.float32), "w"),
            onnx.numpy_helper.from_array(np.array(constants["n"], np.int64), "n"),
        ],
    )
    opset = data.draw(st.sampled_from([7, 11, 13, 20]))
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    path.write_bytes(proto.SerializeToString())
    attempt(dl.load_onnx, path)
