"""Test weights in safetensors files: bytes, names, and one error for all differences."""

import importlib.util
import json
import re
import sys
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from image_sets import pixels_of, refusal

import mpidl as dl
from mpidl.core import keyed
from mpidl.nn import zoo
from mpidl.training.files.model_file import weights_sha256


def network(seed=0):
    layers = [dl.Conv2D(3, 4, name="features_0"), dl.BatchNorm(name="features_1"), dl.ReLU()]
    net = dl.Network([*layers, dl.Dense(3, name="fc")], (2, 6, 5), seed=seed)
    random = np.random.default_rng(seed)
    net.state = {name: random.random(a.shape, np.float32) for name, a in net.state.items()}
    return net


TORCH = {
    "features.0.weight": "features_0.weight",
    "features.0.bias": "features_0.bias",
    "features.1.weight": "features_1.gamma",
    "features.1.bias": "features_1.beta",
    "features.1.running_mean": "features_1.mean",
    "features.1.running_var": "features_1.variance",
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
}


def torch_arrays(net):
    arrays = net.parameters | net.state
    renamed = {name: arrays[ours] for name, ours in TORCH.items()}
    return {**renamed, "features.1.num_batches_tracked": np.int64(7)}


def written(path, arrays):
    safetensors.numpy.save_file({k: np.ascontiguousarray(a) for k, a in arrays.items()}, path)
    return path


def test_weights_come_back_byte_for_byte(tmp_path):
    net = network()
    dl.save_weights(net, tmp_path / "weights.safetensors")
    dl.save_model(tmp_path / "model.h5", net)
    for path in (tmp_path / "weights.safetensors", tmp_path / "model.h5"):
        restored = dl.load_weights(network(seed=1), path)
        assert weights_sha256(restored) == weights_sha256(net) != weights_sha256(network(seed=1))
    # the safetensors library can read the file
    arrays = safetensors.numpy.load_file(tmp_path / "weights.safetensors")
    expected = net.parameters | net.state
    assert arrays.keys() == expected.keys()
    assert all(arrays[name].tobytes() == expected[name].tobytes() for name in expected)
    dl.save_weights(net, tmp_path / "torch.safetensors", names="torchvision")
    assert (
        safetensors.numpy.load_file(tmp_path / "torch.safetensors").keys()
        == torch_arrays(net).keys()
    )


def test_names_of_torchvision(tmp_path):
    net = network()
    path = written(tmp_path / "a.safetensors", torch_arrays(net))
    for names in ("torchvision", "timm", TORCH | {"features.1.num_batches_tracked": None}):
        restored = dl.load_weights(network(seed=1), path, names=names)
        assert weights_sha256(restored) == weights_sha256(net)
    restored = dl.load_weights(network(seed=1), path, names=TORCH.get)
    assert weights_sha256(restored) == weights_sha256(net)


def hugging_face(name):
    """Return the parameter name in a ResNet of Hugging Face's transformers."""
    embedder = "resnet.embedder.embedder."
    if match := re.fullmatch(r"layer(\d)\.(\d+)\.(conv|bn)(\d)\.(\w+)", name):
        stage, block, kind, i, array = match.groups()
        part = {"conv": "convolution", "bn": "normalization"}[kind]
        prefix = f"resnet.encoder.stages.{int(stage) - 1}.layers.{block}"
        return f"{prefix}.layer.{int(i) - 1}.{part}.{array}"
    if match := re.fullmatch(r"layer(\d)\.(\d+)\.downsample\.(\d)\.(\w+)", name):
        stage, block, i, array = match.groups()
        part = ("convolution", "normalization")[int(i)]
        return f"resnet.encoder.stages.{int(stage) - 1}.layers.{block}.shortcut.{part}.{array}"
    name = name.replace("conv1.", f"{embedder}convolution.")
    return name.replace("bn1.", f"{embedder}normalization.").replace("fc.", "classifier.1.")


