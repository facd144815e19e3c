"""Test ONNX's LSTM and GRU in both directions, and the modules that PyTorch exports."""

import itertools

import numpy as np
import onnx
import pytest
from image_sets import refusal
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_models import difference, node, saved, scores, session_scores, without_description
from single_rank import numbers

import mpidl as dl
from mpidl.data.transforms.normalize import Normalization
from mpidl.interchange import onnx_export, onnx_file, onnx_gates

RECURRENT = {"lstm": dl.LSTM, "gru": dl.GRU}


def random_array(name, *shape):
    return numbers(name, *shape, low=-1, high=1, dtype=np.float32)


def with_random_weights(net):
    net.parameters = {name: random_array(name, *v.shape) for name, v in net.parameters.items()}
    return net


def kinds(net):
    """Return the types of a network's layers: "<" marks reverse, and "." only the last step."""
    texts = []
    for layer in net.layers:
        marks = ("<" * getattr(layer, "reverse", False), getattr(layer, "returns", ""))
        texts.append(f"{type(layer).__name__}{marks[0]}{'.' * (marks[1] == 'last')}")
    return " ".join(texts)


# ---- networks of mpidl ----


def written_networks(kind):
    shapes = ((2, 6, 5), (3, 6, 1), (1, 6, 4), (2, 1, 3))
    for shape, returns, reverse in itertools.product(shapes, ("sequence", "last"), (False, True)):
        for units, bias in ((7, True), (1, True), (5, False)):
            options = {"returns": returns, "reverse": reverse, "bias": bias}
            layer = RECURRENT[kind](units, truncate=2, **options)
            yield with_random_weights(dl.Network([dl.Tanh(), layer, dl.Tanh()], shape, seed=1))


@pytest.mark.parametrize("kind", RECURRENT)
def test_layers_are_written_and_read(tmp_path, kind):
    path = tmp_path / "a.onnx"
    for net in written_networks(kind):
        images = random_array("images", 3, *net.input_shape)
        dl.save_onnx(net, path, normalize_images=False)
        onnx.checker.check_model(path, full_check=True)
        assert difference(net, path, images) <= 1e-5
        assert onnx_export.restored(onnx_file.read(path)) is not None
        restored = dl.load_onnx(path)
        assert restored.spec() == net.spec()
        assert dl.weights_sha256(restored) == dl.weights_sha256(net)
        graph_alone = dl.load_onnx(
            without_description(path, tmp_path / "b.onnx"), normalization="none"
        )
        assert kinds(graph_alone) == kinds(net)
        for array, expected in zip(
            graph_alone.parameters.values(), net.parameters.values(), strict=True
        ):
            assert array.tobytes() == expected.tobytes()
        assert graph_alone[graph_alone.layer_names[1]].truncate is None  # only for training


@pytest.mark.parametrize("kind", RECURRENT)
def test_other_orders_of_gates_give_other_scores(tmp_path, monkeypatch, kind):
    """The negative control of the test above."""
    layer = RECURRENT[kind]
    orders = {"lstm": (0, 1, 2, 3), "gru": (0, 1, 2)}
    monkeypatch.setitem(onnx_gates.TO_ONNX, layer, orders[kind])
    net = with_random_weights(dl.Network([layer(7)], (2, 6, 5), seed=1))
    dl.save_onnx(net, tmp_path / "a.onnx", normalize_images=False)
    images = random_array("images", 3, *net.input_shape)
    assert difference(net, tmp_path / "a.onnx", images) > 0.01


