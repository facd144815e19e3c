"""Test the pixels that imported networks get: those of their training, or an error that asks."""

import json

import numpy as np
import onnx
import pytest
import safetensors.numpy
from image_sets import pixels_of, refusal
from onnx_models import node, saved, scores, session_scores

import mpidl as dl
from mpidl.cli import predict
from mpidl.data.transforms import normalize
from mpidl.interchange import command as convert
from mpidl.interchange import network_files
from mpidl.nn import zoo

SHAPE = (3, 6, 5)
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
# {choice: what another program did to 8-bit pixels before it trained, in float64}
TRAINED_ON = {
    "none": lambda pixels: pixels,
    "rescale-zero-one": lambda pixels: pixels / 255,
    "rescale-symmetric": lambda pixels: pixels / 127.5 - 1,
    "imagenet": lambda pixels: (pixels / 255 - MEAN[:, None, None]) / DEVIATION[:, None, None],
    "caffe": lambda pixels: pixels[:, ::-1] - np.array([103.939, 116.779, 123.68])[:, None, None],
    "0.13/0.3": lambda pixels: (pixels / 255 - 0.13) / 0.3,
}
QUESTION = "the file does not say how to normalize the images; choose it with --normalization"


def pictures(count, classes=4):
    """Return 8-bit images, in which the colour of the background tells the class, and labels."""
    labels = np.arange(count) % classes
    colours = np.array([[60, 120, 90], [120, 60, 90], [90, 90, 150], [70, 70, 60]])
    noise = pixels_of(3, count, *SHAPE) // 8
    return (colours[labels][:, :, None, None] + noise).astype(np.uint8), labels


def hand_made_cnn(folder, first=(), output_count=4):
    """Write an ONNX file as another library would. The nodes `first` turn x into "p"."""
    random = np.random.default_rng(1)
    constants = {"w": random.normal(size=(8, 3, 3, 3)), "b": random.normal(size=8) * 3}
    constants |= {"v": random.normal(size=(8, output_count)), "c": random.normal(size=output_count)}
    constants |= {name: value for *_, values in first for name, value in values.items()}
    constants = {name: np.float32(value) for name, value in constants.items()}
    nodes = [operation for operation, _ in first]
    nodes += [node("Conv", f"{'p' if first else 'x'} w b", "h", strides=[2, 2])]
    nodes += [
        node("Relu", "h", "r"),
        node("GlobalAveragePool", "r", "g"),
        node("Flatten", "g", "f"),
    ]
    nodes += [node("Gemm", "f v c", "y")]
    return saved(folder / "foreign.onnx", nodes, constants, SHAPE, producer_name="pytorch")


def scored(capsys, *words):
    """Run mpidl.predict; return the accuracy that it prints and its lines on stderr."""
    capsys.readouterr()
    assert predict.main(["--batch-size", "7", *map(str, words)]) == 0
    printed = capsys.readouterr()
    (line,) = (line for line in printed.out.splitlines() if line.startswith("Accuracy: "))
    return float(line.split()[1]), printed.err.splitlines()