def test_names_of_transformers(tmp_path):
    net = zoo.resnet18((3, 32, 32), 5, seed=1)
    dl.save_weights(net, tmp_path / "a.safetensors", names="torchvision")
    arrays = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    path = written(tmp_path / "b.safetensors", {hugging_face(k): a for k, a in arrays.items()})
    restored = dl.load_weights(zoo.resnet18((3, 32, 32), 5), path, names="transformers")
    assert weights_sha256(restored) == weights_sha256(net)


def test_names_of_the_first_files_of_densenet(tmp_path):
    """In these files, a layer has the modules norm.1, conv.1, norm.2 and conv.2."""
    net = zoo.densenet121((3, 32, 32), 5, seed=1)
    dl.save_weights(net, tmp_path / "a.safetensors", names="torchvision")
    arrays = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    old = {re.sub(r"(denselayer.*)([12])\.(.*)", r"\1.\2.\3", k): a for k, a in arrays.items()}
    assert "features.denseblock1.denselayer2.norm.1.running_mean" in old
    path = written(tmp_path / "b.safetensors", old)
    restored = dl.load_weights(zoo.densenet121((3, 32, 32), 5), path, names="torchvision")
    assert weights_sha256(restored) == weights_sha256(net)


def test_names_of_timm(tmp_path):
    """In timm's VGG, the first two fully connected layers are convolutions."""
    net = dl.Network(
        [
            *(dl.Conv2D(3, 4, name="features_0"), dl.Dense(6, name="classifier_0")),
            *(dl.Dense(5, name="classifier_3"), dl.Dense(2, name="classifier_6")),
        ],
        (1, 5, 4),
        seed=1,
    )
    p = net.parameters
    arrays = {
        "features.0.weight": p["features_0.weight"],
        "features.0.bias": p["features_0.bias"],
        "pre_logits.fc1.weight": p["classifier_0.weight"].reshape(6, 4, 3, 2),
        "pre_logits.fc1.bias": p["classifier_0.bias"],
        "pre_logits.fc2.weight": p["classifier_3.weight"].reshape(5, 6, 1, 1),
        "pre_logits.fc2.bias": p["classifier_3.bias"],
        "head.fc.weight": p["classifier_6.weight"],
        "head.fc.bias": p["classifier_6.bias"],
    }
    path = written(tmp_path / "a.safetensors", arrays)
    restored = dl.load_weights(dl.Network(net.layers, (1, 5, 4)), path, names="timm")
    assert weights_sha256(restored) == weights_sha256(net)


@pytest.mark.parametrize(
    "module",
    [
        "stages.{}.blocks.0.norm",
        "blocks.{}.0.conv",
        pytest.param("blocks.0.{}.bn1", marks=pytest.mark.slow("jobs")),
        "resnet.encoder.stages.{}.layers.0.shortcut.convolution",
        "resnet.encoder.stages.0.layers.0.layer.{}.convolution",
    ],
)
def test_names_with_numbers_of_any_length(tmp_path, module):
    net = zoo.NETWORKS["mobilenet_v2"]((3, 32, 32), 5)
    name = module.format("7" * 5000) + ".weight"  # int() refuses so many digits
    path = written(tmp_path / "a.safetensors", {name: np.zeros(3, np.float32)})
    for names in ("timm", "transformers"):
        assert "the file lacks" in refusal(dl.load_weights, net, path, names=names)


@pytest.mark.parametrize("kind", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_float_types_are_converted(tmp_path, kind):
    arrays = {name: a.astype(kind) for name, a in (network().parameters | network().state).items()}
    net = dl.load_weights(network(seed=1), written(tmp_path / "a.safetensors", arrays))
    for name, value in (net.parameters | net.state).items():
        assert value.dtype == np.float32
        assert np.array_equal(value, arrays[name].astype(np.float32))


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F4"])
def test_types_that_numpy_lacks(tmp_path, kind):
    data = {"fc.bias": {"dtype": kind, "shape": [4], "data_offsets": [0, 2 if kind == "F4" else 4]}}
    text, path = json.dumps(data).encode(), tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(2 if kind == "F4" else 4))
    assert refusal(dl.load_weights, network(), path).startswith(f"{path}: ")


