"""What the commands print and leave: train, predict, verify, info."""

import importlib.util
import re
import shutil

import h5py
import numpy as np
import pool
import pytest
import small
from launcher import mpirun

import mpidl as dl
from mpidl.cli import start

FILES = {
    "checkpoint.h5",
    "checkpoint-previous.h5",
    "metrics.jsonl",
    "model.h5",
    "options.toml",
    "progress.png",
    "summary.json",
}
SHORT = ["--max-iterations", 2, "--batch-size", 50]


@pytest.fixture(scope="module")
def trained(pictures, tmp_path_factory):
    """(folder, Result) of a run of two epochs on 2 ranks, with plots where there is matplotlib."""
    out = tmp_path_factory.mktemp("trained") / "run"
    words = ["--epochs", 2, "--batch-size", 50]
    words = small.command("train", *words, network="digits", data=pictures, out=out)
    return out, mpirun(2, *words, check=0)


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
    lines = small.printed(result)
    assert len(lines) == len(expected), result.stdout
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line)
    assert small.own_lines(result) == []


def test_train_leaves_its_files(trained):
    out, result = trained
    picture = set() if importlib.util.find_spec("matplotlib") else {"progress.png"}
    assert {path.name for path in out.iterdir()} == FILES - picture
    summary = small.summary(out)
    assert f"Test accuracy: {summary['accuracy']:.4f} (21 images)" in result.stdout
    assert f"weights_sha256: {summary['weights_sha256']}" in result.stdout
    assert set(summary) == {
        *("accuracy", "loss", "epochs", "iterations", "ranks", "threads", "device"),
        *("images_per_second", "train_seconds", "weights_sha256"),
        *("best_iteration", "validation_loss", "validation_accuracy", "stopped"),
    }
    for name in ("best_iteration", "validation_loss", "validation_accuracy", "stopped"):
        assert summary[name] is None


def test_what_validation_came_to(pictures, tmp_path):
    """It ends a run that learns nothing, which the summary tells as the lines do."""
    words = ["--learning-rate", 1e-30, "--validation-data", "test", "--validation-frequency", 1]
    words += ["--validation-patience", 2]
    result = small.train(2, pictures, tmp_path, *words, network=small.of("wide"))
    summary = small.summary(tmp_path)
    assert (summary["best_iteration"], summary["stopped"]) == (1, "validation_patience")
    found = f"loss: {summary['validation_loss']:.4f}, Validation accuracy: " + (
        f"{summary['validation_accuracy']:.4f}"
    )
    lines = [line for line in small.printed(result) if line.startswith("Iteration: ")]
    assert lines[:2] == [f"Iteration: {i}, Validation {found}" for i in (1, 2)]
    assert lines[2] == f"Iteration: 3, Validation {found}"
    assert lines[3].startswith("Iteration: 3, Epoch: 1, Loss: ") and len(lines) == 4


def test_a_folder_that_holds_a_run(trained, pictures, tmp_path):
    """Is refused, and left as it is, by a run that does not go on with it, unless that says so."""
    out = shutil.copytree(trained[0], tmp_path / "run")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    words = small.command("train", *SHORT, data=pictures, out=out)
    result = pool.run(2, *words, check=2)
    assert small.own_lines(result) == [
        f"mpidl: --out {out}: it holds a run (iteration 8): --resume {out} goes on with it, "
        "--overwrite replaces it"
    ]
    assert small.printed(result) == []
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    pool.run(2, *words, "--overwrite", check=0)
    assert small.summary(out)["iterations"] == 2 and small.iterations(out) == [1, 2]
    again = ["--resume", out, "--out", out, "--max-iterations", 3]  # as run/train.slurm says it
    pool.run(1, "-m", "mpidl.train", *again, check=0)
    assert small.iterations(out) == [1, 2, 3]


def test_the_model_can_be_loaded(trained):
    out, _ = trained
    net, about = dl.load_model(out / "model.h5")
    assert dl.weights_sha256(net) == small.summary(out)["weights_sha256"]
    assert about["classes"] == list(small.CLASSES)
    assert net.predict(np.zeros((3, 1, 12, 12), np.uint8)).shape == (3, 3)


def test_the_options_of_a_run_make_the_same_run(trained, tmp_path):
    out, _ = trained
    words = ["--config", out / "options.toml", "--out", tmp_path / "again"]
    pool.run(1, "-m", "mpidl.train", *words, check=0)
    assert (
        small.summary(tmp_path / "again")["weights_sha256"]
        == (small.summary(out)["weights_sha256"])
    )