def test_a_bidirectional_network_with_a_normalization(tmp_path):
    layers = [
        *(dl.GRU(3, name="a"), dl.GRU(3, reverse=True, after="images", name="b")),
        *(dl.Concat(inputs=("a", "b"), name="both"), dl.LSTM(4, returns="last", name="c")),
        dl.LSTM(4, returns="last", reverse=True, after="both", name="d"),
        *(dl.Concat(inputs=("c", "d")), dl.Dense(3), dl.Softmax()),
    ]
    net, path = with_random_weights(dl.Network(layers, (2, 6, 5), seed=1)), tmp_path / "a.onnx"
    net.normalization = Normalization()
    dl.save_onnx(net, path)
    images = np.arange(180, dtype=np.uint8).reshape(3, 2, 6, 5)
    assert difference(net, path, images) <= 1e-5
    assert dl.load_onnx(path).spec() == net.spec()
    graph_alone = dl.load_onnx(without_description(path, tmp_path / "b.onnx"))
    assert kinds(graph_alone) == kinds(net)
    assert difference(graph_alone, path, images) <= 1e-5


# ---- nodes ----

UNITS, STEPS, FEATURES, IMAGES = 3, 7, 5, 3
SHAPE = (1, STEPS, FEATURES)
GATES = {"LSTM": 4 * UNITS, "GRU": 3 * UNITS}
CONSTANTS = {
    "zeros": np.zeros((1, IMAGES, UNITS), np.float32),
    "ones": np.ones((1, IMAGES, UNITS), np.float32),
    "peepholes": np.zeros((1, 3 * UNITS), np.float32),
    "lengths": np.full(IMAGES, STEPS, np.int32),
    "first": np.array([0]),
    "second": np.array([1]),
    "two_three": np.array([2, 3]),
    "fourth": np.array([3]),
    "last": np.array(-1),
    "minus_one": np.array([-1]),
    "huge": np.array([1 << 62]),
    "merged": np.array([0, 0, -1]),
    "vector": np.array([0, -1]),
    "rows": np.array([0, 0, STEPS * FEATURES]),
    "gamma": random_array("gamma", UNITS),
    "scale": random_array("scale", 1, 1, UNITS),
    "of_rows": random_array("of_rows", FEATURES, FEATURES),
    "bias_of_rows": random_array("bias_of_rows", FEATURES),
    "of_steps": random_array("of_steps", UNITS, 4),
    "of_state": random_array("of_state", 2 * UNITS, 4),
    "of_all": random_array("of_all", STEPS * UNITS, 4),
    "bias": random_array("bias", 4),
    "shift": random_array("shift", UNITS),
    "filters": random_array("filters", FEATURES, 1, 3, 3),
}


def weights(operator, directions, features=FEATURES):
    size = GATES.get(operator, UNITS)
    shapes = {"w": (size, features), "r": (size, UNITS), "b": (2 * size,)}
    return {k: random_array(k, directions, *shape) for k, shape in shapes.items()}


def recurrent(operator, inputs="X w r b", outputs="Y", **attributes):
    """Return a node; "-" is an omitted input or output."""
    names = [["" if n == "-" else n for n in text.split()] for text in (inputs, outputs)]
    attributes = {"hidden_size": UNITS} | attributes
    if operator == "GRU":
        attributes = {"linear_before_reset": 1} | attributes
    return helper.make_node(operator, *names, names[1][-1], **attributes)


