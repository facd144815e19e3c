"""Test the output and the files of the commands train, predict, verify and info."""

import json
import os
import re
import shutil

import h5py
import jobs
import numpy as np
import pool
import pytest
from cpu_builds import FUSED_BUILDS
from launcher import mpirun

import mpidl as dl
from mpidl import numerics
from mpidl.backends.cpu import builds
from mpidl.cli import user_files
from mpidl.report import run_files

FILES = {
    *("checkpoint.h5", "checkpoint-previous.h5", "metrics.jsonl", "model.h5", "options.toml"),
    *("status.json", "summary.json", "confusion.csv"),
}
SHORT = ["--max-iterations", 2, "--batch-size", 50]


@pytest.fixture(scope="module")
def trained(pictures, tmp_path_factory):
    """Return (folder, Result) of a run of two epochs on 2 ranks."""
    out = tmp_path_factory.mktemp("trained") / "run"
    return out, jobs.train(2, pictures, out, "--epochs", 2, network="digits")


@pytest.fixture
def model(trained):
    """Return the model file of the run `trained`."""
    return trained[0] / "model.h5"


def test_train_prints_from_rank_0(trained, pictures):
    out, result = trained
    number = r"\d+\.\d{4}"
    rate = r"Images/s: \d+, Elapsed: 0:00:\d\d"
    expected = [
        r"Network: digits, 10 layers, 11,723 learnables",
        rf"Data: 189 of {pictures}: 210 images of 1x12x12 in 3 classes",
        rf"Test: 21 of {pictures}: 210 images of 1x12x12 in 3 classes",
        r"Ranks: 2, cpu, \d+ threads? each",
        rf"Results: {out}",
        rf"Epoch: 1, Loss: {number}, Accuracy: {number}, {rate}",
        rf"Epoch: 2, Loss: {number}, Accuracy: {number}, {rate}",
        rf"Test accuracy: {number} \(21 images\)",
        r"Training time: 0:00:\d\d",
        rf"Results: {out}",
        r"weights_sha256: [0-9a-f]{64}",
    ]
    lines = jobs.output_lines(result)
    assert len(lines) == len(expected), result.stdout
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line)
    assert jobs.error_lines(result) == []


def test_train_writes_its_files(trained):
    out, result = trained
    assert {path.name for path in out.iterdir()} == FILES
    summary = jobs.summary(out)
    assert f"Test accuracy: {summary['accuracy']:.4f} (21 images)" in result.stdout
    assert f"weights_sha256: {summary['weights_sha256']}" in result.stdout
    assert set(summary) == {
        *("accuracy", "loss", "epochs", "iterations", "ranks", "threads", "device"),
        *("images_per_second", "train_seconds", "weights_sha256"),
        *("best_iteration", "validation_loss", "validation_accuracy", "stopped"),
        *("rollbacks", "skipped_images", "lost_ranks", "precision", "numerics", "mpidl_version"),
    }
    for name in ("best_iteration", "validation_loss", "validation_accuracy", "stopped"):
        assert summary[name] is None


def test_validation_ends_a_run_that_learns_nothing(pictures, tmp_path):
    """Patience ends the run, and summary.json has the same values as the printed lines."""
    words = ["--learning-rate", 1e-30, "--validation-data", "test", "--validation-frequency", 1]
    words += ["--validation-patience", 2]
    result = jobs.train(2, pictures, tmp_path, *words, network=jobs.network("wide"))
    summary = jobs.summary(tmp_path)
    assert (summary["best_iteration"], summary["stopped"]) == (1, "validation_patience")
    text = f"Validation loss: {summary['validation_loss']:.4f}, "
    text += f"Validation accuracy: {summary['validation_accuracy']:.4f}"
    lines = [line for line in jobs.output_lines(result) if line.startswith("Iteration: ")]
    assert lines[:3] == [f"Iteration: {i}, {text}" for i in (1, 2, 3)]
    assert lines[3].startswith("Iteration: 3, Epoch: 1, Loss: ") and len(lines) == 4


