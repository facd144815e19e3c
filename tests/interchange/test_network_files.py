"""Test loading weights into a network that the caller defines: names, sizes, refused files."""

import json
import os

import numpy as np
import onnx
import pytest
import safetensors.numpy
from image_sets import refusal

import mpidl as dl
from mpidl.data.transforms import normalize
from mpidl.data.transforms.normalize import Normalization
from mpidl.interchange import network_files
from mpidl.nn import zoo

SHAPE = (3, 12, 11)


def build(input_shape, outputs):
    return zoo.digits(input_shape, outputs, seed=None)


def network(classes=4):
    """Return a network with a normalization, class names and preprocessing of images."""
    net = zoo.digits(SHAPE, classes, seed=2)
    net.state = {name: a + np.float32(0.25) for name, a in net.state.items()}
    centre, divisor = np.float32([90, 100, 110]), np.float32([40, 50, 60])
    net.normalization = Normalization("zscore", centre, divisor)
    net.classes, net.preprocess = tuple("abcd"[:classes]), dl.Preprocess(SHAPE[1:])
    return net


def loaded(path, shape=(1, 9, 9), outputs=7, function=build):
    return network_files.load_into(path, function, shape, outputs)


@pytest.mark.parametrize("name", ["a.h5", "a.safetensors", "a.onnx"])
def test_a_file_that_describes_its_network(tmp_path, name):
    old = network()
    network_files.save(old, tmp_path / name)
    net = loaded(tmp_path / name)
    assert dl.weights_sha256(net) == dl.weights_sha256(old)
    assert (net.input_shape, net.output_shape, net.classes) == (SHAPE, (4,), tuple("abcd"))
    assert net.normalization.centre.tolist() == [90, 100, 110]
    assert net.preprocess == old.preprocess
    if name == "a.h5":  # a model file may have any name
        path = (tmp_path / name).rename(tmp_path / "a.model")
        assert dl.weights_sha256(network_files.load(path)) == dl.weights_sha256(old)


def test_names_of_libraries_are_detected(tmp_path):
    old, path = zoo.squeezenet1_1((3, 60, 47), 5, seed=3), tmp_path / "a.safetensors"

    def squeezenet(input_shape, outputs):
        return zoo.squeezenet1_1(input_shape, outputs, seed=None)

    for change in (lambda name: name, lambda name: name.replace("_", ".")):
        arrays = {change(name): array for name, array in old.parameters.items()}
        safetensors.numpy.save_file(arrays, path)
        net = loaded(path, (3, 60, 47), 1000, squeezenet)
        assert dl.weights_sha256(net) == dl.weights_sha256(old) and net.output_shape == (5,)
        assert net.normalization.name == "unknown" and net.classes is None
    text = refusal(loaded, path, SHAPE)
    assert text.startswith(f"{path}: the file lacks conv1.weight, ")
    text = refusal(network_files.load, path)
    assert "no description of the network; --network NAME of mpidl.train" in text


def foreign(path, operator="Relu", softmax=True):
    """Write an ONNX file as another library would, without a description and with other names."""
    dl.save_onnx(network(), path)
    proto = onnx.load(path)
    del proto.metadata_props[:]
    for i, node in enumerate(proto.graph.node):
        node.name = f"node {i}"
        node.op_type = operator if node.name and node.op_type == "Relu" else node.op_type
    if softmax:
        output = proto.graph.output[0].name
        proto.graph.node.append(onnx.helper.make_node("Softmax", [output], ["p"], axis=1))
        proto.graph.output[0].name = "p"
    onnx.save(proto, path)
    return path


def test_onnx_files_of_other_libraries_are_matched_by_the_order_of_layers(tmp_path):
    net = loaded(foreign(tmp_path / "a.onnx"))
    expected = network()
    assert dl.weights_sha256(net) == dl.weights_sha256(expected)
    assert net.layer_names == expected.layer_names and net.classes is None
    assert net.normalization.divisor.tolist() == [40, 50, 60]
    foreign(tmp_path / "b.onnx", "Tanh")
    text = refusal(loaded, tmp_path / "b.onnx")
    assert "expected the layers of the file, found a network whose scores differ by" in text

    def other(input_shape, outputs):
        return dl.Network([dl.Conv2D(5, 20), dl.ReLU(), dl.Dense(outputs)], input_shape, seed=None)

    text = refusal(loaded, tmp_path / "a.onnx", SHAPE, 7, other)
    assert "expected the parameters of the network, conv1.weight (20, 3, 5, 5), conv1.bias" in text


