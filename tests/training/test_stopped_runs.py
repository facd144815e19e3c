"""Test runs that a stop file ends, and the content of status.json.

The tests pass on any number of ranks.
"""

import json
from pathlib import Path

import pytest
from short_training import pictures, small

import mpidl as dl
from mpidl.data.datastore import Datastore
from mpidl.report import status, stop_file

pytestmark = pytest.mark.usefixtures("without_plots")
PER_EPOCH = 3  # iterations per epoch
SLOW_ON_RANKS = pytest.mark.slow_on_ranks


@pytest.fixture(autouse=True)
def looks_always(monkeypatch):
    monkeypatch.setattr(stop_file, "SECONDS", 0)


@pytest.fixture
def folder(world, tmp_path):
    """Return a folder that all ranks use."""
    return Path(world.broadcast(str(tmp_path)))


class Request:
    """A hook that writes a stop file after a given iteration, or at the end of a given epoch."""

    def __init__(self, folder, moment, iteration=None, epoch=None):
        self.folder, self.moment = folder, moment
        self.iteration_of_request, self.epoch_of_request = iteration, epoch

    def step(self, trainer):
        if trainer.position.iteration == self.iteration_of_request and trainer.world.rank == 0:
            stop_file.request(self.folder, self.moment)

    def epoch(self, trainer, summary):
        if summary.epoch == self.epoch_of_request and trainer.world.rank == 0:
            stop_file.request(self.folder, self.moment)


def train(world, out, hooks=(), *, resume=None, epochs=3, store=None, **options):
    net, store = small(), store or pictures(100)
    options = dl.TrainingOptions(**{"epochs": epochs, "batch_size": 40, "verbose": "off"} | options)
    result = dl.train(net, store, options, world=world, out=str(out), hooks=hooks, resume=resume)
    return dl.weights_sha256(net), result


def read_status(world, out):
    world.barrier()
    return status.parse((out / "status.json").read_bytes())


