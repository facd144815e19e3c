"""The folders of a sweep's trials."""

from mpidl.training.files.trial_folder import COMPLETE, FAILED, RUNNING, WAITING, folders_of
from mpidl.training.options.sweep_file import Sweep


def folders(count):
    return folders_of(Sweep("a.toml", {}, [{"seed": i} for i in range(count)], ["seed"]), "out")


def test_more_trials_do_not_rename_the_others():
    names = [folder.name for folder in folders(1001)]
    assert (names[0], names[998], names[999]) == ("trial-001", "trial-999", "trial-1000")
    assert [folder.name for folder in folders(2)] == names[:2]


def test_a_trial_is_complete_once_this_is_recorded(tmp_path):
    """Its summary may be older than a failed upload or than a new start with other options."""
    folder = folders(1)[0]._replace(path=str(tmp_path / "trial-001"))
    assert folder.state() == WAITING
    for state in (RUNNING, FAILED, COMPLETE):
        folder.write(state, "no network" if state == FAILED else None)
        (tmp_path / "trial-001" / "summary.json").write_text('{"accuracy": 0.5}')
        assert folder.state() == state
        assert folder.row()["accuracy"] == (0.5 if state == COMPLETE else None)
    (tmp_path / "trial-001" / "trial.json").write_text("damaged")
    assert folder.state() == WAITING
