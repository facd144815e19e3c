"""Training by commands on images that have targets: numbers, images, a label a pixel."""

import csv
import re

import numpy as np
import pool
import pytest
import small

SIDE, COUNT = 10, 90  # of `pairs`; 81 are trained on: a mini-batch of 50 and one of 31


def trained(pairs, out, ranks, kind, *options, network="shades"):
    words = ["--epochs", 2, "--learning-rate", 0.1, *options]
    result = small.train(ranks, pairs[kind], out, *words, network=small.of(network))
    return small.printed(result), small.summary(out)


def predicted(pairs, out, kind, *options, check=0):
    words = ["--model", out / "model.h5", "--data", pairs[kind], *options]
    command = small.command("predict", *words, network=None)
    return pool.run(2, *command, check=check)


@pytest.mark.parametrize("kind, network", [("numbers", "digits"), ("images", "shades")])
def test_mean_squared_error(pairs, tmp_path, kind, network):
    hashes = set()
    for ranks in (1, 3):
        out = tmp_path / str(ranks)
        network_ = network if network == "digits" else small.of(network)
        words = ["--epochs", 2, "--loss", "mse"]
        result = small.train(ranks, pairs[kind], out, *words, network=network_)
        lines, found = small.printed(result), small.summary(out)
        assert found["accuracy"] is None
        assert f"Test loss: {found['loss']:.6g} (9 images)" in lines
        assert re.search(r"^Epoch: 2, Loss: \d\.\d{4}, Images/s: \d+, ", "\n".join(lines), re.M)
        hashes.add(found["weights_sha256"])
    assert len(hashes) == 1
    line = small.printed(predicted(pairs, tmp_path / "1", kind))[-1]
    assert re.fullmatch(r"RMSE: [\d.e-]+, MAE: [\d.e-]+ \(90 images\)", line)


def test_resume_on_other_ranks(pairs, tmp_path):
    words = ["--loss", "mse"]
    _, whole = trained(pairs, tmp_path / "whole", 1, "images", *words)
    trained(pairs, tmp_path / "part", 2, "images", *words, "--max-iterations", 3)
    small.resume(3, tmp_path / "part", "--max-iterations", "none")
    assert small.summary(tmp_path / "part")["weights_sha256"] == whole["weights_sha256"]
    refused = small.resume(1, tmp_path / "part", "--loss", "crossentropy", check=2)
    assert "crossentropy: expected labels, or whole numbers" in refused.stderr


def test_a_label_a_pixel(pairs, tmp_path):
    runs = [
        trained(pairs, tmp_path / str(ranks), ranks, "pixels", network="pixels") for ranks in (1, 2)
    ]
    assert runs[0][1]["weights_sha256"] == runs[1][1]["weights_sha256"]
    table = tmp_path / "table.csv"
    lines = small.printed(predicted(pairs, tmp_path / "1", "pixels", "--confusion", table))
    accuracy = float(re.fullmatch(r"Accuracy: (\S+) \(90 images, 100 labels each\)", lines[-2])[1])
    rows = list(csv.reader(table.open()))
    counts = np.array([row[1:-1] for row in rows[1:-1]], int)
    assert counts.sum() == COUNT * SIDE * SIDE
    assert accuracy == pytest.approx(counts.trace() / counts.sum(), abs=5e-5)


def test_refusals(pairs, tmp_path):
    for kind, network, options, text in (
        ("images", "digits", ["--loss", "mse"], "--network digits: it gives numbers; the data"),
        ("numbers", "digits", [], "--loss crossentropy: expected labels, or whole numbers"),
        ("pixels", small.of("pixels"), ["--loss", "mse"], "expected targets that are floats"),
        ("images", small.of("pixels"), ["--loss", "mse"], "outputs of shape (1, 10, 10), as"),
        (
            "numbers",
            "digits",
            ["--loss", "l1"],
            "--loss must be crossentropy, mse or mae, found l1",
        ),
    ):
        words = [pairs[kind], tmp_path / "out", *options]
        result = small.train(2, *words, network=network, check=2)
        (line,) = small.own_lines(result)
        assert line.startswith("mpidl: ") and text in line
    assert not (tmp_path / "out").exists()
