"""Test custom hooks and optimizers in `dl.train`. The tests pass on any number of ranks."""

import os

import numpy as np
import pytest
from short_training import pictures, small, trained

import mpidl as dl
from mpidl.errors import UserError
from mpidl.training.files import checkpoint

pytestmark = pytest.mark.usefixtures("without_plots")


class Recorder:
    """A hook that records its calls."""

    def __init__(self):
        self.events, self.losses = [], []

    def start(self, trainer):
        self.events.append(("start", trainer.position.iteration))

    def iteration(self, trainer, result):
        self.events.append(("iteration", result.info.iteration))
        self.losses.append(result.loss)
        assert 0 <= result.accuracy <= 1 and result.images_per_second > 0

    def step(self, trainer):
        self.events.append(("step", trainer.position.iteration))

    def epoch(self, trainer, summary):
        self.events.append(("epoch", summary.epoch))
        assert summary.loss == pytest.approx(np.average(self.losses[-3:], weights=[40, 40, 20]))

    def finish(self, trainer):
        self.events.append(("finish", trainer.position.iteration))

    def end(self, trainer):
        self.events.append(("end", trainer.position.iteration))


def one_rank():
    from mpi4py import MPI

    return dl.World(MPI.COMM_SELF, threads=1)


PIECEWISE = {"learn_rate_schedule": "piecewise", "learn_rate_drop_period": 1}


def train(world, hooks=(), optimizer=None, options=(), **arguments):
    net, options = small(), {"epochs": 2, "batch_size": 40, "verbose_every": 0, **dict(options)}
    arguments |= {"hooks": hooks, "optimizer": optimizer}
    return net, dl.train(
        net, pictures(100), dl.TrainingOptions(**options), world=world, **arguments
    )


def test_events_come_in_order_on_every_rank(world):
    recorder = Recorder()
    net, _ = train(world, [recorder])
    expected = [("start", 0)]
    for epoch in (1, 2):
        for iteration in range(3 * epoch - 2, 3 * epoch + 1):
            expected += [("iteration", iteration), ("step", iteration)]
        expected.append(("epoch", epoch))
    assert recorder.events == [*expected, ("finish", 6), ("end", 6)]
    assert dl.weights_sha256(net) == dl.weights_sha256(trained(world)[0])


def test_a_wrong_hook_is_refused_before_any_file_is_written(world, tmp_path):
    out = world.broadcast(str(tmp_path / "run"))
    train(world, out=out)
    world.barrier()  # wait until rank 0 has removed the lock
    files = sorted(os.listdir(out))
    world.barrier()
    for hooks, text in (
        (Recorder(), "hooks: expected a list of hooks, found Recorder"),
        (None, "expected a list of hooks, found NoneType"),
        ([Recorder], "found the class Recorder itself"),
        ([object()], "hooks: object has none of the methods of a hook: start, iteration"),
        ([len], "has none of the methods of a hook"),
    ):
        with pytest.raises(UserError, match=text):
            train(world, hooks, out=out, overwrite=True)
    assert sorted(os.listdir(out)) == files


class StopsOnOneRank:
    def __init__(self, rank, iteration):
        self.rank, self.iteration_to_stop = rank, iteration

    def step(self, trainer):
        if (trainer.world.rank, trainer.position.iteration) == (self.rank, self.iteration_to_stop):
            trainer.stop()