@pytest.mark.parametrize(
    ("moment", "iteration", "expected"),
    [
        pytest.param(stop_file.NOW, 4, 4, marks=SLOW_ON_RANKS),
        pytest.param(stop_file.NOW, PER_EPOCH, PER_EPOCH, marks=SLOW_ON_RANKS),
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


def validations(world, out):
    """Return the iterations of the validation records in metrics.jsonl."""
    world.barrier()
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    world.barrier()
    return [r["iteration"] for r in records if r["kind"] == "validation"]


@pytest.mark.parametrize(
    ("moment", "complete"),
    [(stop_file.NOW, []), pytest.param(stop_file.EPOCH, [2], marks=SLOW_ON_RANKS)],
)
def test_a_request_during_the_validation_of_an_epoch(world, folder, moment, complete):
    """A stop file ends the validation like a signal, and the resumed run repeats it."""
    out, options = folder / "run", {"validation_fraction": 0.2, "validation_frequency": 0}
    _, result = train(world, out, [Request(out, moment, 2)], epochs=2, **options)
    # 80 images are two mini-batches, so iteration 2 ends the epoch.
    assert (result.stopped, result.iterations) == ("stop file", 2)
    assert validations(world, out) == complete
    sha256, _ = train(world, out, resume=str(out), epochs=2, **options)
    assert validations(world, out) == [2, 4]
    assert sha256 == train(world, folder / "reference", epochs=2, **options)[0]


class RequestAtTheEnd:
    """A hook that writes a stop file after the last mini-batch of the run."""

    def __init__(self, folder):
        self.folder = folder

    def finish(self, trainer):
        if trainer.world.rank == 0:
            stop_file.request(self.folder, stop_file.NOW)


@pytest.mark.parametrize(
    ("statistics", "reason"),
    [("population", "stop file"), pytest.param("moving", None, marks=SLOW_ON_RANKS)],
)
def test_a_request_during_the_statistics(world, folder, statistics, reason):
    out, options = folder / "run", {"batchnorm_statistics": statistics}
    _, result = train(world, out, [RequestAtTheEnd(out)], **options)
    assert (result.stopped, result.iterations) == (reason, 3 * PER_EPOCH)
    assert read_status(world, out).stopped == reason and not (out / "stop").exists()
    sha256, result = train(world, out, resume=str(out), **options)
    assert result.stopped is None
    assert sha256 == train(world, folder / "reference", **options)[0]


class RequestAtFirstRead(Datastore):
    """A datastore that writes a stop file at its first read on rank 0, for the normalization."""

    def __init__(self, store, folder, world):
        self.store, self.folder, self.is_due = store, folder, world.rank == 0
        self.image_shape, self.classes, self.labels = store.image_shape, store.classes, store.labels

    def fingerprint(self):
        return self.store.fingerprint()

    def read(self, indices):
        if self.is_due:
            self.is_due = False
            stop_file.request(self.folder, stop_file.NOW)
        return self.store.read(indices)


def test_a_request_before_the_first_iteration(world, folder):
    out = folder / "run"
    options = {"normalization": "zscore", "validation": pictures(60), "validation_frequency": 1}
    if world.rank == 0:
        out.mkdir()
    world.barrier()
    store = RequestAtFirstRead(pictures(100), out, world)
    _, result = train(world, out, store=store, **options)
    assert (result.stopped, result.iterations) == ("stop file", 0)
    sha256, result = train(world, out, resume=str(out), **options)
    assert result.iterations == 3 * PER_EPOCH
    assert sha256 == train(world, folder / "reference", **options)[0]
    resumed, reference = (dl.history(out).validation, dl.history(folder / "reference").validation)
    assert len(resumed) == 3 * PER_EPOCH and (resumed.loss == reference.loss).all()


@pytest.mark.slow_on_ranks
@pytest.mark.parametrize("moment", [stop_file.NOW, stop_file.EPOCH])
def test_a_request_at_the_end_of_the_last_epoch_changes_nothing(world, folder, moment):
    out = folder / "run"
    _, result = train(world, out, [Request(out, moment, epoch=3)], batchnorm_statistics="moving")
    assert result.stopped is None and result.iterations == 3 * PER_EPOCH
    assert read_status(world, out).stopped is None and not (out / "stop").exists()


@pytest.mark.slow_on_ranks
def test_a_request_to_an_earlier_job_is_dropped(world, folder):
    out = folder / "run"
    if world.rank == 0:
        out.mkdir()
        stop_file.request(out, stop_file.NOW)
    world.barrier()
    _, result = train(world, out)
    assert result.stopped is None and not (out / "stop").exists()


@pytest.mark.slow_on_ranks
def test_without_a_look_the_file_has_no_effect(world, folder, monkeypatch):
    """Negative control: if the stop file is not read, the run continues to the end."""
    monkeypatch.setattr(stop_file, "read", lambda folder: None)
    out = folder / "run"
    _, result = train(world, out, [Request(out, stop_file.NOW, 2)])
    assert result.stopped is None and result.iterations == 3 * PER_EPOCH


class Fails:
    def step(self, trainer):
        if trainer.position.iteration == 2:
            raise dl.UserError("a.png: not an image\nits second line")


@pytest.mark.slow_on_ranks
def test_the_status_names_the_error_of_a_run(world, folder):
    out = folder / "run"
    with pytest.raises(dl.UserError, match="not an image"):
        train(world, out, [Fails()])
    content = read_status(world, out)
    assert (content.state, content.error) == (
        status.FAILED,
        r"a.png: not an image\nits second line",
    )
    assert content.iterations == 3 * PER_EPOCH
    train(world, out)
    content = read_status(world, out)
    assert (content.state, content.error) == (status.FINISHED, None)


@pytest.mark.slow_on_ranks
def test_a_new_run_removes_the_files_of_an_earlier_one(world, folder):
    out = folder / "run"
    train(world, out)
    if world.rank == 0:
        dl.training.files.run_folder.make_folder(str(out))
        assert list(out.iterdir()) == []
    world.barrier()