def test_a_run_does_not_replace_another_one_unasked(trained, pictures, tmp_path):
    """A run in another run's folder is rejected unless it resumes that run or has --overwrite."""
    out = shutil.copytree(trained[0], tmp_path / "run")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    words = jobs.command("train", *SHORT, data=pictures, out=out)
    result = pool.run(2, *words)
    text = f"--out {out}: it contains a run (iteration 8): --resume {out} continues it, "
    assert jobs.refusal(result) == text + "--overwrite replaces it"
    assert jobs.output_lines(result) == []
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    pool.run(2, *words, "--overwrite", check=0)
    assert jobs.summary(out)["iterations"] == 2 and jobs.iterations(out) == [1, 2]
    resume = ["--resume", out, "--out", out, "--max-iterations", 3]  # as in run/train.slurm
    pool.run(1, "-m", "mpidl.train", *resume, check=0)
    assert jobs.iterations(out) == [1, 2, 3]


def test_the_model_can_be_loaded(model):
    net, facts = dl.load_model(model)
    assert dl.weights_sha256(net) == jobs.weights_hash(model.parent)
    assert facts["classes"] == list(jobs.CLASSES)
    assert net.predict(np.zeros((3, 1, 12, 12), np.uint8)).shape == (3, 3)


def test_the_options_of_a_run_make_the_same_run(trained, tmp_path):
    out, _ = trained
    words = ["--config", out / "options.toml", "--out", tmp_path]
    pool.run(1, "-m", "mpidl.train", *words, check=0)
    assert jobs.weights_hash(tmp_path) == jobs.weights_hash(out)


def test_a_batch_per_rank_is_a_batch_size(pictures, tmp_path):
    """--batch-per-rank 25 on 2 ranks gives the weights of --batch-size 50, and a note."""
    words = ["--max-iterations", 2, "--batch-per-rank", 25]
    result = pool.run(2, *jobs.command("train", *words, data=pictures, out=tmp_path / "2"), check=0)
    note = "note: --batch-per-rank 25: mini-batches of 50 on 2 rank(s)"
    assert any(line.startswith(note) for line in jobs.output_lines(result)), result.stdout
    expected = jobs.trained_hash(1, pictures, tmp_path / "1", "--max-iterations", 2)
    assert jobs.weights_hash(tmp_path / "2") == expected


@pytest.mark.parametrize(
    "command", ["train", "predict", "verify", "info", "pack", "report", "benchmarks"]
)
def test_help_is_printed_once(command):
    """--help is printed by one rank only, and all ranks end."""
    words = jobs.command(command, "--help", network=None)
    result = pool.run(2 if command == "train" else None, *words, check=0)
    assert result.stdout.count("usage: ") == 1 and jobs.error_lines(result) == []
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_folders_are_numbered(pictures, tmp_path):
    """Without --out, runs are written to numbered folders in ./runs."""
    for _ in range(2):
        words = jobs.command("train", *SHORT, data=pictures)
        result = pool.run(1, *words, cwd=tmp_path, check=0)
    assert "Results: runs/small-2" in result.stdout
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"small", "small-2"}


def test_verify(pictures):
    words = jobs.command("verify", *SHORT, "--ranks", "1,2", data=pictures)
    lines = jobs.output_lines(pool.run(None, *words, check=0))
    assert lines[0].split() == ["ranks", "iterations", "loss", "seconds", "weights_sha256"]
    rows = [line.split() for line in lines[1:3]]
    assert [row[:2] for row in rows] == [["1", "2"], ["2", "2"]]
    assert rows[0][4] == rows[1][4] and len(rows[0][4]) == 64
    assert lines[3:] == ["the same weights, byte for byte, on 1, 2 ranks"]