def test_a_stop_on_one_rank_ends_all_with_a_checkpoint(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    net, result = train(world, [StopsOnOneRank(world.size - 1, 4)], out=out)
    assert (result.stopped, result.iterations) == ("output_function", 4)
    net, result = train(world, resume=out)
    assert result.iterations == 6
    assert dl.weights_sha256(net) == dl.weights_sha256(trained(world)[0])


class Averages:
    """A hook that reads the network and calls collective operations after every step."""

    def __init__(self):
        self.norms = []

    def step(self, trainer):
        trainer.wait()
        norm = sum(float(np.square(p).sum()) for p in trainer.net.parameters.values())
        self.norms.append(trainer.world.gop("max", norm) - trainer.world.gop("min", norm))


def test_hooks_may_be_collective(world):
    averages = Averages()
    train(world, [averages])
    assert averages.norms == [0.0] * 6


class SignSGD:
    """A custom optimizer: w <- w - learning_rate * sign(m), where m <- 0.9 m + 0.1 g."""

    def __init__(self, learning_rate):
        self.learning_rate, self.means = learning_rate, {}

    def __call__(self, parameters, gradients):
        updated = dict(parameters)
        for name, gradient in gradients.items():
            mean = np.float32(0.9) * self.means.get(name, np.float32(0))
            self.means[name] = mean + np.float32(0.1) * gradient
            step = np.float32(self.learning_rate) * np.sign(self.means[name])
            updated[name] = parameters[name] - step
        return updated

    def state(self):
        return {f"mean.{name}": mean for name, mean in self.means.items()}

    def load_state(self, state):
        self.means = {name.removeprefix("mean."): mean for name, mean in state.items()}


def test_a_custom_optimizer(world, tmp_path):
    """A custom optimizer gives the same weights on any number of ranks, and can be resumed."""
    net, _ = train(world, optimizer=SignSGD(0.01))
    single, _ = train(one_rank(), optimizer=SignSGD(0.01))
    assert dl.weights_sha256(net) == dl.weights_sha256(single)
    assert dl.weights_sha256(net) != dl.weights_sha256(trained(world)[0])

    out = world.broadcast(str(tmp_path))
    train(world, [StopsOnOneRank(0, 4)], SignSGD(0.01), out=out)
    arrays, facts = world.broadcast(checkpoint.load(out) if world.rank == 0 else None)
    assert facts["optimizer"] == ["SignSGD", []] and "mean.conv1.weight" in arrays["optimizer"]
    resumed, _ = train(world, (), SignSGD(0.01), resume=out)
    assert dl.weights_sha256(resumed) == dl.weights_sha256(net)
    with pytest.raises(UserError, match="optimizer: expected SignSGD, .* found SGDM"):
        train(world, optimizer=dl.SGDM(0.01), resume=out)
    with pytest.raises(UserError, match="expected SignSGD, .* found the options' solver"):
        train(world, resume=out)
    with pytest.raises(UserError, match="--learning-rate was 0.01, is 0.02"):
        train(world, optimizer=SignSGD(0.02), resume=out)


def test_a_built_in_optimizer_as_an_argument(world):
    net, _ = train(world, optimizer=dl.SGDM(0.05, l2=1e-4, **small().factors))
    assert dl.weights_sha256(net) == dl.weights_sha256(trained(world, learning_rate=0.05)[0])


def test_schedules_start_from_its_learning_rate(world):
    rates = []

    class Rates:
        def iteration(self, trainer, result):
            rates.append(result.info.learning_rate)

    optimizer = SignSGD(0.5)
    train(world, [Rates()], optimizer, PIECEWISE)
    assert rates == pytest.approx([0.5] * 3 + [0.05] * 3, rel=1e-12)
    assert optimizer.learning_rate == 0.5  # the rate is restored after training


def test_a_wrong_optimizer_is_refused(world):
    with pytest.raises(UserError, match="optimizer: .* found float without learning_rate"):
        train(world, optimizer=0.1)
    with pytest.raises(UserError, match="expected a learning rate above 0, found None"):
        train(world, optimizer=SignSGD(None))


class Changed(SignSGD):
    def __init__(self, change):
        super().__init__(0.01)
        self.change = change

    def __call__(self, parameters, gradients):
        return self.change(super().__call__(parameters, gradients))


def wide(parameters):
    return {name: array.astype(np.float64) for name, array in parameters.items()}


def test_the_parameters_that_an_optimizer_returns_are_checked(world):
    for change, text in (
        (wide, "Changed: conv1.weight: expected float32 as before, found ndarray float64"),
        (lambda p: list(p), "Changed must return new parameters, found list"),
        (lambda p: {}, r"must return all parameters; missing \['conv1.weight'"),
        (lambda p: {n: a.ravel() for n, a in p.items()}, "conv1.weight: expected shape"),
    ):
        with pytest.raises(UserError, match=text):
            train(world, optimizer=Changed(change))
    reversed_order = Changed(lambda p: dict(reversed(p.items())))
    net, _ = train(world, optimizer=reversed_order)
    assert dl.weights_sha256(net) == dl.weights_sha256(train(world, optimizer=SignSGD(0.01))[0])


@pytest.mark.slow_on_ranks
def test_a_resumed_run_refuses_other_arguments_of_the_optimizer(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    train(world, [StopsOnOneRank(0, 4)], dl.SGDM(0.01, momentum=0.5), out=out)
    for other in (dl.SGDM(0.01), dl.SGDM(0.01, momentum=0.5, l2=0.1), None):
        with pytest.raises(UserError, match="optimizer: expected SGDM .*, found"):
            options = {} if other else {"learning_rate": 0.01}
            train(world, optimizer=other, resume=out, options=options)
    assert train(world, optimizer=dl.SGDM(0.01, momentum=0.5), resume=out)[1].iterations == 6


def test_an_optimizer_of_frozen_layers_needs_their_factors(world):
    net = small().freeze("conv1")
    with pytest.raises(UserError, match=r"SGDM\(..., \*\*net.factors\)"):
        dl.train(net, pictures(100), dl.TrainingOptions(epochs=1), world=world, optimizer=dl.SGDM())


class Waits:
    """A hook that waits for pending training steps and saves a checkpoint."""

    def __init__(self):
        self.iterations = []

    def iteration(self, trainer, result):
        self.iterations.append(result.info.iteration)
        trainer.wait()
        trainer.save()


def test_hooks_may_wait_and_save_at_any_time(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    hooks = [Waits(), Waits()]
    net, _ = train(world, hooks, out=out)
    assert [hook.iterations for hook in hooks] == [[1, 2, 3, 4, 5, 6]] * 2
    assert dl.weights_sha256(net) == dl.weights_sha256(trained(world)[0])
