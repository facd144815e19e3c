"""Test ONNX operators that resize images, and that select and reorder channels."""

import numpy as np
import onnx
import pytest
from image_sets import refusal
from onnx import helper
from onnx_models import difference, node, saved, scores, without_description
from single_rank import numbers

import mpidl as dl

SHAPE = (4, 6, 9)
IMAGES = numbers("images", 18, *SHAPE, low=-3, high=3, dtype=np.float32)


def resize(form, **attributes):
    """Return a Resize node that reads its scales or sizes from a constant with this name."""
    inputs = ["x", "", form] if form.startswith("scales") else ["x", "", "", form]
    return helper.make_node("Resize", inputs, ["y"], "y", **attributes)


CONSTANTS = {
    "scales": np.float32([1, 1, 2, 3]),
    "scales_of_pixels": np.float32([1.5, 0.5]),
    "scales_down": np.float32([1, 1, 0.7, 1 / 3]),
    "scales_of_channels": np.float32([1, 2, 1, 1]),
    "scales_of_one": np.float32([1, 1, 1, 1]),
    "sizes": np.array([18, 4, 10, 3]),
    "sizes_of_pixels": np.array([14, 5]),
    "sizes_of_one": np.array([1, 1]),
    "sizes_of_channels": np.array([18, 5, 10, 3]),
    "empty": np.float32([]),
    "grouped": np.array([0, 2, 2, 6, 9]),
    "other_groups": np.array([-1, 4, 1, 6, 9]),
    "joined": np.array([0, -1, 6, 9]),
    "parts": np.array([3, 1]),
    "wrong_parts": np.array([3, 2]),
    "one": np.array([1]),
    "three": np.array([3]),
    "huge": np.array([1 << 62]),
    "minus_three": np.array([-3]),
    "two": np.array([2]),
    "zero_one": np.array([0, 1]),
    "all_three": np.array([1 << 62, 3]),
    "left": np.float32(np.eye(6)[::-1]),
}
RULES = {
    "half_pixel": "round_prefer_floor round_prefer_ceil floor ceil",
    "pytorch_half_pixel": "round_prefer_floor",
    "align_corners": "round_prefer_floor",
    "asymmetric": "floor ceil",
}
LINEAR = {"mode": "linear"}
TENSORFLOW = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"}
# {case: (nodes, opset, layers)}
CASES = {
    f"Resize, {form}, {coordinates}, {mode}": (
        [
            resize(
                form,
                **attributes,
                coordinate_transformation_mode=coordinates,
                **({"axes": [2, 3]} if "of_" in form else {}),
            )
        ],
        19,
        "Resize2D",
    )
    for form in ("scales", "scales_of_pixels", "scales_down", "sizes", "sizes_of_pixels")
    for coordinates, roundings in RULES.items()
    for mode, attributes in (
        *((rounding, {"nearest_mode": rounding}) for rounding in roundings.split()),
        ("linear", LINEAR),
    )
} | {
    "Resize to one pixel": (
        [
            resize(
                "sizes_of_one", **LINEAR, axes=[2, 3], coordinate_transformation_mode="half_pixel"
            )
        ],
        18,
        "Resize2D",
    ),
    "Resize, defaults": ([resize("sizes")], 13, "Resize2D"),
    "Resize, empty inputs": (
        [node("Resize", "x empty empty sizes", "y", **LINEAR)],
        11,
        "Resize2D",
    ),
    "Resize, symmetric": (
        [resize("scales", coordinate_transformation_mode="half_pixel_symmetric", **LINEAR)],
        19,
        "Resize2D",
    ),
    "Resize, as TensorFlow does": (
        [node("Resize", "x empty empty sizes", "y", **TENSORFLOW)],
        11,
        "Resize2D",
    ),
    "Resize before opset 11": ([node("Resize", "x scales", "y", **LINEAR)], 10, "Resize2D"),
    "Resize by 1": ([resize("scales_of_one"), node("Relu", "y", "z")], 19, "ReLU"),
    "Upsample": ([node("Upsample", "x scales", "y")], 9, "Resize2D"),
    "Upsample, linear": (
        [node("Upsample", "x", "y", scales=[1.0, 1.0, 2.0, 3.0], **LINEAR)],
        7,
        "Resize2D",
    ),
    "shuffle": (
        [node("Reshape", "x grouped", "a"), node("Transpose", "a", "b", perm=[0, 2, 1, 3, 4])]
        + [node("Reshape", "b joined", "y")],
        17,
        "ChannelShuffle",
    ),
    "groups that are joined again": (
        [node("Reshape", "x other_groups", "a"), node("Reshape", "a joined", "b")]
        + [node("Relu", "b", "y")],
        17,
        "ReLU",
    ),
    "Split": (
        [
            helper.make_node("Split", ["x", "parts"], ["a", "b"], "split", axis=1),
            node("Concat", "b a", "y", axis=1),
        ],
        17,
        "ChannelSlice ChannelSlice Concat",
    ),
    "Split into equal parts": (
        [
            helper.make_node("Split", ["x"], ["a", "b"], "split", axis=-3, num_outputs=2),
            node("Relu", "b", "y"),
        ],
        18,
        "ChannelSlice ReLU",
    ),
    "Split, sizes as an attribute": (
        [
            helper.make_node("Split", ["x"], ["a", "b"], "split", axis=1, split=[1, 3]),
            node("Concat", "b a", "y", axis=1),
        ],
        11,
        "ChannelSlice ChannelSlice Concat",
    ),
    "Slice": ([node("Slice", "x one three one", "y")], 13, "ChannelSlice"),
    "Slice from the end": ([node("Slice", "x minus_three huge one one", "y")], 13, "ChannelSlice"),
    "Slice of images and channels": (
        [node("Slice", "x zero_one all_three", "y")],
        13,
        "ChannelSlice",
    ),
    "Slice, attributes": (
        [node("Slice", "x", "y", starts=[1], ends=[3], axes=[1])],
        9,
        "ChannelSlice",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_onnxruntime(tmp_path, case):
    nodes, opset, expected = CASES[case]
    read = {name for n in nodes for name in n.input if name in CONSTANTS}
    constants = {name: CONSTANTS[name] for name in sorted(read)}
    output = nodes[-1].output[0]
    path = saved(
        tmp_path / "a.onnx", nodes, constants, SHAPE, output=output, opset=opset, sizes=(18,)
    )
    net = dl.load_onnx(path, normalization="none")
    assert [type(layer).__name__ for layer in net.layers] == expected.split()
    assert difference(net, path, IMAGES) <= 2e-6  # onnxruntime computes weights in float32


UNSUPPORTED = {
    "mode is cubic, expected nearest or linear": ([resize("scales", mode="cubic")], 19),
    "antialias is 1, expected 0": ([resize("sizes", antialias=1, mode="linear")], 19),
    "keep_aspect_ratio_policy is not_larger": (
        [resize("sizes", keep_aspect_ratio_policy="not_larger")],
        19,
    ),
    "coordinate_transformation_mode is tf_crop_and_resize": (
        [resize("sizes", coordinate_transformation_mode="tf_crop_and_resize")],
        19,
    ),
    "coordinate_transformation_mode is half_pixel_symmetric": (
        [resize("scales_down", coordinate_transformation_mode="half_pixel_symmetric")],
        19,
    ),
    "the pixels of smaller images are not defined": ([node("Resize", "x scales_down", "y")], 10),
    "expected scales of rows and columns": ([resize("scales_of_channels")], 19),
    "expected other rows and columns": ([resize("sizes_of_channels")], 19),
    "it has 4 numbers for the axes [2, 3]": ([resize("scales", axes=[2, 3])], 19),
    "input 0 has two axes of channels": (
        [
            node("Reshape", "x grouped", "a"),
            node("Relu", "a", "b"),
            node("Reshape", "b joined", "y"),
        ],
        17,
    ),
    "perm is [0, 1, 3, 2, 4] of (N, 2, 2, 6, 9)": (
        [node("Reshape", "x grouped", "a"), node("Transpose", "a", "y", perm=[0, 1, 3, 2, 4])],
        17,
    ),
    "axis is 2, expected the channels": (
        [
            helper.make_node("Split", ["x"], ["a", "b"], "split", axis=2, num_outputs=2),
            node("Concat", "b a", "y", axis=2),
        ],
        18,
    ),
    "it splits 4 channels into [3, 2]": (
        [
            helper.make_node("Split", ["x", "wrong_parts"], ["a", "b"], "split", axis=1),
            node("Concat", "b a", "y", axis=1),
        ],
        17,
    ),
    "steps [2]": ([node("Slice", "x one three one two", "y")], 13),
    "by constants of (6, 6)": ([node("MatMul", "left x", "y")], 17),
}


def test_enormous_sizes_are_refused_at_once(tmp_path):
    sizes = {"sizes": np.array([18, 4, 1 << 40, 1 << 40])}
    path = saved(tmp_path / "a.onnx", [resize("sizes")], sizes, SHAPE, opset=19, sizes=(18,))
    assert "it computes more than" in refusal(dl.load_onnx, path)


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_forms(tmp_path, reason):
    nodes, opset = UNSUPPORTED[reason]
    path = saved(tmp_path / "a.onnx", nodes, CONSTANTS, SHAPE, opset=opset, sizes=(18,))
    text = refusal(dl.load_onnx, path)
    assert text.startswith(f"{path}: unsupported nodes: ") and reason in text


LAYERS = {
    "Resize": [dl.Resize2D((4, 5)), dl.Resize2D(scale=(1.5, 2), mode="bilinear")],
    "Resize, corners": [dl.Resize2D(11, mode="bilinear", coordinates="align_corners")],
    "Resize, rounded": [dl.Resize2D(11, coordinates="half_pixel", rounding="round_prefer_ceil")],
    "adaptive": [dl.AdaptiveAveragePool2D((4, 5))],
    "adaptive rows": [dl.ReLU(), dl.AdaptiveAveragePool2D((7, 9))],
    "equal windows": [dl.AdaptiveAveragePool2D((3, 9))],
    "one window": [dl.AdaptiveAveragePool2D(1)],
    "shuffle": [dl.ChannelShuffle(2), dl.ChannelSlice(1, 4)],
    "shuffled features": [dl.Dense(6), dl.ChannelShuffle(3), dl.ChannelSlice(0, 4)],
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_are_written_and_read(tmp_path, case):
    net = dl.Network(LAYERS[case], SHAPE, seed=1)
    path = tmp_path / "a.onnx"
    dl.save_onnx(net, path, normalize_images=False)
    onnx.checker.check_model(path, full_check=True)
    assert dl.load_onnx(path).spec() == net.spec()
    graph_alone = dl.load_onnx(without_description(path, tmp_path / "b.onnx"), normalization="none")
    for read in (dl.load_onnx(path), graph_alone):
        assert difference(read, path, IMAGES) <= 2e-6
    if case.startswith("adaptive"):
        assert [type(layer) for layer in graph_alone.layers] == [type(x) for x in net.layers]


def modules(torch):
    """Yield (module, layers) of PyTorch for images of SHAPE."""

    nn = torch.nn

    class Halves(nn.Module):
        def forward(self, x):
            first, second = x.chunk(2, dim=1)
            return torch.cat((second, first), dim=1)

    class Shuffle(nn.Module):
        def forward(self, x):
            n, channels, height, width = x.size()
            x = x.view(n, 2, channels // 2, height, width).transpose(1, 2).contiguous()
            return x.view(n, channels, height, width)

    class Twice(nn.Module):
        def forward(self, x):
            return nn.functional.interpolate(x, size=[2 * n for n in x.shape[2:]], mode="bilinear")

    yield nn.Upsample(scale_factor=2), "Resize2D"
    yield nn.Upsample(scale_factor=(1.5, 2), mode="bilinear"), "Resize2D"
    yield nn.Upsample((13, 4), mode="bilinear"), "Resize2D"
    yield nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), "Resize2D"
    yield Twice(), "Resize2D"
    yield nn.AdaptiveAvgPool2d(1), "GlobalAveragePool2D"
    yield nn.AdaptiveAvgPool2d((2, 3)), "AveragePool2D"
    yield Shuffle(), "ChannelShuffle"
    yield Halves(), "ChannelSlice ChannelSlice Concat"


@pytest.mark.parametrize("opset", [11, 13, 20])
def test_modules_that_pytorch_exports(tmp_path, opset):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    images, path = torch.from_numpy(IMAGES), tmp_path / "a.onnx"
    for module, layers in modules(torch):
        dynamic = {"dynamic_axes": {"x": {0: "N"}}, "input_names": ["x"]}
        torch.onnx.export(
            module.eval(), (images,), str(path), dynamo=False, opset_version=opset, **dynamic
        )
        net = dl.load_onnx(path, normalization="none")
        assert [type(layer).__name__ for layer in net.layers] == layers.split()
        expected = module(images).numpy()
        assert abs(scores(net, IMAGES) - expected).max() <= 1e-6 * abs(expected).max()
