"""Test that `mpidl.convert` between all formats keeps the weights' bytes and the scores."""

import json
import re

import numpy as np
import onnx
import pytest
import safetensors.numpy
from image_sets import refusal

import mpidl as dl
from mpidl.data.transforms.normalize import Normalization
from mpidl.errors import Fault
from mpidl.interchange import command as convert
from mpidl.interchange import network_files
from mpidl.nn import zoo
from mpidl.training.files.model_file import weights_sha256


def network():
    net = zoo.digits((3, 12, 11), 4, seed=2)
    centre, divisor = np.float32([90, 100, 110]), np.float32([40, 50, 60])
    net.normalization = Normalization("zscore", centre, divisor)
    net.classes = ("a", "b", "c", "d")
    return net


def test_all_formats(tmp_path, capsys):
    net = network()
    dl.save_model(tmp_path / "a.h5", net)
    names = ["a.h5", "b.onnx", "c.safetensors", "d.onnx", "e.safetensors", "f.h5"]
    for source, target in zip(names, names[1:], strict=False):
        assert convert.main([str(tmp_path / source), str(tmp_path / target)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{tmp_path / source}: 10 layers, 13,364 learnables"
        assert lines[1] == f"weights_sha256: {weights_sha256(net)}"
        pattern = r".*: scores differ by at most \d\.\de[-+]\d\d of the largest score"
        assert re.fullmatch(pattern, lines[2])
        restored = network_files.load(tmp_path / target)
        assert weights_sha256(restored) == weights_sha256(net)
        assert restored.spec() == net.spec() and restored.classes == net.classes
        assert restored.normalization.divisor.tolist() == [40, 50, 60]
    assert (tmp_path / "f.h5").read_bytes() == (tmp_path / "a.h5").read_bytes()


def test_weights_of_another_library(tmp_path, capsys):
    net, path = zoo.squeezenet1_1((3, 60, 47), 5, seed=3), tmp_path / "a.safetensors"
    safetensors.numpy.save_file(
        {name.replace("_", "."): array for name, array in net.parameters.items()}, path
    )
    words = [str(path), str(tmp_path / "b.h5"), "--network", "squeezenet1_1"]
    sizes = ["--classes", "5", "--input-shape", "3,60,47"]
    text = refusal(convert.main, [*words, *sizes, "--names", "torchvision"])
    assert text.startswith(f"{path}: the file does not say how to normalize the images; ")
    names = ["--names", "torchvision", "--normalization", "imagenet"]
    assert convert.main([*words, *sizes, *names]) == 0
    capsys.readouterr()
    restored, _ = dl.load_model(tmp_path / "b.h5")
    assert weights_sha256(restored) == weights_sha256(net)
    assert restored.normalization.divisor.tolist() == pytest.approx([58.395, 57.12, 57.375])
    text = refusal(convert.main, [*words, *sizes])
    assert text.endswith("; the names of 'torchvision' and 'timm' fit (names=, --names)")
    text = refusal(convert.main, words[:2])
    assert "the file contains only arrays and no description of the network" in text
    back = [str(tmp_path / "b.h5"), str(tmp_path / "c.safetensors"), "--names", "torchvision"]
    assert convert.main(back) == 0
    arrays = safetensors.numpy.load_file(tmp_path / "c.safetensors")
    assert "features.3.squeeze.weight" in arrays


def test_invalid_arguments(tmp_path):
    dl.save_model(tmp_path / "a.h5", network())
    source = str(tmp_path / "a.h5")
    text = refusal(convert.main, [source, "b.pth"])
    assert text == "b.pth: expected a *.h5, *.onnx or *.safetensors file, found '.pth'"
    text = refusal(convert.main, [source, "b.onnx", "--classes", "3"])
    assert text == "--classes: expected --network NAME with it, found none"
    text = refusal(convert.main, [source, "b.onnx", "--network", "x.py:f", "--classes", "3"])
    assert text == "--network x.py:f: expected --input-shape with it, found none"
    (tmp_path / "c.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    text = refusal(convert.main, [str(tmp_path / "c.safetensors"), "b.onnx"])
    assert "no description of the network" in text


def test_a_mean_image_and_a_description_of_another_network(tmp_path, capsys):
    net = network()
    mean = np.random.default_rng(0).uniform(90, 130, (3, 12, 11)).astype("f4")
    net.normalization = Normalization("zerocenter-element", mean, np.ones_like(mean))
    dl.save_model(tmp_path / "a.h5", net)
    for source, target in (
        ("a.h5", "b.onnx"),
        ("b.onnx", "c.safetensors"),
        ("c.safetensors", "d.h5"),
    ):
        assert convert.main([str(tmp_path / source), str(tmp_path / target)]) == 0
    assert (tmp_path / "d.h5").read_bytes() == (tmp_path / "a.h5").read_bytes()
    capsys.readouterr()
    arrays = safetensors.numpy.load_file(tmp_path / "c.safetensors")
    for text in ("[" * 200_000, "{}", json.dumps({"network": "[]", "classes": "null"})):
        metadata = {"format": "mpidl", "description": text}
        safetensors.numpy.save_file(arrays, tmp_path / "e.safetensors", metadata)
        refused = refusal(network_files.load, tmp_path / "e.safetensors")
        assert "e.safetensors: its network cannot be built: " in refused
    text = refusal(convert.main, [str(tmp_path / "a.h5"), "b.onnx", "--input-shape", "3,9,9"])
    assert text == "--input-shape: expected an ONNX file or --network NAME with it"
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setenv("PMI_SIZE", "2")
        text = refusal(convert.main, [str(tmp_path / "a.h5"), "b.onnx"])
    assert text == "convert uses one process: run it without mpirun"


def test_scores_that_differ_are_an_error(tmp_path, monkeypatch, capsys):
    dl.save_model(tmp_path / "a.h5", network())
    write = network_files.save

    def spoil(net, path, names):
        write(net, path, names)
        proto = onnx.load(path)
        (relu,) = (node for node in proto.graph.node if node.name == "relu1")
        relu.op_type = "Tanh"
        path = open(path, "wb")
        with path:
            path.write(proto.SerializeToString())

    monkeypatch.setattr(network_files, "save", spoil)
    with pytest.raises(Fault, match="expected differences of at most 1e-05"):
        convert.main([str(tmp_path / "a.h5"), str(tmp_path / "b.onnx")])
    assert "scores differ by at most" in capsys.readouterr().out
