"""Hooks that record a run: what a tracker receives, and TensorBoard's event files."""

import contextlib
import os

import numpy as np
import pytest
from short_training import pictures, small, trained

import mpidl as dl
from mpidl.errors import UserError
from mpidl.report import Console
from mpidl.report.trackers import tracking
from mpidl.training import tracking_hooks
from mpidl.training.files.run_folder import make_folder

pytestmark = pytest.mark.usefixtures("without_plots")
OPTIONS = {"epochs": 2, "batch_size": 40, "verbose": "off", "validation_frequency": 2}


class Calls(tracking.Tracker):
    """A tracker that keeps its calls, and fails at an iteration."""

    def __init__(self, fails_at=None):
        self.calls, self.fails_at = [], fails_at

    def parameters(self, values):
        self.calls.append(("parameters", values["epochs"], values["ranks"]))

    def scalars(self, step, values):
        if step == self.fails_at:
            raise UserError("store: cannot be written: No space left on device")
        self.calls.append(("scalars", step, values))

    def picture(self, name, step, png):
        self.calls.append(("picture", name, step, png[:8]))

    def histogram(self, name, step, values):
        self.calls.append(("histogram", name, step, values))

    def close(self, state=tracking.FINISHED):
        self.calls.append(("close", state))


class CallsHook(tracking_hooks.TrackingHook):
    def __init__(self, fails_at=None):
        super().__init__()
        self.calls = Calls(fails_at)

    def open(self, trainer):
        assert trainer.world.rank == 0
        return self.calls


def train(world, hooks=(), **arguments):
    net = small()
    options = OPTIONS | arguments.pop("options", {})
    options = dl.TrainingOptions(validation=pictures(20, "validation"), **options)
    arguments |= {"hooks": hooks, "world": world}
    return net, dl.train(net, pictures(100), options, **arguments)


def test_a_tracker_receives_the_run(world, monkeypatch):
    monkeypatch.setattr(tracking_hooks, "_can_draw", lambda classes: False)
    gradients = {}

    class Observer:
        def start(self, trainer):
            trainer.step.observe_gradients(self.observe)
            self.trainer = trainer

        def observe(self, arrays):
            gradients[self.trainer.position.iteration] = np.array(arrays["conv1.weight"])

    hook = CallsHook()
    net, result = train(world, [hook, Observer()])
    assert dl.weights_sha256(net) == dl.weights_sha256(trained(world)[0])  # the same bytes
    calls = hook.calls.calls
    if world.rank:
        assert calls == []
        return
    assert calls[0] == ("parameters", 2, world.size)
    assert calls[1] == ("picture", "gallery", 0, b"\x89PNG\r\n\x1a\n")
    scalars = [(step, values) for kind, step, values in (c for c in calls if c[0] == "scalars")]
    losses = [(step, v["train/loss"]) for step, v in scalars if "train/loss" in v]
    history = result.history
    assert losses == list(zip(history.iteration.iteration, history.iteration.loss, strict=True))
    losses = [(step, v["validation/loss"]) for step, v in scalars if "validation/loss" in v]
    assert losses == list(zip(history.validation.iteration, history.validation.loss, strict=True))
    assert set(scalars[0][1]) == {f"train/{name}" for name in tracking.NUMBERS}
    histograms = {c[1:3]: c[3] for c in calls if c[0] == "histogram"}
    names = [f"{group}/{name}" for group in ("weights", "gradients") for name in net.trainable]
    assert set(histograms) == {(name, step) for name in names for step in (3, 6)}
    for step in (3, 6):  # NumPy's own histogram is the oracle
        histogram = histograms["gradients/conv1.weight", step]
        assert histogram.counts.sum() == gradients[step].size
        expected = np.histogram(gradients[step], tracking.BUCKETS)[1]
        np.testing.assert_allclose(histogram.edges, expected, rtol=1e-5, atol=1e-7)
        assert histogram.total == pytest.approx(gradients[step].sum(), abs=1e-5)
    final = histograms["weights/dense1.weight", 6]
    assert final.edges[-1] == net.parameters["dense1.weight"].max()
    assert calls[-1] == ("close", "finished")


def test_an_error_of_rank_0_ends_the_run_on_all_ranks(world):
    hook = CallsHook(fails_at=2)
    with pytest.raises(UserError, match="store: cannot be written: No space left"):
        train(world, [hook])
    if world.rank == 0:
        assert hook.calls.calls[-1] == ("close", "failed")


class Stages(Console):
    """A console that keeps the numbers of images that each stage reports."""

    def __init__(self, rank):
        super().__init__(rank, progress=False)
        self.processed = {}

    @contextlib.contextmanager
    def stage(self, name, images=0):
        self.processed[name] = []
        yield self.processed[name].append


class Signalled:
    """A hook whose `end` comes before that of the tracker."""

    def end(self, trainer):
        trainer.signals.name = "SIGUSR1"


def test_the_confusion_matrix_is_a_stage_that_a_signal_ends(world, monkeypatch):
    monkeypatch.setattr(tracking_hooks, "_can_draw", lambda classes: True)
    monkeypatch.setattr(tracking_hooks.TrackingHook, "_draw_confusion", lambda *arguments: None)
    for hooks, expected in (([CallsHook()], [20]), ([CallsHook(), Signalled()], [])):
        stages = Stages(world.rank)
        train(world, hooks, console=stages)
        assert stages.processed["confusion matrix"] == expected


class Stops:
    def __init__(self, iteration):
        self.iteration_to_stop = iteration

    def step(self, trainer):
        if trainer.position.iteration == self.iteration_to_stop:
            trainer.stop()


