"""Test Console: the lines of a run, and the table and the bar on a terminal."""

import io
import os
import pty
import re
import sys
import threading

import pytest
from limits import wait_until

import mpidl as dl
from mpidl.report import Console
from mpidl.report.progress import console, rows, stage, terminal
from mpidl.report.progress.bar import Field, compose


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch):
    """Set TERM, because the terminal from which the tests are started may be a dumb one."""
    monkeypatch.setenv("TERM", "xterm")


def report_run(run_console, validation=None):
    """Call a console's methods as a run of 2 epochs with 3 iterations each does."""
    with run_console as c:
        c.header(network="digits", test_data="1000 images")
        c.start(2, 6)
        for epoch in (1, 2):
            for batch in range(1, 4):
                c.iteration(epoch, 3 * (epoch - 1) + batch, 0.5 / epoch, 5210.4, 0.25)
            c.epoch(epoch, 3 * epoch, 0.30714, 5210.4, 12.9, 0.91234, validation)
        c.finish("runs/digits", 61.0, dl.Evaluation(0.999, 0.01, 1000))


def test_a_rank_that_becomes_rank_0_prints_from_then_on(capsys):
    with Console(rank=2) as other:
        other.line("before")
        other.take_over()
        other.line("after")
        other.take_over()
    assert capsys.readouterr().out == "after\n"


def without_escapes(stream):
    """Return the text of a stream without the escape sequences of a terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


def screen_lines(stream):
    """Return all texts that a terminal's lines have had, in order, without surrounding spaces."""
    return [line.strip() for line in re.split(r"[\r\n]+", without_escapes(stream)) if line.strip()]


@pytest.fixture
def at_once(monkeypatch):
    """Let consoles draw and print without the usual pauses."""
    for name in ("BAR_SECONDS", "LINE_SECONDS", "SILENT_SECONDS"):
        monkeypatch.setattr(console, name, 0.0)
    monkeypatch.setattr(console, "TICK_SECONDS", 0.01)


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
        Console(0, stream=stream).epoch(1, 50, 0.5, 100, 3, None, dl.Evaluation(0.25, 1.5, 9))
        text = (tmp_path / "log").read_text()
    assert text.splitlines() == [
        "Iteration: 50, Validation loss: 1.5000, Validation accuracy: 0.2500",
        "Epoch: 1, Loss: 0.5000, Images/s: 100, Elapsed: 0:00:03",
    ]


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


NAMES = ("balanced-accuracy", "precision", "recall", "f1", "iou", "dice", "roc-auc")
NAMES += ("average-precision",)


def with_metrics(*names):
    """Return an evaluation with these metrics, which have the values 0.1, 0.2 and so on."""
    values = {name: (i + 1) / 10 for i, name in enumerate(names)}
    return dl.Evaluation(0.25, 1.5, 9, metrics=dl.ClassMetrics(values, {}, ("a", "b")))


def test_metrics_in_a_log():
    stream = io.StringIO()
    c = Console(0, stream=stream)
    c.validation(50, with_metrics("f1"))
    c.epoch(1, 60, 0.5, 100, 3, None, with_metrics(*NAMES))
    assert stream.getvalue().splitlines() == [
        "Iteration: 50, Validation loss: 1.5000, Validation accuracy: 0.2500",
        "Iteration: 50, Validation f1: 0.1000",
        "Iteration: 60, Validation loss: 1.5000, Validation accuracy: 0.2500",
        "Iteration: 60, Validation balanced-accuracy: 0.1000",
        "Iteration: 60, Validation precision: 0.2000, Validation recall: 0.3000",
        "Iteration: 60, Validation f1: 0.4000, Validation iou: 0.5000",
        "Iteration: 60, Validation dice: 0.6000, Validation roc-auc: 0.7000",
        "Iteration: 60, Validation average-precision: 0.8000",
        "Epoch: 1, Loss: 0.5000, Images/s: 100, Elapsed: 0:00:03",
    ]


def table_of(width, *names):
    """Return the lines of a terminal for an epoch and for a validation within the next epoch."""
    stream = io.StringIO()
    with Console(0, stream=stream, width=width) as c:
        c.start(2, 12, has_validation=True, metrics=names)
        c.epoch(1, 6, 0.30714, 5210.4, 12.9, 0.91234, with_metrics(*names))
        c.validation(9, with_metrics(*names))
    lines = without_escapes(stream).replace("\r", "\n").split("\n")
    return [line for line in lines if line.strip() and "first iteration" not in line]


