"""Test training from a weight file: equal hashes on any number of ranks, resuming, and errors."""

import hashlib
import re
import shutil

import jobs
import numpy as np
import onnx
import pytest
import safetensors.numpy
import tomllib
from launcher import ROOT

import mpidl as dl
from mpidl.data.transforms.normalize import Normalization
from mpidl.interchange import network_files

SLOW = pytest.mark.slow("ranks")
LOCAL = ["--batchnorm", "local", "--epochs", 1]
WORDS = ["--new-layer-factor", 5, "--freeze-up-to", "batchnorm1"]


def network(*classes):
    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.MaxPool2D(2), dl.Conv2D(3, 6)]
    layers += [dl.BatchNorm(), dl.ReLU(), dl.Dropout(0.2), dl.Dense(len(classes))]
    net = dl.Network(layers, (3, 14, 12), seed=4)
    net.classes = classes
    numbers = [120, 125, 130], [60, 61, 62]
    net.normalization = Normalization("zscore", *(np.float32(row) for row in numbers))
    return net


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Return {suffix: file}: the weights of a network of four classes in each format."""
    folder = tmp_path_factory.mktemp("weights")
    net = network("a", "b", "c", "d")
    files = {suffix: folder / f"pretrained.{suffix}" for suffix in ("h5", "onnx", "safetensors")}
    for path in files.values():
        network_files.save(net, path)
    return files


@pytest.fixture(scope="module")
def expected(pictures, weights, tmp_path_factory):
    """Return the folder of a run of two epochs on one rank."""
    out = tmp_path_factory.mktemp("expected") / "run"
    train(1, pictures, out, weights["h5"], "--epochs", 2)
    return out


def train(ranks, data, out, path, *options, **keywords):
    words = ["--weights", path, *WORDS, *options]
    return jobs.train(ranks, data, out, *words, network=None, **keywords)


@pytest.mark.parametrize(
    ("ranks", "suffix"),
    [(3, "onnx"), *(pytest.param(*case, marks=SLOW) for case in ((2, "safetensors"), (4, "h5")))],
)
def test_one_hash_on_any_number_of_ranks(pictures, weights, expected, tmp_path, ranks, suffix):
    train(ranks, pictures, tmp_path / "run", weights[suffix], "--epochs", 2)
    jobs.assert_same_end(expected, tmp_path / "run")


@pytest.mark.slow("ranks")
def test_local_statistics_depend_on_the_ranks(pictures, weights, tmp_path):
    """Negative control: with separate statistics on each rank, the weights differ."""
    hashes = set()
    for ranks in (1, 2):
        train(ranks, pictures, tmp_path / f"{ranks}", weights["h5"], *LOCAL)
        hashes.add(jobs.weights_hash(tmp_path / f"{ranks}"))
    assert len(hashes) == 2


def test_the_files_and_the_output_name_the_weights(pictures, weights, tmp_path):
    path, out = weights["h5"], tmp_path / "run"
    result = train(1, pictures, out, path, "--max-iterations", 1)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    head = jobs.output_lines(result)[:6]
    assert head[1:] == [
        f"Weights: {path}, sha256 {sha256}",
        "New layer: dense1, 3 outputs instead of 4, learning rate times 5",
        "Frozen: the layers up to batchnorm1",
        "Images: converted: rgb, covering 14x12, centre 14x12",
        "Normalization: zscore (minus 120, 125, 130, divided by 60, 61, 62), as the file says",
    ]
    facts = {"path": str(path), "sha256": sha256, "normalization": "weights"}
    assert jobs.summary(out)["weights_file"] == facts
    table = tomllib.loads((out / "options.toml").read_text())
    assert table["weights_file"] == facts
    assert (table["run"]["weights"], table["run"]["network"]) == (str(path), "none")
    net, _ = dl.load_model(out / "model.h5")
    assert net.classes == jobs.CLASSES and net.normalization.centre.tolist() == [120, 125, 130]
    # The model converts images itself, and --config repeats the run.
    assert jobs.predict(out / "model.h5", pictures)[-1].startswith("Accuracy: ")
    words = jobs.command("train", "--config", out / "options.toml", network=None, out=out)
    jobs.pool.run(2, *words, "--overwrite", check=0)
    assert dl.weights_sha256(dl.load_model(out / "model.h5")[0]) == dl.weights_sha256(net)


def test_a_resumed_run_does_not_need_the_file(pictures, weights, expected, tmp_path):
    path, out = shutil.copy(weights["h5"], tmp_path / "moved.h5"), tmp_path / "run"
    limits = ["--epochs", 2, "--max-iterations", jobs.ITERATIONS + 1]
    train(2, pictures, out, path, *limits)
    assert jobs.summary(out)["iterations"] == jobs.ITERATIONS + 1
    path.unlink()
    for options, text in (
        (["--freeze-up-to", "conv1"], "--freeze-up-to was batchnorm1, is conv1"),
        (["--new-layer-factor", 1], "--new-layer-factor was 5.0, is 1.0"),
        (["--network", "digits"], "--network was none, is digits"),
        (["--weights", weights["onnx"]], "found another file"),
    ):
        assert text in jobs.refusal(jobs.resume(None, out, *options, check=2))
    # A job script repeats its options, such as --weights.
    result = jobs.resume(3, out, "--max-iterations", "none", "--weights", path)
    assert f"Resumed after iteration {jobs.ITERATIONS + 1}, in epoch 2" in result.stdout
    jobs.assert_same_end(expected, out)
    assert jobs.rehash(out / "model.h5") == jobs.weights_hash(expected)
    facts = tomllib.loads((out / "options.toml").read_text())
    assert facts["weights_file"]["normalization"] == "weights"
    assert "normalization" not in facts["options"]


CUSTOM = """
import dataclasses
import mpidl as dl

