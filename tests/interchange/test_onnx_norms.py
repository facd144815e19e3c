"""Test ONNX operators for normalization within an image, in both directions."""

import numpy as np
import onnx
import pytest
from image_sets import refusal
from onnx_models import difference, node, saved, scores, without_description
from single_rank import numbers

import mpidl as dl

SHAPE = (4, 6, 9)
IMAGES = numbers("images", 18, *SHAPE, low=-3, high=3, dtype=np.float32)
CONSTANTS = {
    "gamma": np.float32([1, 2, -0.5, 0.25]),
    "beta": np.float32([0, 1, 2, -3]),
    "gamma_of_image": numbers("gamma", *SHAPE, dtype=np.float32),
    "gamma_of_last": numbers("gamma", 6, 9, 4, dtype=np.float32),
    "ones": np.ones(2, np.float32),
    "zeros": np.zeros(2, np.float32),
    "scale": np.float32([1, 2, -0.5, 0]).reshape(4, 1, 1),
    "shift": np.float32([0, 1, 2, -3]).reshape(4, 1, 1),
    "grouped": np.array([0, 2, -1]),
    "split": np.array([0, 2, 2, 6, 9]),
    "joined": np.array([0, 4, 6, 9]),
    "weight": numbers("weight", 4, 5, dtype=np.float32),
    "bias": numbers("bias", 5, dtype=np.float32),
}
GROUPS = [
    node("Reshape", "x grouped", "a"),
    node("InstanceNormalization", "a ones zeros", "b", epsilon=1e-3),
    node("Reshape", "b joined", "c"),
]
TO_LAST = node("Transpose", "x", "a", perm=[0, 2, 3, 1])
TO_FIRST = node("Transpose", "b", "y", perm=[0, 3, 1, 2])
# {case: (nodes, opset, layers)}
CASES = {
    "LayerNormalization of channels": (
        [TO_LAST, node("LayerNormalization", "a gamma beta", "b", epsilon=1e-6), TO_FIRST],
        17,
        "LayerNorm",
    ),
    "LayerNormalization without an offset": (
        [TO_LAST, node("LayerNormalization", "a gamma", "b"), TO_FIRST],
        17,
        "LayerNorm",
    ),
    "LayerNormalization of images": (
        [node("LayerNormalization", "x gamma_of_image gamma_of_image", "y", axis=1)],
        17,
        "LayerNorm",
    ),
    "LayerNormalization of transposed images": (
        [TO_LAST, node("LayerNormalization", "a gamma_of_last", "b", axis=-3), TO_FIRST],
        17,
        "LayerNorm",
    ),
    "a dense layer of the channels of pixels": (
        [
            TO_LAST,
            node("LayerNormalization", "a gamma beta", "c"),
            node("MatMul", "c weight", "d"),
            node("Add", "bias d", "b"),
            TO_FIRST,
        ],
        17,
        "LayerNorm Conv2D",
    ),
    "InstanceNormalization": (
        [node("InstanceNormalization", "x gamma beta", "y")],
        17,
        "InstanceNorm",
    ),
    "GroupNormalization": (
        [node("GroupNormalization", "x gamma beta", "y", num_groups=2)],
        21,
        "GroupNorm",
    ),
    "reshaped groups": ([*GROUPS, node("Relu", "c", "y")], 17, "GroupNorm ReLU"),
    "reshaped groups with factors": (
        [*GROUPS, node("Mul", "c scale", "d"), node("Add", "shift d", "y")],
        17,
        "GroupNorm",
    ),
    "groups of channels": (
        [node("Reshape", "x split", "a"), *GROUPS[1:], node("Add", "c shift", "y")],
        17,
        "GroupNorm",
    ),
    "a result that is also read without its offset": (
        [*GROUPS, node("Add", "c shift", "d"), node("Add", "c d", "y")],
        17,
        "GroupNorm BatchNorm Add",
    ),
}


def file_of(path, nodes, opset):
    read = {name for n in nodes for name in n.input if name in CONSTANTS}
    constants = {name: CONSTANTS[name] for name in sorted(read)}
    return saved(path, nodes, constants, SHAPE, opset=opset)


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_onnxruntime(tmp_path, case):
    nodes, opset, expected = CASES[case]
    path = file_of(tmp_path / "a.onnx", nodes, opset)
    net = dl.load_onnx(path, normalization="none")
    assert [type(layer).__name__ for layer in net.layers] == expected.split()
    assert difference(net, path, IMAGES) <= 2e-6