def test_names_that_would_be_equal(tmp_path):
    @dataclass
    class Scaled(dl.Layer):
        def build(self, shape):
            return dl.Built(shape, {"weight": (shape[:1], 1.0), "gamma": (shape[:1], 2.0)})

    net = dl.Network([Scaled(name="s")], (2, 3, 3))
    dl.save_weights(net, tmp_path / "a.safetensors", names="torchvision")
    arrays = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert arrays["s.gamma"].tolist() == [2, 2] and arrays["s.weight"].tolist() == [1, 1]
    twins = dl.Network([dl.Conv2D(1, 2, name="a_b"), dl.Conv2D(1, 2, name="a__b")], (2, 3, 3))
    dl.save_weights(twins, tmp_path / "b.safetensors", names="torchvision")
    assert len(safetensors.numpy.load_file(tmp_path / "b.safetensors")) == 4


def test_an_error_lists_all_differences(tmp_path):
    net = network()
    before, arrays = weights_sha256(net), net.parameters | net.state
    del arrays["fc.bias"], arrays["features_1.mean"]
    arrays |= {"fc.weight": np.zeros((3, 7), np.float32), "head.bias": np.zeros(2, np.float32)}
    arrays["features_0.bias"] = np.zeros(4, np.int32)
    path = written(tmp_path / "a.safetensors", arrays)
    head, *rest = refusal(dl.load_weights, net, path).split("; ")
    assert head == f"{path}: the file lacks fc.bias, features_1.mean"
    assert sorted(rest) == [
        "fc.weight is float32 (3, 7), the network has (3, 48)",
        "features_0.bias is int32 (4,), the network has (4,)",
        "the network lacks head.bias",
    ]
    assert weights_sha256(net) == before


def test_an_error_for_another_network_is_short(tmp_path):
    net = network()
    arrays = {f"layer{i}.weight": np.zeros(1, np.float32) for i in range(60)}
    text = refusal(dl.load_weights, net, written(tmp_path / "a.safetensors", arrays))
    assert text.endswith(" and 50 more") and text.count(".weight") < 15
    convs = [dl.Conv2D(1, 1) for _ in range(8)]
    deep, path = dl.Network(convs, (1, 2, 2)), tmp_path / "b.safetensors"
    arrays = {name: np.zeros(7, np.float32) for name in deep.parameters}
    text = refusal(dl.load_weights, deep, written(path, arrays))
    assert text.count("the network has") == 10 and text.endswith("; 6 more misfits")


def test_an_error_names_the_library_whose_names_fit(tmp_path):
    path = written(tmp_path / "a.safetensors", torch_arrays(network()))
    text = refusal(dl.load_weights, network(), path)
    assert text.endswith(
        "; the names of 'torchvision' and 'timm' and 'transformers' fit (names=, --names)"
    )
    text = refusal(dl.load_weights, network(), path, names="torchvison")
    assert text == (
        "names: expected one of mpidl, torchvision, timm, transformers, a dict or a function, "
        "found 'torchvison': did you mean torchvision?"
    )
    both = {"fc.bias": "x", "fc.weight": "x"}
    text = refusal(dl.load_weights, network(), path, names=both)
    assert text == f"{path}: fc.bias and fc.weight are both x in the network"