@pytest.mark.parametrize("choice", TRAINED_ON)
def test_predict_feeds_the_pixels_of_the_training_or_asks(tmp_path, capsys, choice):
    """The scores are those of onnxruntime for the pixels of the training, and differ for others."""
    path, (images, _) = hand_made_cnn(tmp_path), pictures(40)
    expected = session_scores(path, TRAINED_ON[choice](images.astype(np.float64)))
    np.savez(
        tmp_path / "a.npz", images=images, labels=expected.argmax(axis=1), classes=list("abcd")
    )
    words = ["--model", path, "--data", tmp_path / "a.npz"]
    text = refusal(predict.main, list(map(str, words)))
    assert text.startswith(f"{path}: {QUESTION}") and "\n" not in text
    assert all(name in text for name in normalize.FIXED)
    accuracy, lines = scored(capsys, *words, "--normalization", choice)
    assert accuracy == 1.0
    assert any(line.startswith(f"Normalization: {choice}") for line in lines)
    net = dl.load_onnx(path, normalization=choice)
    np.testing.assert_allclose(scores(net, images), expected, atol=1e-4 * abs(expected).max())
    alternatives = [scores(dl.load_onnx(path, normalization=other), images) for other in TRAINED_ON]
    near = [abs(values - expected).max() <= 1e-2 * abs(expected).max() for values in alternatives]
    assert near == [other == choice for other in TRAINED_ON]
    # the choice is part of every file that mpidl writes, and nothing asks again
    for name in ("b.h5", "c.onnx", "d.safetensors"):
        network_files.save(net, tmp_path / name)
        assert scored(capsys, "--model", tmp_path / name, *words[2:])[0] == 1.0
        assert network_files.load(tmp_path / name).normalization.name == choice
    words = [str(path), str(tmp_path / "e.h5")]
    assert QUESTION in refusal(convert.main, words)
    assert convert.main([*words, "--normalization", choice]) == 0
    assert scored(capsys, "--model", words[1], "--data", tmp_path / "a.npz")[0] == 1.0


def test_every_use_of_the_network_asks(tmp_path):
    net, (images, labels) = dl.load_onnx(hand_made_cnn(tmp_path)), pictures(20)
    store = dl.ArrayDatastore(images, labels)
    options = dl.TrainingOptions(epochs=1, batch_size=10, verbose="off")
    for use in (
        lambda: dl.evaluate(net, store),
        lambda: dl.predict(net, images),
        lambda: dl.classify(net, store),
        lambda: net.predict(images),
        lambda: dl.train(net, store, options),
        lambda: dl.transfer(net, ["a", "b"]),
    ):
        text = refusal(use)
        assert QUESTION in text and "dl.load_onnx(path, normalization=...)" in text
    assert "expected none (pixels from 0 to 255), " in refusal(
        dl.load_onnx, tmp_path / "foreign.onnx", normalization="zscore"
    )
    normalization = dl.data.Normalization("zscore", np.float32([1, 2, 3]), np.float32([4, 5, 6]))
    net = dl.load_onnx(tmp_path / "foreign.onnx", normalization=normalization)
    assert dl.transfer(net, ["a", "b"]).normalization is normalization


def test_an_unknown_normalization_is_saved_as_unknown(tmp_path):
    net, images = dl.load_onnx(hand_made_cnn(tmp_path)), pictures(20)[0]
    for suffix in ("h5", "safetensors", "onnx"):
        path = tmp_path / f"a.{suffix}"
        network_files.save(net, path)
        loaded = network_files.load(path)
        assert dl.weights_sha256(loaded) == dl.weights_sha256(net)
        assert QUESTION in refusal(dl.predict, loaded, images)
        loaded = network_files.load(path, normalization="rescale-symmetric")
        assert loaded.normalization.name == "rescale-symmetric"
    loaded = dl.load_model(tmp_path / "a.h5")[0]
    assert QUESTION in refusal(dl.predict, loaded, images)


def test_training_options_choose_an_unknown_normalization(tmp_path):
    net, (images, labels) = dl.load_onnx(hand_made_cnn(tmp_path)), pictures(20)
    options = {"epochs": 1, "batch_size": 10, "verbose": "off", "normalization": "zerocenter"}
    dl.train(net, dl.ArrayDatastore(images, labels), dl.TrainingOptions(**options))
    mean = images.mean(axis=(0, 2, 3))
    assert np.allclose(net.normalization.centre, mean)
    net = dl.load_onnx(tmp_path / "foreign.onnx")  # its weights expect BGR
    store, options = dl.ArrayDatastore(images, labels), options | {"normalization": "caffe"}
    text = refusal(dl.train, net, store, dl.TrainingOptions(**options))
    assert 'dl.load_onnx(path, normalization="caffe")' in text


