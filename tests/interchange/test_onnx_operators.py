"""Test ONNX operators that correspond to a layer, and values with axes in another order."""

import numpy as np
import onnx
import pytest
from image_sets import refusal
from onnx import helper
from onnx_models import difference, imported_network, node, saved, scores, session_scores
from short_training import trained
from single_rank import numbers

import mpidl as dl
from mpidl.training.files.model_file import weights_sha256

SHAPE = (4, 7, 6)


def array(name, *shape, low=-1.0, high=1.0):
    return numbers(name, *shape, low=low, high=high, dtype=np.float32)


WEIGHT = array("w", 6, 4, 3, 3)
NUMBERS = {"low": np.float32(-0.4), "high": np.float32(0.7), "zero": np.float32(0)}
NUMBERS |= {"w": WEIGHT, "d": array("d", 168, 5), "f32": np.float32(-3.4028235e38)}
NUMBERS |= {"slope": array("s", 4, 1, 1), "one": array("s", 1), "scalar": array("s")}
NUMBERS |= {"axes23": np.array([2, 3]), "to411": np.array([0, 4, 1, 1])}
NUMBERS |= {"w1": array("w", 1, 4, 1, 1)}
NUMBERS |= {"vector": array("s", 5), "s4": array("s", 1, 4, 1, 1), "minus": np.float32(-0.3)}


def pool(pads, **attributes):
    return node("AveragePool", "x", "y", kernel_shape=[3, 2], pads=pads, **attributes)


def pad(*pads):
    return np.array([0, 0, pads[0], pads[1], 0, 0, pads[2], pads[3]])