@pytest.mark.slow("jobs")
def test_verify_finds_weights_that_differ(pictures):
    words = [*SHORT, "--ranks", "1,3", "--batchnorm", "local"]
    words = jobs.command("verify", *words, data=pictures)
    result = pool.run(None, *words, check=1)
    rows = [line.split() for line in jobs.output_lines(result)[1:3]]
    assert rows[0][4] != rows[1][4]
    assert "DIFFERENT: the weights depend on the number of ranks" in result.stdout


def test_verify_refuses(tmp_path):
    """`verify` reports the error of its training in one line, and does not run under mpirun."""
    words = jobs.command("verify", "--ranks", "1", data=tmp_path / "missing")
    for ranks, text in ((None, "no such folder"), (2, "run it without mpirun")):
        assert text in jobs.refusal(pool.run(ranks, *words))


def test_training_in_bf16(pictures, tmp_path):
    """The precision is printed and recorded, and a resumed run keeps it, on another build too."""
    out = tmp_path / "run"
    lines = jobs.output_lines(jobs.train(2, pictures, out, *SHORT, "--precision", "bf16"))
    assert any(re.fullmatch(r"Ranks: 2, cpu in bf16, \d threads? each", line) for line in lines)
    summary = jobs.summary(out)
    assert (summary["precision"], summary["numerics"]) == ("bf16", numerics.VERSION)
    assert run_files.read(str(out)).versions["numerics"] == str(numerics.VERSION)
    assert dl.load_model(out / "model.h5")[0].trained_precision == "bf16"
    text = jobs.refusal(jobs.resume(1, out, "--precision", "fp32", "--max-iterations", 4, check=2))
    assert text.endswith("--precision was bf16, is fp32")
    jobs.resume(1, out, "--max-iterations", 4)
    env = {"MPIDL_CPU": FUSED_BUILDS[-1]} if builds.running() in FUSED_BUILDS else {}
    for precision in ("bf16", "fp32"):
        words = [*SHORT, "--max-iterations", 4, "--precision", precision]
        jobs.train(2, pictures, tmp_path / precision, *words, env=env)
    jobs.assert_same_end(tmp_path / "bf16", out)
    assert jobs.weights_hash(tmp_path / "fp32") != jobs.weights_hash(out)
    words = [*SHORT, "--precision", "tf32", "--device", "cpu"]
    text = jobs.refusal(jobs.train(2, pictures, tmp_path / "tf32", *words, check=2))
    assert "--precision tf32: expected fp32 or bf16 on CPUs; tf32 needs --device gpu" in text
    assert not (tmp_path / "tf32").exists()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow("jobs"))])
def test_info(ranks):
    lines = pool.run(ranks, "-m", "mpidl.info", check=0).stdout.splitlines()
    facts = {line[:13].strip(): line[14:] for line in lines}
    names = ("mpidl", "Python", "CPU", "CPU features", "mpi4py", "fabric", "/dev/shm")
    names += ("GPU", "CuPy", "NVRTC", "GPU cache", "GPU driver", "GPU messages")
    for name in (*names, "arithmetic", "numerics", "kernels", "bf16"):
        assert facts[name], name
    assert facts["NumPy"].startswith(f"{np.__version__}, BLAS ")
    assert any(word in facts["MPI"].lower() for word in ("mpich", "open mpi", "intel"))
    assert facts["ranks"] == f"{ranks} on 1 host(s)"
    table = lines[lines.index("") + 1 :]
    assert table[0].split()[:4] == ["ranks", "hosts", "cores", "threads"]
    for rank, row in enumerate(table[1 : 1 + ranks]):
        assert re.match(rf"{rank} +{os.uname().nodename} +[\d,-]+ of {os.cpu_count()}\b", row), row
    assert all(line.startswith(("warning: ", "note: ")) for line in table[1 + ranks :])


IN_BF16 = {"numpy": "by NumPy"} | {b: "widened to float32;" for b in builds.built()[-1:]}


