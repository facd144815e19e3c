"""Test the state of a run, read from the files in its folder."""

import errno
import json
import math
import os
import re
import time

import pytest
from image_sets import refusal

from mpidl.report import status, stop_file
from mpidl.report.live import run as live_run
from mpidl.report.live.run import LiveRun, runs_of
from mpidl.report.run_files import short_names


def write_run(folder, iterations=range(1, 11), *, epochs=2, per_epoch=10, **values):
    """Write the files of a run. Each iteration takes half a second."""
    folder.mkdir(exist_ok=True)
    total = epochs * per_epoch
    content = status.Status(
        ranks=2, host="n1", epochs=epochs, iterations_per_epoch=per_epoch, iterations=total
    )
    status.write(folder, content)
    with open(folder / "metrics.jsonl", "a") as file:
        for i in iterations:
            record = {"kind": "iteration", "epoch": 1 + (i - 1) // per_epoch, "iteration": i}
            record |= {"loss": 1 / i, "images_per_second": 100.0, "seconds": i / 2, **values}
            file.write(json.dumps(record) + "\n")
    return content


def age(folder, seconds):
    """Make the last record `seconds` old."""
    written = time.time() - seconds
    os.utime(folder / "metrics.jsonl", (written, written))


def polled(folder):
    run = LiveRun(str(folder), folder.name)
    run.poll()
    return run


def test_a_run_is_read_while_it_is_written(tmp_path):
    run = LiveRun(str(tmp_path / "run"), "run")
    run.poll(at_once=True)
    assert run.describe() == f"waiting for {tmp_path / 'run'}" and run.version == 0
    assert math.isnan(run.progress()) and math.isnan(run.seconds_left())
    assert run.why_no_stop() == "the folder does not exist yet"
    write_run(tmp_path / "run", range(1, 6))
    run.poll()  # too soon after the first poll
    assert run.version == 0
    run.poll(at_once=True)
    assert run.version == 1 and len(run.iterations) == 5
    assert run.describe() == "running on 2 ranks, n1" and run.why_no_stop() is None
    assert run.progress() == 0.25
    assert run.seconds_left() == pytest.approx(7.5)  # 15 iterations of half a second
    write_run(tmp_path / "run", range(6, 11))
    run.poll(at_once=True)
    assert run.progress() == 0.5 and run.version == 2
    run.poll(at_once=True)
    assert run.version == 2


def test_the_end_of_a_run(tmp_path):
    content = write_run(tmp_path)
    run = polled(tmp_path)
    content.state = status.FINISHED
    for reason, text in ((None, "done"), ("SIGUSR1", "stopped: SIGUSR1")):
        content.stopped = reason
        status.write(tmp_path, content)
        run.poll(at_once=True)
        assert run.describe() == text and run.why_no_stop() == "the run has ended"
    summary = {"accuracy": 0.98765, "iterations": 10, "stopped": None}
    for reason, text in (
        (None, "done, test accuracy 0.9877"),
        ("validation_patience", "done (validation_patience), test accuracy 0.9877"),
    ):
        content.stopped = summary["stopped"] = reason
        status.write(tmp_path, content)
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        run.poll(at_once=True)
        assert run.describe() == text
    content.stopped = "SIGUSR1"  # the run was resumed and stopped: the results are older
    status.write(tmp_path, content)
    run.poll(at_once=True)
    assert run.describe() == "stopped: SIGUSR1"
    content.stopped = summary["stopped"] = None
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"iterations": 9}))
    status.write(tmp_path, content)
    run.poll(at_once=True)
    assert run.describe() == "done"


def test_a_run_that_failed(tmp_path):
    content = write_run(tmp_path)
    content.state, content.error = status.FAILED, "a.png: not an\x1bimage"
    status.write(tmp_path, content)
    run = polled(tmp_path)
    assert run.describe() == "failed: a.png: not an\\x1bimage"
    assert run.why_no_stop() == "the run has ended"


def test_a_run_without_records_has_no_progress(tmp_path):
    write_run(tmp_path, [])
    run = polled(tmp_path)
    assert run.progress() == 0.0 and run.describe() == "running on 2 ranks, n1"


