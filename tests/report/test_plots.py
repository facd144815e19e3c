"""Test progress.png: the curves of a metrics file."""

import os
import sys

import numpy as np
import pytest
from image_sets import refusal
from PIL import Image

from mpidl.report import Metrics, plots, run_curves


def test_progress_png(tmp_path):
    pytest.importorskip("matplotlib", reason="progress.png needs the extra `plots`")
    path, png = tmp_path / "metrics.jsonl", tmp_path / "progress.png"
    path.touch()
    assert plots.progress(path, png)  # nothing to draw yet
    with Metrics(path) as records:
        for iteration in range(1, 31):
            epoch, last = (iteration + 9) // 10, iteration % 10 == 0
            values = (epoch, iteration, 2.0 / iteration, 0.01, 100.0, 1.0)
            for kind in ["iteration"] + ["epoch", "validation"] * last:
                records.record(kind, *values, accuracy=1 - 0.5 / iteration)
        records.record("iteration", 4, 31, float("nan"), 0.01, 100.0, 1.0)
    assert plots.progress(path, png)
    with Image.open(png) as image:
        assert image.size == (990, 715)
        colours = np.array([colour for _, colour in image.convert("RGB").getcolors(1 << 20)])
    training = np.array([*bytes.fromhex(run_curves.TRAINING[1:])])
    faint = 255 - 0.4 * (255 - training)  # the colour of the mini-batches
    for colour in (training, [*bytes.fromhex(run_curves.VALIDATION[1:])], faint):
        assert (np.abs(colours - colour).max(axis=1) <= 1).any()
    text = refusal(plots.progress, path, tmp_path / "nothing" / "progress.png")
    assert "progress.png: cannot be written" in text


def test_progress_png_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plots.progress(tmp_path / "metrics.jsonl", tmp_path / "progress.png") is False
    assert os.listdir(tmp_path) == []
