"""Runs that a stop file ends, and status.json, on any number of ranks."""

import json
from pathlib import Path

import pytest
from short_training import pictures, small

import mpidl as dl
from mpidl.report import status, stop_file

pytestmark = pytest.mark.usefixtures("without_plots")
PER_EPOCH = 3  # iterations


@pytest.fixture(autouse=True)
def looks_always(monkeypatch):
    monkeypatch.setattr(stop_file, "SECONDS", 0)


@pytest.fixture
def folder(world, tmp_path):
    """One folder for all ranks."""
    return Path(world.broadcast(str(tmp_path)))


class Request:
    """A hook that writes a stop file after an iteration, or at the end of an epoch."""

    def __init__(self, folder, moment, iteration=None, epoch=None):
        self.folder, self.moment = folder, moment
        self.iteration_of_request, self.epoch_of_request = iteration, epoch

    def step(self, trainer):
        if trainer.position.iteration == self.iteration_of_request and trainer.world.rank == 0:
            stop_file.request(self.folder, self.moment)

    def epoch(self, trainer, summary):
        if summary.epoch == self.epoch_of_request and trainer.world.rank == 0:
            stop_file.request(self.folder, self.moment)


def train(world, out, hooks=(), *, resume=None, epochs=3, **options):
    net = small()
    options = dl.TrainingOptions(**{"epochs": epochs, "batch_size": 40, "verbose": "off"} | options)
    result = dl.train(
        net, pictures(100), options, world=world, out=str(out), hooks=hooks, resume=resume
    )
    return dl.weights_sha256(net), result


def read_status(world, out):
    world.barrier()
    return status.parse((out / "status.json").read_bytes())


@pytest.mark.parametrize(
    ("moment", "iteration", "expected"),
    [
        (stop_file.NOW, 4, 4),
        (stop_file.NOW, PER_EPOCH, PER_EPOCH),
        (stop_file.EPOCH, 4, 2 * PER_EPOCH),
    ],
)
def test_a_stop_file_ends_the_run_with_a_checkpoint(world, folder, moment, iteration, expected):
    out = folder / "run"
    _, result = train(world, out, [Request(out, moment, iteration)])
    assert (result.stopped, result.iterations) == ("stop file", expected)
    content = read_status(world, out)
    assert (content.state, content.stopped) == (status.FINISHED, "stop file")
    assert not (out / "stop").exists()
    sha256, result = train(world, out, resume=str(out))
    assert result.stopped is None and result.iterations == 3 * PER_EPOCH
    assert sha256 == train(world, folder / "reference")[0]
    content = read_status(world, out)
    assert (content.state, content.stopped, content.ranks) == (status.FINISHED, None, world.size)
    sizes = content.epochs, content.iterations_per_epoch, content.iterations
    assert sizes == (3, PER_EPOCH, 3 * PER_EPOCH)


def test_the_validation_of_the_epoch_is_completed_first(world, folder):
    out, options = folder / "run", {"validation_fraction": 0.2, "validation_frequency": 0}
    _, result = train(world, out, [Request(out, stop_file.NOW, 2)], epochs=2, **options)
    assert result.iterations == 2  # 80 images are two mini-batches, so this is the end of the epoch
    world.barrier()
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["iteration"] for r in records if r["kind"] == "validation"] == [2]


@pytest.mark.parametrize("moment", [stop_file.NOW, stop_file.EPOCH])
def test_a_request_at_the_end_of_the_last_epoch_changes_nothing(world, folder, moment):
    out = folder / "run"
    _, result = train(world, out, [Request(out, moment, epoch=3)])
    assert result.stopped is None and result.iterations == 3 * PER_EPOCH


def test_a_request_to_an_earlier_job_is_dropped(world, folder):
    out = folder / "run"
    if world.rank == 0:
        out.mkdir()
        stop_file.request(out, stop_file.NOW)
    world.barrier()
    _, result = train(world, out)
    assert result.stopped is None and not (out / "stop").exists()


def test_without_a_look_the_file_has_no_effect(world, folder, monkeypatch):
    """The negative control of the tests above."""
    monkeypatch.setattr(stop_file, "read", lambda folder: None)
    out = folder / "run"
    _, result = train(world, out, [Request(out, stop_file.NOW, 2)])
    assert result.stopped is None and result.iterations == 3 * PER_EPOCH


def test_a_new_run_removes_the_files_of_an_earlier_one(world, folder):
    out = folder / "run"
    train(world, out, [Request(out, stop_file.EPOCH, epoch=3)])
    if world.rank == 0:
        assert (out / "stop").exists()  # after the last look
        dl.training.files.run_folder.make_folder(str(out))
        assert list(out.iterdir()) == []
    world.barrier()
