"""Test that an audit accepts honest runs, whatever their options and interruptions."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
from certified_runs import (
    CLASSES,
    SIDE,
    arrays,
    audit,
    chain,
    one_world,
    train_command,
    train_run,
    write_data,
)

import mpidl as dl
from mpidl.errors import NotFinite, UserError
from mpidl.evaluation.validation import Validation
from mpidl.training import golden
from mpidl.training.files import checkpoint
from mpidl.training.rollback import Rollback

NETWORKS = Path(__file__).parents[1] / "launch" / "networks.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "set.npz")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Let the golden hashes agree at once, because their trainings take seconds."""
    monkeypatch.setattr(golden, "check", lambda: [])


def assert_equal(run, data, *words):
    """Audit a run from its start, and from its checkpoints; assert that nothing differs."""
    for selection in ((), ("--sample", 2)):
        result = audit(run, data, *words, *selection)
        assert (result.code, result.differing) == (0, []), result.lines
        assert any(line.startswith("iterations ") for line in result.lines)


def test_a_network_with_several_inputs(data, tmp_path):
    """The names of a layer's inputs are a tuple in Python and a list in JSON."""
    run = train_run(data, tmp_path / "run", "--network", f"{NETWORKS}:bottlenecks", "--epochs", 1)
    assert_equal(run, data)


QUICK_INTERVALS = {("50 0", "2 4"), ("2 0", "50 3"), ("50 4", "50 0")}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow("jobs")] * (pair not in QUICK_INTERVALS))
        for pair in itertools.product(("50 0", "2 0", "50 4"), ("2 4", "50 3", "50 0"))
    ],
)
def test_other_intervals_after_a_resume(data, tmp_path, before, after):
    """Each job must record the states of its own intervals, and no others."""
    names = "--certify-every", "--checkpoint-keep"
    pairs = [zip(names, text.split(), strict=True) for text in (before, after)]
    first, second = ([word for pair in options for word in pair] for options in pairs)
    run = train_run(data, tmp_path / "run", *first, "--max-iterations", 6)
    train_command("--resume", run, *second, "--max-iterations", "none")
    assert_equal(run, data)
    states = [x["iteration"] for x in chain(run) if x["kind"] == "state"]
    assert (2 in states) == (before == "2 0") and (8 in states) == (after == "2 4")


def test_several_jobs_at_one_iteration(data, tmp_path):
    """Of the jobs that resumed at iteration 6, only the last one has trained."""
    best = "--output-network", "best-validation", "--validation-frequency", 3
    run = train_run(data, tmp_path / "run", *best, "--max-iterations", 6)
    train_command("--resume", run, "--on-nan", "rollback")
    train_command("--resume", run, "--batchnorm-statistics", "moving")
    train_command("--resume", run, "--max-iterations", "none", "--checkpoint-every", 4)
    assert [x["iteration"] for x in chain(run) if x["kind"] == "start"] == [0, 6, 6, 6]
    assert_equal(run, data)


def test_a_run_that_was_resumed_at_its_end(data, tmp_path):
    """The last job has trained no iteration, but it has finished the network with its options."""
    words = "--output-network", "best-validation", "--max-iterations", 12
    run = train_run(data, tmp_path / "run", *words)
    train_command("--resume", run, "--max-iterations", 9, "--batchnorm-statistics", "moving")
    assert chain(run)[-1]["iteration"] == 12
    assert_equal(run, data)


def test_the_last_iteration(data, tmp_path):
    """The last checkpoint is older than the validation that chooses the network."""
    words = "--output-network", "best-validation", "--max-iterations", 9
    run = train_run(data, tmp_path / "run", *words)
    result = audit(run, data, "--steps", "9:9")
    assert result.code == 0 and result.rows("iterations 8-9")[0][0] == "equal"
    assert result.rows("test")[0][0] == "equal"
    assert audit(run, data, "--steps", "0:0").rows("iterations 0-0")[0][0] == "equal"


