"""Console: the lines of a run, and the bar on a terminal."""

import io
import os
import pty
import re

import pytest

import mpidl as dl
from mpidl.report import Console, console


def report_run(run_console):
    """Call a console as a run of 2 epochs of 3 iterations does."""
    with run_console as c:
        c.header(network="digits", test_data="1000 images")
        c.start(2, 6)
        for epoch in (1, 2):
            for batch in range(1, 4):
                c.iteration(epoch, 3 * (epoch - 1) + batch, 0.5 / epoch, 5210.4, 0.25)
            c.epoch(epoch, 0.30714, 5210.4, 12.9, accuracy=0.91234)
        c.finish("runs/digits", 61.0, dl.Evaluation(0.999, 0.01, 1000))


def without_escapes(stream):
    """Return the text of a stream without the escape sequences of a terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


def test_lines_without_a_terminal():
    stream = io.StringIO()
    report_run(Console(0, stream=stream))
    assert stream.getvalue().splitlines() == [
        "Network: digits",
        "Test data: 1000 images",
        "Epoch: 1, Loss: 0.3071, Accuracy: 0.9123, Images/s: 5210, Elapsed: 0:00:12",
        "Epoch: 2, Loss: 0.3071, Accuracy: 0.9123, Images/s: 5210, Elapsed: 0:00:12",
        "Test accuracy: 0.9990 (1000 images)",
        "Training time: 0:01:01",
        "Results: runs/digits",
    ]


def test_lines_are_flushed(tmp_path):
    with open(tmp_path / "log", "w") as stream:
        Console(0, stream=stream).epoch(1, 0.5, 100, 3, validation=dl.Evaluation(0.25, 1.5, 9))
        line = (tmp_path / "log").read_text()
    assert line == (
        "Epoch: 1, Loss: 0.5000, Validation loss: 1.5000, Validation accuracy: 0.2500, "
        "Images/s: 100, Elapsed: 0:00:03\n"
    )


def test_the_line_of_a_validation():
    stream, evaluation = io.StringIO(), dl.Evaluation(0.25, 1.5, 9)
    Console(0, stream=stream).validation(50, evaluation)
    # a loss without an accuracy
    Console(0, stream=stream).validation(100, dl.Evaluation(None, 1.5, 9))
    Console(0, stream=stream, progress=False).validation(50, evaluation)
    Console(1).validation(50, evaluation)
    assert stream.getvalue().splitlines() == [
        "Iteration: 50, Validation loss: 1.5000, Validation accuracy: 0.2500",
        "Iteration: 100, Validation loss: 1.5000",
    ]


@pytest.mark.parametrize("verbose_every, expected", [(2, [2, 4, 6]), (0, [])])
def test_lines_of_iterations_in_long_epochs(monkeypatch, verbose_every, expected):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    report_run(Console(0, stream=stream, verbose_every=verbose_every))
    numbers = re.findall(r"^Iteration: (\d+), Epoch: ", stream.getvalue(), re.M)
    assert [int(n) for n in numbers] == expected


def test_the_line_of_the_last_iteration(monkeypatch):
    """The last iteration is printed once, even if its line is not due yet."""
    stream = io.StringIO()
    for progress in (True, False):
        with Console(0, stream=stream, progress=progress) as c:
            c.last_iteration()  # no iteration yet
            c.iteration(1, 4, 0.25, 99.6)
            c.last_iteration()
            c.last_iteration()
    line = "Iteration: 4, Epoch: 1, Loss: 0.2500, Images/s: 100\n"
    assert stream.getvalue() == line
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    c = Console(0, stream=stream, verbose_every=1)
    c.iteration(1, 4, 0.25, 99.6)
    c.last_iteration()
    assert stream.getvalue() == 2 * line


def test_other_ranks_are_silent(capsys):
    report_run(Console(1))
    report_run(Console(3, width=80))
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr(console, "BAR_SECONDS", 0.0)
    stream = io.StringIO()
    report_run(Console(0, stream=stream, width=100))
    text = without_escapes(stream)
    assert "Epoch 2/2" in text and "5/6" in text and "5210 images/s" in text
    assert "loss 0.2500  accuracy 0.2500" in text
    # The lines stay above the bar, each on a separate line.
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    epochs = [line for line in lines if line.startswith("Epoch: ")]
    assert [line[:22] for line in epochs] == ["Epoch: 1, Loss: 0.3071", "Epoch: 2, Loss: 0.3071"]
    assert all(line.endswith("Elapsed: 0:00:12") for line in epochs)
    assert lines[-2] == "Results: runs/digits"
    assert stream.getvalue().endswith("Results: runs/digits\n")


def test_a_line_updates_the_bar():
    """A line redraws the bar, however recently it was drawn."""
    stream = io.StringIO()
    with Console(0, stream=stream, width=100) as c:
        c.start(1, 3)
        for i in (1, 2, 3):
            c.iteration(1, i, 0.25, 100.0)
        assert "3/3" not in stream.getvalue()
        c.epoch(1, 0.25, 100.0, 1.0)
    assert "3/3" in without_escapes(stream)


def test_the_bar_follows_the_width_of_the_window(monkeypatch):
    monkeypatch.setattr(console, "BAR_SECONDS", 0.0)
    widths = iter([100, 100, 60])
    monkeypatch.setattr(console, "terminal_width", lambda stream: next(widths))
    stream = io.StringIO()
    with Console(0, stream=stream) as c:
        c.start(1, 10)
        for i in (1, 2):
            c.iteration(1, i, 0.25, 100.0, accuracy=0.5)
    rows = [row for row in re.split(r"[\r\n]+", without_escapes(stream)) if "loss" in row]
    wide, narrow = (row for row in rows if "1/10" in row), (row for row in rows if "2/10" in row)
    assert {len(row) for row in wide} == {100} and {len(row) for row in narrow} == {60}


def test_the_bar_is_removed_if_the_run_fails(monkeypatch):
    monkeypatch.setattr(console, "BAR_SECONDS", 0.0)
    stream = io.StringIO()
    with pytest.raises(RuntimeError), Console(0, stream=stream, width=80) as c:
        c.start(1, 10)
        c.iteration(1, 1, float("nan"), 0.0)
        raise RuntimeError
    assert c.bar is None
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