BOTH = {"direction": "bidirectional"}
TO_STEPS = [node("Squeeze", "x second", "s"), node("Transpose", "s", "X", perm=[1, 0, 2])]
TO_IMAGES = node("Transpose", "Y", "y", perm=[2, 3, 0, 1])
STEPS_TO_IMAGES = [node("Transpose", "z", "t", perm=[1, 2, 0]), node("Unsqueeze", "t fourth", "y")]
MERGED = [node("Transpose", "Y", "u", perm=[0, 2, 1, 3]), node("Reshape", "u merged", "m")]
# {case: (nodes, layers)}
CASES = {
    "zero states and peepholes, the default activations": (
        [
            *TO_STEPS,
            recurrent(
                "LSTM",
                "X w r b - zeros zeros peepholes",
                activations=["Sigmoid", "Tanh", "Tanh"],
                input_forget=0,
            ),
            TO_IMAGES,
        ],
        "LSTM",
    ),
    "no biases, in reverse": (
        [*TO_STEPS, recurrent("LSTM", "X w r", direction="reverse"), TO_IMAGES],
        "LSTM<",
    ),
    "an addition after a layer without biases": (
        [*TO_STEPS, recurrent("LSTM", "X w r"), node("Add", "Y shift", "Z")]
        + [node("Transpose", "Z", "y", perm=[2, 3, 0, 1])],
        "LSTM BatchNorm",
    ),
    "all steps and the last state": (
        [
            *(*TO_STEPS, recurrent("GRU", outputs="Y S")),
            *(node("Transpose", "S", "l", perm=[1, 2, 0]), node("Unsqueeze", "l fourth", "k")),
            *(node("Transpose", "Y", "i", perm=[2, 3, 0, 1]), node("Mul", "i k", "y")),
        ],
        "GRU Pad2D Flatten Multiply",
    ),
    "the last row of both directions": (
        [
            *(*TO_STEPS, recurrent("LSTM", **BOTH), *MERGED),
            *(node("Gather", "m last", "g", axis=0), node("MatMul", "g of_state", "y")),
        ],
        "LSTM LSTM< Concat Pad2D Flatten Dense",
    ),
    "the last state of both directions": (
        [
            *(*TO_STEPS, recurrent("GRU", outputs="- S", **BOTH)),
            *(node("Transpose", "S", "t", perm=[1, 0, 2]), node("Reshape", "t vector", "v")),
            node("Gemm", "v of_state bias", "y"),
        ],
        "GRU. GRU<. Concat Dense",
    ),
    "the last state of the second direction": (
        [
            *(*TO_STEPS, recurrent("LSTM", outputs="- S", **BOTH)),
            node("Gather", "S last", "y", axis=0),
        ],
        "LSTM<.",
    ),
    "all steps of the first direction": (
        [
            *(*TO_STEPS, recurrent("LSTM", **BOTH), node("Slice", "Y first second second", "f")),
            node("Transpose", "f", "y", perm=[2, 3, 0, 1]),
        ],
        "LSTM",
    ),
    "joined states of two layers": (
        [
            *(*TO_STEPS, recurrent("GRU", outputs="Y S")),
            *(node("Squeeze", "Y second", "q"), recurrent("GRU", "q wu r b", "- T")),
            *(node("Concat", "S T", "c", axis=0), node("Gather", "c last", "y", axis=0)),
        ],
        "GRU GRU.",
    ),
    "parts of joined states of two layers": (
        [
            *(*TO_STEPS, recurrent("GRU", outputs="Y S")),
            *(node("Squeeze", "Y second", "q"), recurrent("GRU", "q wu r b", "- T")),
            *(node("Concat", "S T S", "c", axis=0), node("Slice", "c second huge first", "p")),
            *(node("Transpose", "p", "t", perm=[1, 0, 2]), node("Flatten", "t", "v")),
            node("MatMul", "v of_state", "y"),
        ],
        "GRU Pad2D Flatten GRU. Concat Dense",
    ),
    "a dense layer of the rows": (
        [
            *(node("Squeeze", "x second", "s"), node("MatMul", "s of_rows", "d")),
            *(node("Add", "bias_of_rows d", "a"), node("Tanh", "a", "n")),
            *(node("Transpose", "n", "X", perm=[1, 0, 2]), recurrent("LSTM"), TO_IMAGES),
        ],
        "Conv2D Tanh LSTM",
    ),
    "means of the columns": (
        [
            node("Conv", "x filters", "c", pads=[1, 1, 1, 1]),
            node("ReduceMean", "c", "m", axes=[3], keepdims=0),
            *(node("Transpose", "m", "X", perm=[2, 0, 1]), recurrent("GRU"), TO_IMAGES),
        ],
        "Conv2D AdaptiveAveragePool2D GRU",
    ),
    "operators of each step": (
        [
            *(*TO_STEPS, recurrent("GRU"), node("Squeeze", "Y second", "q")),
            *(node("LayerNormalization", "q gamma", "n"), node("Mul", "n scale", "p")),
            *(
                node("Relu", "p", "R"),
                node("MatMul", "R of_steps", "d"),
                node("Add", "d bias", "a"),
            ),
            *(node("Softmax", "a", "z", axis=2), *STEPS_TO_IMAGES),
        ],
        "GRU LayerNorm ReLU Conv2D Softmax",
    ),
    "factors of the units": (
        [*TO_STEPS, recurrent("GRU"), node("Squeeze", "Y second", "q")]
        + [node("Mul", "scale q", "z"), *STEPS_TO_IMAGES],
        "GRU Scale",
    ),
    "all steps, flattened": (
        [
            *(*TO_STEPS, recurrent("LSTM"), node("Squeeze", "Y second", "q")),
            *(node("Transpose", "q", "t", perm=[1, 0, 2]), node("Flatten", "t", "v")),
            node("Gemm", "v of_all bias", "y"),
        ],
        "LSTM Flatten Dense",
    ),
    "the mean of the steps": (
        [
            *(*TO_STEPS, recurrent("LSTM"), node("Squeeze", "Y second", "q")),
            node("ReduceMean", "q", "y", axes=[0], keepdims=0),
        ],
        "LSTM GlobalAveragePool2D Flatten",
    ),
}