def test_statistics_of_a_weight_file(data, tmp_path):
    """A run with --weights keeps the mean of the first images, or measures its own if asked to."""
    changed = {"images": 255 - arrays()["images"]}
    other = write_data(tmp_path / "other.npz", **changed)
    first = train_run(other, tmp_path / "first", "--epochs", 1)
    weights = "--weights", first / "model.h5"
    (tmp_path / "none").mkdir()
    for name, words in {"kept": (), "measured": ("--normalization", "zerocenter")}.items():
        out = tmp_path / name
        options = "--batch-size", 16, "--epochs", 1, "--certify", "public", "--plots", "none"
        words = ["--data", data, "--out", out, *weights, *words, *options, "--verbose", "off"]
        train_command(*words)
        assert_equal(out, data, *weights, "--checkpoints", tmp_path / "none")
    states = [chain(tmp_path / name)[1]["tables"]["normalization"] for name in ("kept", "measured")]
    assert states[0] != states[1] and states[0] == chain(first)[1]["tables"]["normalization"]


NETWORK_FILE = """
import mpidl as dl

def network(input_shape, classes):
    layers = [dl.Conv2D(3, 4, weight_initializer="whitening"), dl.ReLU(), dl.Dense(classes)]
    return dl.Network(layers{plain}, input_shape, seed=7)

def infinite(input_shape, classes):
    return [dl.Conv2D(3, 4), dl.Clip(0, float("inf"), name="inf"), dl.Dense(classes)]
"""


@pytest.mark.parametrize("plain", ["", "[1:]"], ids=["whitening", "plain"])
def test_initial_weights_of_a_file(data, tmp_path, plain):
    """A certificate does not claim that the seed gave the weights of a network from a file."""
    path = tmp_path / "own.py"
    path.write_text(NETWORK_FILE.format(plain=plain))
    words = "--network", f"{path}:network"
    run = train_run(data, tmp_path / "run", *words, "--epochs", 1, "--mixup", 0)
    assert_equal(run, data, *words)
    # A kept checkpoint has the initial weights, too.
    result = audit(run, data)
    assert result.code == 0 and result.rows("initial weights")[0][0] == "other"
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match=r"^--network \(in Python net=\): expected the network"):
        audit(run, data)


def test_a_layer_with_an_infinite_number(data, tmp_path):
    """JSON has no infinite numbers. The layer's name is not one, though it reads like one."""
    path = tmp_path / "own.py"
    path.write_text(NETWORK_FILE.format(plain=""))
    run = train_run(data, tmp_path / "run", "--network", f"{path}:infinite", "--epochs", 1)
    assert_equal(run, data)


def test_a_certificate_without_the_other_files(data, tmp_path):
    """Only the certificate is necessary. The manifest tells which images differ, if any do."""
    run = train_run(data, tmp_path / "run", "--epochs", 1)
    folder = tmp_path / "alone"
    folder.mkdir()
    shutil.copy(run / "certificate.json", folder)
    result = audit(folder / "certificate.json", data)
    assert result.code == 0, result.lines
    verdicts = [result.rows(name)[0][0] for name in ("manifest", "model", "data")]
    assert verdicts == ["unchecked", "unchecked", "equal"]


def test_images_in_parts(data, tmp_path):
    """An auditor may have the images to train on without those of the test."""
    run = train_run(data, tmp_path / "run", "--epochs", 1)
    with np.load(data) as arrays:
        names = "images", "labels", "classes"
        np.savez(tmp_path / "train.npz", **{name: arrays[name] for name in names})
        test = {name: arrays[f"{name}_test"] for name in ("images", "labels")}
        np.savez(tmp_path / "test.npz", **test, classes=arrays["classes"])
    result = audit(run, tmp_path / "train.npz")
    assert result.code == 0 and result.rows("test")[0][0] == "unchecked", result.lines
    assert_equal(run, tmp_path / "train.npz", "--test-data", tmp_path / "test.npz")


def test_images_without_names_of_classes(data, tmp_path):
    run = train_run(data, tmp_path / "run", "--epochs", 1)
    with np.load(data) as arrays:
        np.savez(tmp_path / "set.npz", **{n: a for n, a in arrays.items() if n != "classes"})
    assert_equal(run, tmp_path / "set.npz")