CONV = node("Conv", "p w", "y")
# {case: (nodes, constants, layers)} for images x (N, 4, 7, 6)
CASES = {
    "PRelu": ([node("PRelu", "x slope", "y")], "PReLU"),
    "PRelu, one slope": ([node("PRelu", "x one", "y")], "PReLU"),
    "PRelu, a number": ([node("PRelu", "x scalar", "y")], "PReLU"),
    "PRelu, four axes": ([node("PRelu", "x s4", "y")], "PReLU"),
    "PRelu of vectors": (
        [node("Flatten", "x", "f"), node("MatMul", "f d", "m"), node("PRelu", "m vector", "y")],
        "Flatten Dense PReLU",
    ),
    "Clip": ([node("Clip", "x low high", "y")], "Clip"),
    "Clip, low": ([node("Clip", "x low", "y")], "Clip"),
    "Clip, high": ([helper.make_node("Clip", ["x", "", "high"], ["y"], "y")], "Clip"),
    "Clip, nothing": ([node("Clip", "x f32", "c"), node("Tanh", "c", "y")], "Tanh"),
    "Clip at 0 is ReLU": ([node("Clip", "x zero", "y")], "ReLU"),
    "Max and Min": ([node("Max", "low x", "m"), node("Min", "m high", "y")], "Clip Clip"),
    "HardSigmoid": ([node("HardSigmoid", "x", "y")], "HardSigmoid"),
    "HardSigmoid, alpha": ([node("HardSigmoid", "x", "y", alpha=0.4, beta=0.3)], "HardSigmoid"),
    "HardSwish": ([node("HardSwish", "x", "y")], "HardSwish"),
    "HardSwish by HardSigmoid": (
        [node("HardSigmoid", "x", "h", alpha=1 / 6, beta=0.5), node("Mul", "h x", "y")],
        "HardSwish",
    ),
    "Swish": ([node("Sigmoid", "x", "s"), node("Mul", "x s", "y")], "Swish"),
    "Gelu by Erf": (
        [node("Div", "x root2", "a"), node("Erf", "a", "b"), node("Add", "b unit", "c")]
        + [node("Mul", "x c", "e"), node("Mul", "e half", "y")],
        "GELU",
    ),
    "Gelu by Erf, in another order": (
        [node("Mul", "half x", "h"), node("Mul", "x root_half", "a"), node("Erf", "a", "b")]
        + [node("Add", "unit b", "c"), node("Mul", "c h", "g"), node("Add", "g x", "y")],
        "GELU Add",
    ),
    "Gelu by Tanh": (
        [node("Pow", "x cube", "a"), node("Mul", "a small", "b"), node("Add", "x b", "c")]
        + [node("Mul", "c root", "k"), node("Tanh", "k", "e"), node("Add", "e unit", "f")]
        + [node("Mul", "x half", "h"), node("Mul", "h f", "y")],
        "GELU",
    ),
    "Gelu of clipped numbers": (
        [node("Mul", "x six", "m"), node("Clip", "m minus_ten ten", "z")]
        + [node("Div", "z root2", "a"), node("Erf", "a", "b"), node("Add", "b unit", "c")]
        + [node("Mul", "z c", "e"), node("Mul", "e half", "y")],
        "Clip GELU",
    ),
    "HardSwish by Clip": (
        [node("Add", "x cube", "a"), node("Clip", "a zero six", "b"), node("Mul", "x b", "c")]
        + [node("Div", "c six", "y")],
        "HardSwish",
    ),
    "HardSigmoid by Clip": (
        [node("Add", "x cube", "a"), node("Clip", "a zero six", "b"), node("Div", "b six", "y")],
        "HardSigmoid",
    ),
    "a gate of channels": (
        [node("GlobalAveragePool", "x", "a"), node("HardSigmoid", "a", "b")]
        + [node("Mul", "b x", "y")],
        "GlobalAveragePool2D HardSigmoid Multiply",
    ),
    "a gate of features": (
        [node("GlobalAveragePool", "x", "a"), node("Flatten", "a", "b"), node("Sigmoid", "b", "c")]
        + [node("Unsqueeze", "c axes23", "e"), node("Mul", "x e", "y")],
        "GlobalAveragePool2D Flatten Sigmoid Multiply",
    ),
    "a gate of features, reshaped": (
        [node("GlobalAveragePool", "x", "a"), node("Flatten", "a", "b")]
        + [node("Reshape", "b to411", "c"), node("Mul", "x c", "y")],
        "GlobalAveragePool2D Flatten Multiply",
    ),
    "a gate of pixels": (
        [node("Conv", "x w1", "a"), node("Sigmoid", "a", "b"), node("Mul", "b x", "y")],
        "Conv2D Sigmoid Multiply",
    ),
    "a gate of another order": (
        [node("Transpose", "x", "t", perm=[0, 2, 3, 1]), node("Tanh", "t", "u")]
        + [node("Mul", "u t", "v"), node("Transpose", "v", "y", perm=[0, 3, 1, 2])],
        "Tanh Multiply",
    ),
    "Scale": ([node("Relu", "x", "a"), node("Mul", "slope a", "y")], "ReLU Scale"),
    "LogSoftmax": ([node("LogSoftmax", "x", "y", axis=1)], "Softmax"),
    "AveragePool, not counting": ([pool([1, 1, 0, 1])], "AveragePool2D"),
    "AveragePool, ceil_mode": ([pool([0] * 4, strides=[7, 5], ceil_mode=1)], "AveragePool2D"),
    "AveragePool, ceil_mode, not counting": (
        [pool([1, 1, 0, 1], strides=[7, 5], ceil_mode=1)],
        "AveragePool2D",
    ),
    "AveragePool, ceil_mode, counting": (
        [pool([1, 0, 1, 0], strides=[7, 5], ceil_mode=1, count_include_pad=1)],
        "Pad2D AveragePool2D",
    ),
    "AveragePool, SAME_UPPER": (
        [node("AveragePool", "x", "y", kernel_shape=[3, 2], auto_pad="SAME_UPPER")],
        "AveragePool2D",
    ),
    "Pad": ([node("Pad", "x border low", "y")], "Pad2D"),
    "Pad, negative zero axes": ([node("Pad", "x border2 zero axes", "y")], "Pad2D"),
    "Pad before Conv": ([node("Pad", "x border", "p"), CONV], "Conv2D"),
    "Pad of a value before Conv": ([node("Pad", "x border low", "p"), CONV], "Pad2D Conv2D"),
    "Pad that others read": (
        [node("Pad", "x border", "p"), node("Conv", "p w", "c"), node("Tanh", "p", "t")]
        + [node("GlobalAveragePool", "c", "g"), node("GlobalAveragePool", "t", "h")]
        + [node("Concat", "g h", "y", axis=1)],
        "Pad2D Conv2D Tanh GlobalAveragePool2D GlobalAveragePool2D Concat",
    ),
    "Pad before AveragePool": (
        [
            node("Pad", "x border", "p"),
            node("AveragePool", "p", "y", kernel_shape=[4, 4], strides=[2, 2]),
        ],
        "AveragePool2D",
    ),
    "wide Pad before AveragePool": (
        [node("Pad", "x border", "p"), node("AveragePool", "p", "y", kernel_shape=[2, 2])],
        "Pad2D AveragePool2D",
    ),
    "Pad before MaxPool": (
        [node("Pad", "x border", "p"), node("MaxPool", "p", "y", kernel_shape=[2, 2])],
        "Pad2D MaxPool2D",
    ),
    "Pad of nothing": ([node("Pad", "x none", "p"), node("Tanh", "p", "y")], "Tanh"),
    "Transpose before a dense layer": (
        [node("Transpose", "x", "t", perm=[0, 2, 3, 1]), node("Relu", "t", "r")]
        + [node("Flatten", "r", "f"), node("Dropout", "f", "e"), node("MatMul", "e d", "y")],
        "ReLU Flatten Dropout Dense",
    ),
    "Transpose and Reshape": (
        [node("Tanh", "x", "h"), node("Transpose", "h", "t", perm=[0, 3, 1, 2])]
        + [node("Reshape", "t to", "f")]
        + [node("MatMul", "f d", "m"), node("Add", "m vector", "y")],
        "Tanh Flatten Dense",
    ),
    "a number per flattened feature": (
        [node("Transpose", "x", "t", perm=[0, 2, 3, 1]), node("Flatten", "t", "f")]
        + [node("PRelu", "f long", "g"), node("Gemm", "g d", "y")],
        "Flatten PReLU Dense",
    ),
    "Transposes that cancel": (
        [node("Transpose", "x", "t", perm=[0, 2, 3, 1]), node("Add", "t last", "a")]
        + [node("PRelu", "a slopes", "b"), node("Pad", "b border3", "c")]
        + [node("Concat", "b b", "k", axis=-1), node("ReduceMean", "k rows", "m")]
        + [node("ReduceMean", "c rows", "n"), node("Add", "n n", "o")]
        + [node("Concat", "m o", "q", axis=3), node("Transpose", "q", "y", perm=[0, 3, 1, 2])],
        None,
    ),
    "Softmax of transposed channels": (
        [node("Transpose", "x", "t", perm=[0, 2, 3, 1]), node("Softmax", "t", "s")]
        + [node("Transpose", "s", "y", perm=[0, 3, 1, 2])],
        "Softmax",
    ),
    "Reshape by the sizes of the images": (
        [node("Shape", "x", "s"), node("Slice", "s one_ three", "hw"), node("Shape", "x", "t")]
        + [node("Slice", "s three four", "wide"), node("Concat", "hw wide", "n", axis=0)]
        + [node("ReduceProd", "n", "p", keepdims=1), node("Slice", "t zero_ one_", "batch")]
        + [node("Concat", "batch p", "to_shape", axis=0), node("Reshape", "x to_shape", "f")]
        + [node("MatMul", "f d", "y")],
        "Flatten Dense",
    ),
}
NUMBERS |= {"border": pad(1, 2, 2, 0), "none": pad(0, 0, 0, 0), "border2": np.array([2, 0, 0, 1])}
NUMBERS |= {"axes": np.array([-1, 2]), "to": np.array([-1, 168]), "long": array("l", 168)}
NUMBERS |= {"last": array("a", 4), "slopes": array("b", 1, 1, 4), "rows": np.array([1, 2])}
NUMBERS |= {"border3": np.array([0, 1, 0, 0, 0, 0, 2, 0])}
NUMBERS |= {f"{k}_": np.array([n]) for n, k in enumerate(["zero", "one"])}
NUMBERS |= {"three": np.array([3]), "four": np.array([4])}


