"""Test averages of the weights: their values, and when they replace the weights."""

import copy

import numpy as np
import pytest
from parameter_tables import SHAPES, distance, tables
from short_training import pictures, small, trained

import mpidl as dl
from mpidl.errors import UserError
from mpidl.training.batchnorm_population import population_state
from mpidl.training.files.model_file import weights_sha256
from mpidl.training.weight_average import WeightAverage


class Weights:
    """A hook that copies the learnables after each iteration."""

    def __init__(self):
        self.tables = []

    def step(self, trainer):
        trainer.wait()
        self.tables.append({n: np.array(a) for n, a in trainer.net.parameters.items()})


def options(**changes):
    base = {"epochs": 4, "batch_size": 40, "verbose_every": 0, "validation_frequency": 0}
    return dl.TrainingOptions(**base | changes)


def train(world, net=None, hooks=(), optimizer=None, **changes):
    """Train for 4 epochs of 3 iterations."""
    net = small() if net is None else net
    settings = options(**changes)
    result = dl.train(net, pictures(100), settings, world=world, hooks=hooks, optimizer=optimizer)
    return net, result


@pytest.mark.parametrize("kind", ["ema", "swa"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_averages_are_those_of_pytorch(kind, dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = torch.nn.Module()
    for i, array in enumerate(tables(0, np.float64).values()):
        model.register_parameter(str(i), torch.nn.Parameter(torch.tensor(array)))
    function = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if kind == "ema" else {}
    averaged = AveragedModel(model, **function)
    optimizer = dl.SGDM(0.1, learning_rate_factors={"conv1.bias": 0.5})
    optimizer.keep_average()
    average = WeightAverage(options(average=kind, average_decay=0.9, average_every=2), optimizer)
    weights = tables(0, dtype)
    for step in range(1, 41):  # 10 epochs of 4 iterations
        average.prepare_step(step, 4)
        weights = optimizer(weights, tables(step, dtype))
        if average.share(step, 4):
            with torch.no_grad():
                for i, weight in enumerate(weights.values()):
                    getattr(model, str(i)).copy_(torch.tensor(weight))
            averaged.update_parameters(model)
    expected = (p.detach().numpy() for p in averaged.module.parameters())
    expected = dict(zip(SHAPES, expected, strict=True))
    assert distance(optimizer.averages, expected) < (1e-14 if dtype == np.float64 else 2e-6)
    assert distance(weights, expected) > 0.1
    assert averaged.n_averaged == {"ema": 20, "swa": 14}[kind]


def test_shares_of_the_weights():
    def shares(**changes):
        average = WeightAverage(options(epochs=8, average_decay=0.75, **changes), dl.SGDM())
        return [average.share(i, 2) for i in range(1, 17)]

    assert shares(average="ema") == [1, *[0.25] * 15]
    assert shares(average="ema", average_start=3, average_every=3) == [
        *([0] * 6),
        *[1, 0, 0, 0.25, 0, 0, 0.25, 0, 0, 0.25],
    ]
    thirds = [1 / 3, 0, 1 / 4, 0, 1 / 5]
    assert shares(average="swa", average_start=1)[1:10] == [1, 0, 1 / 2, 0, *thirds]
    assert shares(average="swa") == [*[0] * 13, 1, 0, 1 / 2]  # starts in epoch 7 of 8
    assert shares(average="swa", average_start=8, average_every=1)[-3:] == [0, 1, 1 / 2]


def expected_ema(weights, decay):
    """Return the moving average after each table of weights, computed in float64."""
    average = {name: a.astype(np.float64) for name, a in weights[0].items()}
    averages = [average]
    for table in weights[1:]:
        average = {n: decay * a + (1 - decay) * table[n] for n, a in average.items()}
        averages.append(average)
    return averages


@pytest.mark.slow_on_ranks
def test_the_average_is_validated_and_becomes_the_network(world):
    """Validation and the final network use the averaged weights.

    The population statistics of batch normalization are computed with these weights.
    """
    snapshots, raw, test_set = Weights(), Weights(), pictures(30, "others")
    settings = {"average": "ema", "average_decay": 0.8, "learning_rate": 0.1}
    net, result = train(world, hooks=[snapshots], validation=test_set, **settings)
    plain, _ = train(world, hooks=[raw], validation=test_set, learning_rate=0.1)
    assert all(
        a[n].tobytes() == b[n].tobytes()
        for a, b in zip(snapshots.tables, raw.tables, strict=True)
        for n in a
    )
    average = expected_ema(snapshots.tables, 0.8)[-1]
    for name, weight in net.parameters.items():
        np.testing.assert_allclose(weight, average[name], rtol=1e-5, atol=1e-6)
    last = snapshots.tables[-1]["dense1.weight"]
    assert np.abs(net.parameters["dense1.weight"] - last).max() > 1e-3
    queue = dl.MinibatchQueue(pictures(100), 40, 0, world, "never", **net.input_transform())
    statistics = population_state(net, queue, world)
    assert all(np.array_equal(net.state[name], a) for name, a in statistics.items())
    assert any((plain.state[name] != a).any() for name, a in net.state.items())

    assert result.validation_loss == dl.evaluate(net, test_set, world=world).loss
    unaveraged, _ = train(world, average_use="raw", **settings)
    assert weights_sha256(unaveraged) == weights_sha256(plain) != weights_sha256(net)


@pytest.mark.slow_on_ranks
def test_the_best_network_has_averaged_weights(world):
    snapshots, test_set = Weights(), pictures(30, "others")
    settings = {"average": "swa", "average_start": 2, "average_every": 1, "learning_rate": 0.05}
    net, result = train(
        world, hooks=[snapshots], validation=test_set, output_network="best-validation", **settings
    )
    assert result.best_iteration > 3
    tables = snapshots.tables[3 : result.best_iteration]
    for name, weight in net.parameters.items():
        mean = np.mean([table[name] for table in tables], axis=0, dtype=np.float64)
        np.testing.assert_allclose(weight, mean, rtol=1e-5, atol=1e-6)


def test_an_average_that_never_begins_is_refused():
    with pytest.raises(dl.UserError, match="--average-start 9: expected at most --epochs 4"):
        dl.TrainingOptions(average="swa", average_start=9, epochs=4)


def test_an_average_that_has_not_begun_is_not_used(world):
    plain, _ = train(world, max_iterations=5)
    for start in ({"average": "swa"}, {"average": "ema", "average_start": 3}):
        assert weights_sha256(train(world, max_iterations=5, **start)[0]) == weights_sha256(plain)


@pytest.mark.slow_on_ranks
def test_recorded_and_eager_steps_have_the_same_average(world):
    hashes = {
        weights_sha256(train(world, average="ema", average_decay=0.5, graphs=graphs)[0])
        for graphs in ("auto", "off")
    }
    assert len(hashes) == 1


def test_frozen_learnables_keep_their_bytes(world):
    net = small().freeze("conv1")
    before = copy.deepcopy(net.parameters)
    train(world, net, average="ema", average_decay=0.5)
    assert net.parameters["conv1.weight"].tobytes() == before["conv1.weight"].tobytes()
    assert np.abs(net.parameters["dense1.weight"] - before["dense1.weight"]).max() > 0


def test_an_optimizer_of_the_user(world):
    """A built-in optimizer keeps the average only in runs that request it.

    A custom optimizer cannot keep an average.
    """
    sgdm = dl.SGDM(0.1)
    averaged, _ = train(world, optimizer=sgdm, average="ema", average_decay=0.5)
    assert set(sgdm.averages) == set(averaged.parameters)
    train(world, optimizer=sgdm)
    assert sgdm.averages == {} and sgdm.average_share is None

    class Custom:
        learning_rate = 0.1

        def __call__(self, parameters, gradients):
            return dict(parameters)

        def state(self):
            return {}

        def load_state(self, state):
            pass

    with pytest.raises(UserError, match="--average swa: expected an optimizer of mpidl, which"):
        train(world, optimizer=Custom(), average="swa")


def test_more_epochs_would_move_the_start_of_swa(world, tmp_path, without_plots):
    out = world.broadcast(str(tmp_path))
    for start, text in ((None, "it cannot increase with --average swa"), (2, None)):
        settings = options(average="swa", average_start=start, epochs=2)
        dl.train(small(), pictures(40), settings, world=world, out=out, overwrite=True)
        longer = options(average="swa", average_start=start, epochs=3)
        if text is None:
            assert dl.train(small(), pictures(40), longer, world=world, resume=out).epochs == 3
        else:
            with pytest.raises(UserError, match=text):
                dl.train(small(), pictures(40), longer, world=world, resume=out)


def test_trained_alone_and_with_an_average(world):
    """The average does not affect the training steps, so the loss is unchanged."""
    _, plain = trained(world)
    _, averaged = trained(world, average="ema")
    assert plain.loss == averaged.loss


def test_a_second_training_starts_its_average_anew(world):
    """A second training with an optimizer starts a new average, even if the old average is NaN."""
    used, fresh = dl.SGDM(0.05, momentum=0), dl.SGDM(0.05, momentum=0)
    for kind in ("ema", "swa"):
        train(world, optimizer=used, average=kind)
        for array in used.averages.values():
            array[...] = np.nan
        expected, _ = train(world, optimizer=fresh, average=kind, average_start=2)
        fresh.keep_average(False)
        net, _ = train(world, optimizer=used, average=kind, average_start=2)
        assert weights_sha256(net) == weights_sha256(expected)
