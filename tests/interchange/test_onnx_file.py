"""Test that bad ONNX files give a one-line error, read no other files and need little memory."""

import re

import numpy as np
import onnx
import pytest
from image_sets import refusal
from onnx import TensorProto, helper
from onnx_models import model, node, saved

import mpidl as dl
from mpidl.interchange import onnx_file

SHAPE = (2, 4, 4)
WEIGHT = np.ones((3, 2, 3, 3), np.float32)
CONV = node("Conv", "x w", "y")


def external(path, location, target=None, **place):
    """Write a model whose weight is in another file, and return the model's path."""
    proto = model([CONV], {"w": WEIGHT}, SHAPE)
    (tensor,) = proto.graph.initializer
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **place}.items():
        tensor.external_data.add(key=key, value=str(value))
    if target is not None:
        target.write_bytes(b"\0" * 8 + WEIGHT.tobytes())
    path.write_bytes(proto.SerializeToString())
    return path


def test_external_data(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    path = external(folder / "a.onnx", "w.bin", folder / "w.bin", offset=8, length=WEIGHT.nbytes)
    assert np.array_equal(dl.load_onnx(path).parameters["y.weight"], WEIGHT)
    path = external(folder / "a.onnx", "w.bin", offset=8)
    assert np.array_equal(dl.load_onnx(path).parameters["y.weight"], WEIGHT)


@pytest.mark.parametrize(
    "location", ["../w.bin", "sub/../../w.bin", "{folder}/../w.bin", "link", ""]
)
def test_external_data_outside_the_folder(tmp_path, location):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "w.bin")
    location = location.format(folder=folder)
    path = external(folder / "a.onnx", location, tmp_path / "w.bin", offset=8)
    text = refusal(dl.load_onnx, path)
    assert text == (
        f"{path}: w: expected its data in a file in the folder of the ONNX file, found {location}"
    )


@pytest.mark.parametrize(
    "place, reason",
    [
        ({"offset": 9}, "bytes 9 to 225 of a file of 224 bytes"),
        ({"offset": -8}, "216 bytes at -8"),
        ({"length": 1 << 60}, "1152921504606846976 bytes at 0 for 54 numbers of float32"),
        ({"offset": "eight"}, "invalid literal"),
    ],
)
def test_external_data_beyond_their_file(tmp_path, place, reason):
    path = external(tmp_path / "a.onnx", "w.bin", tmp_path / "w.bin", **place)
    text = refusal(dl.load_onnx, path)
    assert text.startswith(f"{path}: w: its data cannot be read: ") and reason in text


def test_external_data_that_are_missing_or_larger_than_any_file(tmp_path):
    path = external(tmp_path / "a.onnx", "none.bin")
    assert refusal(dl.load_onnx, path) == f"{tmp_path}/none.bin: no such file"
    proto = onnx.load(external(path, "w.bin", tmp_path / "w.bin"), load_external_data=False)
    proto.graph.initializer[0].dims[0] = 1 << 50
    path.write_bytes(proto.SerializeToString())
    assert "its data cannot be read: bytes 0 to" in refusal(dl.load_onnx, path)


def test_unusable_files(tmp_path):
    missing = tmp_path / "none.onnx"
    assert refusal(dl.load_onnx, missing) == f"{missing}: no such file"
    path = tmp_path / "a.onnx"
    for content in (
        b"\xff" * 100,
        b"PK\x03\x04 a zip file",
        model([CONV], {}, SHAPE).SerializeToString(),
    ):
        path.write_bytes(content)
        assert refusal(dl.load_onnx, path).startswith(f"{path}: ")
    proto = model([CONV], {"w": WEIGHT}, SHAPE)
    proto.graph.initializer[0].dims[0] = 1 << 50  # larger than the data
    path.write_bytes(proto.SerializeToString())
    assert "not an ONNX file that can be read: " in refusal(dl.load_onnx, path)
    proto = model([CONV], {"w": WEIGHT}, SHAPE)
    del proto.opset_import[:]
    proto.opset_import.append(helper.make_opsetid("", 6))
    path.write_bytes(proto.SerializeToString())
    assert refusal(dl.load_onnx, path) == (
        f"{path}: expected operators of opset 7 or later, found 6"
    )