def test_metrics_are_columns_of_the_table():
    """Metrics take the place of other columns; the bar shows these numbers, too."""
    assert table_of(80, "recall", "f1") == [
        "                 Training                          Validation",
        "Epoch      Loss  Accuracy      Loss  Accuracy  Recall      F1   Elapsed",
        "    1    0.3071    0.9123    1.5000    0.2500  0.1000  0.2000   0:00:12",
        "                             1.5000    0.2500  0.1000  0.2000",
    ]
    wide = table_of(170, *NAMES)
    assert wide[1].split("  ")[-1].strip() == "Elapsed" and "Avg prec" in wide[1]
    assert max(map(len, wide)) <= 170 and len(wide) == 4


def test_metrics_that_do_not_fit_are_below_a_row():
    lines = table_of(80, *NAMES)
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[:2] == ["Epoch", "Iteration"] and "Recall" not in lines[1]
    assert lines[3:5] == [
        "       balanced-accuracy 0.1000  precision 0.2000  recall 0.3000  f1 0.4000",
        "       iou 0.5000  dice 0.6000  roc-auc 0.7000  average-precision 0.8000",
    ]
    assert lines[6:] == lines[3:5]
    assert max(map(len, table_of(40, *NAMES))) <= 40


LARGE = 999, 1_234_567, 12345.678, 123456.7, 359_999.0, 1.0, dl.Evaluation(1.0, 1e30, 9)


@pytest.mark.parametrize("width", [0, 80])
def test_lines_fit_80_columns(width):
    """The lines of a four-day run with six-digit numbers fit in 80 columns."""
    stream = io.StringIO()
    with Console(0, stream=stream, width=width) as c:
        c.epoch(*LARGE)
        c.validation(1_234_567, LARGE[-1])
        c.iteration(999, 1_234_567, 12345.678, 123456.7, 1.0)
        c.last_iteration()
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 4 and all(0 < len(line) <= 80 for line in lines)
    assert any("99:59:59" in line for line in lines)


def test_the_table_of_a_terminal():
    stream = io.StringIO()
    report_run(Console(0, stream=stream, width=80), dl.Evaluation(0.25, 1.5, 9))
    assert [line for line in screen_lines(stream) if "/2  " not in line][2:6] == [
        "Training          Validation",
        "Epoch  Iteration      Loss  Accuracy      Loss  Accuracy  Images/s   Elapsed",
        "1          3    0.3071    0.9123    1.5000    0.2500      5210   0:00:12",
        "2          6    0.3071    0.9123    1.5000    0.2500      5210   0:00:12",
    ]


def test_the_columns_of_the_table():
    row = {"epoch": "7", "loss": "0.5000", "validation_loss": "1.5000", "accuracy": "0.1000"}
    assert rows.Table(80, False, False).lines(row) == [
        "Epoch  Iteration      Loss  Images/s   Elapsed",
        "    7               0.5000",
    ]
    assert rows.Table(80, False, True).lines(row)[0] == "                  Training  Validation"
    narrow = rows.Table(40, True, False)
    assert narrow.lines(row)[0] == "Epoch      Loss  Accuracy   Elapsed"
    lines = [line for _ in range(40) for line in narrow.lines(row)]
    assert [i for i, line in enumerate(lines) if line.startswith("Epoch")] == [19, 40]


def test_a_row_for_the_last_iteration_on_a_terminal():
    stream = io.StringIO()
    with Console(0, stream=stream, width=80) as c:
        c.iteration(2, 70, 0.5, 816.0, 0.75)
        c.last_iteration()
    assert screen_lines(stream)[-1] == "2         70    0.5000    0.7500       816"


@pytest.mark.parametrize("verbose_every, expected", [(2, [2, 4, 6]), (0, [])])
def test_lines_of_iterations_in_long_epochs(monkeypatch, verbose_every, expected):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    report_run(Console(0, stream=stream, verbose_every=verbose_every))
    numbers = re.findall(r"^Iteration: (\d+), Epoch: ", stream.getvalue(), re.M)
    assert [int(n) for n in numbers] == expected


def test_the_line_of_the_last_iteration(monkeypatch):
    """The last iteration is printed exactly once, even if its line is not due yet."""
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


def test_a_log_is_never_silent(at_once):
    """In every part of a run, lines appear while the main thread does something else."""
    stream = io.StringIO()

    def wait_for(pattern):
        wait_until(lambda: re.search(pattern, stream.getvalue(), re.M))

    with Console(0, stream=stream, verbose_every=50) as c:
        with c.stage("reading the data"):
            wait_for(r"^Reading the data$")
        assert not ticking()
        c.start(1, 3)
        wait_for(r"^First iteration$")
        c.iteration(1, 1, 0.25, 100.0)
        wait_for(r"^Iteration: 1, Epoch: 1, Loss: 0.2500, ")
        wait_for(r"^Iteration: 2 \(0 s\)$")
        c.iteration(1, 3, 0.25, 100.0)
        wait_for(r"^Iteration: 3, Epoch: 1, ")
        wait_for(r"^End of the training \(0 s\)$")
        with c.stage("validation", 900) as advance:
            advance(256)
            wait_for(r"^Validation: 256 of 900 images$")
            with c.stage("checkpoint"):
                wait_for(r"^Checkpoint$")
    assert "Iteration: 4 " not in stream.getvalue()
    assert not ticking()