def test_a_mini_batch_for_each_rank(pictures, tmp_path):
    """It is a batch size; its dependence on the ranks is told."""
    words = ["--max-iterations", 2, "--batch-per-rank", 25]
    result = pool.run(
        2, *small.command("train", *words, data=pictures, out=tmp_path / "2"), check=0
    )
    note = "note: --batch-per-rank 25: mini-batches of 50 on 2 rank(s)"
    assert any(line.startswith(note) for line in small.printed(result)), result.stdout
    pool.run(1, *small.command("train", *SHORT, data=pictures, out=tmp_path / "1"), check=0)
    hashes = {small.summary(tmp_path / name)["weights_sha256"] for name in ("1", "2")}
    assert len(hashes) == 1


@pytest.mark.parametrize("command", ["train", "predict", "verify", "info", "pack", "benchmarks"])
def test_help_is_printed_once(command):
    """On all ranks alike the program ends, but one of them prints."""
    words = small.command(command, "--help", network=None)
    result = pool.run(2 if command == "train" else None, *words, check=0)
    assert result.stdout.count("usage: ") == 1 and small.own_lines(result) == []
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_folders_are_numbered(pictures, tmp_path):
    """Without --out, in the folder one is in."""
    for _ in range(2):
        words = small.command("train", *SHORT, data=pictures)
        result = pool.run(1, *words, cwd=tmp_path, check=0)
    assert "Results: runs/small-2" in result.stdout
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"small", "small-2"}


def test_verify(pictures):
    words = small.command("verify", *SHORT, "--ranks", "1,3", data=pictures)
    lines = small.printed(pool.run(None, *words, check=0))
    assert lines[0].split() == ["ranks", "iterations", "loss", "seconds", "weights_sha256"]
    rows = [line.split() for line in lines[1:3]]
    assert [row[:2] for row in rows] == [["1", "2"], ["3", "2"]]
    assert rows[0][4] == rows[1][4] and len(rows[0][4]) == 64
    assert lines[3:] == ["the same weights, byte for byte, on 1, 3 ranks"]


@pytest.mark.slow("jobs")
def test_verify_where_they_differ(pictures):
    words = small.command("verify", *SHORT, "--ranks", "1,3", data=pictures)
    words += ["--batchnorm", "local"]
    result = pool.run(None, *words, check=1)
    rows = [line.split() for line in small.printed(result)[1:3]]
    assert rows[0][4] != rows[1][4]
    assert "DIFFERENT: the weights depend on the number of ranks" in result.stdout


def test_verify_refuses(tmp_path):
    """In one line what training refused, and to be started under mpirun."""
    words = small.command("verify", "--ranks", "1", data=tmp_path / "missing")
    for ranks, text in ((None, "no such folder"), (2, "run it without mpirun")):
        (line,) = small.own_lines(pool.run(ranks, *words, check=2))
        assert line.startswith("mpidl: ") and text in line


def test_info():
    lines = mpirun(2, "-m", "mpidl.info", check=0).stdout.splitlines()
    facts = {line[:13].strip(): line[14:] for line in lines}
    names = ("mpidl", "Python", "CPU", "CPU features", "mpi4py", "fabric")
    names += ("GPU", "CuPy", "NVRTC", "GPU cache", "GPU messages")
    for name in (*names, "arithmetic", "kernels", "threads"):
        assert facts[name], name
    assert facts["NumPy"].startswith(f"{np.__version__}, BLAS ")
    assert any(word in facts["MPI"].lower() for word in ("mpich", "open mpi", "intel"))
    assert facts["ranks"] == "2 on 1 host(s)"
    (bound,) = (line for line in lines if line.startswith("  "))
    assert re.search(r"rank 0 on cores [\d,-]+; rank 1 on cores [\d,-]+", bound)


def predict(*options, ranks=1, check=0):
    return pool.run(ranks, *small.command("predict", *options, network=None), check=check)


def test_predict_without_labels(trained, pictures, tmp_path):
    """A folder of images alone, as the paths of one class are."""
    out, _ = trained
    scores = tmp_path / "scores.csv"
    options = ["--model", out / "model.h5", "--data", pictures / "bar", "--out", scores]
    result = predict(*options, ranks=2)
    assert small.printed(result) == ["70 images, no labels known", f"Scores: {scores}"]
    rows = scores.read_text().splitlines()
    assert len(rows) == 71 and rows[1].startswith(f"{pictures / 'bar' / '00.png'},")