def events(folder):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the events are read by TensorBoard (pip install '.[test]')",
    )
    sizes = dict.fromkeys((accumulator.SCALARS, accumulator.HISTOGRAMS, accumulator.IMAGES), 0)
    reader = accumulator.EventAccumulator(str(folder), size_guidance=sizes)
    reader.Reload()
    return reader


@pytest.mark.slow_on_ranks
def test_tensorboard_reads_a_resumed_run(world, tmp_path):
    """Steps after the checkpoint are not repeated, and the run may continue in another folder."""
    pytest.importorskip("tensorboardX", reason="pip install '.[tensorboard]'")
    first, second = (world.broadcast(str(tmp_path / name)) for name in ("first", "second"))
    options = {"tensorboard": "on", "checkpoint_every": 4}

    class Fails:
        def iteration(self, trainer, result):
            if result.info.iteration == 6:
                raise UserError("a fault after the checkpoint of iteration 4")

    with pytest.raises(UserError, match="a fault"):
        train(world, [Fails()], out=first, options=options)
    net, result = train(world, resume=first, out=second, options=options)
    assert dl.weights_sha256(net) == dl.weights_sha256(trained(world)[0])
    if world.rank == 0:
        reader, history = events(os.path.join(second, "tensorboard")), result.history
        for group, kind in tracking.GROUPS.items():
            series = getattr(history, group)
            for name in ("loss", "accuracy"):
                points = reader.Scalars(f"{kind}/{name}")
                assert [point.step for point in points] == list(series.iteration), (kind, name)
                numbers = getattr(series, name).astype(np.float32)
                assert [point.value for point in points] == list(numbers)
        assert [point.step for point in reader.Histograms("weights/conv1.bias")] == [3, 6]
        values = reader.Histograms("gradients/conv1.weight")[-1].histogram_value
        assert sum(values.bucket) == values.num == 36
        assert [image.step for image in reader.Images("gallery")] == [0]
        assert [image.step for image in reader.Images("confusion/validation")] == [6]
        assert "options/text_summary" in reader.Tags()["tensors"]
    world.barrier()


def test_a_new_run_removes_the_events_of_the_old_one(tmp_path):
    old = tmp_path / "tensorboard" / "events.out.tfevents.1"
    old.parent.mkdir()
    old.touch()
    (tmp_path / "metrics.jsonl").touch()
    make_folder(str(tmp_path))
    assert not old.parent.exists()


def test_tensorboard_without_a_folder_is_refused(world):
    with pytest.raises(UserError, match=r"tensorboard: expected a folder for the run, dl.train"):
        train(world, options={"tensorboard": True})


def test_wandb_without_a_folder_is_refused(world):
    pytest.importorskip("wandb", reason="pip install '.[wandb]'")
    with pytest.raises(UserError, match="--wandb: expected a folder for the run"):
        train(world, [tracking_hooks.WandbHook()])


@pytest.mark.parametrize(
    ("package", "hook", "text"),
    [
        ("tensorboardX", "TensorBoardHook", "--tensorboard: requires tensorboardX, which is not"),
        ("mlflow", "MLflowHook", r"--mlflow: requires mlflow, .* \(pip install '.\[mlflow\]'\)"),
        ("wandb", "WandbHook", r"--wandb: requires wandb, .* \(pip install '.\[wandb\]'\)"),
    ],
)
def test_a_missing_package_is_one_line(monkeypatch, package, hook, text):
    find_spec = tracking.importlib.util.find_spec
    monkeypatch.setattr(
        tracking.importlib.util,
        "find_spec",
        lambda name: None if name == package else find_spec(name),
    )
    with pytest.raises(UserError, match=text):
        getattr(dl, hook)()


def test_a_store_on_a_server_and_empty_names_are_refused():
    with pytest.raises(UserError, match="--wandb: expected the name of a project"):
        dl.WandbHook("")
    with pytest.raises(UserError, match="--mlflow : expected a folder, found an empty name"):
        dl.MLflowHook("")
    with pytest.raises(UserError, match="--mlflow http://host: expected a folder, found a URL"):
        dl.MLflowHook("http://host")


@pytest.mark.parametrize("values", [[], [3], [0.0] * 5, [1, np.nan, np.inf, 2], [-1e38, 3e38]])
def test_histograms_of_unusual_arrays(values):
    histogram = tracking.histogram(np.array(values, np.float32))
    finite = np.array(values, np.float32)[np.isfinite(values)]
    assert histogram.counts.sum() == finite.size and len(histogram.edges) == 65
    if finite.size:
        assert (histogram.edges[0], histogram.edges[-1]) == (finite.min(), finite.max())


def test_an_empty_folder_has_no_identity(tmp_path):
    tracking.remember(str(tmp_path), "mlflow", {"run_id": "a"})
    tracking.remember(str(tmp_path), "wandb", {"run_id": "b"})
    assert tracking.identity(str(tmp_path), "mlflow") == {"run_id": "a"}
    (tmp_path / tracking.IDENTITIES).write_text("[")
    assert tracking.identity(str(tmp_path), "wandb") == tracking.identity(None, "wandb") == {}


def test_an_event_file_on_a_full_disk_is_one_line(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install '.[tensorboard]'")
    from mpidl.report.trackers.tensorboard_files import EventFile

    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/tensorboard: cannot be written: Not a directory"):
        EventFile(str(tmp_path / "file" / "tensorboard"))
    file = EventFile(str(tmp_path))
    file._writer._py_recordio_writer._writer = open("/dev/full", "wb", buffering=0)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        file.scalars(1, {"train/loss": 1.0})
