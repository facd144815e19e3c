"""Test the report of the benchmark of checkpoints."""

from types import SimpleNamespace

import pytest

import mpidl as dl
from benchmarks import saves
from mpidl.errors import Fault


def report_of(seconds, capsys):
    hook = saves.Turns(3, 10)
    hook.seconds, hook.stalls, hook.processor_seconds = seconds, [0.1], [0.1]
    names = dict.fromkeys(saves.OPTIONS, 1) | {"command": "saves", "busy": 0.0}
    options = SimpleNamespace(**names | {"iterations": 10, "network": "alexnet", "batch_size": 32})
    record = saves._report(options, dl.World(threads=1), hook, 1e6)
    return record, capsys.readouterr().out


def test_a_stopped_training_reports_its_complete_rounds(capsys):
    seconds = {saves.PLAIN: [10.0, 10.0], saves.SAVING: [11.0, 11.0, 99.0]}
    record, text = report_of(seconds, capsys)
    assert "2 rounds of 10 steps" in text
    assert record["cost_ms"]["median"] == pytest.approx(1000)


def test_a_training_that_was_stopped_in_the_first_round(capsys):
    with pytest.raises(Fault, match="stopped before the end of the first round"):
        report_of({saves.PLAIN: [], saves.SAVING: [11.0]}, capsys)