def file_of(path, nodes, opset=17):
    operator = next((n for n in nodes if n.op_type in (*GATES, "RNN")), None)
    directions = 1 + any(a.s == b"bidirectional" for a in operator.attribute)
    constants = weights(operator.op_type, directions)
    constants["wu"] = weights(operator.op_type, directions, UNITS)["w"]
    constants |= CONSTANTS
    read = {name for n in nodes for name in n.input if name in constants}
    return saved(path, nodes, {name: constants[name] for name in sorted(read)}, SHAPE, opset=opset)


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_onnxruntime(tmp_path, case):
    nodes, expected = CASES[case]
    path = file_of(tmp_path / "a.onnx", nodes)
    net = dl.load_onnx(path, normalization="none")
    assert kinds(net) == expected
    assert difference(net, path, random_array("images", IMAGES, *SHAPE)) <= 1e-5


@pytest.mark.parametrize("outputs", ["Y", "- S"])
def test_the_mini_batch_is_the_first_axis(tmp_path, outputs):
    """The oracle is onnx's evaluator, because onnxruntime does not support layout=1."""
    perm = [0, 3, 1, 2] if outputs == "Y" else [0, 2, 1]
    nodes = [
        *(node("Squeeze", "x second", "X"), recurrent("LSTM", outputs=outputs, layout=1)),
        node("Transpose", outputs[-1], "y", perm=perm),
    ]
    path = file_of(tmp_path / "a.onnx", nodes)
    images = random_array("images", IMAGES, *SHAPE)
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"x": images})
    actual = scores(dl.load_onnx(path, normalization="none"), images)
    assert abs(actual.reshape(expected.shape) - expected).max() <= 1e-5 * abs(expected).max()


