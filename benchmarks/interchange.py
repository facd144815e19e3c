"""`python -m benchmarks interchange`: compare scores with those of onnxruntime and PyTorch.

Each network gets random weights and random statistics of its batch normalizations. The benchmark
writes the network as ONNX and as safetensors, and reads both files back. Differences are relative
to the largest score. The weights that are read back must have the same bytes.
"""

import argparse
import importlib.util
import os
import tempfile

import numpy as np

from benchmarks import machine, report, torch_step
from mpidl.core.blocks import OneRank, from_images, share
from mpidl.data.transforms.normalize import Normalization
from mpidl.errors import Fault, UserError
from mpidl.interchange import network_files
from mpidl.interchange.onnx_import import load_onnx
from mpidl.interchange.weights import load_weights
from mpidl.nn import Network, zoo
from mpidl.training.files.model_file import weights_sha256
from mpidl.training.options import configuration

IMAGES = 4
LIMIT = 1e-5  # largest accepted difference, relative to the largest score
COLUMNS = {
    "export": "ONNX file, onnxruntime",
    "import": "graph read back",
    "pytorch": "safetensors, PyTorch",
    "bytes": "weights read back",
}


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    machine.refuse_launcher("interchange")
    for package in ("onnxruntime", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"interchange requires {package}, which is not installed")
    rows, differences = [["network", *COLUMNS.values()]], {}
    for name in options.networks:
        with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
            measured = _measure(name, folder, options.seed)
        differences[name] = measured
        rows.append([name, *(_cell(measured.get(column)) for column in COLUMNS)])
    report.print_table(rows)
    versions = configuration.versions_of("none")
    versions |= {name: configuration.version_of(name) for name in ("onnx", "onnxruntime")}
    if torch_step.is_installed():
        versions["torch"] = configuration.version_of("torch")
    record = report.header(options, versions, "networks", "seed") | {"difference": differences}
    largest = max(v for figures in differences.values() for v in figures.values())
    if not largest <= LIMIT:
        raise Fault(f"scores differ by {largest:.1e} of the largest score, expected {LIMIT:g}")
    return record


def _cell(value):
    return "" if value is None else "the same" if value == 0 else f"{value:.1e}"


def _measure(name: str, folder: str, seed: int) -> dict[str, float]:
    """Return the differences of one network by column; "bytes" is 0 if all weights are equal."""
    random = np.random.default_rng(seed)
    net = zoo.NETWORKS[name](seed=seed)
    ranges = {"mean": (-0.2, 0.2), "variance": (0.5, 1.5)}
    net.state = {
        key: random.uniform(*ranges[key.rpartition(".")[2]], array.shape).astype(np.float32)
        for key, array in net.state.items()
    }
    digest = weights_sha256(net)
    channels = net.input_shape[0]
    net.normalization = Normalization("zscore", *np.full((2, channels), [[120], [60]], np.float32))
    images = random.integers(0, 256, (IMAGES, *net.input_shape)).astype(np.float32)
    expected = _scores(net, images)

    path = os.path.join(folder, "network.onnx")
    network_files.save(net, path)
    figures = {"export": _difference(_onnxruntime_scores(path, images), expected)}
    figures["import"] = _difference(_scores(load_onnx(path, graph_alone=True), images), expected)
    _compare_bytes(load_onnx(path), digest, path)
    os.remove(path)  # such files have up to 600 MB

    path = os.path.join(folder, "network.safetensors")
    network_files.save(net, path)
    _compare_bytes(network_files.load(path), digest, path)
    if torch_step.is_installed() and name in zoo.torchvision.NETWORKS:
        network_files.save(net, path, names="torchvision")
        scores = _pytorch_scores(name, path, net.normalization(images))
        figures["pytorch"] = _difference(scores, expected)
        _compare_bytes(load_weights(zoo.NETWORKS[name](), path, "torchvision"), digest, path)
    return figures | {"bytes": 0.0}


def _scores(net: Network, images: np.ndarray) -> np.ndarray:
    """Return the scores of images of pixels."""
    return net(from_images(net.normalization(images), share(len(images), OneRank()))).local()


def _onnxruntime_scores(path, images):
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: images})[0]


def _pytorch_scores(name, path, images):
    """Load the file with torchvision's names into torchvision's network, and return its scores."""
    import safetensors.torch

    from benchmarks import torch_networks  # requires PyTorch

    classes = 21 if name in zoo.PIXEL_NETWORKS else 1000
    oracle = torch_networks.create(name, classes)
    oracle.load_state_dict(safetensors.torch.load_file(path))
    return torch_networks.scores(oracle, images)


def _difference(scores, expected):
    return float(np.abs(scores - expected).max() / np.abs(expected).max())


def _compare_bytes(net: Network, digest: str, path: str) -> None:
    if weights_sha256(net) != digest:
        raise Fault(f"{path}: expected the weights {digest}, found {weights_sha256(net)}")