def test_a_file_system_that_does_not_answer_changes_nothing(tmp_path, monkeypatch):
    write_run(tmp_path)
    run, fstat = polled(tmp_path), os.fstat

    def stale(descriptor):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "fstat", stale)
    run.poll(at_once=True)
    assert len(run.iterations) == 10 and run.status is not None and run.version == 1
    monkeypatch.setattr(os, "fstat", fstat)
    write_run(tmp_path, [11])
    run.poll(at_once=True)
    assert len(run.iterations) == 11 and run.version == 2


def test_requests_to_stop(tmp_path):
    write_run(tmp_path)
    run = polled(tmp_path)
    for moment, text in (
        (stop_file.EPOCH, "running on 2 ranks, n1; stops after this epoch"),
        (stop_file.NOW, "running on 2 ranks, n1; stop requested"),
    ):
        assert run.folder.request_stop(moment) is None
        run.poll(at_once=True)
        assert run.describe() == text
    age(tmp_path, 130)
    text = polled(tmp_path).describe()
    assert re.fullmatch(r"no record for 0:02:1\d, was running .*; stop requested", text)
    for path in tmp_path.glob("*.json*"):
        path.unlink()
    assert polled(tmp_path).describe() == f"waiting for {tmp_path}; stop requested"
    (tmp_path / "stop").unlink()
    (tmp_path / "stop").mkdir()
    assert "cannot be written" in run.folder.request_stop(stop_file.NOW)


def test_a_folder_without_permission_cannot_be_stopped(tmp_path, monkeypatch):
    """Without permission to write in a folder, the run cannot be stopped."""
    write_run(tmp_path)
    run = polled(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert run.why_no_stop() == f"no permission to write in {tmp_path}"


def test_a_run_that_writes_nothing_is_named(tmp_path, monkeypatch):
    write_run(tmp_path)
    age(tmp_path, 130)
    text = polled(tmp_path).describe()
    assert re.fullmatch(r"no record for 0:02:1\d, was running on 2 ranks, n1", text)


def test_a_run_of_an_older_version_has_no_status(tmp_path):
    write_run(tmp_path, range(1, 15))
    (tmp_path / "status.json").unlink()
    run = polled(tmp_path)
    assert run.describe() == "running" and math.isnan(run.progress())
    assert run.iterations_per_epoch == 10


DAMAGED = ["", "[]", "{", '{"state": 3}', '{"epochs": "2"}', "[" * 10**5]
DAMAGED += ['{"iterations": 1' + "0" * 400 + "}", '{"host": "\\ud800"}', '{"epochs": -1}']


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_status_is_ignored(tmp_path, content):
    write_run(tmp_path)
    (tmp_path / "status.json").write_text(content)
    (tmp_path / "summary.json").write_text(content)
    run = polled(tmp_path)
    assert run.status is None and run.describe() == "running"


def test_records_with_other_values_than_numbers(tmp_path):
    write_run(tmp_path, seconds="x", loss=[], images_per_second=None)
    run = polled(tmp_path)
    assert len(run.iterations) == 10 and math.isnan(run.iterations.last("loss"))
    assert math.isnan(run.seconds_left())


def test_short_names():
    assert short_names(["/runs/a"]) == ["a"]
    assert short_names(["/runs/a", "/runs/b"]) == ["a", "b"]
    assert short_names(["/x/a", "/y/a", "/y/b"]) == ["x/a", "y/a", "y/b"]
    assert short_names(["/a", "/b/a"]) == ["a", "b/a"]
    assert short_names(["/"]) == ["/"]
    assert short_names(["a", "a/"]) == ["a (1)", "a/ (2)"]


def test_folders_that_are_no_runs_are_refused(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    paths = [str(tmp_path / name) for name in ("run", "empty", "later")]
    assert [run.name for run in runs_of([*paths, paths[0] + "/"])] == ["run", "empty", "later"]
    (tmp_path / "trial-001").mkdir()
    (tmp_path / "trial-001" / "trial.json").touch()
    assert len(runs_of([str(tmp_path / "trial-001")])) == 1  # a trial still reading its data
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    text = refusal(runs_of, [str(tmp_path / "other")])
    assert text.endswith("other: expected a run's folder, with metrics.jsonl, found none in it")
    assert f"it holds runs, such as {tmp_path}/run" in refusal(runs_of, [str(tmp_path)])
    file = str(tmp_path / "run" / "metrics.jsonl")
    assert refusal(runs_of, [file]) == f"{file}: expected a run's folder, found a file"
    assert live_run.FILE == "metrics.jsonl"
