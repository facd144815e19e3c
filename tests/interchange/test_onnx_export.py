"""Test that ONNX files have onnxruntime's scores, and that reading them restores the network."""

import json

import numpy as np
import onnx
import pytest
from image_sets import pixels_of, refusal
from onnx_models import difference, without_description

import mpidl as dl
from mpidl.data.transforms.normalize import Normalization, no_normalization
from mpidl.interchange import onnx_export
from mpidl.nn import layers, zoo
from mpidl.training.files.model_file import weights_sha256

LAYERS = [
    dl.Conv2D(3, 8, padding="same", name="first"),
    dl.BatchNorm(decay=0.25, epsilon=1e-3),
    dl.ReLU(name="a"),
    dl.CrossChannelNorm(5, alpha=1e-2),
    dl.LayerNorm(),
    dl.LeakyReLU(0.1),
    dl.GroupNorm(2),
    dl.PReLU(initial=0.3),
    dl.GELU(),
    dl.Pad2D(((1, 0), (2, 1)), 0.5),
    dl.HardSigmoid(0.3, 0.4),
    dl.AveragePool2D((2, 5), 1, ((0, 0), (1, 0)), count_padding=False),
    dl.ChannelShuffle(4),
    dl.ChannelSlice(1, 7),
    dl.Resize2D(scale=(1.5, 2), mode="bilinear"),
    dl.Resize2D((8, 9), coordinates="half_pixel", rounding="round_prefer_ceil"),
    dl.AdaptiveAveragePool2D((7, 6)),
    dl.HardSwish(),
    dl.Conv2D((2, 3), 8, padding="same", dilation=2, groups=2, bias=False),
    dl.Dropout(0.25, name="drop"),
    dl.Tanh(name="b"),
    dl.Add(inputs=("a", "b", "first"), name="sum"),
    dl.TransposedConv2D((4, 3), 4, stride=2, cropping=((1, 2), (0, 1)), name="up"),
    dl.MaxPool2D(2, padding=((0, 1), (1, 0)), name="down"),
    dl.AveragePool2D((3, 2), stride=(1, 2), padding=1, name="means", after="up"),
    dl.Conv2D(1, 3, stride=(2, 1)),
    dl.Swish(),
    dl.InstanceNorm(),
    dl.Clip(-1, 2),
    dl.LayerNorm("image"),
    dl.GELU("tanh"),
    dl.GRU(4),
    dl.LSTM(3, reverse=True),
    dl.GlobalAveragePool2D(name="c"),
    dl.GlobalAveragePool2D(after="down", name="d"),
    dl.Concat(inputs=("c", "d"), name="both"),
    dl.Scale(0.5),
    dl.StochasticDepth(0.25, name="depth"),
    dl.Multiply(inputs=("depth", "both")),
    dl.Flatten(name="gate"),
    dl.Multiply(inputs=("both", "gate"), name="gated"),
    dl.Flatten(),
    dl.Dense(5, bias=False),
    dl.PReLU(shared=True),
    dl.Clip(-0.5, float("inf")),
    dl.Sigmoid(),
    dl.Clip(-float("inf"), 0.9),
    dl.Dense(4),
    dl.ChannelShuffle(2),
    dl.PReLU(),
    dl.Dense(3),
    dl.Softmax(),
]


def network(seed=1):
    net = dl.Network(LAYERS, (2, 7, 6), seed=seed)
    random = np.random.default_rng(seed)
    net.parameters = {
        name: value + np.float32(0.1) * random.standard_normal(value.shape, np.float32)
        for name, value in net.parameters.items()
    }
    net.state = {k: random.uniform(0.5, 1.5, v.shape).astype("f4") for k, v in net.state.items()}
    return net


@pytest.mark.parametrize("fuse", [True, False])
def test_every_layer(tmp_path, fuse):
    net, path, images = network(), tmp_path / "a.onnx", pixels_of(0, 5, 2, 7, 6)
    net.fuse = fuse
    dl.save_onnx(net, path)
    onnx.checker.check_model(path, full_check=True)
    assert difference(net_with_usual(net), path, images) <= 1e-5
    restored = dl.load_onnx(path)
    assert restored.spec() == net.spec() and weights_sha256(restored) == weights_sha256(net)
    graph_alone = dl.load_onnx(without_description(path, tmp_path / "b.onnx"))
    assert difference(graph_alone, path, images) <= 1e-5


def test_every_layer_class_has_an_operator():
    abstract = {layers.Layer, layers.Weighted}
    types = {
        value
        for value in (getattr(layers, name) for name in dir(layers))
        if isinstance(value, type) and issubclass(value, layers.Layer)
    }
    assert types - abstract == set(onnx_export.OPERATORS) == set(map(type, LAYERS))


def net_with_usual(net):
    net.normalization = Normalization()
    return net


NETWORKS = {
    "digits": (1, 28, 28),
    "cifar": (3, 32, 32),
    "resnet": (3, 32, 32),
    "alexnet": (3, 67, 67),
    "alexnet_torchvision": (3, 63, 63),
    "vgg11_bn": (3, 32, 32),
    "resnet18": (3, 64, 64),
    "resnet50": (3, 64, 64),
    "squeezenet1_1": (3, 60, 47),
    "mobilenet_v2": (3, 33, 33),
    "unet": (1, 16, 24),
}
SLOW = ("alexnet", "alexnet_torchvision", "vgg11_bn", "resnet18", "resnet50", "mobilenet_v2")
ZOO = [pytest.param(name, marks=[pytest.mark.slow("ranks")] * (name in SLOW)) for name in NETWORKS]


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(tmp_path, name):
    shape, path = NETWORKS[name], tmp_path / "a.onnx"
    net, images = zoo.NETWORKS[name](shape, 10, 1), pixels_of(0, 4, *shape)
    dl.save_onnx(net, path)
    assert difference(net_with_usual(net), path, images) <= 1e-5
    restored = dl.load_onnx(path)
    assert restored.spec() == net.spec() and weights_sha256(restored) == weights_sha256(net)
    graph_alone = dl.load_onnx(without_description(path, tmp_path / "b.onnx"))
    assert difference(graph_alone, path, images) <= 1e-5


