"""Test runs that return to an earlier state because a weight or the loss is not finite."""

import numpy as np
import pytest
from short_training import pictures, small
from single_rank import numbers

import mpidl as dl
from mpidl.errors import Fault
from mpidl.report import metrics
from mpidl.training.files import checkpoint

pytestmark = pytest.mark.usefixtures("without_plots")
PER_EPOCH = 3  # iterations per epoch
SLOW = pytest.mark.slow("ranks")
SLOW_ON_RANKS = pytest.mark.slow_on_ranks


class Spoil:
    """A hook that makes a weight NaN after given iterations, once per iteration."""

    def __init__(self, *iterations, element=np.nan):
        self.iterations_left, self.element = list(iterations), element

    def step(self, trainer):
        if trainer.position.iteration in self.iterations_left:
            self.iterations_left.remove(trainer.position.iteration)
            weight = np.array(trainer.net.parameters["dense1.weight"])
            weight.flat[0] = self.element
            trainer.net.parameters["dense1.weight"] = weight


class Stop:
    def __init__(self, iteration):
        self.iteration_of_stop = iteration

    def step(self, trainer):
        if trainer.position.iteration == self.iteration_of_stop:
            trainer.stop()


def train(world, hooks=(), out=None, resume=None, **options):
    net = small()
    options = {"epochs": 4, "batch_size": 40, "verbose": "off", "on_nan": "rollback"} | options
    result = dl.train(
        net,
        pictures(100),
        dl.TrainingOptions(**options),
        world=world,
        hooks=hooks,
        out=out,
        resume=resume,
    )
    return dl.weights_sha256(net), result


def halved_after(*iterations, rate=0.01):
    """Return a schedule that halves the learning rate after each given iteration."""
    return lambda epoch, i: rate * 0.5 ** sum(i > after for after in iterations)


@pytest.mark.parametrize(
    ("spoiled", "interval", "returns"),
    [
        pytest.param(
            [4], 0, [3], marks=SLOW_ON_RANKS
        ),  # the loss of iteration 5 is NaN; epoch 1 ended with iteration 3
        ([5], 2, [4]),  # the run returns to a periodic checkpoint
        pytest.param([1], 0, [0], marks=SLOW_ON_RANKS),
        # a weight becomes NaN at the end of an epoch, before the state of the epoch is kept
        pytest.param([6], 0, [3], marks=SLOW_ON_RANKS),
        pytest.param([4, 8, 10], 0, [3, 6, 9], marks=SLOW_ON_RANKS),
    ],
)
def test_the_run_continues_from_the_last_state_with_half_the_rate(
    world, spoiled, interval, returns
):
    weights, result = train(world, [Spoil(*spoiled)], checkpoint_every=interval)
    assert result.rollbacks == len(returns) and result.iterations == 4 * PER_EPOCH
    expected, plain = train(world, learn_rate_schedule=halved_after(*returns))
    assert weights == expected and plain.rollbacks == 0
    assert weights != train(world)[0]  # negative control: the learning rate matters
    iterations = result.history.iteration
    assert iterations.iteration.tolist() == list(range(1, 13))
    expected_rates = [halved_after(*returns)(0, i) for i in range(1, 13)]
    assert iterations.learning_rate.tolist() == expected_rates


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_run_returns_from_a_last_update_that_is_not_finite(world, tmp_path, has_folder):
    """No loss follows the last update, and this one is not at the end of an epoch."""

    class Finish:
        count = 0

        def finish(self, trainer):
            self.count += 1

    out = world.broadcast(str(tmp_path / "run")) if has_folder else None
    spoil, finish = Spoil(5), Finish()
    weights, result = train(world, [spoil, finish], out=out, max_iterations=5)
    expected, plain = train(world, max_iterations=5, learn_rate_schedule=halved_after(3))
    assert (weights, result.iterations, result.rollbacks) == (expected, 5, 1)
    assert result.history.iteration.loss.tolist() == plain.history.iteration.loss.tolist()
    assert finish.count == 1 and spoil.iterations_left == []
    with pytest.raises(Fault, match="dense1.weight is not finite after iteration 5"):
        train(world, [Spoil(5)], on_nan="stop", max_iterations=5)


@pytest.mark.slow_on_ranks
def test_the_option_does_not_change_a_run_without_nan(world):
    assert train(world)[0] == train(world, on_nan="stop")[0]


def test_without_rollback_the_run_ends(world):
    with pytest.raises(Fault, match="the loss is nan at epoch 2, iteration 5"):
        train(world, [Spoil(4)], on_nan="stop")


@pytest.mark.slow_on_ranks
def test_the_number_of_rollbacks_is_limited(world):
    class Always(Spoil):
        def step(self, trainer):
            self.iterations_left = [4]
            super().step(trainer)

    text = r"the loss is nan at epoch 2, iteration 5.*; the run has rolled back 5 times \(--on-nan"
    with pytest.raises(Fault, match=text):
        train(world, [Always(4)])