def test_unusable_files_and_names(tmp_path, monkeypatch):
    missing = tmp_path / "none.safetensors"
    assert refusal(dl.load_weights, network(), missing) == f"{missing}: no such file"
    (tmp_path / "a.txt").write_text("weights")
    text = refusal(dl.load_weights, network(), tmp_path / "a.txt")
    assert text.endswith("expected a weight file *.safetensors, *.pth or *.h5, found '.txt'")
    (tmp_path / "a.h5").write_text("weights")
    assert "a.h5: not a model file: " in refusal(dl.load_weights, network(), tmp_path / "a.h5")
    text = refusal(dl.save_weights, network(), tmp_path / "a.pth")
    assert text == f"{tmp_path}/a.pth: expected a name that ends with .safetensors"
    assert "names: expected mpidl or torchvision" in refusal(
        dl.save_weights, network(), tmp_path / "a.safetensors", names="timm"
    )
    text = refusal(dl.save_weights, network(), tmp_path / "none" / "a.safetensors")
    assert str(tmp_path / "none") in text
    monkeypatch.setitem(sys.modules, "safetensors", None)
    text = refusal(dl.load_weights, network(), missing)
    assert text == (
        f"{missing}: expected the package safetensors, which is not installed "
        "(pip install 'mpidl[safetensors]')"
    )


def test_training_starts_from_loaded_weights_on_any_ranks(world, tmp_path):
    """Each rank reads the file. The weights and the first step must be the same."""
    path = world.broadcast(str(tmp_path / "a.safetensors"))
    if world.rank == 0:
        dl.save_weights(network(seed=3), path)
    world.barrier()
    net = dl.load_weights(network(), path)
    assert world.broadcast(weights_sha256(net)) == weights_sha256(network(seed=3))
    world.barrier()


def test_slopes_have_the_name_of_pytorch(tmp_path):
    layers = [dl.Conv2D(3, 4, name="features_0"), dl.PReLU(name="features_1"), dl.Dense(2)]
    net, path = dl.Network(layers, (1, 5, 5), seed=1), tmp_path / "a.safetensors"
    net.parameters = {**net.parameters, "features_1.slope": np.arange(4, dtype=np.float32)}
    dl.save_weights(net, path, names="torchvision")
    assert "features.1.weight" in safetensors.numpy.load_file(path)
    loaded = dl.load_weights(dl.Network(layers, (1, 5, 5), seed=2), path, names="torchvision")
    assert weights_sha256(loaded) == weights_sha256(net)


FAST = {"resnet18", "squeezenet1_1"}  # networks whose weights are small


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow("ranks")] * (name not in FAST))
        for name in zoo.torchvision.NETWORKS
    ],
)
def test_scores_are_those_of_pytorch(monkeypatch, name, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    safetensors = pytest.importorskip("safetensors.torch")
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision, the reference, is not installed: pip install 'mpidl[bench]'")
    from benchmarks import torch_networks

    classes = 21 if name in zoo.PIXEL_NETWORKS else 1000
    oracle, path = torch_networks.create(name, classes), tmp_path / "weights.safetensors"
    safetensors.save_file(oracle.state_dict(), path)
    # Drawing a hundred million initial weights takes seconds.
    monkeypatch.setattr(keyed, "uniform", lambda seed, key, count: np.zeros(count, np.float32))
    net = dl.load_weights(zoo.NETWORKS[name](), path, names="torchvision")
    images = (pixels_of(0, 3, 3, 224, 224) / np.float32(255) - np.float32(0.45)) / np.float32(0.225)
    with torch.no_grad():
        expected = torch_networks.scores(oracle, images)
    batch = dl.share(len(images), dl.OneRank())
    scores = net(dl.from_images(images, batch)).local()
    assert abs(scores - expected).max() <= 1e-5 * abs(expected).max()
    dl.save_weights(net, tmp_path / "again.safetensors", names="torchvision")
    with torch.no_grad():
        for array in oracle.state_dict().values():
            array.zero_()
        oracle.load_state_dict(safetensors.load_file(tmp_path / "again.safetensors"))
        assert np.array_equal(torch_networks.scores(oracle, images), expected)
