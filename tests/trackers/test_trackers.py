"""Test the hooks that record a run: what a tracker receives, and TensorBoard's event files."""

import os
import sys
import types

import numpy as np
import pytest
from short_training import pictures, small, trained

import mpidl as dl
from mpidl.errors import UserError
from mpidl.evaluation import evaluate as evaluation
from mpidl.trackers import base, records
from mpidl.training import tracking
from mpidl.training.files.run_folder import make_folder

pytestmark = pytest.mark.usefixtures("without_plots")
OPTIONS = {"epochs": 2, "batch_size": 40, "verbose": "off", "validation_frequency": 2}


class Calls(base.Tracker):
    """A tracker that stores its calls, and raises an error at a given iteration."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.calls, self.fails_at = [], fails_at

    def open(self, trainer):
        assert trainer.world.rank == 0

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

    def flush(self):
        self.calls.append(("flush",))

    def close(self, state="finished"):
        self.calls.append(("close", state))


def train(world, hooks=(), **arguments):
    net = small()
    options = OPTIONS | arguments.pop("options", {})
    options = dl.TrainingOptions(validation=pictures(20, "validation"), **options)
    arguments |= {"hooks": hooks, "world": world}
    return net, dl.train(net, pictures(100), options, **arguments)


def test_a_tracker_receives_the_run(world, monkeypatch):
    monkeypatch.setattr(base, "_can_draw", lambda classes: False)
    gradients = {}

    class Observer:
        def start(self, trainer):
            trainer.step.observe_gradients(self.observe)
            self.trainer = trainer

        def observe(self, arrays):
            gradients[self.trainer.position.iteration] = np.array(arrays["conv1.weight"])

    hook = Calls()
    net, result = train(world, [hook, Observer()])
    assert dl.weights_sha256(net) == dl.weights_sha256(trained(world)[0])  # the same bytes
    calls = hook.calls
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
    assert set(scalars[0][1]) == {f"train/{name}" for name in records.NUMBERS}
    histograms = {c[1:3]: c[3] for c in calls if c[0] == "histogram"}
    names = [f"{group}/{name}" for group in ("weights", "gradients") for name in net.trainable]
    assert set(histograms) == {(name, step) for name in names for step in (3, 6)}
    for step in (3, 6):  # compare with NumPy's histogram
        histogram = histograms["gradients/conv1.weight", step]
        assert histogram.counts.sum() == gradients[step].size
        expected = np.histogram(gradients[step], records.BUCKETS)[1]
        np.testing.assert_allclose(histogram.edges, expected, rtol=1e-5, atol=1e-7)
        assert histogram.total == pytest.approx(gradients[step].sum(), abs=1e-5)
    final = histograms["weights/dense1.weight", 6]
    assert final.edges[-1] == net.parameters["dense1.weight"].max()
    assert calls[-1] == ("close", "finished")


def test_an_error_of_rank_0_ends_the_run_on_all_ranks(world):
    hook = Calls(fails_at=2)
    with pytest.raises(UserError, match="store: cannot be written: No space left on device$"):
        train(world, [hook])
    if world.rank == 0:
        assert hook.calls[-1] == ("close", "failed")


def test_an_error_leaves_a_checkpoint_of_the_epoch(world, tmp_path):
    out = world.broadcast(str(tmp_path / "run"))
    text = f"No space left on device; checkpoint written; to continue, .* --resume {out}$"
    with pytest.raises(UserError, match=text):
        train(world, [Calls(fails_at=2)], out=out)
    net, result = train(world, resume=out)
    assert list(result.history.epoch.iteration) == [3, 6]
    assert dl.weights_sha256(net) == dl.weights_sha256(trained(world)[0])
    world.barrier()


@pytest.mark.slow_on_ranks
def test_an_error_after_the_last_epoch_leaves_the_result(world):
    """`concluded` returns the error to its caller after it has closed the records of all hooks."""
    hooks = [Calls(fails_at=5), Calls()]
    for hook in hooks:
        hook.ends_with_training = False
    _, result = train(world, hooks, options={"max_iterations": 5})
    assert result.iterations == 5
    error = tracking.concluded(hooks, world, None)
    assert str(error) == "store: cannot be written: No space left on device"
    if world.rank == 0:
        assert [hook.calls[-1] for hook in hooks] == 2 * [("close", "finished")]


class Stops:
    def __init__(self, iteration):
        self.iteration_to_stop = iteration

    def step(self, trainer):
        if trainer.position.iteration == self.iteration_to_stop:
            trainer.stop()


def own_loss(net, images, labels):
    return dl.softmax_cross_entropy(net(images), labels)


def nameless(count, name="pictures"):
    """Return images with labels of classes that have no names."""
    labelled = pictures(count, name)
    return dl.data.combined(dl.ArrayDatastore(labelled.images), labelled.labels)


@pytest.fixture
def drawn(monkeypatch):
    """Replace the drawing of confusion matrices. Return the class names of each drawn matrix."""
    names = []

    def draw(counts, classes, accuracy):
        names.append(classes)
        return b"matrix"

    monkeypatch.setattr(base, "_can_draw", lambda classes: classes == 3)
    monkeypatch.setattr(base.confusion, "draw", draw)
    return names


@pytest.mark.slow_on_ranks
@pytest.mark.parametrize("stop", [[], [Stops(4)]])
@pytest.mark.parametrize("loss", ["crossentropy", own_loss])
def test_a_network_without_class_names(world, drawn, loss, stop):
    hook, net = Calls(), small()
    options = dl.TrainingOptions(**OPTIONS, validation=nameless(20, "validation"), loss=loss)
    result = dl.train(net, nameless(100), options, world=world, hooks=[hook, *stop])
    assert net.classes is None and (result.stopped is not None) == bool(stop)
    if world.rank == 0:
        assert hook.calls[-1] == ("close", "stopped" if stop else "finished")
        assert drawn == ([("0", "1", "2")] if loss == "crossentropy" else [])


def confusions(hook):
    return [call[1:] for call in hook.calls if call[0] == "picture" and call[1] != "gallery"]


def test_trackers_share_one_confusion_matrix(world, drawn, monkeypatch):
    counts, evaluate = [], evaluation.evaluate

    def counted(*arguments, confusion=False, **options):
        counts.append(confusion)
        return evaluate(*arguments, confusion=confusion, **options)

    monkeypatch.setattr(evaluation, "evaluate", counted)
    hooks = [Calls(), Calls()]
    train(world, hooks)
    assert counts == [False, False, False, True]  # only the final validation counts them
    if world.rank == 0:
        expected = [("confusion/validation", 6, b"matrix")]
        assert [confusions(hook) for hook in hooks] == [expected, expected]


def test_a_signal_ends_the_pass_for_the_confusion_matrix(world, drawn, monkeypatch):
    evaluate, results = evaluation.evaluate, []

    def interrupted(*arguments, signals, confusion=False, **options):
        if confusion and world.rank == world.size - 1:
            signals.name = "SIGTERM"
        results.append(evaluate(*arguments, signals=signals, confusion=confusion, **options))
        return results[-1]

    monkeypatch.setattr(evaluation, "evaluate", interrupted)
    hook = Calls()
    train(world, [hook])
    assert [result.images for result in results] == [20, 20, 20, 0]
    if world.rank == 0:
        assert confusions(hook) == [] and hook.calls[-1] == ("close", "stopped")


def test_records_are_written_before_each_checkpoint(world, tmp_path):
    hook = Calls()
    out = world.broadcast(str(tmp_path / "run"))
    train(world, [hook], out=out, options={"checkpoint_every": 2})
    steps, flushed = [0], []
    for call in hook.calls:
        steps += [call[1]] if call[0] == "scalars" else []
        flushed += [steps[-1]] if call[0] == "flush" else []
    assert flushed == ([2, 3, 4, 6] if world.rank == 0 else [])
    world.barrier()


@pytest.mark.slow_on_ranks
def test_records_after_the_end_are_left_out(world):
    class RecordsLate:
        def end(self, trainer):
            trainer.writer.record("validation", 2, 6, 1.0, 0.1, None, 1.0, 0.5)

    hook = Calls()
    train(world, [RecordsLate(), hook])
    if world.rank == 0:
        assert hook.calls[-1] == ("close", "finished")


def run_in(folder, iteration=0):
    """Return what a tracker asks of a run when it opens: its folder and the current iteration."""
    position = types.SimpleNamespace(iteration=iteration)
    return types.SimpleNamespace(writer=types.SimpleNamespace(out=folder), position=position)


def events(folder):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the events are read by TensorBoard (pip install 'mpidl[test]')",
    )
    sizes = dict.fromkeys((accumulator.SCALARS, accumulator.HISTOGRAMS, accumulator.IMAGES), 0)
    reader = accumulator.EventAccumulator(str(folder), size_guidance=sizes)
    reader.Reload()
    return reader


@pytest.mark.slow_on_ranks
def test_tensorboard_reads_a_resumed_run(world, tmp_path):
    """TensorBoard shows each step once, even if the run continues in another folder."""
    pytest.importorskip("tensorboardX", reason="pip install 'mpidl[tensorboard]'")
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
        for group, kind in records.GROUPS.items():
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


def test_a_new_run_removes_the_records_of_the_old_one(tmp_path):
    old = tmp_path / "tensorboard" / "events.out.tfevents.1"
    old.parent.mkdir()
    old.touch()
    parts = [tmp_path / "wandb" / f"offline-run-20260101_000000-{name}" for name in ("abc", "def")]
    for part in parts:
        part.mkdir(parents=True)
    records.remember(str(tmp_path), "wandb", {"run_id": "abc"})
    (tmp_path / "metrics.jsonl").touch()
    make_folder(str(tmp_path))
    assert not old.parent.exists()
    assert [part.exists() for part in parts] == [False, True]  # the other run's folder is kept


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))


def test_a_new_run_keeps_files_beside_event_files(tmp_path):
    """A new run removes TensorBoard's event files only if the folder belongs to a run."""
    foreign = ["tensorboard/events.out.tfevents.1", "tensorboard/a/notes.txt"]
    for name in foreign:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    make_folder(str(tmp_path))
    assert files_in(tmp_path) == sorted(foreign)
    (tmp_path / "metrics.jsonl").touch()  # this file marks the folder of a run
    (tmp_path / "timeline.json.gz").touch()
    make_folder(str(tmp_path))
    assert files_in(tmp_path) == ["tensorboard/a/notes.txt"]