NUMBERS |= {
    name: np.float32(value)
    for name, value in {
        "root2": 2**0.5,
        "root_half": 0.5**0.5,
        "unit": 1,
        "half": 0.5,
        "cube": 3,
        "small": 0.044715,
        "root": (2 / np.pi) ** 0.5,
        "six": 6,
        "ten": 10,
        "minus_ten": -10,
    }.items()
}


def read_constants(nodes):
    names = {name for n in nodes for name in n.input}
    return {name: value for name, value in NUMBERS.items() if name in names}


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_onnxruntime(tmp_path, case):
    nodes, layers = CASES[case]
    path = saved(tmp_path / "a.onnx", nodes, read_constants(nodes), SHAPE)
    net, images = (
        dl.load_onnx(path, normalization="none"),
        array("images", 19, *SHAPE, low=-4, high=4),
    )
    expected, actual = session_scores(path, images), scores(net, images)
    expected = np.exp(expected) if case == "LogSoftmax" else expected
    assert actual.shape == expected.shape
    assert abs(actual - expected).max() <= 1e-5 * max(abs(expected).max(), 1e-3)
    if layers is not None:
        assert " ".join(type(layer).__name__ for layer in net.layers) == layers
    restored = dl.Network.from_spec(net.spec(), net.input_shape)
    assert list(restored.parameters) == list(net.parameters)