UNSUPPORTED = {
    "it normalizes the axes [1, 2]": ([node("LayerNormalization", "x gamma", "y", axis=2)], 17),
    "stash_type is 11, expected 1": (
        [TO_LAST, node("LayerNormalization", "a gamma", "b", stash_type=11), TO_FIRST],
        17,
    ),
    "y: 3 groups do not divide the 4 channels": (
        [node("GroupNormalization", "x gamma beta", "y", num_groups=3)],
        21,
    ),
    "its gamma has the shape (6, 9, 4), expected (4, 6, 9)": (
        [node("LayerNormalization", "x gamma_of_last", "y", axis=1)],
        17,
    ),
    "input 0 is transposed": (
        [TO_LAST, node("InstanceNormalization", "a gamma beta", "b"), TO_FIRST],
        17,
    ),
    "input 0 has two axes of channels": ([GROUPS[0], node("Relu", "a", "y")], 17),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_forms(tmp_path, reason):
    path = file_of(tmp_path / "a.onnx", *UNSUPPORTED[reason])
    text = refusal(dl.load_onnx, path)
    assert text.startswith(f"{path}: unsupported nodes: ") and reason in text


LAYERS = {
    "pixels": [dl.LayerNorm(epsilon=1e-6), dl.LayerNorm(affine=False)],
    "image": [dl.LayerNorm("image"), dl.ReLU(), dl.LayerNorm("image", affine=False)],
    "features": [dl.Dense(6), dl.LayerNorm(), dl.GroupNorm(2), dl.ReLU(), dl.LayerNorm("image")],
    "groups": [dl.GroupNorm(2), dl.GroupNorm(4, affine=False, epsilon=1e-3)],
    "instances": [dl.InstanceNorm(), dl.ReLU(), dl.InstanceNorm(affine=False)],
}


def with_other_factors(net):
    """Return a network whose scales differ from 1, and whose offsets differ from 0."""
    net.parameters = {
        name: value + numbers(name, *value.shape, low=-0.5, high=0.5, dtype=np.float32)
        for name, value in net.parameters.items()
    }
    return net


@pytest.mark.parametrize("case", LAYERS)
def test_layers_are_written_and_read(tmp_path, case):
    net = with_other_factors(dl.Network(LAYERS[case], SHAPE, seed=1))
    path = tmp_path / "a.onnx"
    dl.save_onnx(net, path, normalize_images=False)
    onnx.checker.check_model(path, full_check=True)
    restored = dl.load_onnx(path)
    assert restored.spec() == net.spec()
    assert scores(restored, IMAGES).tobytes() == scores(net, IMAGES).tobytes()
    graph_alone = dl.load_onnx(without_description(path, tmp_path / "b.onnx"), normalization="none")
    assert [type(layer) for layer in graph_alone.layers if not isinstance(layer, dl.Flatten)] == [
        type(layer) for layer in net.layers
    ]
    for read in (restored, graph_alone):
        assert difference(read, path, IMAGES) <= 2e-6


def modules(torch):
    """Yield (module, layers) of PyTorch for images of SHAPE, among them a block of ConvNeXt."""
    nn = torch.nn

    class LayerNorm2d(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    class Permute(nn.Module):
        def __init__(self, *axes):
            super().__init__()
            self.axes = axes

        def forward(self, x):
            return x.permute(*self.axes)

    dense = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)
    block = Permute(0, 2, 3, 1), nn.LayerNorm(4, eps=1e-6), *dense, Permute(0, 3, 1, 2)
    yield nn.Sequential(*block), "LayerNorm Conv2D GELU Conv2D"
    yield LayerNorm2d(4), "LayerNorm"
    yield nn.LayerNorm(SHAPE), "LayerNorm"
    yield nn.GroupNorm(2, 4), "GroupNorm"
    yield nn.GroupNorm(1, 4, affine=False), "GroupNorm"
    yield nn.InstanceNorm2d(4), "InstanceNorm"
    yield nn.InstanceNorm2d(4, affine=True), "InstanceNorm"


@pytest.mark.parametrize("opset", [17, 18])
def test_modules_that_pytorch_exports(tmp_path, opset):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(0)
    images, path = torch.from_numpy(IMAGES), tmp_path / "a.onnx"
    for module, layers in modules(torch):
        for parameter in module.parameters():
            torch.nn.init.uniform_(parameter, -1, 1)
        dynamic = {"dynamic_axes": {"x": {0: "N"}}, "input_names": ["x"]}
        torch.onnx.export(
            module.eval(), (images,), str(path), dynamo=False, opset_version=opset, **dynamic
        )
        net = dl.load_onnx(path, normalization="none")
        assert [type(layer).__name__ for layer in net.layers] == layers.split()
        expected = module(images).detach().numpy()
        assert abs(scores(net, IMAGES) - expected).max() <= 1e-6 * abs(expected).max()


def test_weights_have_the_names_of_pytorch(tmp_path):
    layers = [
        *(dl.LayerNorm(name="stem_1"), dl.GroupNorm(2, name="norm"), dl.InstanceNorm(name="last")),
        *(dl.LayerNorm("image", name="whole"), dl.Dense(3, name="fc")),
    ]
    net = with_other_factors(dl.Network(layers, SHAPE, seed=1))
    path = tmp_path / "a.safetensors"
    dl.save_weights(net, path, names="torchvision")
    torch = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    arrays = torch.load_file(path)
    assert arrays["stem.1.weight"].tobytes() == net.parameters["stem_1.gamma"].tobytes()
    assert arrays["norm.bias"].tobytes() == net.parameters["norm.beta"].tobytes()
    assert arrays["whole.weight"].shape == SHAPE and "last.weight" in arrays
    other = dl.Network(layers, SHAPE, seed=2)
    dl.load_weights(other, path, names="torchvision")
    assert dl.weights_sha256(other) == dl.weights_sha256(net)