def test_predict_refuses(trained, pictures, tmp_path):
    out, _ = trained
    torn = tmp_path / "torn.h5"
    torn.write_bytes((out / "model.h5").read_bytes()[:-500])
    small.draw(tmp_path / "large", per_class=1, side=14)
    for options, ranks, text in (
        (
            [tmp_path / "missing.h5", pictures],
            2,
            "missing.h5: not a model that can be loaded: it is",
        ),
        ([torn, pictures], 2, "torn.h5: not a model that can be loaded: "),
        ([out, pictures], 1, "not a model that can be loaded: it is a folder, not a file"),
        ([pictures / "bar" / "00.png", pictures], 1, "00.png: not a model that can be loaded: "),
        ([out / "model.h5", tmp_path / "large"], 2, "expected images of shape (1, 12, 12)"),
        ([out / "model.h5", tmp_path / "none"], 1, "no such folder"),
    ):
        result = predict("--model", options[0], "--data", options[1], ranks=ranks, check=2)
        (line,) = small.own_lines(result)
        assert line.startswith("mpidl: ") and text in line
    (line,) = small.own_lines(predict("--data", pictures, check=2))
    assert line == "mpidl: the following arguments are required: --model"


def test_predict_says_how_right_it_is(trained, pictures, tmp_path):
    """The numbers are those of the files, which are those of `dl.evaluate`."""
    out, _ = trained
    table, scores = tmp_path / "table.csv", tmp_path / "scores.csv"
    words = ["--model", out / "model.h5", "--data", pictures, "--top-k", 2]
    printed = small.printed(predict(*words, "--confusion", table, "--out", scores, ranks=2))
    images = dl.ImageFolder(pictures)
    found = dl.evaluate(dl.load_model(out / "model.h5")[0], images, top_k=2, confusion=True)
    assert printed == [
        f"Accuracy: {found.accuracy:.4f} (210 images)",
        f"Top-2 accuracy: {found.top_k:.4f}",
        f"Confusion matrix: {table}",
        f"Scores: {scores}",
    ]
    rows = [[str(cell) for cell in row] for row in found.confusion.rows()]
    assert [line.split(",") for line in table.read_text().splitlines()] == rows
    taken = [line.split(",")[1] for line in scores.read_text().splitlines()[1:]]
    columns = found.confusion.counts.sum(axis=0)
    assert [taken.count(name) for name in small.CLASSES] == columns.tolist()


def test_predict_draws_the_confusion_matrix(trained, pictures, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture")
    out, _ = trained
    words = ["--model", out / "model.h5", "--data", pictures]
    words = small.command("predict", *words, "--confusion", tmp_path / "a.png", network=None)
    mpirun(1, *words, check=0)  # the ranks of a pool have no matplotlib
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_predict_writes_activations(trained, pictures, tmp_path):
    out, _ = trained
    words = ["--model", out / "model.h5", "--data", pictures, "--activations", "relu1", "--out"]
    for name in ("a.npy", "a.h5"):
        line = f"Activations: 20x8x8 of relu1, 210 images: {tmp_path / name}"
        assert small.printed(predict(*words, tmp_path / name, ranks=2)) == [line]
    images, (net, _) = dl.ImageFolder(pictures), dl.load_model(out / "model.h5")
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
world = dl.World()
how = dl.Preprocess(size=(16, 16), colour="gray", cover=True, crop=(12, 12))
photos = dl.ImageFolder(sys.argv[1], world, preprocess=how)
train, test = photos.split(0.8, seed=0)
net = dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(3)], train.image_shape)
dl.train(net, train, dl.TrainingOptions(epochs=2, batch_size=50), world=world)
accuracy = dl.evaluate(net, photos, world=world).accuracy
if world.rank == 0:
    dl.save_model(sys.argv[2], net, photos.classes)
    print(f"Accuracy: {accuracy:.4f} (90 images)")
"""


def test_predict_with_a_network_that_a_script_trained(colours, tmp_path):
    """On the raw images, which are larger and in colour: the model knows how they were made."""
    (tmp_path / "own.py").write_text(SCRIPT)
    result = pool.run(2, tmp_path / "own.py", colours, tmp_path / "model.h5", check=0)
    expected = small.printed(result)[-1]
    assert expected.startswith("Accuracy: ")
    printed = small.printed(predict("--model", tmp_path / "model.h5", "--data", colours, ranks=2))
    assert printed == [expected]


LAYERS = """
from dataclasses import dataclass
import mpidl as dl