def test_an_older_graph_without_arrays_of_its_normalization(tmp_path):
    """Such a file of mpidl has no key "scaling", which these normalizations do not need."""
    for name in ("rescale-zero-one", "none"):
        net, path = dl.load_onnx(hand_made_cnn(tmp_path), normalization=name), tmp_path / "a.onnx"
        dl.save_onnx(net, path, normalize_images=False)
        proto = onnx.load(path)
        (entry,) = proto.metadata_props
        entry.value = json.dumps(
            {key: value for key, value in json.loads(entry.value).items() if key != "scaling"}
        )
        onnx.save(proto, path)
        assert dl.load_onnx(path).normalization.name == name


def affine(operator, value, output="p", read="x"):
    return node(operator, f"{read} {output}_", output), {f"{output}_": np.float32(value)}


# {case: (nodes before the network, name of the pixels that they are for, or None if unclear)}
BEGINNINGS = {
    "ImageNet's, 0 to 1": (
        [
            affine("Sub", MEAN.reshape(1, 3, 1, 1), "s"),
            affine("Div", DEVIATION.reshape(1, 3, 1, 1), "p", "s"),
        ],
        "rescale-zero-one",
    ),
    "ImageNet's, 0 to 255": (
        [
            affine("Div", 255, "a"),
            affine("Sub", MEAN.reshape(1, 3, 1, 1), "s", "a"),
            affine("Div", DEVIATION.reshape(1, 3, 1, 1), "p", "s"),
        ],
        "none",
    ),
    "means": ([affine("Sub", np.reshape([123.7, 116.8, 103.9], (1, 3, 1, 1)))], "none"),
    "one 255th": ([affine("Mul", 1 / 255)], "none"),
    "-1 to 1": ([affine("Mul", 1 / 127.5, "m"), affine("Sub", 1, "p", "m")], "none"),
    "-1 to 1 from 0 to 1": (
        [affine("Mul", 2, "m"), affine("Sub", 1, "p", "m")],
        "rescale-zero-one",
    ),
    "unclear": ([affine("Div", 7)], None),
}


@pytest.mark.parametrize("case", BEGINNINGS)
def test_a_graph_that_begins_with_a_normalization(tmp_path, case):
    first, pixels = BEGINNINGS[case]
    path, (images, _) = hand_made_cnn(tmp_path, first), pictures(20)
    if pixels is None:
        assert QUESTION in refusal(dl.load_onnx(path).predict, images)
    else:
        expected = session_scores(path, TRAINED_ON[pixels](images.astype(np.float64)))
        net = dl.load_onnx(path)
        np.testing.assert_allclose(scores(net, images), expected, atol=1e-4 * abs(expected).max())
        assert "with which the graph begins" in net.normalization.describe()
    for choice in ("none", "rescale-zero-one", "rescale-symmetric"):  # what the graph gets
        expected = session_scores(path, TRAINED_ON[choice](images.astype(np.float64)))
        values = scores(dl.load_onnx(path, normalization=choice), images)
        np.testing.assert_allclose(values, expected, atol=1e-4 * abs(expected).max())
    text = refusal(dl.load_onnx, path, normalization="imagenet")
    assert "the graph begins with a normalization" in text
    floats = images.astype(np.float32) / 255
    expected = session_scores(path, floats)
    values = scores(dl.load_onnx(path, normalization="none"), floats)
    np.testing.assert_allclose(values, expected, atol=1e-4 * abs(expected).max())
    if pixels == "rescale-zero-one":  # the network's normalization is for 8-bit pixels
        for choice in (None, "rescale-zero-one"):
            net = dl.load_onnx(path, normalization=choice)
            assert "expected 8-bit images, found float32" in refusal(net.predict, floats)


def torchvision_arrays(net):
    """Return the arrays of a network of the zoo with the names of torchvision."""
    names = {"gamma": "weight", "beta": "bias", "mean": "running_mean", "variance": "running_var"}
    arrays = {}
    for name, array in (net.parameters | net.state).items():
        layer, _, kind = name.rpartition(".")
        arrays[f"{layer.replace('_', '.')}.{names.get(kind, kind)}"] = array
    return arrays