# Runs of Python programs.


def network(**options):
    return dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.Dense(3)], (1, SIDE, SIDE), **options)


def images(first=0, last=48):
    contents = arrays()
    pixels, labels = (contents[name][first:last] for name in ("images", "labels"))
    return dl.ArrayDatastore(pixels, labels, classes=CLASSES)


def options_of(**options):
    common = {"epochs": 3, "batch_size": 16, "verbose": "off", "plots": "none"}
    common |= {"certify": "public", "certify_every": 2, "checkpoint_keep": 4}
    return dl.TrainingOptions(**common | options)


def train(out, **options):
    keywords = {name: options.pop(name) for name in ("hooks", "optimizer") if name in options}
    resume = options.pop("resume", None)
    keywords |= {"resume": out} if resume else {"out": out}
    return dl.train(network(), images(), options_of(**options), world=one_world(), **keywords)


def assert_audited(out, options=None, **keywords):
    for selection in ({}, {"sample": 2}):
        arguments = {"world": one_world(), **keywords, **selection}
        result = dl.audit(out, images(), options, **arguments)
        assert result.is_equal, str(result)


class Validate:
    """A hook that validates at iterations that no option names."""

    def step(self, trainer):
        if trainer.position.iteration in (3, 7):
            trainer.validate()

    def epoch(self, trainer, summary):
        trainer.validate()


def test_a_hook_that_validates(tmp_path):
    options = {"validation": images(48, 72), "validation_frequency": 50}
    options |= {"output_network": "best-validation", "learning_rate": 0.5}
    result = train(tmp_path, hooks=[Validate()], **options)
    assert result.history.validation.iteration.tolist() == [3, 6, 7, 9]
    assert_audited(tmp_path, options_of(**options))


def test_a_signal_in_a_validation(tmp_path, monkeypatch):
    """The job that resumes makes the validation, after the state of its iteration."""
    run = Validation.run

    def interrupted(self, net, iteration, signals=None, progress=None):
        if iteration == 4 and signals is not None:
            signals.name = "SIGUSR1"
        return run(self, net, iteration, signals, progress)

    options = {"validation": images(48, 72), "validation_frequency": 2}
    options |= {"output_network": "best-validation"}
    with monkeypatch.context() as patches:
        patches.setattr(Validation, "run", interrupted)
        assert train(tmp_path, **options).stopped == "SIGUSR1"
    train(tmp_path, **options, resume=True)
    kinds = [link["kind"] for link in chain(tmp_path) if link["iteration"] == 4]
    assert kinds == ["state", "start", "validation"]
    assert_audited(tmp_path, options_of(**options))


def test_validation_images_that_an_auditor_does_not_pass(tmp_path):
    train(tmp_path, validation=images(48, 72))
    with pytest.raises(UserError, match="^--validation-data .* the 24 images of the run"):
        dl.audit(tmp_path, images(), world=one_world())


class Diverging:
    """A run of 8 iterations per epoch that returns from iteration 48 to iteration 40."""

    options = {"epochs": 8, "batch_size": 4, "loss": "mse", "momentum": 0.0, "learning_rate": 0.8}

    def __init__(self, out):
        self.out = out
        pixels = np.random.default_rng(0).integers(0, 256, (32, 1, 4, 4), dtype=np.uint8)
        targets = (pixels.mean((1, 2, 3)) / 255).astype(np.float32)
        self.images = dl.ArrayDatastore(pixels, targets=targets)

    def train(self, is_resumed=False, **options):
        options = options_of(**self.options | {"on_nan": "rollback"} | options)
        net = dl.Network([dl.Dense(1)], (1, 4, 4), seed=0)
        place = {"resume": self.out} if is_resumed else {"out": self.out}
        return dl.train(net, self.images, options, world=one_world(), **place)

    def assert_audited(self, last):
        counts = {x["iteration"]: x["rollbacks"] for x in chain(self.out) if x["kind"] == "state"}
        assert counts[40] == 0 and counts[last] == 1
        for selection in ({}, {"sample": 3}, {"steps": (41, 44)}):
            result = dl.audit(self.out, self.images, world=one_world(), **selection)
            assert result.is_equal, str(result)