@pytest.mark.parametrize("name", ["rescale-zero-one", "none", "zscore", "zerocenter-element"])
def test_normalization_is_part_of_the_graph(tmp_path, name):
    random, net = np.random.default_rng(0), zoo.digits((3, 12, 11), 4, seed=2)
    centre, divisor = random.uniform(90, 130, 3), random.uniform(40, 60, 3)
    net.normalization = {
        "rescale-zero-one": Normalization(),
        "none": no_normalization(3),
        "zscore": Normalization("zscore", centre.astype("f4"), divisor.astype("f4")),
        "zerocenter-element": Normalization(
            name, random.uniform(90, 130, (3, 12, 11)).astype("f4"), np.ones((3, 12, 11), "f4")
        ),
    }[name]
    net.classes, path, images = (
        ("a", "b", "c", "d"),
        tmp_path / "a.onnx",
        pixels_of(1, 20, 3, 12, 11),
    )
    dl.save_onnx(net, path)
    assert difference(net, path, images) <= 1e-5
    assert difference(dl.load_onnx(path, graph_alone=True), path, images) <= 1e-5
    restored = dl.load_onnx(path)
    assert restored.normalization.name == name and restored.classes == net.classes
    assert restored.predict(images).tobytes() == net.predict(images).tobytes()
    dl.save_onnx(net, path, normalize_images=False)
    assert dl.load_onnx(path).classes == net.classes
    values = net.normalization(images)
    for plain in (dl.load_onnx(path), dl.load_onnx(path, graph_alone=True)):
        assert plain.normalization.name == name  # the metadata have it, the graph does not
        assert plain.predict(images) == pytest.approx(net.predict(images), abs=1e-6)
        plain.normalization = no_normalization(3)
        assert difference(plain, path, values) <= 1e-5


def test_a_changed_graph_is_read_as_it_is(tmp_path):
    net, path = zoo.digits(seed=1), tmp_path / "a.onnx"
    dl.save_onnx(net, path)
    proto = onnx.load(path)
    (relu,) = (n for n in proto.graph.node if n.name == "relu1")
    relu.op_type = "Tanh"
    path.write_bytes(proto.SerializeToString())
    changed = dl.load_onnx(path)
    assert isinstance(changed["relu1"], dl.Tanh)
    assert difference(changed, path, pixels_of(0, 3, 1, 28, 28)) <= 1e-5


def test_a_description_that_does_not_fit_is_ignored(tmp_path):
    """If the description does not match the graph, the graph is read without it, or refused."""
    net, path = zoo.digits((1, 12, 11), 3, seed=1), tmp_path / "a.onnx"
    net.classes = ("a", "b", "c")
    dl.save_onnx(net, path)
    proto = onnx.load(path)
    (entry,) = proto.metadata_props
    description, images = json.loads(entry.value), pixels_of(0, 3, 1, 12, 11)

    def read(**changes):
        entry.value = json.dumps(description | changes)
        path.write_bytes(proto.SerializeToString())
        return dl.load_onnx(path)

    assert read().classes == net.classes
    layers = json.loads(description["network"])
    layers[-1]["outputs"] = 60_000_000  # would need 100 GB
    for changes in (
        {"classes": '["a", "b"]'},
        {"classes": '"abc"'},
        {"input_shape": [1, 13, 11]},
        {"network": json.dumps(layers)},
        {"network": "[" * 200_000},
    ):
        changed = read(**changes)
        assert changed.classes is None and difference(changed, path, images) <= 1e-5
    entry.value = "[" * 200_000
    path.write_bytes(proto.SerializeToString())
    assert dl.load_onnx(path).classes is None


def test_arrays_of_other_types(tmp_path):
    net, path = zoo.digits((1, 12, 11), 3, seed=1), tmp_path / "a.onnx"
    dl.save_onnx(net, path)
    proto = onnx.load(path)
    for tensor in proto.graph.initializer:
        half = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(half, tensor.name))
    path.write_bytes(proto.SerializeToString())
    restored = dl.load_onnx(path)
    assert {value.dtype for value in restored.parameters.values()} == {np.dtype(np.float32)}
    for tensor in proto.graph.initializer:
        integers = (10 * onnx.numpy_helper.to_array(tensor)).astype(np.int8)
        tensor.CopyFrom(onnx.numpy_helper.from_array(integers, tensor.name))
    path.write_bytes(proto.SerializeToString())
    assert {value.dtype for value in dl.load_onnx(path).state.values()} == {np.dtype(np.float32)}


def test_what_cannot_be_written(tmp_path):
    class Twice(dl.Layer):
        pass

    net = dl.Network([dl.Conv2D(3, 2), Twice(), Twice(), dl.Dense(2)], (1, 5, 5))
    text = refusal(dl.save_onnx, net, tmp_path / "a.onnx")
    assert text == f"{tmp_path}/a.onnx: ONNX has no operator for twice1 (Twice), twice2 (Twice)"
    text = refusal(dl.save_onnx, zoo.digits(), tmp_path / "a.pb")
    assert text == f"{tmp_path}/a.pb: expected a name that ends with .onnx"
    assert list(tmp_path.iterdir()) == []