@pytest.mark.parametrize("name", ["squeezenet1_1", "resnet18"])
def test_published_weights_are_known_by_their_names_and_shapes(tmp_path, name):
    """Fine-tuned weights, and weights with other names, are not published ones."""
    net = zoo.NETWORKS[name](classes=1000, seed=1)
    arrays = torchvision_arrays(net)

    def normalization_of(arrays, classes=1000):
        safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
        fresh = zoo.NETWORKS[name](classes=classes, seed=None)
        dl.load_weights(fresh, tmp_path / "a.safetensors", names="torchvision")
        return fresh.normalization

    published = normalization_of(arrays)
    assert published.name == "imagenet"
    assert f"as in torchvision's {name}" in published.describe()
    images = pixels_of(0, 2, 3, 4, 4)
    np.testing.assert_allclose(
        published(images), TRAINED_ON["imagenet"](images), rtol=1e-5, atol=1e-6
    )
    few = torchvision_arrays(zoo.NETWORKS[name](classes=7, seed=1))
    assert not normalization_of(few, 7).is_known
    # a network that has a normalization keeps it, and a choice replaces it
    safetensors.numpy.save_file(few, tmp_path / "a.safetensors")
    fresh = zoo.NETWORKS[name](classes=7, seed=None)
    fresh.normalization = normalize.fixed("none", 3)
    options = {"names": "torchvision"}
    assert (
        dl.load_weights(fresh, tmp_path / "a.safetensors", **options).normalization.name == "none"
    )
    options["normalization"] = "imagenet"
    dl.load_weights(fresh, tmp_path / "a.safetensors", **options)
    assert fresh.normalization.name == "imagenet"


def test_a_published_graph_is_known_by_its_names(tmp_path):
    """As PyTorch exports it: the weights keep their names."""
    net, path = zoo.squeezenet1_1(classes=1000, seed=1), tmp_path / "a.onnx"
    dl.save_onnx(net, path, normalize_images=False)

    def changed(rename):
        proto = onnx.load(path)
        del proto.metadata_props[:]
        proto.producer_name = "pytorch"
        for part in proto.graph.initializer:
            part.name = rename(part.name) if part.name in net.parameters else part.name
        for operation in proto.graph.node:
            names = [rename(name) if name in net.parameters else name for name in operation.input]
            del operation.input[:]
            operation.input.extend(names)
        onnx.save(proto, tmp_path / "b.onnx")
        return dl.load_onnx(tmp_path / "b.onnx").normalization

    assert changed(lambda name: name.replace("_", ".")).name == "imagenet"
    assert not changed(lambda name: "w" + name.replace(".", "_")).is_known


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        *(("vgg16", "caffe"), ("resnet50", "caffe"), ("resnet50v2", "rescale-symmetric")),
        *(("mobilenetv2_1.00_224", "rescale-symmetric"), ("densenet121", "imagenet")),
        ("my_resnet50", None),
    ],
)
def test_graphs_of_keras_are_known_by_the_names_of_their_nodes(tmp_path, model, expected):
    random = np.random.default_rng(0)
    kernel = f"StatefulPartitionedCall/{model}/conv1/Conv2D/ReadVariableOp:0"
    constants = {kernel: np.float32(random.normal(size=(4, 3, 3, 3)))}
    constants["v"] = np.float32(random.normal(size=(4, 1000)))
    nodes = [node("Conv", f"x {kernel}", "h"), node("GlobalAveragePool", "h", "g")]
    nodes += [node("Flatten", "g", "f"), node("MatMul", "f v", "y")]
    path = saved(tmp_path / "a.onnx", nodes, constants, SHAPE, producer_name="tf2onnx")
    net, images = dl.load_onnx(path), pixels_of(0, 3, *SHAPE)
    if expected is None:
        assert not net.normalization.is_known
        return
    assert f"Keras' {model}" in net.normalization.describe()
    expected_scores = session_scores(path, TRAINED_ON[expected](images.astype(np.float64)))
    np.testing.assert_allclose(
        scores(net, images), expected_scores, atol=1e-4 * abs(expected_scores).max()
    )