@pytest.mark.parametrize("build, text", IN_BF16.items())
def test_info_says_how_a_build_computes_in_bf16(build, text):
    lines = mpirun(1, "-m", "mpidl.info", env={"MPIDL_CPU": build}, check=0).stdout.splitlines()
    facts = {line[:13].strip(): line[14:] for line in lines}
    assert facts["bf16"].startswith(text)
    for name in builds.built():
        kind = "native" if name.endswith("-bf16") else "widened"
        assert f"{name} ({kind} bf16" in facts["kernels"]


def test_info_as_json():
    """The facts about each rank are those that this process gets from the system."""
    text = pool.run(2, "-m", "mpidl.info", "--json", "--threads", 999, check=0).stdout
    report = json.loads(text)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    for rank in report["ranks"]:
        assert rank["host"] == os.uname().nodename and rank["threads"] == 999
        assert rank["native_bf16"] == rank["kernels"].endswith("-bf16")
        assert rank["memory"]["total"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert set(rank["cores"]) <= set(os.sched_getaffinity(0))
        status = os.statvfs("/dev/shm")
        assert rank["shared_memory"]["total"] == status.f_blocks * status.f_frsize
    (line,) = (line for line in report["warnings"] if "x 999 thread(s)" in line)
    assert "which slows all of them: " in line


@pytest.mark.slow("jobs")
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2,
    reason="this process may use one core; binding two ranks needs two",
)
def test_info_of_bound_ranks():
    """A warning is printed if and only if the ranks are not bound to separate cores."""
    words = ("-m", "mpidl.info", "--json")
    for env, is_bound in (({"HYDRA_BINDING": "none"}, False), ({"HYDRA_BINDING": "core"}, True)):
        env["PRTE_MCA_hwloc_default_binding_policy"] = env["HYDRA_BINDING"]
        report = json.loads(mpirun(2, *words, env=env, check=0).stdout)
        assert [rank["bound"] for rank in report["ranks"]] == [is_bound] * 2
        unbound = [line for line in report["warnings"] if "are not bound to separate cores" in line]
        assert len(unbound) == (not is_bound)


def test_predict_without_labels(model, pictures, tmp_path):
    """`predict` writes scores for a folder of images without labels."""
    scores = tmp_path / "scores.csv"
    lines = jobs.predict(model, pictures / "bar", "--out", scores)
    assert lines == ["70 images, no labels known", f"Scores: {scores}"]
    rows = scores.read_text().splitlines()
    assert len(rows) == 71 and rows[1].startswith(f"{pictures / 'bar' / '00.png'},")


def test_predict_refuses(model, pictures, tmp_path):
    torn = tmp_path / "torn.h5"
    torn.write_bytes(model.read_bytes()[:-500])
    jobs.draw_images(tmp_path / "large", per_class=1, side=14)
    unusable = "the model cannot be loaded: "
    for path, data, ranks, text in (
        (tmp_path / "missing.h5", pictures, 2, f"missing.h5: {unusable}it is"),
        (torn, pictures, 2, f"torn.h5: {unusable}"),
        (model.parent, pictures, 1, "expected a file, found a folder"),
        (
            pictures / "bar" / "00.png",
            pictures,
            1,
            "00.png: expected a *.h5, *.onnx or *.safetensors",
        ),
        (model, tmp_path / "large", 2, "expected images of shape (1, 12, 12)"),
        (model, tmp_path / "none", 1, "no such folder"),
    ):
        assert text in jobs.refused_prediction(path, data, ranks=ranks)
    words = jobs.command("predict", network=None, data=pictures)
    text = "the following arguments are required: --model"
    assert jobs.refusal(pool.run(1, *words)) == text


