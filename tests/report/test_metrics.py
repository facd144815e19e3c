"""Test the records of the metrics file, and how a resumed run continues the file."""

import json
import os

import pytest
from image_sets import refusal

from mpidl.report import Metrics, metrics
from mpidl.report.metrics import Cut


def write(path, iterations, **keywords):
    """Write records of iterations of epoch 1. Return the closed Metrics."""
    with Metrics(path, **keywords) as records:
        for iteration in iterations:
            records.record("iteration", 1, iteration, 0.5 / iteration, 0.01, 100.0, 0.1 * iteration)
        return records


def test_the_keys_of_a_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as records:
        records.record("iteration", 1, 1, 2.5, 0.01, 100.0, 0.5)
        records.record("epoch", 1, 1, 2.5, 0.01, 100.0, 0.5, accuracy=0.125)
        lines = path.read_text().splitlines()  # an epoch's record is written immediately
    keys = ["kind", "epoch", "iteration", "loss", "learning_rate", "images_per_second", "seconds"]
    assert list(json.loads(lines[0])) == keys
    assert list(json.loads(lines[1])) == [*keys[:4], "accuracy", *keys[4:]]
    with pytest.raises(ValueError, match="kind must be one of"):
        Metrics(path, rank=1).record("batch", 1, 1, 2.5, 0.01, 100.0, 0.5)


def test_numbers_that_are_not_finite_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as records:
        records.record("iteration", 1, 1, float("nan"), 0.01, float("inf"), 0.5)
        records.record("validation", 1, 1, 0.5, 0.01, None, 0.5)  # no training since the start
    for line, loss in zip(path.read_text().splitlines(), (None, 0.5), strict=True):
        record = json.loads(line, parse_constant=lambda text: pytest.fail(text))
        assert record["loss"] == loss and record["images_per_second"] is None


def test_records_after_the_checkpoint_are_cut_at_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    with open(path, "a") as file:
        file.write('{"kind": "iteration", "epoch": 1, "iterat')
    write(path, (5, 6), cut=Cut(4, 4))
    assert [record["iteration"] for record in metrics.read(path)] == [1, 2, 3, 4, 5, 6]
    assert len(path.read_text().splitlines()) == 6
    write(path, (1,))
    assert len(metrics.read(path)) == 1
    write(tmp_path / "new.jsonl", (5,), cut=Cut(4, 4))
    assert os.listdir(tmp_path) and not list(tmp_path.glob("*.part"))


def test_records_are_cut_while_the_file_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as records:
        for iteration in (1, 2, 3, 2, 3):
            if iteration == 2 and records.file.tell():
                records.rewind(Cut(1, 1))
            records.record("iteration", 1, iteration, 0.5, 0.01, 100.0, float(iteration))
    assert [record["iteration"] for record in metrics.read(path)] == [1, 2, 3]


def test_another_rank_continues_the_file_with_the_records_that_are_missing(tmp_path):
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other.jsonl"
    write(path, (1, 2, 3))  # this rank is lost before it writes the fourth record
    write(other, (1, 2, 3, 4))
    heir = Metrics(path, rank=1)
    heir.record("iteration", 1, 5, 0.5, 0.01, 100.0, 1.0)  # no effect before the rewind
    heir.rewind(Cut(4, 4), metrics.read(other))
    heir.record_lost(1, 4, {"ranks": [0], "hosts": ["n1"], "ranks_left": 3, "seconds_lost": 0.5})
    heir.record("iteration", 1, 5, 0.5, 0.01, 100.0, 1.0)
    heir.close()
    records = [(record["kind"], record["iteration"]) for record in metrics.read(path)]
    numbers = [("iteration", i) for i in (1, 2, 3, 4)]
    assert records == [*numbers, ("lost", 4), ("iteration", 5)]


def test_other_ranks_write_nothing(tmp_path):
    records = write(tmp_path / "metrics.jsonl", range(1, 4), rank=1)
    records.flush()
    assert os.listdir(tmp_path) == []


def test_metrics_that_cannot_be_written_are_an_error(tmp_path):
    path = tmp_path / "nothing" / "metrics.jsonl"
    assert "metrics.jsonl: cannot be written: No such file" in refusal(Metrics, path)
    full = Metrics("/dev/full")
    text = refusal(full.record, "epoch", 1, 1, 0.5, 0.01, 100.0, 1.0)
    assert "/dev/full: cannot be written: No space left" in text


def test_records_that_are_discarded(tmp_path):
    """Discarded records do not reach the file, because it may already belong to another run."""
    path = tmp_path / "metrics.jsonl"
    records = Metrics(path)
    records.record("iteration", 1, 1, 0.5, 0.01, 100.0, 0.1)
    records.flush()
    content = path.read_bytes()
    records.record("iteration", 1, 2, 0.5, 0.01, 100.0, 0.2)
    records.close(discard=True)
    assert path.read_bytes() == content
