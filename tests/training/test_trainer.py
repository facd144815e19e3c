"""What options do in a training run; right on any number of ranks."""

import dataclasses
import io
import json

import numpy as np
import pytest
from short_training import SIDE, pictures, small, trained

import mpidl as dl
from mpidl.blocks import LANES
from mpidl.data import partition
from mpidl.errors import UserError
from mpidl.report import Console
from mpidl.training.files import checkpoint
from mpidl.training.files.model_file import weights_sha256
from mpidl.training.load_balancing import LoadBalancer
from mpidl.training.options import configuration

pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture(scope="module")
def world():
    return dl.World(threads=1)


# ---- schedules ----


def test_the_rate_of_each_iteration_is_told(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    known = dl.TrainingOptions(
        epochs=3,
        batch_size=40,
        learning_rate=0.5,
        learn_rate_schedule="piecewise",
        learn_rate_drop_period=1,
        warmup_iterations=2,
    )
    dl.train(small(), pictures(100), known, world=world, out=out)
    if world.rank == 0:
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        rates = [r["learning_rate"] for r in found if r["kind"] == "iteration"]
        assert rates == pytest.approx([0.05, 0.275, 0.5, *[0.05] * 3, *[0.005] * 3], rel=1e-12)


def test_a_function_of_epoch_and_iteration(world):
    asked = []

    def rate(epoch, iteration):
        asked.append((epoch, iteration))
        return 0.01 if epoch == 1 else 0.002

    net, _ = trained(world, learn_rate_schedule=rate)
    assert asked[-6:] == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]
    how = {"learn_rate_drop_factor": 0.2, "learn_rate_drop_period": 1}
    other, _ = trained(world, learn_rate_schedule="piecewise", **how)
    assert weights_sha256(net) == weights_sha256(other)


def test_a_rate_for_another_batch_size(world):
    one, _ = trained(world, learning_rate=0.1, scale_rate=80)
    other, _ = trained(world, learning_rate=0.05)
    assert weights_sha256(one) == weights_sha256(other)


# ---- output functions ----


def test_output_functions_are_told_all(world):
    seen = []
    net, result = trained(
        world,
        output_functions=[seen.append],
        validation=pictures(30, "others"),
        validation_frequency=2,
    )
    assert [info.state for info in seen] == [
        *("start", "iteration", "iteration", "iteration", "epoch"),
        *("iteration", "iteration", "iteration", "epoch", "done"),
    ]
    assert [info.iteration for info in seen] == [0, 1, 2, 3, 3, 4, 5, 6, 6, 6]
    assert seen[0].loss is seen[0].accuracy is seen[1].validation_loss is None
    assert all(0 < info.loss < 3 and info.learning_rate == 0.01 for info in seen[1:])
    assert 0 <= seen[4].accuracy <= 1 and seen[3].validation_loss > 0
    assert result.stopped is None and result.best_iteration in (2, 4, 6)