def test_predict_prints_and_writes_the_values_of_evaluate(model, pictures, tmp_path):
    table, scores = tmp_path / "table.csv", tmp_path / "scores.csv"
    files = ["--confusion", table, "--out", scores]
    images = dl.ImageFolder(pictures)
    expected = dl.evaluate(dl.load_model(model)[0], images, top_k=2, confusion=True)
    assert jobs.predict(model, pictures, "--top-k", 2, *files) == [
        f"Accuracy: {expected.accuracy:.4f} (210 images)",
        f"Top-2 accuracy: {expected.top_k:.4f}",
        f"Confusion matrix: {table}",
        f"Scores: {scores}",
    ]
    rows = [[str(cell) for cell in row] for row in expected.confusion.rows()]
    assert [line.split(",") for line in table.read_text().splitlines()] == rows
    predicted = [line.split(",")[1] for line in scores.read_text().splitlines()[1:]]
    columns = expected.confusion.counts.sum(axis=0)
    assert [predicted.count(name) for name in jobs.CLASSES] == columns.tolist()


# The ranks of a pool cannot import matplotlib. The import takes long, so one process runs both
# commands.
TWO_COMMANDS = """
import json, sys
from mpidl.cli import predict, train

for main, words in zip((train.main, predict.main), json.loads(sys.argv[1])):
    sys.argv[1:] = words
    main()
"""


@pytest.mark.slow("jobs")
def test_pictures_are_drawn(model, pictures, tmp_path):
    """`train` draws progress.png, and `predict` draws the confusion matrix."""
    pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
    out, confusion = tmp_path / "run", tmp_path / "a.png"
    words = jobs.command("train", *SHORT, data=pictures, out=out)[2:]
    drawing = ["--model", model, "--confusion", confusion, "--data", pictures]
    arguments = [list(map(str, command)) for command in (words, drawing)]
    mpirun(1, "-c", TWO_COMMANDS, json.dumps(arguments), check=0)
    for path in (out / "progress.png", confusion):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_predict_writes_activations(model, pictures, tmp_path):
    for path in (tmp_path / "a.npy", tmp_path / "a.h5"):
        lines = jobs.predict(model, pictures, "--activations", "relu1", "--out", path)
        assert lines == [f"Activations: 20x8x8 of relu1, 210 images: {path}"]
    images, (net, _) = dl.ImageFolder(pictures), dl.load_model(model)
    expected = dl.activations(net, images, "relu1")
    assert np.array_equal(np.load(tmp_path / "a.npy"), expected)
    with h5py.File(tmp_path / "a.h5") as file:
        assert np.array_equal(file["activations"], expected)
        assert np.array_equal(file["labels"], images.labels)
        assert file["names"].asstr()[5] == images.name(5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "a.npy"]


SCRIPT = """
import sys
import mpidl as dl
from mpidl import numerics
world = dl.World()
preprocess = dl.Preprocess(size=(16, 16), colour="gray", cover=True, crop=(12, 12))
photos = dl.ImageFolder(sys.argv[1], world, preprocess=preprocess)
train, test = photos.split(0.8, seed=0)
net = dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(3)], train.image_shape)
dl.train(net, train, dl.TrainingOptions(epochs=2, batch_size=50), world=world)
accuracy = dl.evaluate(net, photos, world=world).accuracy
if world.rank == 0:
    dl.save_model(sys.argv[2], net, photos.classes)
    print(f"Accuracy: {accuracy:.4f} (60 images)")
"""


def test_predict_with_a_network_that_a_script_trained(colours, tmp_path):
    """`predict` applies the model's stored preprocessing, and gives the script's accuracy."""
    script, path = tmp_path / "script.py", tmp_path / "model.h5"
    script.write_text(SCRIPT)
    expected = jobs.output_lines(pool.run(2, script, colours, path, check=0))[-1]
    assert expected.startswith("Accuracy: ")
    assert jobs.predict(path, colours) == [expected]


LAYERS = """
from dataclasses import dataclass
import mpidl as dl
from mpidl import numerics

@dataclass
class Halved(dl.Layer):
    def forward(self, x, context):
        return 0.5 * x
"""


