"""Test History: the records of a run as arrays, from memory and from files."""

import json
import math

import numpy as np
import pytest
from image_sets import refusal

import mpidl as dl
from mpidl.report import Metrics, history, metrics
from mpidl.report.history import HistoryRecorder
from mpidl.report.metrics import Cut


def write(path):
    with Metrics(path) as records:
        for iteration in range(1, 7):
            accuracy = iteration / 8
            records.record(
                "iteration", 1 + iteration // 4, iteration, 1 / iteration, 0.5, 80.0, 2.0, accuracy
            )
        records.record("epoch", 1, 3, 0.25, 0.5, 100.0, 1.0)
        records.record("validation", 1, 3, math.nan, 0.5, None, 1.5, 0.75)


def test_columns_have_the_numbers_of_the_file(tmp_path):
    write(tmp_path / "metrics.jsonl")
    history = dl.history(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    iterations = [line for line in lines if line["kind"] == "iteration"]
    assert len(history.iteration) == 6 and len(history.epoch) == len(history.validation) == 1
    for name, column in history.iteration.as_dict().items():
        np.testing.assert_array_equal(column, [line[name] for line in iterations])
        assert column.dtype == (np.int64 if name in ("epoch", "iteration") else np.float64)
    assert math.isnan(history.epoch.accuracy[0])  # the loss has no classes
    assert math.isnan(history.validation.loss[0]) and history.validation.accuracy[0] == 0.75
    assert math.isnan(history.validation.images_per_second[0])
    assert repr(history.iteration) == "Series(6 records, last iteration 6)"


def test_a_recorder_removes_later_records(tmp_path):
    write(tmp_path / "metrics.jsonl")
    recorder = HistoryRecorder(metrics.read(tmp_path / "metrics.jsonl"))
    recorder.cut(Cut(3, 3))
    history = recorder.history()
    assert history.iteration.iteration.tolist() == [1, 2, 3]
    assert len(history.epoch) == len(history.validation) == 1
    recorder.cut(Cut(2, 2))
    assert len(recorder.history().epoch) == 0


def test_a_recorder_returns_the_records_of_the_file(tmp_path):
    write(tmp_path / "metrics.jsonl")
    records = metrics.read(tmp_path / "metrics.jsonl")
    recorded = list(HistoryRecorder(records).records())
    assert [r["iteration"] for r in recorded] == sorted(r["iteration"] for r in recorded)
    numbers = [record for record in records if record["kind"] in ("iteration", "epoch")]
    assert all(record in recorded for record in numbers)


def test_metrics_of_validations(tmp_path):
    """Metrics survive writing and reading the file, a rewind, and a resume with other metrics."""
    with Metrics(tmp_path / "metrics.jsonl") as records:
        for i, values in enumerate(({"f1": 0.25}, None, {"f1": math.nan, "iou": 0.5}), 1):
            records.record("validation", 1, i, 0.5, 0.1, None, 1.0, 0.75, metrics=values)
    recorder = HistoryRecorder(metrics.read(tmp_path / "metrics.jsonl"))
    assert [r.get("metrics") for r in recorder.records()] == [
        {"f1": 0.25},
        None,
        {"f1": None, "iou": 0.5},
    ]
    validation = recorder.history().validation
    np.testing.assert_array_equal(validation.metrics["f1"], [0.25, math.nan, math.nan])
    np.testing.assert_array_equal(validation.metrics["iou"], [math.nan, math.nan, 0.5])
    assert list(validation.as_dict())[-2:] == ["f1", "iou"]
    recorder.cut(Cut(2, 2))
    assert list(recorder.history().validation.metrics) == ["f1"]


def test_a_run_that_is_being_written_can_be_read(tmp_path):
    """Incomplete lines, records of other kinds and values of other types are ignored."""
    path = tmp_path / "metrics.jsonl"
    write(path)
    with open(path, "a") as file:
        for kind in ("ranks", ["iteration"], None):
            file.write(json.dumps({"kind": kind, "epoch": 2, "iteration": 6}) + "\n")
        for position in ("7", 2**64, -1, 7.5, None):
            file.write(json.dumps({"kind": "epoch", "epoch": position, "iteration": 7}) + "\n")
        file.write('{"kind": "iteration", "epoch": 2, "iteration": 7, "loss": "text"}\n')
        file.write('{"kind": "iteration", "epoch": 2, "iterat')
    history = dl.history(path)
    assert list(history.iteration.iteration) == [1, 2, 3, 4, 5, 6, 7]
    assert math.isnan(history.iteration.loss[-1]) and len(history.epoch) == 1
    assert len(dl.History.from_records(metrics.read(path)).validation) == 1


def test_what_is_no_run_is_one_line(tmp_path):
    (tmp_path / "other.txt").touch()
    for path, text in (
        (tmp_path, "expected the folder of a run, found no metrics.jsonl in it"),
        (tmp_path / "none", "expected the folder of a run, found nothing there"),
        (tmp_path / "other.txt", "expected the folder of a run or its metrics.jsonl, found"),
    ):
        message = refusal(dl.history, path)
        assert message.startswith(f"{path}: {text}") and "\n" not in message


@pytest.mark.parametrize("kind", ["iteration", "epoch", "validation"])
def test_an_empty_history_has_empty_columns(tmp_path, kind):
    (tmp_path / "metrics.jsonl").touch()
    series = getattr(dl.history(tmp_path), kind)
    assert len(series) == 0 and series.loss.shape == (0,)
    assert repr(series) == "Series(0 records)"


@pytest.mark.parametrize("reserved", [0, 40, 1e9, math.inf])
def test_a_recorder_grows_beyond_the_memory_that_it_has_reserved(reserved, monkeypatch):
    monkeypatch.setattr(history, "MOST_RESERVED", 50)
    recorder = HistoryRecorder()
    recorder.reserve(reserved)
    first = None
    for iteration in range(1, 201):
        recorder.add({"kind": "iteration", "epoch": 1, "iteration": iteration, "loss": iteration})
        first = recorder.history() if iteration == 20 else first
    np.testing.assert_array_equal(recorder.history().iteration.loss, np.arange(1.0, 201))
    recorder.cut(Cut(120, 120))
    recorder.add({"kind": "iteration", "epoch": 2, "iteration": 121})
    assert recorder.history().iteration.iteration[-2:].tolist() == [120, 121]
    assert first.iteration.iteration.tolist() == [*range(1, 21)]  # `first` is a copy