def test_a_stop_that_one_rank_asks_for(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    last = world.size - 1

    def ask(info):
        return world.rank == last and info.iteration == 4

    known = dl.TrainingOptions(epochs=3, batch_size=40, output_functions=ask)
    net = small()
    result = dl.train(net, pictures(100), known, world=world, out=out)
    assert (result.stopped, result.iterations, result.epochs) == ("output_function", 4, 1)
    arrays, facts = world.broadcast(checkpoint.load(out) if world.rank == 0 else None)
    assert facts["position"]["iteration"] == 4
    rest = dataclasses.replace(known, output_functions=())
    again = small()
    result = dl.train(again, pictures(100), rest, world=world, resume=(arrays, facts))
    whole, _ = trained(world, epochs=3)
    assert result.stopped is None
    assert weights_sha256(again) == weights_sha256(whole) != weights_sha256(net)


@pytest.mark.parametrize("state", ["iteration", "epoch"])
def test_a_stop_that_is_asked_for_at_the_end(world, state):
    """The run ends as one that was not asked to stop: with the population's statistics."""

    def ask(info):
        return info.state == state and info.iteration == 6

    whole, _ = trained(world)
    net, result = trained(world, output_functions=ask)
    assert (result.stopped, result.iterations, result.epochs) == (None, 6, 2)
    assert weights_sha256(net) == weights_sha256(whole)


def test_a_stop_before_the_first_iteration_leaves_the_network_as_it_is(world):
    net, result = trained(world, output_functions=lambda info: True)
    assert (result.stopped, result.iterations, result.epochs) == ("output_function", 0, 0)
    assert weights_sha256(net) == weights_sha256(small())


def test_a_softmax_at_the_end_is_the_one_of_the_loss(world):
    ended = dl.Network([*small().layers, dl.Softmax()], (1, SIDE, SIDE), seed=1)
    net, result = trained(world)
    ended, other = trained(world, ended)
    assert weights_sha256(ended) == weights_sha256(net) and other.loss == result.loss
    found = [dl.evaluate(n, pictures(30, "others"), world=world) for n in (net, ended)]
    assert found[0] == found[1]
    images = pictures(5).read(np.arange(5))
    assert ended.predict(images).tobytes() == net.predict(images).tobytes()


def test_options_that_do_not_go_together():
    with pytest.raises(UserError, match="expected no warm-up with it"):
        dl.TrainingOptions(learn_rate_schedule=lambda epoch, i: 0.1, warmup_iterations=2)
    with pytest.raises(UserError, match="--sampling partition and --worker-load measured"):
        dl.TrainingOptions(sampling="partition", worker_load="measured")


def test_what_is_no_function_is_refused():
    with pytest.raises(UserError, match="output_functions must be functions"):
        dl.TrainingOptions(output_functions=["print"])


# ---- what is said of the images, and what the network keeps of them ----


def test_classes_without_images_are_told(world):
    """Labels from 1 make an empty class 0."""
    store = pictures(100)
    others = dl.ArrayDatastore(store.images, store.labels + 1)
    shown = Console(world.rank, stream=io.StringIO())
    net = dl.Network([dl.Dense(4)], (1, SIDE, SIDE))
    dl.train(net, others, dl.TrainingOptions(epochs=1), world=world, console=shown)
    if world.rank == 0:
        line = shown.stream.getvalue().splitlines()[0]
        assert line == (
            "warning: arrays: 100 images of 1x6x6 in 4 classes: no image of class 0 (of 4): labels "
            "count from 0"
        )


def test_a_network_keeps_how_its_images_were_made(world):
    how = dl.Preprocess(size=(SIDE, SIDE))
    large = dl.ArrayDatastore(np.repeat(pictures(100).images, 2, axis=3), pictures(100).labels)
    for store in (dl.data.preprocessed(large, how), dl.data.preprocessed(large, how).split(0.5)[0]):
        net, _ = trained(world, store=store, epochs=1)
        assert net.preprocess == how
    trained(world, net=net, epochs=1)  # of images that came through nothing that is known
    assert net.preprocess == how


# ---- statistics of the population ----


def test_population_statistics(world):
    """Of what the convolution gives for all images, each mini-batch with its own statistics."""
    store = pictures(100)
    moving, _ = trained(world, batchnorm_statistics="moving")
    found, _ = trained(world)
    for name, value in moving.parameters.items():
        assert np.array_equal(value, found.parameters[name])
    conv = np.lib.stride_tricks.sliding_window_view(store.images[:, 0] / 255.0, (3, 3), (1, 2))
    weight, bias = (found.parameters[f"conv1.{n}"].astype(np.float64) for n in ("weight", "bias"))
    y = np.einsum("nhwrs,krs->nkhw", conv, weight[:, 0]) + bias[None, :, None, None]
    mean, variance = y.mean(axis=(0, 2, 3)), y.var(axis=(0, 2, 3))
    np.testing.assert_allclose(found.state["batchnorm1.mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(found.state["batchnorm1.variance"], variance, rtol=1e-5)
    assert not np.allclose(moving.state["batchnorm1.mean"], mean, rtol=1e-3)
    assert found.state["batchnorm1.mean"].dtype == np.float32


def test_population_statistics_leave_out_dropout_and_what_is_frozen(world):
    frozen = dl.BatchNorm(name="still", trainable=False)
    layers = dl.Dropout(0.5), dl.Conv2D(3, 2, name="second"), dl.BatchNorm(name="other"), frozen
    net, _ = trained(world, small(*layers))
    twin = small(*(layer for layer in layers if not isinstance(layer, dl.Dropout)))
    assert net.state["still.mean"].tobytes() == twin.state["still.mean"].tobytes()
    twin.parameters, twin.state = net.parameters, dict(net.state)
    from mpidl.training.batchnorm_population import population_state

    queue = dl.MinibatchQueue(pictures(100), 40, world=world, shuffle="never")
    for state in (population_state(twin, queue, world), population_state(net, queue, world)):
        for name, value in state.items():
            assert value.tobytes() == net.state[name].tobytes(), name


# ---- the ranks' loads ----


def test_loads_do_not_matter(world):
    expected, _ = trained(world)
    weights = [n % 3 for n in range(1, world.size + 1)]  # some idle, where there are three
    for load in ("measured", ",".join(map(str, weights)), ",".join(["0.5"] * world.size)):
        found, _ = trained(world, worker_load=load, epochs=2)
        assert weights_sha256(found) == weights_sha256(expected), load


def test_loads_that_cannot_be_used(world):
    for text, words in (
        (",".join(["1"] * (world.size + 1)), "expected a number for each of"),
        (",".join(["0"] * world.size), "expected a number above 0"),
    ):
        with pytest.raises(UserError, match=words):
            trained(world, worker_load=text)
    with pytest.raises(UserError, match="worker_load must be measured, or a number per rank"):
        dl.TrainingOptions(worker_load="1;2")


class Pretended:
    """A world of several ranks, seen from one of them."""

    def __init__(self, speeds, rank):
        self.speeds, self.rank, self.size = speeds, rank, len(speeds)
        self.transport = self
        self.wait_seconds = 0.0

    def gop(self, operation, mine):
        assert operation == "max" and mine[self.rank] == self.speeds[self.rank]
        return np.array(self.speeds)


def test_loads_are_by_the_time_of_ones_own_work():
    world = Pretended([4.0, 0.0, 2.0, 1.0], 2)
    measured = LoadBalancer(world)
    measured.start(10.0)
    world.wait_seconds += 3.0
    measured.stop(15.0, 4)  # 4 blocks in 2 seconds of its own
    assert measured.load() == (1000, 583, 500, 250)
    world.speeds = [0.0] * 4
    assert measured.load() is None


# ---- partitions ----


def test_each_rank_has_a_part_of_the_set():
    order, shares = np.arange(100)[::-1], [partition.image_shares(n, 3, None) for n in (40, 40, 20)]
    assert shares[0] == [(0, 16), (16, 32), (32, 40)] and shares[2] == [(0, 16), (16, 20), (20, 20)]
    epochs = [partition.partition_order(order, shares, 0, epoch) for epoch in (None, 1, 2)]
    firsts = np.cumsum([0, 40, 40])
    parts = []
    for found in epochs:
        assert sorted(found) == list(range(100))
        each = [
            {i for f, s in zip(firsts, shares, strict=True) for i in found[f:][slice(*s[rank])]}
            for rank in range(3)
        ]
        parts.append(each)
    assert parts[0] == parts[1] == parts[2]
    assert list(epochs[0][:16]) == list(range(99, 83, -1))
    assert not np.array_equal(epochs[1], epochs[2])


def test_sampling_by_partitions(world):
    for shuffle in ("never", "once", "every-epoch"):
        how = {"world": world, "shuffle": shuffle, "sampling": "partition"}
        queue = dl.MinibatchQueue(pictures(100), 40, **how)
        mine = [
            {i for images, _ in queue.epoch(epoch) for i in images.batch.indices.tolist()}
            for epoch in (1, 2)
        ]
        assert mine[0] == mine[1] and sorted(queue.order(1)) == list(range(100))
        parts = world.gather(sorted(mine[0]))
        if parts:
            assert sorted(sum(parts, [])) == list(range(100))
    with pytest.raises(UserError, match="sampling must be global, partition, got part"):
        dl.MinibatchQueue(pictures(3), 3, sampling="part")


def test_one_rank_has_the_whole_set_as_its_part():
    queue = dl.MinibatchQueue(pictures(50), 40, shuffle="once", sampling="partition")
    plain = dl.MinibatchQueue(pictures(50), 40, shuffle="once")
    assert np.array_equal(queue.order(3), plain.order(3)) and LANES == 16


# ---- where values come from ----


def test_a_recipe_belongs_to_its_solver_and_its_rate():
    known = configuration.resolve({}).options
    assert (known.solver, known.learning_rate) == ("sgdm", 0.01)
    known, _, sources = configuration.resolve({"solver": "adam"})
    assert (known.learning_rate, known.epochs) == (0.001, 20)
    assert (sources["learning_rate"], sources["epochs"]) == ("default", "recipe digits")
    assert dl.TrainingOptions.from_recipe("digits", solver="rmsprop").learning_rate == 0.001
    known = configuration.resolve({"network": "cifar", "batch_size": 512}).options
    assert (known.learning_rate, known.scale_rate) == (0.1, 256)
    known = configuration.resolve({"network": "cifar", "learning_rate": 0.3}).options
    assert (known.learning_rate, known.scale_rate) == (0.3, None)


def test_epochs_end_a_cosine():
    saved = {"options": dl.TrainingOptions(epochs=5, learn_rate_schedule="cosine").as_dict()}
    saved |= {"network": [], "fingerprint": ""}
    now = {**saved, "options": {**saved["options"], "epochs": 6}}
    with pytest.raises(UserError, match="was 5, is 6, where --learn-rate-schedule cosine ends"):
        configuration.changed_on_resume(saved, now)