UNSUPPORTED = {
    "linear_before_reset is 0, expected 1": recurrent("GRU", linear_before_reset=0),
    "clip is 0.5, expected none": recurrent("LSTM", clip=0.5),
    "activations are relu, tanh, tanh, expected the default ones": recurrent(
        "LSTM", activations=["Relu", "Tanh", "Tanh"]
    ),
    "input_forget is 1, expected 0": recurrent("LSTM", input_forget=1),
    "it has the input sequence_lens": recurrent("LSTM", "X w r b lengths"),
    "its input initial_h is not 0": recurrent("GRU", "X w r b - ones"),
    "its input initial_c is not 0": recurrent("LSTM", "X w r b - zeros ones"),
    "its input P is not 0": recurrent("LSTM", "X w r b - - - other_peepholes"),
    "its output Y_c, the last cell state, is used": recurrent("LSTM", outputs="- - Y"),
    "RNN Y (7, 1, N, 3): no layer of mpidl computes it": recurrent("RNN"),
    "weights of the shapes (12, 5) and (12, 3)": recurrent("LSTM", hidden_size=UNITS + 1),
    "direction is sideways": recurrent("LSTM", direction="sideways"),
    "whose steps are not the rows of images (1, 7, 5)": recurrent("LSTM", "C w r b"),
    "it reads (7, N, 1, 5), expected the rows of images": recurrent("LSTM", "I w r b"),
    "it reads (N, 7, 5), expected the rows of images": recurrent("LSTM", "s w r b"),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_forms(tmp_path, monkeypatch, reason):
    monkeypatch.setitem(CONSTANTS, "other_peepholes", 1 + CONSTANTS["peepholes"])
    failing = UNSUPPORTED[reason]
    nodes = [
        *(*TO_STEPS, node("Transpose", "s", "C", perm=[2, 0, 1])),
        *(node("Transpose", "x", "I", perm=[2, 0, 1, 3]), failing, node("Relu", "Y", "y")),
    ]
    path = file_of(tmp_path / "a.onnx", nodes)
    text = refusal(dl.load_onnx, path)
    assert text.startswith(f"{path}: unsupported nodes: {failing.op_type} Y ") and reason in text


# ---- modules of PyTorch ----

# {case: (module, layers, bidirectional, batch_first, steps or outputs, shape of images, layers of
# mpidl)}. An image (C, H, W) becomes a sequence of H steps with C*W features.
MODULES = {
    "last output": ("LSTM", 1, False, True, "output", (1, 7, 5), "LSTM. Dense"),
    "last output, steps first": ("GRU", 1, False, False, "output", (1, 7, 5), "GRU. Dense"),
    "images with channels": ("GRU", 1, False, True, "output", (2, 7, 3), "GRU. Dense"),
    "sequences of features": ("LSTM", 1, False, True, "output", (4, 6, 1), "LSTM. Dense"),
    "last output of two directions": (
        *("LSTM", 1, True, True, "output", (1, 7, 5)),
        "LSTM LSTM< Concat Pad2D Flatten Dense",
    ),
    "last state of two layers": ("LSTM", 2, False, True, "state", (1, 7, 5), "LSTM LSTM. Dense"),
    "last state of two layers and two directions": (
        *("GRU", 2, True, False, "state", (2, 7, 3)),
        "GRU GRU< Concat GRU. GRU<. Concat Dense",
    ),
    "all steps": ("GRU", 2, False, True, "steps", (1, 7, 5), "GRU GRU Conv2D"),
    "all steps of two directions": (
        *("LSTM", 1, True, False, "steps", (1, 7, 5)),
        "LSTM LSTM< Concat Conv2D",
    ),
    "mean of all steps": (
        *("LSTM", 1, False, True, "mean", (2, 7, 3)),
        "LSTM GlobalAveragePool2D Flatten Dense",
    ),
}


def module_of(torch, kind, layers, bidirectional, batch_first, output, shape):
    nn = torch.nn

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            options = {"bidirectional": bidirectional, "batch_first": batch_first}
            features = shape[0] * shape[2]
            self.rnn = getattr(nn, kind)(features, UNITS, num_layers=layers, **options)
            self.fc = nn.Linear(UNITS * (1 + bidirectional), 4)

        def forward(self, x):
            if x.dim() == 4:
                x = x.squeeze(1) if x.shape[1] == 1 else x.permute(0, 2, 1, 3).flatten(2)
            x = x if batch_first else x.transpose(0, 1)
            steps, state = self.rnn(x)
            state = state[0] if kind == "LSTM" else state
            axis = 1 if batch_first else 0
            if output == "output":
                return self.fc(steps[:, -1] if batch_first else steps[-1])
            if output == "state":
                return self.fc(torch.cat([state[-2], state[-1]], 1) if bidirectional else state[-1])
            if output == "mean":
                return self.fc(steps.mean(axis))
            return self.fc(steps if batch_first else steps.transpose(0, 1))

    torch.manual_seed(0)
    module = Recurrent().eval()
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, -1, 1)
    return module


def exported(torch, module, images, path, dynamo, **keywords):
    """Export a module whose number of images is not fixed."""
    if dynamo:
        keywords = {"dynamic_shapes": ({0: torch.export.Dim("N")},)} | keywords
    else:
        keywords = {"dynamic_axes": {"x": {0: "N"}}} | keywords
    inputs = (torch.from_numpy(images),)
    torch.onnx.export(module, inputs, str(path), dynamo=dynamo, input_names=["x"], **keywords)


