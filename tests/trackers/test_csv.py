"""Test the CSV file of a run: its rows, a resumed run, and errors."""

import csv
import errno
import os
import types

import numpy as np
import pytest
from short_training import pictures, small, trained

import mpidl as dl
from mpidl.errors import UserError
from mpidl.training import tracking
from mpidl.training.files.run_folder import make_folder

pytestmark = pytest.mark.usefixtures("without_plots")
OPTIONS = {"epochs": 2, "batch_size": 40, "verbose": "off", "validation_frequency": 2}


def train(world, hooks=(), **arguments):
    options = {**OPTIONS, "metrics": "f1", "track": "csv"} | arguments.pop("options", {})
    options = dl.TrainingOptions(validation=pictures(20, "validation"), **options)
    net = small()
    return net, dl.train(net, pictures(100), options, hooks=hooks, world=world, **arguments)


def opened(path, iteration=0):
    """Return a tracker that writes a file for a run at an iteration."""
    (tracker,) = tracking.requested(dl.TrainingOptions(track=f"csv={path}"))
    tracker.open(types.SimpleNamespace(position=types.SimpleNamespace(iteration=iteration)))
    return tracker


def columns(path):
    """Return {column: numbers} of a file, where empty cells are NaN."""
    with open(path, newline="") as file:
        head, *rows = csv.reader(file)
    numbers = [[float(cell or "nan") for cell in row] for row in rows]
    return dict(zip(head, np.array(numbers).T, strict=True))


@pytest.mark.slow_on_ranks
def test_a_resumed_run_has_one_row_per_iteration(world, tmp_path):
    first, second = (world.broadcast(str(tmp_path / name)) for name in ("first", "second"))

    class Fails:
        def iteration(self, trainer, result):
            if result.info.iteration == 6:
                raise UserError("a fault after the checkpoint of iteration 4")

    with pytest.raises(UserError, match="a fault"):
        train(world, [Fails()], out=first, options={"checkpoint_every": 4})
    net, result = train(world, resume=first, out=second)
    assert dl.weights_sha256(net) == dl.weights_sha256(trained(world)[0])
    if world.rank == 0:
        table, history = columns(os.path.join(second, "metrics.csv")), result.history
        np.testing.assert_array_equal(table["iteration"], history.iteration.iteration)
        series = {"train": history.iteration, "epoch": history.epoch}
        series |= {"validation": history.validation, "final_validation": history.final_validation}
        for group, records in series.items():
            rows = np.isin(table["iteration"], records.iteration)
            names = ["loss", "accuracy"]
            names += ["images_per_second"] if group in ("train", "epoch") else []
            for name in names:
                column = table[f"{group}_{name}"]
                np.testing.assert_array_equal(column[rows], getattr(records, name))
                assert np.isnan(column[~rows]).all()
        f1 = table["validation_f1"]
        np.testing.assert_array_equal(f1[np.isfinite(f1)], history.validation.metrics["f1"])
    world.barrier()


def test_a_pending_validation_joins_the_row_of_its_iteration(tmp_path):
    """A killed run leaves later rows, the last one incomplete, which the resumed run replaces."""
    path = tmp_path / "table.csv"
    killed = opened(path)
    for step in (1, 2, 30):
        killed.scalars(step, {"train/loss": step / 10})
    killed.flush()
    path.write_bytes(path.read_bytes()[: -len("0,3.0\n")])
    resumed = opened(path, iteration=2)
    resumed.scalars(2, {"validation/loss": 0.25, "validation/accuracy": np.nan})
    resumed.scalars(3, {"train/loss": 0.3})
    resumed.close()
    head = "iteration,train_loss,validation_loss\n"
    assert path.read_text() == head + "1,0.1,\n2,0.2,0.25\n3,0.3,\n"


def test_rows_are_written_before_a_checkpoint(tmp_path):
    path = tmp_path / "table.csv"
    tracker = opened(path)
    for step in (1, 2):
        tracker.scalars(step, {"train/loss": 0.5})
        tracker.flush()
        assert list(columns(path)["iteration"]) == list(range(1, step + 1))


def test_a_new_run_removes_the_file(tmp_path):
    for name in ("metrics.csv", "metrics.jsonl"):
        (tmp_path / name).touch()
    make_folder(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_or_with_an_unusable_file(world, tmp_path):
    with pytest.raises(UserError, match=r"--track csv: expected a folder for the run, dl.train"):
        train(world)
    with pytest.raises(UserError, match="no/table.csv: cannot be written: No such file"):
        opened(tmp_path / "no" / "table.csv")
    (tmp_path / "other.csv").write_text("name\nx\n")
    with pytest.raises(UserError, match="other.csv: expected a column iteration, found another"):
        opened(tmp_path / "other.csv", iteration=1)
    tracker = opened(tmp_path / "table.csv")

    def flush():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tracker._file = types.SimpleNamespace(flush=flush)
    with pytest.raises(UserError, match="table.csv: cannot be written: No space left on device"):
        tracker.flush()