@pytest.mark.parametrize("interval", [43, 0])
def test_a_rollback_to_before_a_resume(tmp_path, interval):
    """The second job repeats iterations of the first one, and may keep other states of them."""
    run = Diverging(tmp_path)
    run.train(max_iterations=45)
    run.train(is_resumed=True, checkpoint_every=interval, max_iterations=52)
    assert [x["iteration"] for x in chain(tmp_path) if x["kind"] == "start"] == [0, 40]
    run.assert_audited(48)


def test_a_checkpoint_of_iterations_that_a_run_has_repeated(tmp_path):
    """The previous checkpoint is older than the rollback, so no state of the run is that one."""
    run = Diverging(tmp_path)
    run.train(max_iterations=45, checkpoint_keep=0)
    run.train(is_resumed=True, max_iterations=48, checkpoint_keep=0, certify_every=5)
    position = checkpoint.load(tmp_path / "checkpoint-previous.h5")[1]["position"]
    assert (position["iteration"], position["rollbacks"]) == (45, 0)
    run.assert_audited(48)


def test_a_signal_just_after_a_rollback(tmp_path, monkeypatch):
    """The last checkpoint, which the run may keep, has more rollbacks than its state."""
    restore = Rollback.restore

    def interrupted(self, trainer, problem):
        restore(self, trainer, problem)
        trainer.signals.name = "SIGUSR1"

    run = Diverging(tmp_path)
    with monkeypatch.context() as patches:
        patches.setattr(Rollback, "restore", interrupted)
        assert run.train().stopped == "SIGUSR1"
    run.train(is_resumed=True, max_iterations=48)
    position = checkpoint.load(checkpoint.path_of(tmp_path, 40))[1]["position"]
    assert (position["iteration"], position["rollbacks"]) == (40, 1)
    run.assert_audited(48)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_rollback_without_cause_is_different(tmp_path, monkeypatch, is_resumed):
    """A rollback halves the learning rate, so a run must not claim one that never came."""
    run, step, is_done = Diverging(tmp_path), Rollback.step, []

    def forged(self, trainer):
        step(self, trainer)
        if trainer.position.iteration == 46 and not is_done:
            is_done.append(True)
            raise NotFinite("the loss is not finite", "")

    rate = {"learning_rate": 0.01}
    if is_resumed:
        run.train(max_iterations=40, **rate)
    with monkeypatch.context() as patches:
        patches.setattr(Rollback, "step", forged)
        run.train(is_resumed=is_resumed, max_iterations=52, **rate)
    counts = {x["iteration"]: x["rollbacks"] for x in chain(tmp_path) if x["kind"] == "state"}
    assert is_done and counts[40] == 0 and counts[48] == 1
    for selection in ({}, {"steps": (41, 48)}):
        result = dl.audit(tmp_path, run.images, world=one_world(), **selection)
        assert not result.is_equal, str(result)
        assert any("rolled back 1 times, the replay has not" in f.text for f in result.findings)


class Signs:
    """An optimizer that follows the signs of the gradients."""

    def __init__(self, learning_rate):
        self.learning_rate = learning_rate

    def __call__(self, parameters, gradients):
        rate = np.float32(self.learning_rate)
        return {name: p - rate * np.sign(gradients[name]) for name, p in parameters.items()}

    def state(self):
        return {}

    def load_state(self, state):
        pass


def test_options_that_an_auditor_passes(tmp_path):
    """An optimizer has the learning rate, and the options may be those of any job."""
    train(tmp_path, optimizer=Signs(1e-3))
    train(tmp_path, optimizer=Signs(1e-3), resume=True, epochs=4)
    for epochs in (3, 4):
        options = options_of(epochs=epochs)
        assert_audited(tmp_path, options, optimizer=Signs(1e-3))
    result = dl.audit(tmp_path, images(), options_of(epochs=5), optimizer=Signs(1e-3))
    assert result.differing == ["options"]
    with pytest.raises(UserError, match="^options: expected TrainingOptions, found dict"):
        dl.audit(tmp_path, images(), {"epochs": 3})