def test_weights_of_another_network_of_the_zoo(tmp_path):
    """The error names the network whose weights have the shapes of the file."""

    def fill(name, classes=1000):
        """Write weights with the names of torchvision, or of mpidl, and without a description."""
        net = zoo.NETWORKS[name](classes=classes, seed=None)
        arrays = {name: np.zeros(a.shape, np.float16) for name, a in net.parameters.items()}
        if name in zoo.torchvision.NETWORKS:
            arrays = {name.replace("_", "."): a for name, a in arrays.items()}
        safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
        return tmp_path / "a.safetensors"

    def alexnet(input_shape, outputs):
        return zoo.alexnet(input_shape, outputs, seed=None)

    for name, classes in (("alexnet_torchvision", 7), ("squeezenet1_1", 1000)):
        text = refusal(loaded, fill(name, classes), (3, 227, 227), 1000, alexnet)
        assert text.endswith(f"; the weights have the shapes of --network {name}")
    # an ONNX file, whose weights have other names: the AlexNet of Caffe in the onnx package
    folder = os.path.join(os.path.dirname(onnx.__file__), "backend", "test", "data", "light")
    path = os.path.join(folder, "light_bvlc_alexnet.onnx")
    text = refusal(loaded, path, SHAPE, 7, zoo.alexnet_torchvision)
    assert text.endswith("; the weights have the shapes of --network alexnet")
    text = refusal(loaded, fill("digits", 5), (3, 227, 227), 1000, alexnet)
    assert "the weights have the shapes of --network digits" in text
    arrays = {
        "a.weight": np.zeros((3, 2, 1, 1), np.float32)
    }  # a network that the zoo does not have
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    text = refusal(loaded, tmp_path / "a.safetensors", (3, 227, 227), 1000, alexnet)
    assert "--network" not in text


def test_damaged_descriptions(tmp_path):
    dl.save_weights(network(), tmp_path / "a.safetensors")
    with safetensors.safe_open(tmp_path / "a.safetensors", "numpy") as file:
        original = file.metadata()
    description = json.loads(original["description"])
    arrays = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    path = tmp_path / "b.safetensors"
    for change in (
        {"input_shape": None},
        {"input_shape": [3, 2**20, 2**20]},
        {"input_shape": [3, 2**40, 2**40]},
        {"input_shape": [3, 1e400, 4]},
        {"input_shape": [3]},
        {"normalization": "zerocenter-elements"},
        {"normalization": 7},
        {"classes": None, "preprocess": "{}}"},
    ):
        metadata = original | {"description": json.dumps(description | change)}
        safetensors.numpy.save_file(arrays, path, metadata)
        refusal(loaded, path)
        refusal(network_files.load, path)
    for numbers in ("{}", "[]", "{", '{"centre": [[1], [1, 2]]}', '{"centre": ["a"]}'):
        safetensors.numpy.save_file(arrays, path, original | {"normalization": numbers})
        refusal(loaded, path)
    metadata = original | {"description": json.dumps(description | {"classes": '["a"]'})}
    safetensors.numpy.save_file(arrays, path, metadata)
    assert loaded(path).classes is None  # one class name for four outputs


def test_files_that_are_no_weights(tmp_path):
    (tmp_path / "a.pth").write_bytes(b"\x80\x02")
    for load in (loaded, network_files.load):
        assert "a.pth: not a file with the tensors of a PyTorch module" in refusal(
            load, tmp_path / "a.pth"
        )
        assert "found '.txt'" in refusal(load, tmp_path / "a.txt")
        assert "no such file" in refusal(load, tmp_path / "a.onnx")
    assert refusal(loaded, tmp_path / "a.h5").endswith("not a model file: it is missing")


@pytest.mark.parametrize("name", ["imagenet", "0.485,0.456,0.406/0.229,0.224,0.225"])
def test_the_numbers_of_imagenets_normalization(name):
    """The numbers must equal torchvision's means and standard deviations for pixels in 0..1."""
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5)).astype(np.uint8)
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (images / 255 - mean[:, None, None]) / deviation[:, None, None]
    values = normalize.fixed(name, 3)(images)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("suffix", network_files.SUFFIXES)
def test_files_keep_whether_the_first_layer_is_whitened(tmp_path, suffix):
    whiten = dl.Conv2D(2, 6, name="whiten", bias=False, weight_initializer="whitening")
    net = dl.Network([whiten, dl.Dense(3)], (1, 6, 6), seed=1)
    net.normalization = normalize.normalization("none", dl.ArrayDatastore(np.zeros((5, 1, 6, 6))))
    path = str(tmp_path / f"model{suffix}")
    for factor, expected in ((1, ["whiten"]), (0, [])):
        net.parameters = {name: array * factor for name, array in net.parameters.items()}
        network_files.save(net, path)
        assert network_files.load(path).unwhitened == expected


@pytest.mark.parametrize("suffix", network_files.SUFFIXES)
def test_a_pipe_is_refused(tmp_path, suffix):
    os.mkfifo(pipe := tmp_path / f"pipe{suffix}")
    text = "expected a file, found a device or a pipe"
    assert refusal(network_files.load, pipe).endswith(text)
    if suffix != ".onnx":
        net = dl.Network([dl.ReLU()], (1, 2, 2))
        assert refusal(dl.load_weights, net, pipe).endswith(text)
