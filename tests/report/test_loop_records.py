"""Test the records of values that a custom loop reports."""

import numpy as np
import pytest
from image_sets import refusal

import mpidl as dl
from mpidl.report.loop_records import LoopRecords


@pytest.fixture
def reports():
    """Return (function that reports values, list of (kind, epoch, iteration, other values))."""
    records = []

    def write(record):
        names = ("loss", "accuracy", "learning_rate", "images_per_second")
        values = {name: record[name] for name in names if record[name] is not None}
        records.append((record["kind"], record["epoch"], record["iteration"], values))

    listener = LoopRecords(write)
    return lambda **facts: listener(facts), records


def test_iterations_epochs_and_validations(reports):
    report, records = reports
    for iteration in (1, 2):
        report(epoch=1, iteration=iteration, loss=np.float32(0.5), learning_rate=0.1, note="text")
    report(epoch=1, loss=0.25, validation_loss=2, validation_accuracy=np.array(0.75))
    report(iteration=3, loss=0.125)
    assert records == [
        ("iteration", 1, 1, {"loss": 0.5, "learning_rate": 0.1}),
        ("iteration", 1, 2, {"loss": 0.5, "learning_rate": 0.1}),
        ("epoch", 1, 2, {"loss": 0.25}),
        ("validation", 1, 2, {"loss": 2.0, "accuracy": 0.75}),
        ("iteration", 1, 3, {"loss": 0.125}),
    ]


def test_a_loop_that_reports_only_epochs_has_curves(reports):
    report, records = reports
    for epoch in (1, 2):
        report(epoch=epoch, loss=1 / epoch)
    expected = [(kind, n, n, {"loss": 1 / n}) for n in (1, 2) for kind in ("iteration", "epoch")]
    assert records == expected


@pytest.mark.parametrize("first", [0, 1])
def test_iterations_increase_if_each_epoch_counts_anew(reports, first):
    report, records = reports
    for epoch in (1, 2, 3):
        for i in range(first, first + 4):
            report(epoch=epoch, iteration=i, loss=0.0)
    assert [iteration for _, _, iteration, _ in records] == list(range(first, first + 12))


def test_reports_without_a_position_or_a_number_are_not_recorded(reports):
    report, records = reports
    assert report(accuracy=0.9) == report(epoch=1) == set()
    assert report(epoch=1, iteration=1, note="text") == set()
    assert records == []
    assert report(epoch=1, loss=1, validation_loss=2, f1=3) == {"loss", "validation_loss"}


def test_values_of_a_wrong_type_are_one_line(reports):
    report, records = reports
    text = refusal(report, epoch=1.5, loss=0)
    assert text == "world.report: expected a whole number as epoch, found 1.5"
    text = refusal(report, epoch=1, iteration="2", loss=0)
    assert text == "world.report: expected a whole number as iteration, found '2'"
    text = refusal(report, epoch=1, loss="low")
    assert text == "world.report: expected a number as loss, found str"
    partial = dl.from_images(np.ones((3, 2), np.float32), dl.share(3, dl.OneRank()))
    text = refusal(report, epoch=1, loss=dl.sum(partial))
    assert text.endswith("found Partial; world.gplus adds up the ranks' parts")
    assert records == []