def test_inputs_and_outputs(tmp_path):
    path = tmp_path / "a.onnx"
    saved(path, [CONV], {"w": WEIGHT}, (2, "rows", "columns"))
    text = refusal(dl.load_onnx, path)
    assert text.endswith(
        "of shape (N, 2, 0, 0); input_shape=(C, H, W), or --input-shape of mpidl.convert, sets "
        "sizes that the file leaves open"
    )
    assert dl.load_onnx(path, input_shape=(2, 5, 6)).output_shape == (3, 3, 4)
    text = refusal(dl.load_onnx, path, input_shape=(3, 5, 6))
    assert text == f"{path}: input_shape (3, 5, 6): the file has images of shape (2, 0, 0) (0: any)"
    saved(path, [node("Relu", "x", "y")], {}, (7,))
    assert "expected an input of images (N, C, H, W), found x of shape (N, 7)" in refusal(
        dl.load_onnx, path
    )
    proto = model([CONV], {"w": WEIGHT}, SHAPE)
    proto.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1]))
    path.write_bytes(proto.SerializeToString())
    assert refusal(dl.load_onnx, path) == f"{path}: expected a network with one input, found x, z"
    proto = model([CONV, node("Relu", "y", "z")], {"w": WEIGHT}, SHAPE)
    proto.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 3, 2, 2]))
    path.write_bytes(proto.SerializeToString())
    assert refusal(dl.load_onnx, path) == f"{path}: expected a network with one output, found y, z"
    # an initializer may also be listed as an input, as before IR version 4
    proto = model([CONV], {"w": WEIGHT}, SHAPE)
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, WEIGHT.shape))
    path.write_bytes(proto.SerializeToString())
    assert dl.load_onnx(path).output_shape == (3, 2, 2)
    saved(path, [node("Identity", "w", "y")], {"w": WEIGHT}, SHAPE)
    assert "expected an output that depends on the images" in refusal(dl.load_onnx, path)
    saved(path, [node("Identity", "x", "y")], {}, SHAPE)
    assert "expected a network whose last node is its output" in refusal(dl.load_onnx, path)


def test_external_data_of_a_constant(tmp_path, monkeypatch):
    """The data are in the folder of the ONNX file, not in the current folder."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(WEIGHT.tobytes())
    (tmp_path / "w.bin").write_bytes((7 * WEIGHT).tobytes())
    tensor = onnx.numpy_helper.from_array(WEIGHT, "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    proto = model([CONV], {"w": WEIGHT}, SHAPE)
    del proto.graph.initializer[:]
    proto.graph.node.insert(0, node("Constant", "", "w", value=tensor))
    path = tmp_path / "sub" / "a.onnx"
    path.write_bytes(proto.SerializeToString())
    for folder in (tmp_path, tmp_path / "sub"):
        monkeypatch.chdir(folder)
        assert np.array_equal(dl.load_onnx(path).parameters["y.weight"], WEIGHT)


def test_many_constants_that_are_allowed_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "MAX_ELEMENTS", 1 << 22)
    nodes = [node("ConstantOfShape", "n", f"c{i}") for i in range(8)]
    nodes += [node("Slice", f"c{i} zero one zero", f"s{i}") for i in range(8)]
    names = " ".join(f"s{i}" for i in range(8))
    nodes += [
        node("Concat", names, "b", axis=0),
        node("Gather", "b zero", "d"),
        CONV,
        node("Add", "y d", "z"),
    ]
    constants = {"n": np.array([1 << 19]), "zero": np.array([0]), "one": np.array([1]), "w": WEIGHT}
    path = saved(tmp_path / "a.onnx", nodes, constants, SHAPE, output="z")
    assert "all computed constants together may have" in refusal(dl.load_onnx, path)


def test_the_type_of_the_input(tmp_path):
    proto = model([node("Relu", "x", "y")], {}, SHAPE)
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
    path = tmp_path / "a.onnx"
    path.write_bytes(proto.SerializeToString())
    text = refusal(dl.load_onnx, path)
    assert text == f"{path}: expected an input of float32 images, found another type"


def test_constants_larger_than_allowed(tmp_path):
    """Without a limit, a few bytes of a file could make the reader compute terabytes."""
    long = np.ones(1 << 15, np.float32)
    for nodes, constants in (
        ([node("ConstantOfShape", "n", "w")], {"n": np.array([1 << 20, 1 << 20, 3, 3])}),
        ([node("ConstantOfShape", "n", "w")], {"n": np.array([1 << 26, 1, 3, 3])}),
        ([node("Mul", "a b", "w")], {"a": long[:, None], "b": long}),
        (
            [node("Gather", "a i", "w", axis=1)],
            {"a": np.ones((1 << 14, 1)), "i": np.zeros(1 << 16, int)},
        ),
    ):
        path = saved(tmp_path / "a.onnx", [*nodes, CONV], constants, SHAPE)
        text = refusal(dl.load_onnx, path)
        assert re.search(r"the constant cannot be computed: it would have \d+ numbers", text)


def test_a_constant_of_an_unknown_type(tmp_path):
    tensor = onnx.numpy_helper.from_array(WEIGHT, "w")
    tensor.data_type = 99
    path = saved(tmp_path / "a.onnx", [node("Constant", "", "w", value=tensor), CONV], {}, SHAPE)
    text = refusal(dl.load_onnx, path)
    assert text == f"{path}: Constant w: the constant cannot be computed: KeyError(99)"


def test_images_that_no_memory_could_hold(tmp_path):
    pads = np.array([0, 0, 1 << 40, 0, 0, 0, 1 << 40, 0])
    for nodes, shape, reason in (
        ([CONV], (2, 1 << 17, 4), "images of shape (2, 131072, 4): expected sizes up to 65536"),
        ([CONV], (2, 1 << 16, 1 << 16), "it computes more than 268435456 values per image"),
        ([node("Flatten", "x", "y")], (2, 1 << 16, 1 << 16), "it computes more than"),
        ([node("Pad", "x pads", "y")], SHAPE, "it computes more than"),
    ):
        constants = {"w": WEIGHT} if nodes == [CONV] else {"pads": pads}
        path = saved(tmp_path / "a.onnx", nodes, constants, shape)
        assert reason in refusal(dl.load_onnx, path)
