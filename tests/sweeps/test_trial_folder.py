"""Test the folders of the trials of a sweep."""

import pytest

from mpidl.sweeps.sweep_file import Sweep
from mpidl.sweeps.trial_folder import (
    COMPLETE,
    FAILED,
    PRUNED,
    RUNNING,
    WAITING,
    TrialFolder,
    folders_of,
)


def folders(count):
    return folders_of(Sweep("a.toml", {}, [{"seed": i} for i in range(count)], ["seed"]), "out")


def test_more_trials_do_not_rename_the_others():
    names = [folder.name for folder in folders(1001)]
    assert (names[0], names[998], names[999]) == ("trial-001", "trial-999", "trial-1000")
    assert [folder.name for folder in folders(2)] == names[:2]


@pytest.mark.parametrize(
    "text",
    [
        '{"trial": 1, "options": "x", "state": "failed"}',
        '{"trial": 1, "options": {}, "state": ["failed"]}',
        "[]",
    ],
)
def test_a_damaged_record_is_that_of_a_trial_that_waits(tmp_path, text):
    (tmp_path / "trial.json").write_text(text)
    trial = TrialFolder(str(tmp_path), 1, {"epochs": 3})
    assert trial.state() == "waiting" and trial.changes() == [] and trial.row()["error"] is None


def test_a_trial_is_complete_once_this_is_recorded(tmp_path):
    """A summary alone does not make a trial complete, because the summary may be outdated."""
    folder = folders(1)[0]._replace(path=str(tmp_path / "trial-001"))
    assert folder.state() == WAITING
    for state in (RUNNING, FAILED, COMPLETE):
        folder.write(state, "no network" if state == FAILED else None)
        (tmp_path / "trial-001" / "summary.json").write_text('{"accuracy": 0.5}')
        assert folder.state() == state
        assert folder.row()["accuracy"] == (0.5 if state == COMPLETE else None)
    (tmp_path / "trial-001" / "trial.json").write_text("damaged")
    assert folder.state() == WAITING


def test_a_pruned_trial_has_the_scores_of_the_validation_that_pruned_it(tmp_path):
    """Validations after it, which a killed sweep may have left, do not count."""
    folder = folders(1)[0]._replace(path=str(tmp_path / "trial-001"))
    folder.write(PRUNED, validations=2)
    assert folder.state() == PRUNED and folder.row()["validation_loss"] is None  # no records
    lines = [
        f'{{"kind": "validation", "epoch": 1, "iteration": {i}, "loss": {3 / i}, "seconds": {i}}}'
        for i in (1, 2, 3)
    ]
    (tmp_path / "trial-001" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    row = folder.row()
    assert (row["validation_loss"], row["iterations"], row["seconds"]) == (1.5, 2, 2)
    assert row["validation_accuracy"] is None and row["weights_sha256"] is None
    assert folder.validations("validation_loss") == [3, 1.5]
    assert folder.recorded(["seed"]) == {"seed": 0} and folder.recorded(["l2"]) is None
    folder.write(COMPLETE)
    assert folder.validations("validation_loss") == [3, 1.5, 1]
