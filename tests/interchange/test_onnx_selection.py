"""Test ONNX operators that select rows, columns, steps and states."""

import numpy as np
import pytest
from image_sets import refusal
from onnx_models import difference, node, saved, scores, session_scores, without_description
from single_rank import numbers

import mpidl as dl

SHAPE = (4, 6, 5)
IMAGES = numbers("images", 18, *SHAPE, low=-3, high=3, dtype=np.float32)
CONSTANTS = {
    "one": np.array([1]),
    "three": np.array([3]),
    "two_one": np.array([2, 1]),
    "five_three": np.array([5, 3]),
    "two_three": np.array([2, 3]),
    "crop": np.array([0, 0, -1, 0, 0, 0, -2, -1]),
    "crop_and_border": np.array([0, 0, -1, 2, 0, 0, 1, -1]),
    "last": np.array(-1),
    "second": np.array([1]),
    "w": numbers("w", 3, 4, 3, 3, dtype=np.float32),
    "steps_first": np.array([0, 0, 20]),
    "d": numbers("d", 20, 7, dtype=np.float32),
    "rows": np.array([0, 6, 20]),
    "huge": np.array([1 << 62]),
    "minus_one": np.array([-1]),
}
TO_ROWS = [node("Transpose", "x", "t", perm=[0, 2, 1, 3]), node("Reshape", "t rows", "r")]
# {case: (nodes, layers)}
CASES = {
    "Slice of columns": ([node("Slice", "x one three three", "y")], "Pad2D"),
    "Slice of rows and columns": (
        [node("Slice", "x two_one five_three two_three", "y")],
        "Pad2D Pad2D",
    ),
    "Pad that removes pixels": ([node("Pad", "x crop", "y")], "Pad2D"),
    "Pad on one side alone": ([node("Pad", "x crop_and_border", "y")], "Pad2D"),
    "a convolution of fewer pixels": (
        [node("Pad", "x crop", "a"), node("Conv", "a w", "y", pads=[1, 1, 1, 1])],
        "Pad2D Conv2D",
    ),
    "Gather of a channel": (
        [node("Gather", "x second", "a", axis=1), node("Relu", "a", "y")],
        "ChannelSlice ReLU",
    ),
    "Gather of the last row of flattened rows": (
        [*TO_ROWS, node("Gather", "r last", "g", axis=1), node("MatMul", "g d", "y")],
        "Pad2D Flatten Dense",
    ),
    "Slice of the last of flattened rows": (
        [
            *TO_ROWS,
            node("Slice", "r minus_one huge one", "g"),
            node("Flatten", "g", "f"),
            node("Gemm", "f d", "y"),
        ],
        "Pad2D Flatten Dense",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_onnxruntime(tmp_path, case):
    nodes, expected = CASES[case]
    read = {name for n in nodes for name in n.input if name in CONSTANTS}
    constants = {name: CONSTANTS[name] for name in sorted(read)}
    path = saved(tmp_path / "a.onnx", nodes, constants, SHAPE, opset=17)
    net = dl.load_onnx(path, normalization="none")
    assert [type(layer).__name__ for layer in net.layers] == expected.split()
    assert difference(net, path, IMAGES) <= 2e-6


def test_a_row_of_images(tmp_path):
    """The rows of the output are one axis in mpidl, and none in the graph."""
    path = saved(
        tmp_path / "a.onnx", [node("Gather", "x last", "y", axis=2)], CONSTANTS, SHAPE, opset=17
    )
    net = dl.load_onnx(path, normalization="none")
    assert net.output_shape == (4, 1, 5)
    assert np.array_equal(scores(net, IMAGES)[:, :, 0], session_scores(path, IMAGES))


UNSUPPORTED = {
    "it selects 2 indices of axis 1 of (N, 4, 6, 5)": [node("Gather", "x two_three", "y", axis=1)],
    "it selects 1 indices of axis 0 of (N, 4, 6, 5)": [node("Gather", "x second", "y")],
    "it selects 3 to 4 of 3": [
        node("Slice", "x one huge one", "s"),
        node("Gather", "s three", "y", axis=1),
    ],
    "axis is 4 of (N, 4, 6, 5)": [node("Slice", "x one three four", "y")],
    "it selects images": [node("Slice", "x one three zero", "y")],
    "it selects a part of axis 2 of (N, 6, 20)": [
        *TO_ROWS,
        node("Slice", "r one three two", "y"),
    ],
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_forms(tmp_path, reason):
    constants = CONSTANTS | {"zero": np.array([0]), "two": np.array([2]), "four": np.array([4])}
    path = saved(tmp_path / "a.onnx", UNSUPPORTED[reason], constants, SHAPE, opset=17)
    text = refusal(dl.load_onnx, path)
    assert text.startswith(f"{path}: unsupported nodes: ") and reason in text


def test_rows_are_removed_in_both_directions(tmp_path):
    net = dl.Network([dl.Pad2D(((-2, 1), (0, -1)), 0.5), dl.Dense(3)], SHAPE, seed=1)
    path = tmp_path / "a.onnx"
    dl.save_onnx(net, path, normalize_images=False)
    assert dl.load_onnx(path).spec() == net.spec()
    graph_alone = dl.load_onnx(without_description(path, tmp_path / "b.onnx"), normalization="none")
    for read in (net, graph_alone):
        assert difference(read, path, IMAGES) <= 2e-6