def test_stages_that_are_not_shown(at_once):
    """Other ranks, runs that are not verbose, and iterations with verbose_every=0 are silent."""
    stream = io.StringIO()
    for c in (Console(1, stream=stream), Console(0, stream=stream, progress=False)):
        c.start(1, 3)
        with c.stage("validation", 900) as advance:
            advance(256)
            assert not ticking()
    c = Console(0, stream=stream, verbose_every=0)
    c.iteration(1, 1, 0.25, 100.0)
    c._tick()
    assert stream.getvalue() == ""


def ticking():
    return any(thread.name == "mpidl-console" for thread in threading.enumerate())


def test_the_thread_of_a_console_ends_with_its_stream(at_once):
    stream = io.StringIO()
    with Console(0, stream=stream) as c:
        c.start(1, 3)
        stream.close()
        wait_until(lambda: not ticking())


def test_the_time_of_a_stage(monkeypatch):
    times = iter([100.0, 100.4, 123.0])
    monkeypatch.setattr(stage.time, "monotonic", lambda: next(times))
    validation = stage.Stage("validation", 10)
    validation.advance(3)
    assert validation.describe() == "validation: 3 of 10 images"
    assert validation.describe() == "validation: 3 of 10 images (23 s)"


def test_other_ranks_are_silent(capsys):
    report_run(Console(1))
    report_run(Console(3, width=80))
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(at_once):
    stream = io.StringIO()
    report_run(Console(0, stream=stream, width=100))
    text = without_escapes(stream)
    assert "Epoch 2/2" in text and "5/6" in text and "5210 images/s" in text
    assert "loss 0.2500  accuracy 0.2500" in text and "left" in text
    # The lines stay above the bar, each on a separate line.
    lines = screen_lines(stream)
    assert [line for line in lines if line.endswith(" 0:00:12")] == [
        f"{epoch}          {3 * epoch}    0.3071    0.9123      5210   0:00:12" for epoch in (1, 2)
    ]
    assert lines[-1] == "Results: runs/digits"
    assert stream.getvalue().endswith("Results: runs/digits\n")


def test_the_bar_names_what_follows_the_last_iteration(at_once):
    stream = io.StringIO()
    with Console(0, stream=stream, width=80) as c:
        with c:  # as the trainer does; afterwards, the command keeps the bar
            c.start(1, 3, 0, 1)
            wait_until(lambda: "first iteration" in without_escapes(stream))
            c.iteration(1, 3, 0.25, 100.0)
        with c.stage("test", 1000) as advance:
            advance(640)
            wait_until(lambda: "test: 640 of 1000 images" in without_escapes(stream))
        c.finish("runs/digits", 1.0)
    line = next(line for line in screen_lines(stream) if "test: 640" in line)
    assert line.startswith("Epoch 1/1  ━━━━") and "3/3" in line and len(line) == 80


def test_a_stage_before_the_run_has_a_line_without_a_bar(at_once):
    stream = io.StringIO()
    c = Console(0, stream=stream, width=80)
    with pytest.raises(dl.UserError), c.stage("reading the data"):
        wait_until(lambda: "reading the data" in stream.getvalue())
        raise dl.UserError("no such folder")
    assert c.bar is None and "━" not in stream.getvalue() and not ticking()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_of_others_keeps_its_stream(stream, capsys, at_once):
    """A bar on stderr does not capture the output of a command to a file or a pipe."""
    with Console(0, stream=getattr(sys, stream), width=80) as c:
        c.start(1, 3)
        print("a result")
    out, err = capsys.readouterr()
    assert "a result" in out and ("Epoch 1/1" in out) == (stream == "stdout")
    assert ("Epoch 1/1" in err) == (stream == "stderr") and "a result" not in err


def test_the_label_of_a_resumed_run():
    stream = io.StringIO()
    with Console(0, stream=stream, width=80) as c:
        c.start(20, 1420, 500, 8)
    assert re.match(r"Epoch 8/20  ━+  500/1420  first iteration$", screen_lines(stream)[0])