@pytest.mark.parametrize("opset", [7, 10])
def test_attributes_of_old_opsets(tmp_path, opset):
    nodes = [
        node("Pad", "x", "p", pads=[0, 0, 1, 2, 0, 0, 0, 1], value=0.5),
        *(node("Clip", "p", "c", min=-0.5), node("Clip", "c", "d", max=1.0, min=-0.25)),
        node("Clip", "d", "y"),
    ]
    path = saved(tmp_path / "a.onnx", nodes, {}, SHAPE, opset=opset)
    net = dl.load_onnx(path, normalization="none")
    assert [type(layer).__name__ for layer in net.layers] == ["Pad2D", "Clip", "Clip"]
    assert difference(net, path, array("images", 5, *SHAPE, low=-2, high=2)) <= 1e-6


def channels_last(nodes, constants, path):
    """Write a model with the input x (N, 7, 6, 4)."""
    return saved(path, nodes, constants, (*SHAPE[1:], SHAPE[0]))


def test_images_that_the_graph_transposes_first(tmp_path):
    """Networks exported from TensorFlow have such graphs. A normalization may come first."""
    nodes = [
        *(node("Sub", "x mean", "a"), node("Div", "a std", "b"), node("Pad", "b border", "p")),
        node("Transpose", "p", "t", perm=[0, 3, 1, 2]),
        *(node("Conv", "t w", "c"), node("Clip", "c low high", "k")),
        *(node("Transpose", "k", "u", perm=[0, 2, 3, 1]), node("Reshape", "u to", "f")),
        node("MatMul", "f v", "y"),
    ]
    constants = {"w": WEIGHT, "low": np.float32(0), "high": np.float32(6), "v": array("v", 168, 3)}
    constants |= {"mean": array("m", 4), "std": array("n", 1, 1, 1, 4, low=0.5), "zero": 0}
    constants |= {"border": np.array([0, 1, 0, 0, 0, 1, 2, 0]), "to": np.array([-1, 7 * 6 * 6])}
    constants["v"] = array("v", 7 * 6 * 6, 3)
    path = channels_last(nodes, constants, tmp_path / "a.onnx")
    net, images = (
        dl.load_onnx(path, normalization="none"),
        array("images", 19, *SHAPE, low=-2, high=2),
    )
    assert net.input_shape == SHAPE and net.normalization.centre.shape == (4,)
    names = [type(layer).__name__ for layer in net.layers]
    assert names == ["Conv2D", "Clip", "Flatten", "Dense"]
    expected = session_scores(path, images.transpose(0, 2, 3, 1))
    assert abs(scores(net, images) - expected).max() <= 1e-5 * abs(expected).max()
    proto = onnx.load(path)
    for axis in (1, 2):
        proto.graph.input[0].type.tensor_type.shape.dim[axis].Clear()
    (tmp_path / "b.onnx").write_bytes(proto.SerializeToString())
    assert "sizes that the file leaves open" in refusal(dl.load_onnx, tmp_path / "b.onnx")
    assert dl.load_onnx(tmp_path / "b.onnx", SHAPE).input_shape == SHAPE