@dataclass
class Halved(dl.Layer):
    name: str | None = None

    def forward(self, x, context):
        return 0.5 * x
"""


def test_predict_with_layers_of_a_user(pictures, tmp_path):
    file, path = tmp_path / "mylayers.py", tmp_path / "model.h5"
    file.write_text(LAYERS)
    (tmp_path / "bare.py").write_text("import mpidl as dl\n")
    (kind,) = start.user_layers(file)
    net = dl.Network([dl.Flatten(), kind(), dl.Dense(3)], (1, 12, 12), seed=1)
    dl.save_model(path, net, small.CLASSES)
    words = ["--model", path, "--data", pictures]
    scores = dl.evaluate(net, dl.ImageFolder(pictures))
    printed = small.printed(predict(*words, "--layers", file, ranks=2))
    assert printed == [f"Accuracy: {scores.accuracy:.4f} (210 images)"]
    for options, text in (
        ([], "its network cannot be built: unknown layer type 'Halved'"),
        (["--layers", tmp_path / "none.py"], "--layers: no file"),
        (["--layers", tmp_path / "bare.py"], "expected a class derived from dl."),
    ):
        (line,) = small.own_lines(predict(*words, *options, check=2))
        assert text in line


def test_predict_with_a_network_of_images(pictures, tmp_path):
    """A network without classes: its outputs are written."""
    net = dl.Network([dl.Conv2D(3, 1, padding=1)], (1, 12, 12))
    dl.save_model(tmp_path / "model.h5", net, [])
    out = tmp_path / "a.npy"
    words = ["--model", tmp_path / "model.h5", "--data", pictures]
    printed = small.printed(predict(*words, "--out", out, ranks=2))
    assert printed == ["210 images, no targets known", f"Outputs: {out}"]
    assert np.array_equal(np.load(out), dl.predict(net, dl.ImageFolder(pictures)))
    (line,) = small.own_lines(predict(*words, "--top-k", 1, check=2))
    assert line.startswith("mpidl: --top-k: expected a model with a score for each class")
    images = (np.arange(40 * 144).reshape(40, 1, 12, 12) * 31 % 251).astype(np.uint8)
    targets = images.astype(np.float32) / 300
    with h5py.File(tmp_path / "pairs.h5", "w") as file:
        file["images"], file["targets"] = images, targets
    words = ["--model", tmp_path / "model.h5", "--data", tmp_path / "pairs.h5"]
    error = dl.predict(net, images).astype(np.float64) - targets
    rmse, mae = np.sqrt((error**2).mean()), np.abs(error).mean()
    for ranks in (1, 3):
        line = small.printed(predict(*words, ranks=ranks))[-1]
        assert line == f"RMSE: {rmse:.6g}, MAE: {mae:.6g} (40 images)"


def test_predict_refuses_what_it_cannot_write(trained, pictures, tmp_path):
    out, _ = trained
    words = ["--model", out / "model.h5", "--data", pictures]
    bare = ["--model", out / "model.h5", "--data", pictures / "bar"]
    npy = ["--out", tmp_path / "a.npy"]
    for options, text in (
        ([*words, "--confusion", "a.txt"], "a.txt: --confusion is written as .csv or .png"),
        ([*words, "--activations", "relu1"], "--activations: expected --out FILE.npy or FILE.h5"),
        (
            [*words, "--activations", "relu1", "--out", "a.csv"],
            "written as .npy or .h5, found .csv",
        ),
        ([*words, "--activations", "relu9", *npy], "model.h5: no layer relu9: did you mean relu"),
        ([*words, "--activations", "relu1", "--top-k", 1, *npy], "expected no --top-k with it"),
        (
            [*words, "--activations", "relu1", "--out", tmp_path / "none" / "a.npy"],
            "none/a.npy: cannot be written: No such file or directory",
        ),
        ([*words, "--top-k", 4], "--top-k 4: the model has 3 classes"),
        ([*words, "--top-k", 0], "--top-k must be at least 1, found 0"),
        ([*words, *npy], "the scores of classes are written as .csv"),
        ([*bare, "--top-k", 1], "--top-k: expected images with labels, found none in --data"),
        ([*bare, "--confusion", "a.csv"], "--confusion: expected images with labels, found none"),
    ):
        (line,) = small.own_lines(predict(*options, ranks=2, check=2))
        assert line.startswith("mpidl: ") and text in line
    assert list(tmp_path.iterdir()) == []
