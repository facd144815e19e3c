"""What a run shows: console, metrics.jsonl, progress.png."""

import io
import json
import os
import pty
import re

import pytest

import mpidl as dl
from mpidl.errors import UserError
from mpidl.report import Console, Metrics, console, metrics, plots


def show(shown, epochs=2):
    """The calls of a short run of 3 iterations an epoch."""
    with shown:
        shown.header(network="digits", test_data="1000 images")
        shown.start(epochs, 3 * epochs)
        for epoch in range(1, epochs + 1):
            for batch in range(1, 4):
                shown.iteration(epoch, 3 * (epoch - 1) + batch, 0.5 / epoch, 5210.4, 0.25)
            shown.epoch(epoch, 0.30714, 5210.4, 12.9, accuracy=0.91234)
        shown.finish("runs/digits", 61.0, dl.Evaluation(0.999, 0.01, 1000))


def test_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    show(Console(0, stream=stream))
    assert stream.getvalue().splitlines() == [
        "Network: digits",
        "Test data: 1000 images",
        "Epoch: 1, Loss: 0.3071, Accuracy: 0.9123, Images/s: 5210, Elapsed: 0:00:12",
        "Epoch: 2, Loss: 0.3071, Accuracy: 0.9123, Images/s: 5210, Elapsed: 0:00:12",
        "Test accuracy: 0.9990 (1000 images)",
        "Training time: 0:01:01",
        "Results: runs/digits",
    ]


def test_lines_come_at_once(tmp_path):
    with open(tmp_path / "log", "w") as stream:
        Console(0, stream=stream).epoch(1, 0.5, 100, 3, validation=dl.Evaluation(0.25, 1.5, 9))
        line = (tmp_path / "log").read_text()
    assert line == (
        "Epoch: 1, Loss: 0.5000, Validation loss: 1.5000, Validation accuracy: 0.2500, "
        "Images/s: 100, Elapsed: 0:00:03\n"
    )


def test_the_line_of_a_validation():
    stream = io.StringIO()
    shown = Console(0, stream=stream)
    shown.validation(50, dl.Evaluation(0.25, 1.5, 9))
    shown.validation(100, dl.Evaluation(None, 1.5, 9))  # of a loss that classifies nothing
    Console(0, stream=stream, progress=False).validation(50, dl.Evaluation(0.25, 1.5, 9))
    Console(1).validation(50, dl.Evaluation(0.25, 1.5, 9))
    assert stream.getvalue().splitlines() == [
        "Iteration: 50, Validation loss: 1.5000, Validation accuracy: 0.2500",
        "Iteration: 100, Validation loss: 1.5000",
    ]


@pytest.mark.parametrize("every, wanted", [(2, [2, 4, 6]), (0, [])])
def test_lines_of_iterations_in_long_epochs(monkeypatch, every, wanted):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    show(Console(0, stream=stream, verbose_every=every))
    assert [int(n) for n in re.findall(r"^Iteration: (\d+), Epoch: ", stream.getvalue(), re.M)] == (
        wanted
    )


def test_the_line_of_the_last_iteration(monkeypatch):
    """Once, however little time has passed, and where it was not due."""
    stream = io.StringIO()
    for progress in (True, False):
        with Console(0, stream=stream, progress=progress) as shown:
            shown.last_iteration()  # there was none
            shown.iteration(1, 4, 0.25, 99.6)
            shown.last_iteration()
            shown.last_iteration()
    line = "Iteration: 4, Epoch: 1, Loss: 0.2500, Images/s: 100\n"
    assert stream.getvalue() == line
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    shown = Console(0, stream=stream, verbose_every=1)
    shown.iteration(1, 4, 0.25, 99.6)
    shown.last_iteration()
    assert stream.getvalue() == 2 * line


def test_other_ranks_are_silent(capsys):
    show(Console(1))
    show(Console(3, width=80))
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr(console, "BAR_SECONDS", 0.0)
    stream = io.StringIO()
    show(Console(0, stream=stream, width=100))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "Epoch 2/2" in shown and "5/6" in shown and "5210 images/s" in shown
    assert "loss 0.2500  accuracy 0.2500" in shown
    # The lines stay: each stands alone, above the bar.
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown)]
    epochs = [line for line in lines if line.startswith("Epoch: ")]
    assert [line[:22] for line in epochs] == ["Epoch: 1, Loss: 0.3071", "Epoch: 2, Loss: 0.3071"]
    assert all(line.endswith("Elapsed: 0:00:12") for line in epochs)
    assert lines[-2] == "Results: runs/digits"
    assert stream.getvalue().endswith("Results: runs/digits\n")


def test_a_line_finds_the_bar_where_training_is():
    """However short the time since it was drawn."""
    stream = io.StringIO()
    with Console(0, stream=stream, width=100) as shown:
        shown.start(1, 3)
        for i in (1, 2, 3):
            shown.iteration(1, i, 0.25, 100.0)
        assert "3/3" not in stream.getvalue()
        shown.epoch(1, 0.25, 100.0, 1.0)
    assert "3/3" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