def test_predict_with_custom_layers(pictures, tmp_path):
    file, path = tmp_path / "mylayers.py", tmp_path / "model.h5"
    file.write_text(LAYERS)
    (tmp_path / "bare.py").write_text("import mpidl as dl\n")
    (layer_class,) = user_files.user_layers(file)
    net = dl.Network([dl.Flatten(), layer_class(), dl.Dense(3)], (1, 12, 12), seed=1)
    dl.save_model(path, net, jobs.CLASSES)
    accuracy = dl.evaluate(net, dl.ImageFolder(pictures)).accuracy
    lines = jobs.predict(path, pictures, "--layers", file)
    assert lines == [f"Accuracy: {accuracy:.4f} (210 images)"]
    for options, text in (
        ([], "its network cannot be built: unknown layer type 'Halved'"),
        (["--layers", tmp_path / "none.py"], "--layers: no such file"),
        (["--layers", tmp_path / "bare.py"], "expected a class derived from dl."),
    ):
        assert text in jobs.refused_prediction(path, pictures, *options, ranks=1)


def test_predict_with_a_network_of_images(pictures, tmp_path):
    """`predict` writes the outputs of a network without classes."""
    path, out = tmp_path / "model.h5", tmp_path / "a.npy"
    net = dl.Network([dl.Conv2D(3, 1, padding=1)], (1, 12, 12))
    dl.save_model(path, net, [])
    lines = jobs.predict(path, pictures, "--out", out)
    assert lines == ["210 images, no targets known", f"Outputs: {out}"]
    assert np.array_equal(np.load(out), dl.predict(net, dl.ImageFolder(pictures)))
    line = jobs.refused_prediction(path, pictures, "--top-k", 1, ranks=1)
    assert line.startswith("--top-k: expected a model with a score for each class")
    images = (np.arange(40 * 144).reshape(40, 1, 12, 12) * 31 % 251).astype(np.uint8)
    targets = images.astype(np.float32) / 300
    with h5py.File(tmp_path / "pairs.h5", "w") as file:
        file["images"], file["targets"] = images, targets
    error = dl.predict(net, images).astype(np.float64) - targets
    rmse, mae = np.sqrt((error**2).mean()), np.abs(error).mean()
    for ranks in (1, 2):
        line = jobs.predict(path, tmp_path / "pairs.h5", ranks=ranks)[-1]
        assert line == f"RMSE: {rmse:.6g}, MAE: {mae:.6g} (40 images)"


def test_predict_refuses_unusable_outputs(model, pictures, tmp_path):
    npy = ["--out", tmp_path / "a.npy"]
    missing = ["--out", tmp_path / "none" / "a.npy"]
    relu1 = ["--activations", "relu1"]
    for options, text in (
        (["--confusion", "a.txt"], "a.txt: --confusion is written as .csv or .png"),
        (relu1, "--activations: expected --out FILE.npy or FILE.h5"),
        ([*relu1, "--out", "a.csv"], "written as .npy or .h5, found .csv"),
        (["--activations", "relu9", *npy], "model.h5: no layer relu9: did you mean relu"),
        ([*relu1, "--top-k", 1, *npy], "expected no --top-k with it"),
        ([*relu1, *missing], "none/a.npy: cannot be written: No such file or directory"),
        (["--top-k", 4], "--top-k 4: the model has 3 classes"),
        (["--top-k", 0], "--top-k must be at least 1, found 0"),
        (npy, "class scores are written as .csv"),
    ):
        assert text in jobs.refused_prediction(model, pictures, *options)
    for options in (["--top-k", 1], ["--confusion", "a.csv"]):
        line = jobs.refused_prediction(model, pictures / "bar", *options)
        assert f"{options[0]}: expected images with labels, found none in --data" in line
    assert list(tmp_path.iterdir()) == []
