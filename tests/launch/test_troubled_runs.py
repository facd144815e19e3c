"""Test jobs with unreadable files, a loss that is not finite, and a late rank."""

import csv
import os
import shutil
import socket

import jobs
import numpy as np
import pool
import pytest
from image_sets import pixels_of, save


@pytest.fixture(scope="module")
def damaged(pictures, tmp_path_factory):
    """Return a copy of the pictures in which five files are damaged.

    One file is empty, one is truncated, one has another size, one is not an image, and one is a
    pipe, for whose writer an open would wait.
    """
    folder = shutil.copytree(pictures, tmp_path_factory.mktemp("damaged") / "images")
    (folder / "bar" / "07.png").write_bytes(b"")
    content = (folder / "box" / "33.png").read_bytes()
    (folder / "box" / "33.png").write_bytes(content[: len(content) // 2])
    save(folder / "dot" / "12.png", pixels_of(1, 1, 9, 14))
    (folder / "dot" / "69.png").write_text("no image")
    (folder / "dot" / "30.png").unlink()
    os.mkfifo(folder / "dot" / "30.png")
    return folder


SKIP = ("--on-bad-image", "skip", "--epochs", 2)
CASES = [(1, ("--prefetch", 0)), (3, ("--workers", 3))]


def test_any_ranks_skip_the_same_files(damaged, tmp_path):
    hashes = {}
    for ranks, words in CASES:
        out = tmp_path / str(ranks)
        hashes[ranks] = jobs.trained_hash(ranks, damaged, out, *SKIP, *words)
        with open(out / "bad-images.csv", newline="") as file:
            listed = sorted(row["image"] for row in csv.DictReader(file))
        names = ("bar/07.png", "box/33.png", "dot/12.png", "dot/30.png", "dot/69.png")
        assert listed == [str(damaged / name) for name in names]
        assert jobs.summary(out)["skipped_images"] == 5
    jobs.assert_same_weights(hashes)
    words = (tmp_path / "1" / "model.h5", damaged, "--on-bad-image", "skip")
    scores = jobs.predict(*words, "--out", tmp_path / "scores.csv", ranks=3)
    assert "Skipped images: 5 of 210" in scores and any("(205 images)" in s for s in scores)
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 1 + 205
    jobs.predict(*words, "--activations", "dense1", "--out", tmp_path / "activations.npy")
    rows = np.load(tmp_path / "activations.npy")
    assert np.flatnonzero(np.isnan(rows).all(axis=1)).tolist() == [7, 103, 152, 170, 209]
    assert np.isfinite(rows).all(axis=1).sum() == 205


@pytest.mark.slow("jobs")
def test_a_run_that_skips_resumes_on_other_ranks(damaged, tmp_path):
    expected = jobs.trained_hash(1, damaged, tmp_path / "expected", *SKIP)
    out = tmp_path / "run"
    jobs.train(3, damaged, out, *SKIP, "--max-iterations", 6)
    jobs.resume(2, out, "--max-iterations", "none")
    jobs.assert_same_weights({1: expected, "resumed": jobs.weights_hash(out)})


def test_a_run_stops_at_such_a_file(damaged, tmp_path):
    """Negative control: without the option, the first bad file ends the job."""
    for words in ((), ("--normalization", "zscore")):  # zscore reads all images before training
        line = jobs.refusal(jobs.train(2, damaged, tmp_path / "run", *words, check=2))
        assert str(damaged) in line and "use --on-bad-image skip" in line


def test_a_preview_skips_such_files(damaged, tmp_path):
    """The preview draws the last image of each class. The last image of dot is not an image."""
    picture = tmp_path / "seen.png"
    words = jobs.command("train", "--preview", picture, "--test-fraction", 0, data=damaged)
    assert str(damaged / "dot" / "69.png") in jobs.refusal(pool.run(1, *words, check=2))
    pool.run(1, *words, "--on-bad-image", "skip", check=0)
    assert picture.exists()


def test_any_ranks_roll_back_alike(pictures, tmp_path):
    """Runs on any number of ranks roll back to the same state, with the same weights.

    The loss of iteration 6 is infinite, so the run returns to the end of epoch 1, iteration 4.
    """
    network, hashes = jobs.network("infinite_once"), {}
    for ranks in (1, 3):
        out, words = tmp_path / str(ranks), ("--on-nan", "rollback", "--epochs", 2)
        result = jobs.train(ranks, pictures, out, *words, network=network)
        text = "iteration 6, but finite when computed again: rolled back to iteration 4; "
        assert text in result.stdout
        assert jobs.summary(out)["rollbacks"] == 1
        assert jobs.iterations(out) == list(range(1, 2 * jobs.ITERATIONS + 1))
        hashes[ranks] = jobs.weights_hash(out)
    jobs.assert_same_weights(hashes)
    result = jobs.train(1, pictures, tmp_path / "stop", "--epochs", 2, network=network, check=1)
    assert "the loss is nan at epoch 2, iteration 6, but finite when" in result.stderr


@pytest.mark.slow("jobs")
@pytest.mark.parametrize(("name", "iterations"), [("late_on_rank_1", 110), ("small", 160)])
def test_a_late_rank_is_named_once(name, iterations, pictures, tmp_path):
    words = ("--max-iterations", iterations, "--epochs", 100, "--batch-size", 64)
    result = jobs.train(2, pictures, tmp_path / "run", *words, network=jobs.network(name))
    lines = [line for line in result.stdout.splitlines() if "always late" in line]
    if name == "small":
        assert lines == []
        return
    (line,) = lines
    assert line.startswith(f"warning: always late: rank 1 on host {socket.gethostname()}; in the ")
