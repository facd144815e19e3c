"""Test that validations describe the network that a run returns."""

import dataclasses

import numpy as np
import pytest
from short_training import pictures, small

import mpidl as dl
from mpidl.report import metrics
from mpidl.training.files import checkpoint
from mpidl.training.final_network import validated_network

pytestmark = pytest.mark.usefixtures("without_plots")
HELD_OUT = pictures(30, "held out")
OPTIONS = {"epochs": 2, "batch_size": 40, "verbose": "off", "validation": HELD_OUT}
SLOW_ON_RANKS = pytest.mark.slow_on_ranks


def train(world, net=None, out=None, resume=None, hooks=(), **options):
    net = small() if net is None else net
    options = dl.TrainingOptions(**OPTIONS | options)
    store = pictures(100)
    result = dl.train(net, store, options, world=world, out=out, resume=resume, hooks=hooks)
    return net, result


def validations(out):
    return [r for r in metrics.read(f"{out}/metrics.jsonl") if "validation" in r["kind"]]


def diverging(epoch, iteration):
    return 0.02 if iteration < 4 else 1.5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"output_network": "best-validation", "validation_frequency": 1},
        pytest.param({"average": "ema", "average_decay": 0.8}, marks=SLOW_ON_RANKS),
        pytest.param({"average": "ema", "output_network": "best-validation"}, marks=SLOW_ON_RANKS),
        pytest.param({"batchnorm_statistics": "moving"}, marks=SLOW_ON_RANKS),
        pytest.param({"validation_patience": 1, "validation_frequency": 1}, marks=SLOW_ON_RANKS),
        pytest.param({"accumulate": 2, "max_iterations": 5}, marks=SLOW_ON_RANKS),
    ],
    ids=lambda options: " ".join(map(str, options.values())) or "default",
)
def test_the_final_validation_is_of_the_returned_network(world, tmp_path, options):
    out = world.broadcast(str(tmp_path / "run"))
    options = {"learn_rate_schedule": diverging} | options
    net, result = train(world, out=out, metrics="f1", **options)
    evaluation = dl.evaluate(net, HELD_OUT, world=world, metrics="f1")
    assert result.validation_loss == evaluation.loss
    assert result.validation_accuracy == evaluation.accuracy
    final = result.history.final_validation
    assert final.loss.tolist() == [evaluation.loss]
    assert final.metrics["f1"].tolist() == [evaluation.metrics["f1"]]
    if world.rank == 0:
        record = validations(out)[-1]
        assert record["kind"] == "final_validation" and record["loss"] == evaluation.loss
        is_best = "output_network" in options
        assert record["iteration"] == (result.best_iteration if is_best else result.iterations)


def test_the_best_network_is_judged_with_its_final_statistics(world):
    """Each validation has the loss of the network that a run of so many iterations returns."""
    options = {"validation_frequency": 2, "learn_rate_schedule": diverging}
    _, result = train(world, output_network="best-validation", **options)
    losses = []
    for iteration in (2, 4, 6):
        net, _ = train(world, max_iterations=iteration, **options)
        losses.append(dl.evaluate(net, HELD_OUT, world=world).loss)
    assert result.history.validation.loss.tolist() == losses
    assert result.validation_loss == min(losses)


class Statistics:
    """A hook that compares a validation's statistics with a float64 mean over the mini-batches."""

    def __init__(self):
        self.states, self.compared = [], 0

    def start(self, trainer):
        self.states.append({k: np.float64(a) for k, a in trainer.net.state.items()})

    def step(self, trainer):
        self.start(trainer)
        state = validated_network(trainer, None).state
        for name, value in state.items():
            olds, news = (np.stack([s[name] for s in part]) for part in self.ends())
            of_batches = (news - 0.9 * olds) / 0.1
            shares = 0.9 ** np.arange(len(of_batches))[::-1, None]
            expected = (shares * of_batches).sum(axis=0) / shares.sum()
            np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-5)
            self.compared += 1
            # negative control: the stored statistics still contain their initial values
            assert np.abs(trainer.net.state[name] - expected).max() > 1e-3

    def ends(self):
        return self.states[:-1], self.states[1:]