def test_the_events_of_a_resumed_run_come_beside_those_of_others(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, name in ((first, "events.out.tfevents.1"), (second, "notes.txt")):
        (folder / "tensorboard").mkdir(parents=True)
        (folder / "tensorboard" / name).touch()
    make_folder(str(second), str(first))
    assert files_in(second) == ["tensorboard/events.out.tfevents.1", "tensorboard/notes.txt"]


def test_tensorboard_without_a_folder_is_refused(world):
    with pytest.raises(UserError, match=r"tensorboard: expected a folder for the run, dl.train"):
        train(world, options={"tensorboard": True})


@pytest.mark.slow("files")
@pytest.mark.slow_on_ranks
def test_wandb_without_a_folder_is_refused(world):
    pytest.importorskip("wandb", reason="pip install 'mpidl[wandb]'")
    with pytest.raises(UserError, match="--wandb: expected a folder for the run"):
        train(world, [dl.WandbHook()])


@pytest.mark.parametrize(
    ("package", "hook", "text"),
    [
        ("tensorboardX", "TensorBoardHook", "--tensorboard: requires tensorboardX, which is not"),
        (
            "mlflow",
            "MLflowHook",
            r"--mlflow: requires mlflow, .* \(.* 'mpidl\[mlflow\]'\)",
        ),
        ("wandb", "WandbHook", r"--wandb: requires wandb, .* \(pip install 'mpidl\[wandb\]'\)"),
    ],
)
def test_a_missing_package_is_one_line(monkeypatch, package, hook, text):
    find_spec = records.importlib.util.find_spec
    monkeypatch.setattr(
        records.importlib.util,
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
    histogram = records.histogram(np.array(values, np.float32))
    finite = np.array(values, np.float32)[np.isfinite(values)]
    assert histogram.counts.sum() == finite.size and len(histogram.edges) == 65
    if finite.size:
        assert (histogram.edges[0], histogram.edges[-1]) == (finite.min(), finite.max())


def test_names_of_the_numbers_of_a_record():
    record = {"kind": "validation", "loss": 0.5, "metrics": {"f1": 0.25, "x": None}}
    assert records.scalars(record) == {"validation/loss": 0.5, "validation/f1": 0.25}


def test_the_option_names_trackers(tmp_path, monkeypatch):
    """A tracker is found by its name, and the text after it is the first argument of the class."""
    monkeypatch.setattr(records.importlib.util, "find_spec", lambda package: object())
    options = dl.TrainingOptions(track=f"tensorboard={tmp_path}, wandb", tensorboard="off")
    board, wandb = tracking.requested(options, {"mlflow": None, "wandb": None})
    assert (board.folder, wandb.project) == (str(tmp_path), "mpidl")
    inputs = {"mlflow": "store", "wandb": "shapes"}
    assert [tracker.name for tracker in tracking.requested(options, inputs)[1:]] == [None, None]
    assert tracking.requested(options, present=[board, wandb]) == []
    assert tracking.requested(dl.TrainingOptions()) == []
    for word, text in (("mlfow", "did you mean mlflow"), ("x", "expected .*mlflow, tensorboard")):
        with pytest.raises(UserError, match=f"--track {word}: unknown tracker.*{text}"):
            tracking.requested(dl.TrainingOptions(track=word))


def test_an_empty_folder_has_no_identity(tmp_path, monkeypatch):
    records.remember(str(tmp_path), "mlflow", {"run_id": "a"})
    records.remember(str(tmp_path), "wandb", {"run_id": "b"})
    assert records.identity(str(tmp_path), "mlflow") == {"run_id": "a"}
    monkeypatch.chdir(tmp_path)
    assert records.identity(None, "mlflow") == {}
    (tmp_path / records.IDENTITIES).write_text("[")
    assert records.identity(str(tmp_path), "wandb") == records.identity(None, "wandb") == {}


def test_an_event_file_on_a_full_disk_is_one_line(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install 'mpidl[tensorboard]'")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/tensorboard: cannot be written: Not a directory"):
        dl.TensorBoardHook(tmp_path / "file" / "tensorboard").open(run_in(None))
    file = dl.TensorBoardHook(tmp_path)
    file.open(run_in(None))
    file._writer._py_recordio_writer._writer = open("/dev/full", "wb", buffering=0)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        file.scalars(1, {"train/loss": 1.0})


def test_a_flush_of_an_event_file_reaches_the_disk(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install 'mpidl[tensorboard]'")
    file = dl.TensorBoardHook(tmp_path)
    file.open(run_in(None))
    file.scalars(1, {"train/loss": 1.0})
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    file.flush()
    assert path.stat().st_size > size


def test_a_killed_run_continues_its_record_for_wandb(tmp_path, monkeypatch):
    """The resumed run logs only its pending validation and the records after the checkpoint."""
    from mpidl.trackers import wandb

    logged = []
    library = types.ModuleType("wandb")
    library.Error, library.Settings = RuntimeError, dict
    library.init = lambda **_: types.SimpleNamespace(
        log=lambda values, step: logged.append((step, *values))
    )
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setattr(wandb, "SETTINGS", {})
    first, second = dl.WandbHook("project"), dl.WandbHook("project")
    first.open(run_in(tmp_path))
    for step in (1, 2):
        first.scalars(step, {"train/loss": 1.0})
    first.flush()
    first.scalars(3, {"train/loss": 1.0})
    second.open(run_in(tmp_path, iteration=2))
    for step in (2, 3):
        second.scalars(step, {"train/loss": 1.0, "validation/loss": 1.0})
    assert second.run_id == first.run_id
    assert logged[3:] == [(2, "validation/loss"), (3, "train/loss", "validation/loss")]