def test_transposed_pixels_at_the_end(tmp_path):
    """The network's output must have the usual order of axes."""
    nodes = [node("Conv", "x w", "c"), node("Transpose", "c", "y", perm=[0, 2, 3, 1])]
    path = saved(tmp_path / "a.onnx", nodes, {"w": WEIGHT}, SHAPE)
    images = array("images", 3, *SHAPE)
    expected = session_scores(path, images).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(
        scores(dl.load_onnx(path, normalization="none"), images), expected, atol=1e-5
    )


UNSUPPORTED = {
    "expected a number per channel": [node("PRelu", "x pixels", "y")],
    "constants of shape (4,)": [node("PRelu", "x four", "y")],
    "input 1 is not constant": [node("Relu", "x", "a"), node("Clip", "x a", "y")],
    "expected numbers low < high": [node("Clip", "x high low", "y")],
    "expected a value and a constant number": [node("Min", "x pixels", "y")],
    "it is not the last node": [node("LogSoftmax", "x", "a", axis=1), node("Relu", "a", "y")],
    "mode is reflect": [node("Pad", "x border", "y", mode="reflect")],
    "leaves no pixels of images (4, 7, 6)": [node("Pad", "x crop", "y")],
    "expected rows and columns": [node("Pad", "x channels", "y")],
    "value must be a finite number": [node("Pad", "x border infinite", "y")],
    "it has 3 pads for 4 axes": [node("Pad", "x three", "y")],
    "input 0 has the shape (4, N, 7, 6), expected images": [
        *(node("Transpose", "x", "t", perm=[1, 0, 2, 3]), node("Conv", "t w", "y"))
    ],
    "input 0 is transposed": [
        *(node("Transpose", "x", "t", perm=[0, 1, 3, 2]), node("Conv", "t w", "y"))
    ],
    "its inputs have different orders": [
        *(node("Transpose", "x", "t", perm=[0, 3, 2, 1]), node("Relu", "x", "r")),
        *(node("Transpose", "r", "u", perm=[0, 3, 2, 1]), node("Flatten", "u", "v")),
        *(node("Flatten", "r", "f"), node("Add", "v f", "y")),
    ],
    "it combines two values": [
        *(node("Sigmoid", "x", "s"), node("Relu", "x", "r"), node("Sub", "r s", "y"))
    ],
    "alpha is 2.0, expected 1.0": [node("Swish", "x", "y", alpha=2.0)],
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_forms(tmp_path, reason):
    nodes = UNSUPPORTED[reason]
    constants = {"pixels": array("p", 4, 7, 6), "crop": pad(-7, 0, 0, 0), "border": pad(1, 1, 0, 0)}
    constants |= {
        "four": array("s", 4),
        "infinite": np.float32(-np.inf),
        "three": np.array([1] * 3),
    }
    constants |= {"channels": np.array([0, 1, 0, 0, 0, 0, 0, 0]), "w": array("w", 5, 4, 3, 3)}
    constants |= {k: NUMBERS[k] for k in ("low", "high")}
    opset = 24 if nodes[0].op_type == "Swish" else 20
    text = refusal(dl.load_onnx, saved(tmp_path / "a.onnx", nodes, constants, SHAPE, opset=opset))
    assert "unsupported nodes: " in text and reason in text


def test_an_output_that_does_not_begin_with_the_mini_batch_is_refused(tmp_path):
    images = [node("Transpose", "x", "y", perm=[1, 0, 2, 3])]
    features = [node("Flatten", "x", "f"), node("Transpose", "f", "y", perm=[1, 0])]
    for nodes, shape in ((images, "(4, N, 7, 6)"), (features, "(168, N)")):
        text = refusal(dl.load_onnx, saved(tmp_path / "a.onnx", nodes, {}, SHAPE))
        assert text.endswith(f"whose first axis is the mini-batch, found {shape}")


def test_a_transposed_output_of_features_is_refused(tmp_path):
    nodes = [node("Transpose", "x", "t", perm=[0, 2, 3, 1]), node("Flatten", "t", "y")]
    text = refusal(dl.load_onnx, saved(tmp_path / "a.onnx", nodes, {}, SHAPE))
    assert text.endswith("a.onnx: the output is a transposed image, flattened")


def test_a_pattern_that_others_read_stays(tmp_path):
    nodes = CASES["Gelu by Erf"][0][:-1] + [node("Mul", "e half", "g"), node("Add", "g c", "y")]
    text = refusal(
        dl.load_onnx, saved(tmp_path / "a.onnx", nodes, read_constants(nodes), SHAPE, output="y")
    )
    assert "Erf b" in text and "no layer of mpidl computes it" in text


def test_a_sigmoid_that_others_read_stays(tmp_path):
    nodes = [node("Sigmoid", "x", "s"), node("Mul", "x s", "m"), node("Add", "m s", "y")]
    path = saved(tmp_path / "a.onnx", nodes, {}, SHAPE)
    net = dl.load_onnx(path, normalization="none")
    assert [type(layer).__name__ for layer in net.layers] == ["Sigmoid", "Multiply", "Add"]
    assert difference(net, path, array("images", 3, *SHAPE)) <= 1e-5


def hash_of_training(world, net):
    return weights_sha256(trained(world, net, normalization="zscore")[0])


def test_imported_networks_train_alike_on_any_number_of_ranks(world, tmp_path):
    mpi = pytest.importorskip("mpi4py.MPI", reason="no mpi4py")
    single = dl.World(mpi.COMM_SELF, threads=1)
    before, expected = (
        imported_network(tmp_path),
        hash_of_training(single, imported_network(tmp_path)),
    )
    assert hash_of_training(world, imported_network(tmp_path)) == expected
    assert expected != weights_sha256(before)
    separate = imported_network(tmp_path)
    separate.fuse = False
    assert len(before.stored_layers()) < len(separate.stored_layers())
    assert hash_of_training(world, separate) == expected
    frozen = imported_network(tmp_path)
    frozen_names = frozen.layer_names[: frozen.layer_names.index("conv2") + 3]
    frozen.freeze(*frozen_names)
    net, _ = trained(world, frozen, normalization="zscore")
    for name, value in net.parameters.items():
        is_kept = name.rpartition(".")[0] in frozen_names
        assert np.array_equal(value, before.parameters[name]) == is_kept, name


def test_modules_that_pytorch_exports(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    nn = torch.nn

    class Exported(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.ConstantPad2d((1, 0, 2, 1), 0.0), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)),
                *(nn.ReLU6(), nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)),
                *(nn.Conv2d(6, 6, 1), nn.PReLU(6), nn.Conv2d(6, 6, 1), nn.PReLU(), nn.SiLU()),
                *(
                    nn.Hardswish(),
                    nn.ConstantPad2d(1, 0.5),
                    nn.Hardsigmoid(),
                    nn.GELU(),
                    nn.MaxPool2d(2),
                ),
                nn.GELU("tanh"),
            )
            self.last = nn.Linear(36, 5)

        def forward(self, x):
            x = self.layers(x)
            x = x.permute(0, 2, 3, 1).reshape(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3])
            x = self.last(x)
            return nn.functional.log_softmax(x.view(x.size(0), -1).clamp(min=-0.4, max=0.5), 1)

    torch.manual_seed(1)
    oracle, path = Exported().eval(), tmp_path / "a.onnx"
    images = torch.tensor(array("images", 21, *SHAPE, low=-3, high=3))
    with torch.no_grad():
        expected = oracle(images).exp().numpy()
    for opset in (11, 17, 20):
        dynamic = {"dynamic_axes": {"x": {0: "N"}}, "input_names": ["x"]}
        torch.onnx.export(
            oracle, (images,), str(path), dynamo=False, opset_version=opset, **dynamic
        )
        actual = scores(dl.load_onnx(path, normalization="none"), images.numpy())
        assert abs(actual - expected).max() <= 1e-5 * abs(expected).max()
