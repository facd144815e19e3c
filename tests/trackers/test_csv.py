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


def opened(folder, iteration=0):
    """Return a tracker that writes to the folder of a run at an iteration."""
    (tracker,) = tracking.requested(dl.TrainingOptions(track="csv"))
    position, writer = types.SimpleNamespace(iteration=iteration), types.SimpleNamespace(out=folder)
    tracker.open(types.SimpleNamespace(position=position, writer=writer))
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
    path = tmp_path / "metrics.csv"
    killed = opened(tmp_path)
    for step in (1, 2, 30):
        killed.scalars(step, {"train/loss": step / 10})
    killed.flush()
    path.write_bytes(path.read_bytes()[: -len("0,3.0\n")])
    resumed = opened(tmp_path, iteration=2)
    resumed.scalars(2, {"validation/loss": 0.25, "validation/accuracy": np.nan})
    resumed.scalars(3, {"train/loss": 0.3})
    resumed.close()
    head = "iteration,train_loss,validation_loss\n"
    assert path.read_text() == head + "1,0.1,\n2,0.2,0.25\n3,0.3,\n"


def test_rows_are_written_before_a_checkpoint(tmp_path):
    path = tmp_path / "metrics.csv"
    tracker = opened(tmp_path)
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
    with pytest.raises(UserError, match="no/metrics.csv: cannot be written: No such file"):
        opened(tmp_path / "no")
    tracker = opened(tmp_path)

    def flush():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tracker._file = types.SimpleNamespace(flush=flush)
    with pytest.raises(UserError, match="metrics.csv: cannot be written: No space left on device"):
        tracker.flush()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"name\nx\n", "found no column iteration"),
        (b"iteration,loss\n1,2,3\n", "expected a table of --track csv"),
        (b"iteration,loss\n\xff,2\n", "expected a table of --track csv"),
        (b"iteration,loss\none,2\n", "expected a table of --track csv"),
    ],
)
def test_a_damaged_file_is_one_line_and_is_kept(tmp_path, content, problem):
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"metrics.csv: .*{problem}"):
        opened(tmp_path, iteration=1)
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbfiteration,train_loss\r\n1,0.5\r\n"])
def test_an_empty_file_and_a_file_that_excel_has_saved_are_continued(tmp_path, content):
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    tracker = opened(tmp_path, iteration=1)
    tracker.scalars(2, {"train/loss": 0.25})
    tracker.close()
    assert path.read_text() == "iteration,train_loss\n" + "1,0.5\n" * bool(content) + "2,0.25\n"


@pytest.mark.parametrize(
    ("track", "problem"),
    [
        ("csv=a.csv", "--track csv=a.csv: expected csv without a value"),
        ("csv,csv", "--track csv,csv: found csv twice"),
        ("=a", "--track : unknown tracker"),
    ],
)
def test_wrong_words_of_the_option_are_one_line(track, problem):
    with pytest.raises(UserError, match=problem):
        tracking.requested(dl.TrainingOptions(track=track))