@dataclasses.dataclass
class Half(dl.Layer):
    name: str = None

    def forward(self, x, context):
        return dl.relu(x)

def custom(input_shape, classes):
    return [dl.Conv2D(3, 4), Half(), dl.Dense(classes)]
"""


def test_a_network_with_custom_layers_needs_the_file_again(pictures, tmp_path):
    (tmp_path / "own.py").write_text(CUSTOM)
    name, path = f"{tmp_path / 'own.py'}:custom", tmp_path / "a.safetensors"
    net = dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(7)], (1, 12, 12), seed=1)
    safetensors.numpy.save_file(net.parameters, path)
    out, words = tmp_path / "run", ["--weights", path, "--epochs", 1]
    words += ["--normalization", "rescale-symmetric"]  # the resumed run does not ask for it again
    result = jobs.train(2, pictures, out, *words, "--max-iterations", 2, network=name)
    assert "New layer: dense1, 3 outputs instead of 7" in result.stdout
    jobs.train(1, pictures, tmp_path / "whole", *words, network=name)
    content = path.read_bytes()
    other = dl.Network(net.layers, (1, 12, 12), seed=2)
    safetensors.numpy.save_file(other.parameters, path)
    line = jobs.refusal(jobs.resume(2, out, "--max-iterations", "none", check=2))
    assert line.startswith(f"--weights {path}: expected {path}, with which the resumed run started")
    path.write_bytes(content)
    jobs.resume(3, out, "--max-iterations", "none")
    jobs.assert_same_end(tmp_path / "whole", out)


@pytest.mark.slow("jobs")
def test_a_network_of_the_zoo_and_the_options_of_the_user(pictures, tmp_path):
    net = dl.nn.zoo.squeezenet1_1((3, 224, 224), 4, seed=2)
    path = tmp_path / "a.safetensors"
    arrays = {name.replace("_", "."): array for name, array in net.parameters.items()}
    safetensors.numpy.save_file(arrays, path)
    words = ["--network", "squeezenet1_1", "--weights", path, "--max-iterations", 1]
    words += ["--test-fraction", 0, "--freeze-up-to", "features_12"]
    command = jobs.command("train", *words, network=None, data=pictures, out=tmp_path / "run")
    line = jobs.refusal(jobs.pool.run(None, *command))
    assert line.startswith(f"{path}: the file does not say how to normalize the images; ")
    command += ["--normalization", "imagenet"]
    result = jobs.pool.run(None, *command, "--batch-size", 16, check=0)
    assert "Images: converted: rgb, covering 224x224, centre 224x224" in result.stdout
    pattern = "imagenet (minus 123.675, 116.28, 103.53, divided by 58.395, 57.12, 57.375)"
    assert f"Normalization: {pattern}, as chosen" in result.stdout
    line = jobs.refusal(jobs.pool.run(None, *command, "--colour", "rgb", "--overwrite"))
    assert "expected images of shape (3, 224, 224), found (3, 12, 12) after --colour" in line


def test_weights_without_a_normalization_ask_for_it(pictures, weights, tmp_path):
    """The choice is stored in the run, and a resumed run and a prediction do not ask again."""
    proto = onnx.load(weights["onnx"])
    del proto.metadata_props[:]
    proto.producer_name = "pytorch"
    for part in proto.graph.node[:2]:  # the normalization
        proto.graph.node.remove(part)
    proto.graph.node[0].input[0] = "images"
    path, out = tmp_path / "foreign.onnx", tmp_path / "run"
    onnx.save(proto, path)
    words = ["--weights", path, *WORDS, "--max-iterations", 2]
    command = jobs.command("train", *words, network=None, data=pictures, out=out)
    question = f"{path}: the file does not say how to normalize the images; choose it with "
    question += "--normalization, in Python with dl.load_onnx(path, normalization=...) or "
    question += "dl.load_weights: none (pixels from 0 to 255), rescale-zero-one "
    assert jobs.refusal(jobs.pool.run(2, *command)).startswith(question)
    assert jobs.refused_prediction(path, pictures).startswith(question)
    assert not out.exists()
    command += ["--normalization", "0.1,0.2,0.3/0.5"]
    result = jobs.pool.run(2, *command, check=0)
    numbers = "minus 25.5, 51, 76.5, divided by 127.5, 127.5, 127.5"
    line = f"Normalization: 0.1,0.2,0.3/0.5 ({numbers}), as chosen"
    assert line in jobs.output_lines(result)
    assert jobs.summary(out)["weights_file"]["normalization"] == "command line"
    net, _ = dl.load_model(out / "model.h5")
    assert net.normalization.describe() == f"0.1,0.2,0.3/0.5 ({numbers}), as the file says"
    assert jobs.predict(out / "model.h5", pictures)[-1].startswith("Accuracy: ")
    jobs.resume(3, out, "--max-iterations", 4)
    jobs.pool.run(1, *command, "--overwrite", "--max-iterations", 4, check=0)
    assert jobs.rehash(out / "model.h5") == jobs.weights_hash(out)
    statistics = [*command[:-1], "zerocenter", "--overwrite"]  # of the new images
    jobs.pool.run(2, *statistics, check=0)
    assert dl.load_model(out / "model.h5")[0].normalization.name == "zerocenter"


def test_refused_weights(pictures, weights, tmp_path):
    def refused(*words):
        command = jobs.command("train", *words, network=None, data=pictures, out=tmp_path / "run")
        line = jobs.refusal(jobs.pool.run(2, *command))
        assert not (tmp_path / "run").exists()
        return line

    path = weights["h5"]
    line = refused("--weights", path, "--freeze-up-to", "conv9")
    assert line == (
        "freeze_up_to (--freeze-up-to) conv9: no layer conv9: did you mean conv2? the layers with "
        "weights before dense1 are, in order, conv1, conv2"
    )
    assert refused("--weights", tmp_path / "none.h5").endswith("none.h5: no such file")
    line = refused("--weights", "s3://bucket/a.h5")
    assert line == "--weights s3://bucket/a.h5: expected a file on a file system, found a URL"
    line = refused("--weights", "s3://me:secret@bucket/a.h5")
    assert line.startswith("--weights s3://bucket/a.h5: expected a URL without user name")
    assert refused(*WORDS) == "--new-layer-factor 5.0: expected --weights FILE with it"
    line = refused("--weights", path, "--resize", 20)
    assert line.startswith(f"--weights {path}: expected images of shape (3, 14, 12), found (1, 20,")
    line = refused("--weights", path, "--network", "digits")
    assert re.search(r"the file lacks .*conv3\.weight", line)


def test_predict_reads_the_files_of_other_formats(pictures, weights, tmp_path):
    words = ["--colour", "rgb", "--cover", "14x12", "--centre-crop", "14x12"]
    outputs = {}
    for suffix, path in weights.items():
        table = tmp_path / f"{suffix}.csv"
        lines = jobs.predict(path, pictures, *words, "--out", table)
        assert lines[0].startswith("210 images, no labels known: sub-folder bar is not one of")
        outputs[suffix] = table.read_text()
    assert outputs["h5"] == outputs["onnx"] == outputs["safetensors"]
    assert outputs["h5"].startswith("image,predicted,a,b,c,d\n")
    line = jobs.refused_prediction(tmp_path / "a.npz", pictures)
    assert line.endswith("a.npz: expected a *.h5, *.onnx or *.safetensors file, found '.npz'")


def test_info_shows_the_layers_of_a_file(weights):
    command = jobs.command("info", "--model", weights["onnx"], network=None)
    lines = jobs.pool.run(2, *command, check=0).stdout.splitlines()
    assert lines[:2] == [
        f"{weights['onnx']}, outputs 4: a, b, c, d",
        "images 3x14x12, normalization zscore",
    ]
    assert re.match(r"dense1 +Dense +4 ", lines[-3]), lines


@pytest.mark.slow("jobs")
def test_verify_trains_from_weights(pictures, weights):
    words = ["--ranks", "1,3", "--weights", weights["onnx"], *WORDS, "--batch-size", 50]
    command = jobs.command("verify", *words, network=None, data=pictures)
    text = jobs.launcher.mpirun(None, *command, check=0).stdout
    assert "the same weights, byte for byte, on 1, 3 ranks" in text


@pytest.mark.slow("jobs")
def test_the_benchmark(tmp_path):
    words = ["-m", "benchmarks", "transfer", "--seeds", 1, "--per-class", 4, "--epochs", 2]
    words += ["--pretraining-epochs", 1, "--test-images", 50, "--accuracies", "30,100"]
    text = jobs.pool.run(None, *words, cwd=ROOT, check=0).stdout
    lines = text.splitlines()
    assert "images per class  weights" in lines[-3] and "epochs, images to 0.3" in lines[-3]
    assert re.match(r"4 +pretrained +0\.\d+ ", lines[-2])
    assert "not reached" in lines[-1] and "initial weights" in lines[-1]
