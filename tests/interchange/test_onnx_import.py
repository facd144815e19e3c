"""Test networks from ONNX files: scores like onnxruntime's, errors for unknown operators."""

import importlib.util
import os
import re

import numpy as np
import onnx
import pytest
from image_sets import pixels_of, refusal
from network_steps import bytes_of, step
from onnx import TensorProto, helper
from onnx_models import difference, node, saved, scores, session_scores
from single_rank import SingleRank, all_images, blocked, numbers

import mpidl as dl
from mpidl.losses import cross_entropy
from mpidl.training.files.model_file import weights_sha256

SHAPE = (4, 7, 6)


def array(name, *shape, low=-1.0, high=1.0):
    return numbers(name, *shape, low=low, high=high, dtype=np.float32)


def conv(output, inputs, weight, **attributes):
    return node("Conv", f"{inputs} {weight}", output, **attributes)


WEIGHT = array("w", 6, 4, 3, 3)
PER_CHANNEL = array("c", 1, 4, 1, 1, low=0.5, high=1.5)
NORM = {k: array(k, 4, low=0.5, high=1.5) for k in ("gamma", "beta", "mean", "variance")}
CONV = [conv("h", "x", "w")]
DENSE = [node("Flatten", "x", "f")]

# {case: (nodes, constants)} for images x (N, 4, 7, 6)
CASES = {
    "Conv, pads": ([conv("y", "x", "w", pads=[2, 0, 1, 1], strides=[2, 1])], {"w": WEIGHT}),
    "Conv, dilations": ([conv("y", "x", "w", dilations=[2, 1])], {"w": WEIGHT}),
    "Conv, groups and bias": (
        [conv("y", "x", "w b", group=2)],
        {"w": array("g", 6, 2, 3, 2), "b": array("b", 6)},
    ),
    "Conv, SAME_UPPER": (
        [conv("y", "x", "w", auto_pad="SAME_UPPER", strides=[2, 2])],
        {"w": WEIGHT},
    ),
    "Conv, SAME_LOWER": (
        [conv("y", "x", "w", auto_pad="SAME_LOWER", strides=[3, 2])],
        {"w": WEIGHT},
    ),
    "Conv, VALID": ([conv("y", "x", "w", auto_pad="VALID")], {"w": WEIGHT}),
    "Conv and Add": (
        [*CONV, node("Add", "h b", "y")],
        {"w": WEIGHT, "b": array("b", 6, 1, 1)},
    ),
    "Add and Conv": ([*CONV, node("Add", "b h", "y")], {"w": WEIGHT, "b": array("b", 1, 6, 1, 1)}),
    "ConvTranspose": (
        [node("ConvTranspose", "x w b", "y", strides=[2, 3], pads=[1, 0, 0, 2])],
        {"w": array("t", 4, 5, 3, 4), "b": array("b", 5)},
    ),
    "BatchNormalization": (
        [node("BatchNormalization", "x gamma beta mean variance", "y", epsilon=1e-3, momentum=0.7)],
        NORM,
    ),
    "Relu": ([node("Relu", "x", "y")], {}),
    "LeakyRelu": ([node("LeakyRelu", "x", "y", alpha=0.3)], {}),
    "Sigmoid and Tanh": ([node("Sigmoid", "x", "s"), node("Tanh", "s", "y")], {}),
    "Gelu": ([node("Gelu", "x", "y")], {}),
    "Gelu, tanh": ([node("Gelu", "x", "y", approximate="tanh")], {}),
    "LRN": ([node("LRN", "x", "y", size=3, alpha=0.5, beta=0.6, bias=1.5)], {}),
    "MaxPool": (
        [node("MaxPool", "x", "y", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])],
        {},
    ),
    "MaxPool, ceil_mode": (
        [node("MaxPool", "x", "y", kernel_shape=[2, 4], strides=[3, 3], ceil_mode=1)],
        {},
    ),
    "MaxPool, ceil_mode with pads": (
        [node("MaxPool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4, ceil_mode=1)],
        {},
    ),
    "AveragePool": ([node("AveragePool", "x", "y", kernel_shape=[3, 2])], {}),
    "AveragePool, count_include_pad": (
        [
            node(
                "AveragePool", "x", "y", kernel_shape=[3, 2], pads=[1, 1, 0, 1], count_include_pad=1
            )
        ],
        {},
    ),
    "GlobalAveragePool": ([node("GlobalAveragePool", "x", "y")], {}),
    "ReduceMean": ([node("ReduceMean", "x a", "y", keepdims=0)], {"a": np.array([-1, 2])}),
    "Dropout": (
        [*CONV, node("Dropout", "h r", "d"), node("Relu", "d", "y")],
        {"w": WEIGHT, "r": np.float32(0.3)},
    ),
    "Add": ([node("Relu", "x", "a"), node("Add", "a x", "y")], {}),
    "Sum": ([node("Relu", "x", "a"), node("Tanh", "x", "b"), node("Sum", "x a b", "y")], {}),
    "Concat": ([node("Relu", "x", "a"), node("Concat", "a x a", "y", axis=1)], {}),
    "Concat, axis from the end": (
        [node("Relu", "x", "a"), node("Concat", "a x", "y", axis=-3)],
        {},
    ),
    "Identity and Cast": (
        [*CONV, node("Identity", "h", "i"), node("Cast", "i", "y", to=TensorProto.FLOAT)],
        {"w": WEIGHT},
    ),
    "Softmax of pixels": ([node("Softmax", "x", "y", axis=1)], {}),
    "Gemm": (
        [*DENSE, node("Gemm", "f w b", "y", alpha=0.5, beta=2.0, transB=1)],
        {"w": array("d", 5, 168), "b": array("b", 5)},
    ),
    "Gemm, one bias": (
        [*DENSE, node("Gemm", "f w b", "y")],
        {"w": array("d", 168, 5), "b": array("b", 1)},
    ),
    "MatMul and Add": (
        [*DENSE, node("MatMul", "f w", "m"), node("Add", "m b", "y")],
        {"w": array("d", 168, 5), "b": array("b", 5)},
    ),
    "MatMul": ([*DENSE, node("MatMul", "f w", "y")], {"w": array("d", 168, 5)}),
    "Reshape": (
        [node("Reshape", "x s", "f"), node("MatMul", "f w", "m"), node("Softmax", "m", "y")],
        {"w": array("d", 168, 5), "s": np.array([0, -1])},
    ),
    "Reshape by Shape, as PyTorch once exported x.view(x.size(0), -1)": (
        [
            *(node("Shape", "x", "s"), node("Gather", "s zero", "n", axis=0)),
            *(node("Unsqueeze", "n axis", "u"), node("Concat", "u rest", "to", axis=0)),
            *(node("Reshape", "x to", "f"), node("MatMul", "f w", "y")),
        ],
        {
            "zero": np.array(0),
            "axis": np.array([0]),
            "rest": np.array([-1]),
            "w": array("d", 168, 5),
        },
    ),
    "Squeeze": (
        [node("GlobalAveragePool", "x", "p"), node("Squeeze", "p a", "y")],
        {"a": np.array([2, 3])},
    ),
    "Sub and Div before the network": (
        [node("Sub", "x c", "a"), node("Div", "a d", "b"), conv("y", "b", "w")],
        {"c": PER_CHANNEL, "d": 2 * PER_CHANNEL, "w": WEIGHT},
    ),
    "Mul and Add before the network": (
        [node("Mul", "x c", "a"), node("Add", "d a", "b"), conv("y", "b", "w")],
        {"c": np.float32(1 / 127.5), "d": np.float32(-1), "w": WEIGHT},
    ),
    "Mul and Sub inside the network": (
        [node("Relu", "x", "r"), node("Mul", "r c", "a"), node("Sub", "a d", "y")],
        {"c": PER_CHANNEL, "d": PER_CHANNEL},
    ),
    "constants that nodes compute": (
        [
            *(node("Unsqueeze", "b axes", "u"), node("Mul", "w u", "scaled")),
            *(node("Constant", "", "half", value_float=0.5), node("Mul", "scaled half", "v")),
            *(node("Transpose", "v", "t", perm=[0, 1, 3, 2]), conv("y", "x", "t")),
        ],
        {"w": WEIGHT, "b": array("b", 6), "axes": np.array([1, 2, 3])},
    ),
    "a node that nothing needs": ([node("Elu", "x", "z"), node("Relu", "x", "y")], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_onnxruntime(tmp_path, case):
    nodes, constants = CASES[case]
    images = array("images", 19, *SHAPE, low=-2, high=2)
    path = saved(tmp_path / "a.onnx", nodes, constants, SHAPE)
    net = dl.load_onnx(path, normalization="none")
    assert difference(net, path, images) <= 1e-5
    restored = dl.Network.from_spec(net.spec(), net.input_shape)
    assert list(restored.parameters) == list(net.parameters)


def test_biases_become_part_of_layers_and_names_are_those_of_nodes(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"], "/features/0/Conv"),
        helper.make_node("Add", ["h", "b"], ["a"], "/features/0/Add"),
        helper.make_node("Relu", ["a"], ["r"], "images"),
        helper.make_node("Relu", ["r"], ["y"], "images"),
    ]
    constants = {"w": WEIGHT, "b": array("b", 6, 1, 1)}
    net = dl.load_onnx(saved(tmp_path / "a.onnx", nodes, constants, SHAPE), normalization="none")
    assert net.layer_names == ["features_0_Conv", "images_2", "images_3"]
    assert np.array_equal(net.parameters["features_0_Conv.weight"], WEIGHT)
    assert np.array_equal(net.parameters["features_0_Conv.bias"], constants["b"].ravel())


def test_a_value_that_others_read_keeps_its_bias_apart(tmp_path):
    nodes = [*CONV, node("Add", "h b", "a"), node("Mul", "a b", "c"), node("Add", "c h", "y")]
    constants = {"w": WEIGHT, "b": array("b", 6, 1, 1)}
    net = dl.load_onnx(saved(tmp_path / "a.onnx", nodes, constants, SHAPE), normalization="none")
    assert [type(layer).__name__ for layer in net.layers] == [
        "Conv2D",
        "BatchNorm",
        "Scale",
        "Add",
    ]
    assert not net["h"].bias and not net["a"].trainable
    images = array("images", 5, *SHAPE)
    assert difference(net, tmp_path / "a.onnx", images) <= 1e-5


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 17, 20, 21, 23])
def test_opsets(tmp_path, opset):
    """The network has operators that have changed between opsets."""
    norm = "BatchNormalization"
    dropout = {"ratio": 0.25} if opset < 12 else {}
    nodes = [
        *(conv("h", "x", "w", pads=[1] * 4), node(norm, "h gamma beta mean variance", "n")),
        *(node("Relu", "n", "r"), node("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2])),
        *(
            node("Dropout", "p" if opset < 12 else "p ratio", "d", **dropout),
            node("Flatten", "d", "f"),
        ),
        *(node("Gemm", "f v b", "g", transB=1), node("Softmax", "g", "y", axis=1)),
    ]
    constants = {"w": WEIGHT[:4], "v": array("v", 3, 36), "b": array("b", 3), **NORM}
    if opset >= 12:
        constants["ratio"] = np.float32(0.25)
    path = saved(tmp_path / "a.onnx", nodes, constants, SHAPE, opset=opset)
    net = dl.load_onnx(path, normalization="none")
    assert difference(net, path, array("images", 5, *SHAPE)) <= 1e-5
    assert [layer.probability for layer in net.layers if isinstance(layer, dl.Dropout)] == [0.25]


def test_an_imported_network_trains_and_fuses_on_any_ranks(world, tmp_path):
    norm = "BatchNormalization"
    nodes = [
        *(
            node("Sub", "x c", "s"),
            conv("h", "s", "w"),
            node(norm, "h gamma beta mean variance", "n"),
        ),
        *(node("Relu", "n", "r"), node("GlobalAveragePool", "r", "p"), node("Flatten", "p", "f")),
        node("Gemm", "f v b", "y", transB=1),
    ]
    constants = {
        "w": WEIGHT[:4],
        "v": array("v", 3, 4),
        "b": array("b", 3),
        "c": PER_CHANNEL,
        **NORM,
    }
    net = dl.load_onnx(saved(tmp_path / "a.onnx", nodes, constants, SHAPE), normalization="none")
    assert len(net.stored_layers()) == len(net.layers) - 2  # the first three layers are one op
    images, labels = array("images", 37, *SHAPE), np.arange(37) % 3

    def results(ranks):
        return step(ranks, net, blocked(ranks, images, labels), cross_entropy)

    assert bytes_of(results(world)) == bytes_of(results(SingleRank()))
    net.freeze("h", "n")
    _, gradients, _ = results(SingleRank())
    assert set(gradients) == {"y.weight", "y.bias"}
    replaced = net.replace_layers({"y": dl.Dense(7)}, seed=1)
    assert replaced.output_shape == (7,)
    assert np.array_equal(replaced.parameters["h.weight"], net.parameters["h.weight"])
    assert replaced.normalization is net.normalization


def test_an_error_lists_all_unsupported_nodes(tmp_path):
    nodes = [
        *(node("Selu", "x", "a"), node("Relu", "a", "b"), node("Erf", "b", "c")),
        *(
            node("AveragePool", "x", "d", kernel_shape=[2, 2], dilations=[2, 2]),
            node("Sub", "d e", "f"),
        ),
        node("Concat", "c d f", "y", axis=1),
    ]
    path = saved(tmp_path / "a.onnx", nodes, {"e": array("e", 1, 4, 5, 4)}, SHAPE)
    lines = refusal(dl.load_onnx, path).split("; ")
    assert lines == [
        f"{path}: unsupported nodes: Selu a (N, 4, 7, 6): no layer of mpidl computes it",
        "Erf c (N, 4, 7, 6): no layer of mpidl computes it",
        "AveragePool d (N, 4, 5, 4): dilations is [2, 2], expected [1, 1]",
    ]


UNSUPPORTED = {
    "no layer of mpidl computes it": [node("Elu", "x", "y")],
    "constants of shape (1, 4, 7, 6)": [node("Relu", "x", "a"), node("Mul", "a c", "y")],
    "constants of shape (1, 1, 1, 1, 1)": [node("Add", "x five", "y")],
    "constants of shape (4, 1)": [node("Flatten", "x", "f"), node("Gemm", "f w c4", "y")],
    "it also computes the statistics": [
        helper.make_node("BatchNormalization", ["x", *"gbmv"], ["y", "a1", "b1"], "y")
    ],
    "training_mode is true": [node("Dropout", "x ratio true", "y")],
    "it computes with the number of images": [
        *(node("Shape", "x", "k"), node("Cast", "k", "t", to=1), node("Gather", "t zero", "n")),
        *(node("Relu", "x", "r"), node("Mul", "r n", "y")),
    ],
    "to [1, 168]": [node("Reshape", "x one", "y")],
    "its second output is used": [
        helper.make_node("MaxPool", ["x"], ["p", "i"], "p", kernel_shape=[2, 2]),
        *(node("Cast", "i", "j", to=1), node("Add", "p j", "y")),
    ],
    "input 1 is not constant": [node("Relu", "x", "a"), conv("y", "x", "a")],
    "axis is 2, expected the channels": [node("Concat", "x x", "y", axis=2)],
    "axis is 3, expected the channels": [node("Softmax", "x", "y", axis=3)],
    "axis is 2, expected 1": [node("Flatten", "x", "y", axis=2)],
    "it combines two values": [node("Relu", "x", "a"), node("Div", "x a", "y")],
    "it multiplies features by images": [node("Flatten", "x", "a"), node("Mul", "x a", "y")],
    "it reads features as images of one pixel": [
        *(node("Flatten", "x", "a"), node("Unsqueeze", "a axes", "u"), node("Relu", "u", "y")),
    ],
    "a factor is 0": [node("Mul", "x z", "y")],
    "dilations is [2, 2], expected [1, 1]": [
        node("MaxPool", "x", "y", kernel_shape=[2, 2], dilations=[2, 2])
    ],
    "it reshapes (N, 4, 7, 6) to [7, 24]": [node("Reshape", "x s", "y")],
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_forms(tmp_path, reason):
    constants = {"c": array("e", 1, 4, 7, 6), "z": np.float32(0), "s": np.array([7, 24])}
    constants["axes"] = np.array([2, 3])
    constants |= {
        "five": np.ones((1,) * 5, np.float32),
        "c4": array("c", 4, 1),
        "w": array("w", 168, 4),
    }
    constants |= {name: array(name, 4) for name in "gbmv"}
    constants |= {"ratio": np.float32(0.5), "true": np.array(True), "one": np.array([1, 168])}
    constants |= {"zero": np.array(0)}
    path = saved(tmp_path / "a.onnx", UNSUPPORTED[reason], constants, SHAPE)
    text = refusal(dl.load_onnx, path)
    assert text.startswith(f"{path}: unsupported nodes: ") and reason in text


# Values with two names: a node that reads one name also reads the value of the other name.
ALIASES = {
    "a bias": [
        *(*CONV, node("Identity", "h", "a"), node("Add", "a b", "s")),
        *(node("Relu", "s", "r"), node("Add", "r h", "y")),
    ],
    "a bias behind a cast that comes later": [
        *(*CONV, node("Add", "h b", "s"), node("Cast", "h", "a", to=1)),
        *(node("Relu", "s", "r"), node("Add", "r a", "y")),
    ],
    "normalization": [
        *(node("Identity", "x", "a"), node("Sub", "a c", "s")),
        *(node("Relu", "s", "r"), node("Add", "r x", "y")),
    ],
    "normalization of one branch": [
        *(node("Identity", "x", "a"), node("Mul", "a c", "s"), conv("h", "s", "w")),
        *(conv("g", "x", "w"), node("Add", "h g", "y")),
    ],
    "vectors": [
        *(node("Flatten", "x", "f"), node("MatMul", "f v", "m"), node("Flatten", "m", "n")),
        *(node("Add", "n d", "p"), node("Add", "p m", "y")),
    ],
}


@pytest.mark.parametrize("case", ALIASES)
def test_values_with_two_names(tmp_path, case):
    constants = {"w": WEIGHT, "b": array("b", 6, 1, 1), "c": PER_CHANNEL}
    constants |= {"v": array("v", 168, 5), "d": array("d", 5)}
    path = saved(tmp_path / "a.onnx", ALIASES[case], constants, SHAPE)
    assert (
        difference(dl.load_onnx(path, normalization="none"), path, array("images", 5, *SHAPE))
        <= 1e-5
    )


def test_a_file_for_one_image(tmp_path):
    nodes = [node("Reshape", "x s", "f"), node("MatMul", "f w", "y")]
    constants = {"s": np.array([1, 168]), "w": array("w", 168, 4)}
    path = saved(tmp_path / "a.onnx", nodes, constants, SHAPE, sizes=(1,))
    assert (
        difference(dl.load_onnx(path, normalization="none"), path, array("images", 1, *SHAPE))
        <= 1e-5
    )


def test_many_nodes_take_no_quadratic_time(tmp_path):
    nodes = [node("Relu", "x", "v0")]
    nodes += [node("Relu", f"v{i}", f"v{i + 1}") for i in range(3000)]
    path = saved(tmp_path / "a.onnx", nodes, {}, SHAPE, output="v3000")
    assert len(dl.load_onnx(path).layers) == 3001


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_network_that_pytorch_exports(tmp_path, dynamo):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if dynamo:  # PyTorch's default
        pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision, the reference, is not installed: pip install 'mpidl[bench]'")
    from benchmarks import torch_networks

    oracle, path = torch_networks.create("resnet18", 10), tmp_path / "a.onnx"
    images = torch.tensor(pixels_of(0, 3, 3, 64, 64) / np.float32(255))
    axes = {"dynamic_axes": {"x": {0: "N"}}, "input_names": ["x"]}
    if dynamo:
        axes = {"dynamic_shapes": ({0: torch.export.Dim("N")},)}
    torch.onnx.export(oracle, (images,), str(path), dynamo=dynamo, **axes)
    net = dl.load_onnx(path, normalization="none")
    with torch.no_grad():
        expected = oracle(images).numpy()
    assert abs(scores(net, images.numpy()) - expected).max() <= 1e-5 * abs(expected).max()


# The light models of the onnx package: nodes compute their weights, which are constants.
LIGHT_MODELS = os.path.join(os.path.dirname(onnx.__file__), "backend", "test", "data", "light")
LIGHT_NAMES = ("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "vgg19")
LIGHT_NAMES += ("shufflenet", "squeezenet", "zfnet512")


def with_drawn_weights(proto):
    """Replace the constant weights, with which all outputs are equal, by drawn weights."""
    random = np.random.default_rng(1)
    shapes = {part.name: part for part in proto.graph.initializer}
    for constant in [n for n in proto.graph.node if n.op_type == "ConstantOfShape"]:
        shape = tuple(onnx.numpy_helper.to_array(shapes[constant.input[0]]))
        if len(shape) > 1:
            values = random.normal(size=shape, scale=(2 / np.prod(shape[1:])) ** 0.5)
        else:  # biases, and the arrays of batch normalizations
            values = random.uniform(0.5, 1, shape)
        tensor = onnx.numpy_helper.from_array(values.astype(np.float32), constant.output[0])
        proto.graph.initializer.append(tensor)
        proto.graph.node.remove(constant)
    proto.ir_version = max(proto.ir_version, 4)  # older files declare weights as inputs
    return proto


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow("ranks")] * (name != "inception_v1"))
        for name in LIGHT_NAMES
    ],
)
def test_light_models_have_the_scores_of_onnxruntime(tmp_path, name):
    path, drawn = os.path.join(LIGHT_MODELS, f"light_{name}.onnx"), tmp_path / "drawn.onnx"
    onnx.save(with_drawn_weights(onnx.load(path)), drawn)
    for file in (path, drawn):
        net = dl.load_onnx(file, normalization="none")
        images = np.random.default_rng(0).normal(size=(1, *net.input_shape)).astype(np.float32)
        expected, values = session_scores(file, images), scores(net, images)
        assert abs(values - expected).max() <= 1e-4 * abs(expected).max()
    assert expected.std() > 1e-2 * abs(expected).max()  # the drawn weights tell images apart


def test_the_message_of_a_used_second_output(tmp_path):
    dropout = helper.make_node("Dropout", ["x"], ["d", "mask"], "d")
    nodes = [dropout, node("Cast", "mask", "m", to=1), node("Add", "d m", "y")]
    text = refusal(dl.load_onnx, saved(tmp_path / "a.onnx", nodes, {}, SHAPE))
    assert re.search("Cast m .*: it reads mask, an output that no layer computes", text)


def test_weights_are_loaded_alike_on_all_ranks(world, tmp_path):
    path = saved(tmp_path / "a.onnx", CONV, {"w": WEIGHT}, SHAPE, output="h")
    digest = weights_sha256(dl.load_onnx(path))
    assert world.broadcast(digest) == digest
    x = array("images", 5, *SHAPE)
    batch = dl.share(5, world)
    first, stop = batch.images
    values = dl.load_onnx(path)(dl.from_images(x[first:stop], batch))
    expected = session_scores(path, x)
    np.testing.assert_allclose(all_images(world, values), expected, atol=1e-5)
