"""Test commands for images whose targets are numbers, images, or one label per pixel."""

import csv
import re

import jobs
import numpy as np
import pytest

from mpidl.report import run_files
from mpidl.report.page import run_page

# Side and number of the images in `pairs`. Of these images, 81 are for training, in mini-batches of
# 50 and 31.
SIDE, COUNT = 10, 90
SHADES, PIXELS = jobs.network("shades"), jobs.network("pixels")
OPTIONS = ["--epochs", 2, "--learning-rate", 0.1]


@pytest.mark.parametrize(
    "kind, network",
    [pytest.param("numbers", "digits", marks=pytest.mark.slow("jobs")), ("images", SHADES)],
)
def test_mean_squared_error(pairs, tmp_path, kind, network):
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        words = ["--epochs", 1, "--loss", "mse"]
        result = jobs.train(ranks, pairs[kind], out, *words, network=network)
        lines, summary = jobs.output_lines(result), jobs.summary(out)
        assert summary["accuracy"] is None
        assert f"Test loss: {summary['loss']:.6g} (9 images)" in lines
        assert re.search(r"^Epoch: 1, Loss: \d\.\d{4}, Images/s: \d+, ", "\n".join(lines), re.M)
    assert jobs.weights_hash(tmp_path / "1") == jobs.weights_hash(tmp_path / "2")
    line = jobs.predict(tmp_path / "1" / "model.h5", pairs[kind])[-1]
    assert re.fullmatch(r"RMSE: [\d.e-]+, MAE: [\d.e-]+ \(90 images\)", line)


@pytest.mark.slow("jobs")
def test_resume_on_other_ranks(pairs, tmp_path):
    data, words, out = pairs["images"], [*OPTIONS, "--loss", "mse"], tmp_path / "halted"
    expected = jobs.trained_hash(1, data, tmp_path / "expected", *words, network=SHADES)
    jobs.train(2, data, out, *words, "--max-iterations", 3, network=SHADES)
    jobs.resume(3, out, "--max-iterations", "none")
    assert jobs.weights_hash(out) == expected
    line = jobs.refusal(jobs.resume(1, out, "--loss", "crossentropy", check=2))
    assert "crossentropy: expected labels, or whole numbers" in line


def test_a_label_per_pixel(pairs, tmp_path):
    hashes = {
        jobs.trained_hash(ranks, pairs["pixels"], tmp_path / str(ranks), *OPTIONS, network=PIXELS)
        for ranks in (1, 2)
    }
    assert len(hashes) == 1
    table = tmp_path / "table.csv"
    lines = jobs.predict(tmp_path / "1" / "model.h5", pairs["pixels"], "--confusion", table)
    accuracy = float(re.fullmatch(r"Accuracy: (\S+) \(90 images, 100 labels each\)", lines[-2])[1])
    rows = list(csv.reader(table.open()))
    counts = np.array([row[1:-1] for row in rows[1:-1]], int)
    assert counts.sum() == COUNT * SIDE * SIDE
    assert accuracy == pytest.approx(counts.trace() / counts.sum(), abs=5e-5)


LOSSES = {
    "labels": ["--loss", "binary-crossentropy", "--positive-weights", "balanced"],
    "pixels": ["--loss", "crossentropy+dice", "--class-weights", "balanced", "--ignore-label", 9],
    "tversky": ["--loss", "tversky", "--class-weights", "0,1,2"],
}


SLOW = pytest.mark.slow("jobs")
KINDS = ["labels", pytest.param("pixels", marks=SLOW), pytest.param("tversky", marks=SLOW)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_of_labels_on_any_ranks_and_resumed(pairs, tmp_path, kind):
    """Losses with weights that depend on the targets give the same bytes on any number of ranks.

    The bytes are also the same with more threads and after a resume.
    """
    network = "digits" if kind == "labels" else PIXELS
    pair = pairs["labels" if kind == "labels" else "pixels"]
    words, halted = [*OPTIONS, *LOSSES[kind], "--metrics", "all"], tmp_path / "halted"
    base = [*words, "--threads", 1]
    expected = jobs.trained_hash(1, pair, tmp_path / "1", *base, network=network)
    jobs.train(3, pair, halted, *words, "--max-iterations", 3, network=network)
    jobs.resume(2, halted, "--max-iterations", "none", "--threads", 2)
    jobs.assert_same_weights({"1": expected, "3, then 2": jobs.weights_hash(halted)})
    first, last = jobs.summary(tmp_path / "1"), jobs.summary(halted)
    for name in ("loss", "accuracy", "metrics"):
        assert first[name] == last[name]
    tables = [(out / "class-metrics.csv").read_text() for out in (tmp_path / "1", halted)]
    assert tables[0] == tables[1]
    page = run_page.render([run_files.read(str(halted))]).decode()
    assert "Metrics on the test set" in page and f"{last['metrics']['f1']:.4f}" in page
    if kind == "labels":
        out = tmp_path / "labels.csv"
        lines = jobs.predict(halted / "model.h5", pair, "--metrics", "all", "--out", out)
        assert re.fullmatch(r"Accuracy: \S+ \(90 images, 3 labels each\)", lines[-7])
        assert lines[-6].split()[:3] == ["class", "precision", "recall"]
        rows = list(csv.reader(out.open()))
        assert rows[0] == ["image", "predicted", "0", "1", "2"] and len(rows) == 91
        for _, labels, *chances in rows[1:]:
            likely = (n for n, p in zip("012", chances, strict=True) if float(p) > 0.5)
            assert labels == ";".join(likely)
        line = jobs.refused_prediction(halted / "model.h5", pair, "--top-k", 2)
        assert "probabilities of separate labels" in line
    plain = jobs.trained_hash(1, pair, tmp_path / "plain", *OPTIONS, *words[4:6], network=network)
    assert plain != expected


def test_refusals(pairs, tmp_path):
    for kind, network, options, text in (
        ("images", "digits", ["--loss", "mse"], "--network digits: expected FILE.py:FUNCTION"),
        ("numbers", "digits", [], "--loss crossentropy: expected labels, or whole numbers"),
        ("pixels", PIXELS, ["--loss", "mse"], "expected targets that are floats"),
        ("images", PIXELS, ["--loss", "mse"], "outputs of shape (1, 10, 10), like"),
        ("numbers", "digits", ["--loss", "l1"], "mse or mae, found l1"),
    ):
        words = [pairs[kind], tmp_path / "out", *options]
        result = jobs.train(2, *words, network=network, check=2)
        assert text in jobs.refusal(result)
    assert not (tmp_path / "out").exists()