@pytest.mark.parametrize(
    ("interval", "stop"),
    [
        pytest.param(0, 4, marks=SLOW_ON_RANKS),
        (2, 7),
        *(pytest.param(*pair, marks=SLOW) for pair in [(0, 5), (0, 7), (2, 4), (2, 5)]),
    ],
)
def test_a_resumed_run_returns_to_the_same_states(world, tmp_path, interval, stop):
    """A checkpoint between two kept states also stores the kept state."""
    out = world.broadcast(str(tmp_path / "run"))
    expected, _ = train(world, [Spoil(5, 8)], checkpoint_every=interval)
    hooks = [Spoil(5, 8), Stop(stop)]
    _, stopped = train(world, hooks, out=out, checkpoint_every=interval)
    assert stopped.stopped is not None and stopped.iterations <= stop
    left = hooks[0].iterations_left
    weights, result = train(world, [Spoil(*left)], resume=out, checkpoint_every=interval)
    assert weights == expected and result.rollbacks == 2
    if world.rank == 0:
        records = [r for r in metrics.read(f"{out}/metrics.jsonl") if r["kind"] == "iteration"]
        assert [r["iteration"] for r in records] == list(range(1, 13))


@pytest.mark.slow_on_ranks
def test_a_regular_checkpoint_stores_one_state(world, tmp_path):
    out = world.broadcast(str(tmp_path / "run"))
    train(world, out=out)
    arrays, facts = checkpoint.load(out)
    assert not any(table.startswith("rollback") for table in arrays) and "rollback" not in facts


def test_the_validation_is_restored(world):
    """A rollback also restores the best network and the validation results."""
    options = {
        "validation": pictures(30, "others"),
        "validation_frequency": 2,
        "output_network": "best-validation",
        "checkpoint_every": 2,
    }
    weights, result = train(world, [Spoil(7)], **options)
    schedule = halved_after(6)
    expected, plain = train(world, learn_rate_schedule=schedule, **options)
    assert weights == expected and result.best_iteration == plain.best_iteration
    iterations = result.history.validation.iteration.tolist()
    assert iterations == plain.history.validation.iteration.tolist()


@pytest.mark.slow_on_ranks
def test_state_of_the_optimizer(world):
    options = {"solver": "adam", "learning_rate": 0.01}
    weights, result = train(world, [Spoil(4, element=np.inf)], **options)
    expected, _ = train(world, learn_rate_schedule=halved_after(3), **options)
    assert weights == expected and result.rollbacks == 1


class SpoilInPlace:
    """A hook that makes a weight infinite in place, so that a recorded step stays valid."""

    def __init__(self, iteration, element=np.inf):
        self.last_good, self.element = iteration, element

    def step(self, trainer):
        if trainer.position.iteration == self.last_good:
            self.last_good = None
            trainer.net.parameters["conv2.weight"][...] = self.element


def two_terms(net, images, targets):
    scores = net(images)
    return dl.softmax_cross_entropy(scores, targets) + dl.dice_loss(scores, targets)


def segment(world, loss, hooks=(), on_nan="rollback", outputs=2, **options):
    images = numbers("pixels to segment", 60, 1, 6, 6, low=0, high=255).astype(np.uint8)
    store = dl.ArrayDatastore(images, targets=(images[:, 0] > 127).astype(np.uint8))
    layers = [dl.Conv2D(3, 4, padding=1), dl.ReLU(), dl.Conv2D(1, outputs)]
    net = dl.Network(layers, (1, 6, 6), seed=1)
    options = {"epochs": 4, "batch_size": 20, "verbose": "off"} | options
    options = dl.TrainingOptions(loss=loss, on_nan=on_nan, **options)
    result = dl.train(net, store, options, world=world, hooks=hooks)
    return dl.weights_sha256(net), result


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("loss", ["crossentropy+dice", two_terms])
def test_a_loss_of_several_terms_is_reported_and_rolled_back(world, loss, graphs):
    place = "all ranks" if world.size < 3 else "rank 0, 1"  # the mini-batch has two blocks
    text = f"the loss is nan at epoch 3, iteration 8, on {place};"
    with pytest.raises(Fault, match=text):
        segment(world, loss, [SpoilInPlace(7)], "stop", graphs=graphs)
    weights, result = segment(world, loss, [SpoilInPlace(7)], graphs=graphs)
    expected, _ = segment(world, loss, learn_rate_schedule=halved_after(6), graphs=graphs)
    assert weights == expected and result.rollbacks == 1


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        ("crossentropy", 2),
        ("dice", 2),
        pytest.param("dice", 1, marks=SLOW_ON_RANKS),
        pytest.param(dl.Dice(generalized=True), 2, marks=SLOW_ON_RANKS),
    ],
    ids=str,
)
def test_nan_weights_end_a_run_with_any_loss(world, loss, outputs, graphs):
    """The next loss is NaN. After the last update, no loss follows, so the weights are checked."""
    for spoiled, text in (
        (7, "the loss is nan at epoch 3, iteration 8"),
        (12, "conv2.weight is not finite after iteration 12, on all ranks"),
    ):
        hooks = [SpoilInPlace(spoiled, np.nan)]
        with pytest.raises(dl.errors.NotFinite, match=text):
            segment(world, loss, hooks, "stop", outputs, graphs=graphs)