def test_the_bar_follows_the_window(monkeypatch):
    monkeypatch.setattr(console, "BAR_SECONDS", 0.0)
    widths = iter([100, 100, 60])
    monkeypatch.setattr(console, "terminal_width", lambda stream: next(widths))
    stream = io.StringIO()
    with Console(0, stream=stream) as shown:
        shown.start(1, 10)
        for i in (1, 2):
            shown.iteration(1, i, 0.25, 100.0, accuracy=0.5)
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    rows = [row for row in re.split(r"[\r\n]+", drawn) if "loss" in row]
    wide, narrow = (row for row in rows if "1/10" in row), (row for row in rows if "2/10" in row)
    assert {len(row) for row in wide} == {100} and {len(row) for row in narrow} == {60}


def test_the_bar_goes_away_when_the_run_fails(monkeypatch):
    monkeypatch.setattr(console, "BAR_SECONDS", 0.0)
    stream = io.StringIO()
    with pytest.raises(RuntimeError), Console(0, stream=stream, width=80) as shown:
        shown.start(1, 10)
        shown.iteration(1, 1, float("nan"), 0.0)
        raise RuntimeError
    assert shown.bar is None
    assert stream.getvalue().rfind("\x1b[?25l") < stream.getvalue().rfind("\x1b[?25h")


def test_a_terminal_is_recognised(monkeypatch, tmp_path):
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    with open(slave, "w") as terminal, open(tmp_path / "log", "w") as log:
        assert console.terminal_width(terminal) > 0
        assert console.terminal_width(log) == 0
        monkeypatch.setenv("TERM", "dumb")
        assert console.terminal_width(terminal) == 0
    os.close(master)
    assert console.terminal_width(io.StringIO()) == console.terminal_width(None) == 0


def write(path, iterations, **keywords):
    with Metrics(path, **keywords) as records:
        for iteration in iterations:
            records.record("iteration", 1, iteration, 0.5 / iteration, 0.01, 100.0, 0.1 * iteration)
        return records


def test_metrics_have_exactly_these_keys(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as records:
        records.record("iteration", 1, 1, 2.5, 0.01, 100.0, 0.5)
        records.record("epoch", 1, 1, 2.5, 0.01, 100.0, 0.5, accuracy=0.125)
        lines = path.read_text().splitlines()  # an epoch's record is there at once
    keys = ["kind", "epoch", "iteration", "loss", "learning_rate", "images_per_second", "seconds"]
    assert list(json.loads(lines[0])) == keys
    assert list(json.loads(lines[1])) == [*keys[:4], "accuracy", *keys[4:]]
    with pytest.raises(ValueError, match="kind must be one of"):
        Metrics(path, rank=1).record("batch", 1, 1, 2.5, 0.01, 100.0, 0.5)


def test_metrics_are_json_where_the_loss_is_not_a_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as records:
        records.record("iteration", 1, 1, float("nan"), 0.01, float("inf"), 0.5)
        records.record(
            "validation", 1, 1, 0.5, 0.01, None, 0.5
        )  # of images to train on it has none
    for line, loss in zip(path.read_text().splitlines(), (None, 0.5), strict=True):
        record = json.loads(line, parse_constant=lambda text: pytest.fail(text))
        assert record["loss"] == loss and record["images_per_second"] is None


def test_metrics_are_cut_at_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    with open(path, "a") as file:
        file.write('{"kind": "iteration", "epoch": 1, "iterat')
    write(path, (5, 6), cut=4)
    assert [record["iteration"] for record in metrics.read(path)] == [1, 2, 3, 4, 5, 6]
    assert len(path.read_text().splitlines()) == 6
    write(path, (1,))
    assert len(metrics.read(path)) == 1
    write(tmp_path / "new.jsonl", (5,), cut=4)
    assert os.listdir(tmp_path) and not list(tmp_path.glob("*.part"))


def test_metrics_on_other_ranks_write_nothing(tmp_path):
    records = write(tmp_path / "metrics.jsonl", range(1, 4), rank=1)
    records.flush()
    assert os.listdir(tmp_path) == []


def test_metrics_that_cannot_be_written(tmp_path):
    path = tmp_path / "nothing" / "metrics.jsonl"
    with pytest.raises(UserError, match="metrics.jsonl: cannot be written: No such file"):
        Metrics(path)
    with pytest.raises(UserError, match="/dev/full: cannot be written: No space left"):
        Metrics("/dev/full").record("epoch", 1, 1, 0.5, 0.01, 100.0, 1.0)


def test_progress_png(tmp_path):
    pytest.importorskip("matplotlib", reason="progress.png needs the extra `plots`")
    from PIL import Image

    path, png = tmp_path / "metrics.jsonl", tmp_path / "progress.png"
    write(path, ())
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
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    for colour in (plots.TRAINING, plots.VALIDATION, plots.FAINT):
        assert tuple(bytes.fromhex(colour[1:])) in colours
    with pytest.raises(UserError, match="progress.png: cannot be written"):
        plots.progress(path, tmp_path / "nothing" / "progress.png")


def test_progress_png_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert plots.progress(tmp_path / "metrics.jsonl", tmp_path / "progress.png") is False
    assert os.listdir(tmp_path) == []
