"""Test that any bytes of a weight file give weights or a one-line UserError, in little memory."""

import json

import numpy as np
import onnx
import parsers
import pytest
from fuzzing import FUZZ, bounded, fuzz, impatient
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from parsers import attempt

import mpidl as dl
from mpidl.interchange import onnx_import

__all__ = ["bounded", "impatient"]


@pytest.mark.parametrize("name", parsers.NETWORKS)
def test_damaged_files_of_networks(tmp_path, name):
    fuzz(name, tmp_path)


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
def test_hostile_headers(tmp_path_factory, header, length, data):
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    text = json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    attempt(dl.load_weights, parsers.network(), path)


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
    """Graphs of valid operators may have any attributes and inputs."""
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