def error_of(torch, net, module, images):
    """Return the largest difference from the module's scores, relative to the largest score."""
    expected = module(torch.from_numpy(images)).detach().numpy()
    if expected.ndim == 3:  # (N, steps, outputs)
        expected = expected.transpose(0, 2, 1)[..., None]
    actual = scores(net, images if images.ndim == 4 else images[:, None])
    assert actual.shape == expected.shape
    return abs(actual - expected).max() / abs(expected).max()


EXPORTS = [(case, False) for case in MODULES]
EXPORTS += [  # PyTorch's default exporter takes seconds per module
    pytest.param(case, True, marks=[pytest.mark.slow("ranks")] * (i > 0))
    for i, case in enumerate(MODULES)
]


@pytest.mark.parametrize("case, dynamo", EXPORTS)
def test_modules_that_pytorch_exports(tmp_path, case, dynamo):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if dynamo:
        pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    *arguments, shape, layers = MODULES[case]
    module, path = module_of(torch, *arguments, shape), tmp_path / "a.onnx"
    images = random_array("images", IMAGES, *shape)
    exported(torch, module, images, path, dynamo)
    net = dl.load_onnx(path, normalization="none")
    assert kinds(net) == layers
    assert error_of(torch, net, module, images) <= 1e-5


@pytest.mark.parametrize("batch_first", [False, True])
def test_an_input_of_sequences(tmp_path, batch_first):
    """Sequences of T steps with F features become images (1, T, F)."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Steps(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = torch.nn.GRU(FEATURES, UNITS, batch_first=batch_first)

        def forward(self, x):
            return self.rnn(x)[0]

    torch.manual_seed(0)
    module, path = Steps().eval(), tmp_path / "a.onnx"
    sequences = random_array("images", IMAGES, STEPS, FEATURES)
    inputs = sequences if batch_first else np.ascontiguousarray(sequences.transpose(1, 0, 2))
    axes = {"dynamic_axes": {"x": {0: "N", 1: "T"} if batch_first else {0: "T", 1: "N"}}}
    exported(torch, module, inputs, path, False, **axes)
    assert "sets sizes that the file leaves open" in refusal(dl.load_onnx, path)
    net = dl.load_onnx(path, (1, STEPS, FEATURES), normalization="none")
    assert net.input_shape == (1, STEPS, FEATURES) and kinds(net) == "GRU"
    expected = session_scores(path, inputs)
    expected = expected if batch_first else expected.transpose(1, 0, 2)
    actual = scores(net, sequences[:, None])[..., 0].transpose(0, 2, 1)
    assert abs(actual - expected).max() <= 1e-5 * abs(expected).max()


def test_a_fixed_number_of_images(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    shape = (1, STEPS, FEATURES)
    for images in (1, IMAGES):
        module, path = module_of(torch, "LSTM", 2, True, True, "state", shape), tmp_path / "a.onnx"
        values = random_array("images", images, *shape)
        exported(torch, module, values, path, False, dynamic_axes=None)
        net = dl.load_onnx(path, normalization="none")
        assert error_of(torch, net, module, values) <= 1e-5


def test_columns_as_steps_are_refused(tmp_path):
    """As in networks that read text from left to right. mpidl's steps are rows."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Columns(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.rnn = torch.nn.Conv2d(1, 4, (STEPS, 1)), torch.nn.LSTM(4, UNITS)

        def forward(self, x):
            return self.rnn(self.conv(x).squeeze(2).permute(2, 0, 1))[0]

    path, images = tmp_path / "a.onnx", random_array("images", IMAGES, *SHAPE)
    exported(torch, Columns().eval(), images, path, False)
    text = refusal(dl.load_onnx, path)
    reason = "it reads (5, N, 4), whose steps are not the rows of images (4, 1, 5)"
    assert "unsupported nodes: LSTM " in text and text.endswith(reason)