def test_a_module_of_pytorch_with_the_name_of_a_model_of_keras(tmp_path):
    """PyTorch's exporter writes its path into the names of nodes."""
    random = np.random.default_rng(0)
    constants = {"resnet50.conv1.weight": np.float32(random.normal(size=(4, 3, 3, 3)))}
    constants["v"] = np.float32(random.normal(size=(4, 1000)))
    nodes = [node("Conv", "x resnet50.conv1.weight", "h"), node("GlobalAveragePool", "h", "g")]
    nodes[0].name, nodes[1].name = "/resnet50/conv1/Conv", "/resnet50/avgpool/GlobalAveragePool"
    nodes += [node("Flatten", "g", "f"), node("MatMul", "f v", "y")]
    path = saved(tmp_path / "a.onnx", nodes, constants, SHAPE, producer_name="pytorch")
    assert not dl.load_onnx(path).normalization.is_known


MODULE = """
import mpidl as dl

def cnn(input_shape, classes):
    layers = [dl.Conv2D(3, 8, name="conv"), dl.BatchNorm(name="norm"), dl.ReLU()]
    return dl.Network([*layers, dl.GlobalAveragePool2D(), dl.Dense(classes, name="head")],
                      input_shape)
"""


@pytest.mark.parametrize("choice", ["rescale-zero-one", "imagenet", "none"])
def test_a_network_that_pytorch_trained_has_pytorchs_accuracy(tmp_path, capsys, choice):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(0)
    images, labels = pictures(120)
    x, y = torch.tensor(TRAINED_ON[choice](images.astype(np.float64))).float(), torch.tensor(labels)
    module = torch.nn.Sequential()
    module.add_module("conv", torch.nn.Conv2d(3, 8, 3))
    module.add_module("norm", torch.nn.BatchNorm2d(8))
    for i, layer in enumerate((torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())):
        module.add_module(f"l{i}", layer)
    module.add_module("head", torch.nn.Linear(8, 4))
    solver = torch.optim.Adam(module.parameters(), lr=0.02)
    for _ in range(100):
        solver.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        solver.step()
    module.eval()
    with torch.no_grad():
        accuracy = (module(x).argmax(1) == y).float().mean().item()
    assert accuracy >= 0.99
    onnx_path, arrays_path = tmp_path / "a.onnx", tmp_path / "a.safetensors"
    torch.onnx.export(module, (x[:2],), str(onnx_path), dynamo=False)
    state = {name: value.numpy() for name, value in module.state_dict().items()}
    safetensors.numpy.save_file(state, arrays_path)
    np.savez(tmp_path / "a.npz", images=images, labels=labels, classes=list("abcd"))
    (tmp_path / "module.py").write_text(MODULE)
    sizes = ["--input-shape", "3,6,5", "--classes", "4", "--names", "torchvision"]
    command = [str(arrays_path), str(tmp_path / "b.h5"), "--network", f"{tmp_path}/module.py:cnn"]
    assert QUESTION in refusal(convert.main, [*command, *sizes])
    assert convert.main([*command, *sizes, "--normalization", choice]) == 0
    data = ["--data", tmp_path / "a.npz"]
    assert scored(capsys, "--model", tmp_path / "b.h5", *data)[0] == pytest.approx(
        accuracy, abs=1e-4
    )
    text = refusal(predict.main, list(map(str, ["--model", onnx_path, *data])))
    assert text.startswith(f"{onnx_path}: {QUESTION}")
    result = scored(capsys, "--model", onnx_path, *data, "--normalization", choice)[0]
    assert result == pytest.approx(accuracy, abs=1e-4)
    other = "none" if choice != "none" else "rescale-zero-one"
    assert scored(capsys, "--model", onnx_path, *data, "--normalization", other)[0] < 0.9