@pytest.mark.parametrize("is_trained", [False, True])
def test_validations_leave_out_the_initial_statistics(world, is_trained):
    net, hook = small(), Statistics()
    if is_trained:  # the statistics of earlier images are left out, too
        net.state = {name: array + np.float32(0.5) for name, array in net.state.items()}
    train(world, net, hooks=[hook], max_iterations=4)
    assert hook.compared == 4 * 2


@pytest.mark.slow_on_ranks
def test_the_first_validation_is_close_to_the_final_one(world):
    _, result = train(world, epochs=4, learning_rate=0.02)
    during, final = result.history.validation, result.history.final_validation
    assert abs(during.accuracy[-1] - final.accuracy[-1]) < 0.1
    assert result.history.disagreement() is None or abs(during.loss[-1] / final.loss[-1] - 1) < 0.2


class StopAfter:
    def __init__(self, iteration):
        self.iteration_of_stop = iteration

    def step(self, trainer):
        if trainer.position.iteration == self.iteration_of_stop:
            trainer.stop()


@pytest.mark.parametrize("options", [{}, {"accumulate": 3, "batch_size": 48}])
def test_a_resumed_run_validates_as_one_that_never_stopped(world, tmp_path, options):
    out = world.broadcast(str(tmp_path / "run"))
    options = {"validation_frequency": 1} | options
    net, expected = train(world, **options)
    _, stopped = train(world, out=out, hooks=[StopAfter(2)], **options)
    assert stopped.iterations == 2 and len(stopped.history.final_validation) == 1
    resumed, result = train(world, resume=out, **options)
    assert dl.weights_sha256(resumed) == dl.weights_sha256(net)
    for kind in ("validation", "final_validation"):
        series, reference = getattr(result.history, kind), getattr(expected.history, kind)
        assert series.iteration.tolist() == reference.iteration.tolist()
        assert series.loss.tolist() == reference.loss.tolist()
    if world.rank == 0:
        kinds = [record["kind"] for record in validations(out)]
        assert kinds == ["validation"] * len(expected.history.validation) + ["final_validation"]


def test_a_checkpoint_keeps_initial_statistics_only_while_they_matter(world, tmp_path):
    out = world.broadcast(str(tmp_path / "run"))
    tables = []
    for decay in (0.1, 0.99):  # 0.01**6 is negligible
        net = small()
        net.layers[1].decay = decay
        train(world, net, out=f"{out}-{decay}")
        tables.append("initial_state" in checkpoint.load(f"{out}-{decay}")[0])
    assert tables == [True, False]


@pytest.mark.parametrize("limit", [5, None])
def test_a_validation_after_a_resume_replaces_its_record_and_has_the_rate(world, tmp_path, limit):
    """The last validation of a run follows its last checkpoint, so a resumed run repeats it."""
    out = world.broadcast(str(tmp_path / "run"))
    options = {"learn_rate_schedule": "cosine", "epochs": 3, "validation_frequency": 4}
    options |= {"max_iterations": limit}
    _, first = train(world, out=out, **options)
    records = validations(out) if world.rank == 0 else None
    _, resumed = train(world, resume=out, **options)
    rates = dict(
        zip(
            resumed.history.iteration.iteration,
            resumed.history.iteration.learning_rate,
            strict=True,
        )
    )
    for series in (resumed.history.validation, resumed.history.final_validation):
        assert series.learning_rate.tolist() == [rates[i] for i in series.iteration]
    assert resumed.history.validation.iteration.tolist() == [4, *([5] if limit else [8, 9])]
    if world.rank == 0:
        for a, b in zip(validations(out), records, strict=True):
            assert {**a, "seconds": 0} == {**b, "seconds": 0}


def test_without_validation_images_there_is_no_final_validation(world):
    _, result = train(world, validation=None)
    assert len(result.history.final_validation) == 0 and result.validation_loss is None


def test_visible_differences_are_noted(world, capsys):
    """At a high learning rate, moving statistics are those of earlier weights."""
    _, result = train(world, learning_rate=0.5, max_iterations=3, verbose="on")
    assert result.history.disagreement() is not None
    equal = dataclasses.replace(result.history, final_validation=result.history.validation)
    assert equal.disagreement() is None
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    expected = [f"note: {result.history.disagreement()}"] if world.rank == 0 else []
    assert lines == expected