def test_two_runs_on_one_console():
    stream = io.StringIO()
    with Console(0, stream=stream, width=80) as c:
        for _ in range(2):
            c.start(1, 3)
            c.iteration(1, 3, 0.25, 100.0)
            c.epoch(1, 3, 0.25, 100.0, 1.0)
    lines = screen_lines(stream)
    assert len([line for line in lines if line.startswith("Epoch  Iteration")]) == 2
    assert len([line for line in lines if line.endswith("0/3  first iteration")]) == 2


def test_the_time_left_is_that_of_the_run():
    c = Console(0, stream=io.StringIO(), width=80)
    c.iterations, c.pace, c.iteration_time = 100, (1000.0, 11), 1020.0  # 2 s per iteration
    assert c._time_left(1020.0, 11) == ""
    assert c._time_left(1020.0, 21) == "2:38 left"
    assert c._time_left(1022.0, 21) == "2:36 left"
    assert c._time_left(1900.0, 21) == "0:00 left"
    assert rows.time_left(7200) == "2:00:00 left" and rows.time_left(0.2) == "0:01 left"


def test_a_narrow_bar_leaves_out_fields():
    fields = [Field("94/1420", 3), Field("loss 0.25"), Field("accuracy 0.5", 1), Field("", 1)]
    fields.append(Field("99 images/s", 2))
    texts = {width: compose(width, "Epoch 2/20", 0.5, fields).plain for width in range(5, 120)}
    assert all(len(text) == width or "━" not in text for width, text in texts.items())
    assert all(len(text) <= width for width, text in texts.items())
    assert texts[80].endswith("━━  94/1420  loss 0.25  accuracy 0.5  99 images/s")
    assert texts[60].endswith("━━  loss 0.25  accuracy 0.5  99 images/s")
    assert texts[45].endswith("━━  loss 0.25  accuracy 0.5")
    assert texts[32].endswith("━━  loss 0.25") and texts[15] == "Epoch 2/20  los"
    assert compose(40, "", None, [Field("reading the data")]).plain == "reading the data"


def test_a_bar_without_colours_or_unicode(monkeypatch):
    assert compose(20, "", 0.5, [], bar="#-").plain == "##########----------"
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    with Console(0, stream=stream, width=40) as c:
        c.start(1, 10, 5)
    assert re.search(r"Epoch 1/1  ━+ +first iteration", without_escapes(stream))


def test_a_line_updates_the_bar():
    """A line redraws the bar, no matter how recently the bar was drawn."""
    stream = io.StringIO()
    with Console(0, stream=stream, width=100) as c:
        c.start(1, 3)
        for i in (1, 2, 3):
            c.iteration(1, i, 0.25, 100.0)
        assert "3/3" not in stream.getvalue()
        c.epoch(1, 3, 0.25, 100.0, 1.0)
    assert "3/3" in without_escapes(stream)


def test_the_bar_follows_the_width_of_the_window(monkeypatch):
    monkeypatch.setattr(console, "BAR_SECONDS", 0.0)
    widths = iter([100, 100, 100, 60])
    monkeypatch.setattr(console, "terminal_width", lambda stream: next(widths))
    stream = io.StringIO()
    with Console(0, stream=stream) as c:
        c.start(1, 10)
        for i in (1, 2):
            c.iteration(1, i, 0.25, 100.0, accuracy=0.5)
    drawn = [row for row in re.split(r"[\r\n]+", without_escapes(stream)) if "loss" in row]
    assert {len(row) for row in drawn} == {100, 60}


def test_the_bar_is_removed_if_the_run_fails(monkeypatch):
    monkeypatch.setattr(console, "BAR_SECONDS", 0.0)
    stream = io.StringIO()
    with pytest.raises(RuntimeError), Console(0, stream=stream, width=80) as c:
        c.start(1, 10)
        c.iteration(1, 1, float("nan"), 0.0)
        raise RuntimeError
    assert c.bar is None and not ticking()
    assert stream.getvalue().rfind("\x1b[?25l") < stream.getvalue().rfind("\x1b[?25h")


def test_a_terminal_is_recognised(monkeypatch, tmp_path):
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    with open(slave, "w") as tty, open(tmp_path / "log", "w") as log:
        assert terminal.terminal_width(tty) > 0
        assert terminal.terminal_width(log) == 0
        monkeypatch.setenv("TERM", "dumb")
        assert terminal.terminal_width(tty) == 0
    os.close(master)
    assert terminal.terminal_width(io.StringIO()) == terminal.terminal_width(None) == 0


def test_control_characters_are_escaped():
    """A path or a name must not change the colours of the terminal, or its title."""
    stream = io.StringIO()
    console = Console(0, stream=stream)
    console.header(data="\x1b]0;title\x07 \x1b[31mred\n", other="é 猫 ─")
    assert stream.getvalue() == "Data: \\x1b]0;title\\x07 \\x1b[31mred\\n\nOther: é 猫 ─\n"
