"""Test options of a run: learning rates, stops, statistics, worker loads and partitions."""

import dataclasses
import io
import json
import time

import numpy as np
import pytest
from image_sets import refusal
from short_training import SIDE, pictures, small, trained

import mpidl as dl
from mpidl.core.blocks import LANES
from mpidl.data import partition
from mpidl.data.datastore import Derived
from mpidl.errors import UserError
from mpidl.evaluation.validation import Validation
from mpidl.report import Console, metrics
from mpidl.training.files import checkpoint, resume_changes
from mpidl.training.files.model_file import weights_sha256
from mpidl.training.files.run_folder import RunWriter
from mpidl.training.load_balancing import LoadBalancer
from mpidl.training.options import configuration

pytestmark = pytest.mark.usefixtures("without_plots")


# ---- schedules ----


# Options of a schedule that divides the learning rate by 10 after each epoch.
PIECEWISE = {"learn_rate_schedule": "piecewise", "learn_rate_drop_period": 1}


def test_metrics_have_the_rate_of_each_iteration(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    options = dl.TrainingOptions(
        epochs=3, batch_size=40, learning_rate=0.5, warmup_iterations=2, **PIECEWISE
    )
    dl.train(small(), pictures(100), options, world=world, out=out)
    if world.rank == 0:
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        rates = [r["learning_rate"] for r in records if r["kind"] == "iteration"]
        assert rates == pytest.approx([0.05, 0.275, 0.5, *[0.05] * 3, *[0.005] * 3], rel=1e-12)


def test_a_schedule_may_be_a_function_of_epoch_and_iteration(world):
    calls = []

    def rate(epoch, iteration):
        calls.append((epoch, iteration))
        return 0.01 if epoch == 1 else 0.002

    net, _ = trained(world, learn_rate_schedule=rate)
    assert calls[-6:] == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]
    other, _ = trained(world, learn_rate_drop_factor=0.2, **PIECEWISE)
    assert weights_sha256(net) == weights_sha256(other)


def test_scale_rate_scales_the_rate_to_the_batch_size(world):
    scaled, _ = trained(world, learning_rate=0.1, scale_rate=80)
    plain, _ = trained(world, learning_rate=0.05)
    assert weights_sha256(scaled) == weights_sha256(plain)


# ---- the speed of an epoch ----


def test_the_speed_leaves_out_validations_and_checkpoints(world, tmp_path, monkeypatch):
    slept = []

    def slow(function):
        def call(*arguments, **keywords):
            time.sleep(0.05)
            slept.append(0.05)
            return function(*arguments, **keywords)

        return call

    class Clock:
        def start(self, trainer):
            self.begin = time.monotonic()

        def epoch(self, trainer, summary):
            self.duration = time.monotonic() - self.begin - sum(slept)
            self.seconds = 100 / summary.images_per_second

    monkeypatch.setattr(Validation, "run", slow(Validation.run))
    monkeypatch.setattr(RunWriter, "save", slow(RunWriter.save))
    options = {"validation": pictures(16), "validation_frequency": 1, "checkpoint_every": 1}
    options = dl.TrainingOptions(epochs=1, batch_size=40, **options)
    out, clock = world.broadcast(str(tmp_path)), Clock()
    dl.train(small(), pictures(100), options, world=world, out=out, hooks=[clock])
    assert len(slept) >= 5 and clock.seconds <= clock.duration


# ---- images that cannot be read ----


class Vanishing(Derived):
    """A datastore in which the last image disappears after this rank has read it once."""

    reads_left = 1

    def read(self, indices):
        if len(self) - 1 in indices:
            if not self.reads_left:
                raise UserError("last.png: No such file or directory")
            self.reads_left -= 1
        return self.parent.read(indices)


def test_an_image_that_vanishes_costs_no_iteration(world, tmp_path):
    """The checkpoint contains all completed iterations, and the run can be resumed."""
    out = world.broadcast(str(tmp_path))
    options = dl.TrainingOptions(epochs=3, batch_size=20, cache_mb=0, prefetch=1, shuffle="never")
    store = Vanishing(pictures(100))
    text = refusal(dl.train, small(), store, options, world=world, out=out)
    assert text == (
        "last.png: No such file or directory; checkpoint written; to continue, run again with "
        f"--resume {out}"
    )
    store.reads_left = 100
    net = small()
    result = dl.train(net, store, options, world=world, resume=out)
    expected, _ = trained(world, epochs=3, batch_size=20, shuffle="never")
    assert result.iterations == 15 and weights_sha256(net) == weights_sha256(expected)
    if world.rank == 0:
        records = metrics.read(tmp_path / "metrics.jsonl")
        assert [r["iteration"] for r in records if r["kind"] == "iteration"] == list(range(1, 16))


def test_an_image_that_is_missing_at_the_start_leaves_no_checkpoint(world, tmp_path):
    out, store = world.broadcast(str(tmp_path)), Vanishing(pictures(30))
    store.reads_left = 0
    options = dl.TrainingOptions(epochs=1, batch_size=30, cache_mb=0)
    text = refusal(dl.train, small(), store, options, world=world, out=out)
    assert text == "last.png: No such file or directory" and not checkpoint.exists(out)


def test_a_discarded_mini_batch_shortens_the_epoch(world):
    """Discarding the last mini-batch gives the same weights as training without its images.

    With shuffle="never", the discarded images are the same in every epoch.
    """
    options = {"shuffle": "never", "batchnorm_statistics": "moving"}
    net, result = trained(world, partial_minibatch="discard", **options)
    assert (result.epochs, result.iterations) == (2, 4)  # 100 images in mini-batches of 40
    other, _ = trained(world, store=pictures(100).subset(range(80)), **options)
    assert weights_sha256(net) == weights_sha256(other)
    complete, _ = trained(world, **options)
    assert weights_sha256(net) != weights_sha256(complete)
    with pytest.raises(UserError, match="discard: expected images for at least one mini-batch"):
        trained(world, batch_size=101, partial_minibatch="discard")


# ---- output functions ----


def test_output_functions_receive_every_step(world):
    steps = []
    _, result = trained(
        world,
        output_functions=[steps.append],
        validation=pictures(30, "others"),
        validation_frequency=2,
    )
    assert [info.state for info in steps] == [
        *("start", "iteration", "iteration", "iteration", "epoch"),
        *("iteration", "iteration", "iteration", "epoch", "done"),
    ]
    assert [info.iteration for info in steps] == [0, 1, 2, 3, 3, 4, 5, 6, 6, 6]
    assert steps[0].loss is steps[0].accuracy is steps[1].validation_loss is None
    assert all(0 < info.loss < 3 and info.learning_rate == 0.01 for info in steps[1:])
    assert 0 <= steps[4].accuracy <= 1 and steps[3].validation_loss > 0
    assert result.stopped is None and result.best_iteration in (2, 4, 6)


def test_one_rank_may_stop_the_run(world, tmp_path):
    out = world.broadcast(str(tmp_path))

    def stop(info):
        return world.rank == world.size - 1 and info.iteration == 4

    options = dl.TrainingOptions(epochs=3, batch_size=40, output_functions=stop)
    net = small()
    result = dl.train(net, pictures(100), options, world=world, out=out)
    assert (result.stopped, result.iterations, result.epochs) == ("output_function", 4, 1)
    arrays, facts = world.broadcast(checkpoint.load(out) if world.rank == 0 else None)
    assert facts["position"]["iteration"] == 4
    options = dataclasses.replace(options, output_functions=())
    resumed = small()
    result = dl.train(resumed, pictures(100), options, world=world, resume=(arrays, facts))
    unstopped, _ = trained(world, epochs=3)
    assert result.stopped is None
    assert weights_sha256(resumed) == weights_sha256(unstopped) != weights_sha256(net)


@pytest.mark.parametrize("state", ["iteration", "epoch"])
def test_a_stop_after_the_last_iteration_changes_nothing(world, state):
    """The run ends normally, with population statistics for batch normalization."""

    def stop(info):
        return info.state == state and info.iteration == 6

    unstopped, _ = trained(world)
    net, result = trained(world, output_functions=stop)
    assert (result.stopped, result.iterations, result.epochs) == (None, 6, 2)
    assert weights_sha256(net) == weights_sha256(unstopped)


def test_a_stop_before_the_first_iteration_leaves_the_network_as_it_is(world):
    net, result = trained(world, output_functions=lambda info: True)
    assert (result.stopped, result.iterations, result.epochs) == ("output_function", 0, 0)
    assert weights_sha256(net) == weights_sha256(small())


def test_a_last_softmax_layer_is_part_of_the_loss(world):
    with_softmax = dl.Network([*small().layers, dl.Softmax()], (1, SIDE, SIDE), seed=1)
    net, result = trained(world)
    _, other = trained(world, with_softmax)
    assert weights_sha256(with_softmax) == weights_sha256(net) and other.loss == result.loss
    test_set = pictures(30, "others")
    scores = dl.evaluate(net, test_set, world=world)
    assert dl.evaluate(with_softmax, test_set, world=world) == scores
    images = pictures(5).read(np.arange(5))
    assert with_softmax.predict(images).tobytes() == net.predict(images).tobytes()


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="cannot be combined with warm-up"):
        dl.TrainingOptions(learn_rate_schedule=lambda epoch, i: 0.1, warmup_iterations=2)
    with pytest.raises(UserError, match="--sampling partition and --worker-load measured"):
        dl.TrainingOptions(sampling="partition", worker_load="measured")
    with pytest.raises(UserError, match="worker_load must be measured, or a number per rank"):
        dl.TrainingOptions(worker_load="1;2")
    with pytest.raises(UserError, match="output_functions must be functions"):
        dl.TrainingOptions(output_functions=["print"])


# ---- images ----


def test_a_class_without_images_is_a_warning(world):
    """If labels start at 1, a warning says that class 0 has no images."""
    store = pictures(100)
    from_one = dl.ArrayDatastore(store.images, store.labels + 1)
    console = Console(world.rank, stream=io.StringIO())
    net = dl.Network([dl.Dense(4)], (1, SIDE, SIDE))
    dl.train(net, from_one, dl.TrainingOptions(epochs=1), world=world, console=console)
    if world.rank == 0:
        assert console.stream.getvalue().splitlines()[0] == (
            "warning: arrays: 100 images of 1x6x6 in 4 classes: no image of class 0 (of 4): labels "
            "start at 0"
        )


def test_a_network_keeps_the_preprocessing_of_its_images(world):
    preprocess = dl.Preprocess(size=(SIDE, SIDE))
    large = dl.ArrayDatastore(np.repeat(pictures(100).images, 2, axis=3), pictures(100).labels)
    store = dl.data.preprocessed(large, preprocess)
    for train_set in (store, store.split(0.5)[0]):
        net, _ = trained(world, store=train_set, epochs=1)
        assert net.preprocess == preprocess
    trained(world, net=net, epochs=1)  # train again on images without preprocessing
    assert net.preprocess == preprocess


# ---- statistics of the population ----


def test_population_statistics(world):
    """The statistics equal the statistics of the convolution's outputs for all images."""
    store = pictures(100)
    moving, _ = trained(world, batchnorm_statistics="moving")
    net, _ = trained(world)
    for name, value in moving.parameters.items():
        assert np.array_equal(value, net.parameters[name])
    conv = np.lib.stride_tricks.sliding_window_view(store.images[:, 0] / 255.0, (3, 3), (1, 2))
    weight, bias = (net.parameters[f"conv1.{n}"].astype(np.float64) for n in ("weight", "bias"))
    y = np.einsum("nhwrs,krs->nkhw", conv, weight[:, 0]) + bias[None, :, None, None]
    mean, variance = y.mean(axis=(0, 2, 3)), y.var(axis=(0, 2, 3))
    np.testing.assert_allclose(net.state["batchnorm1.mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(net.state["batchnorm1.variance"], variance, rtol=1e-5)
    assert not np.allclose(moving.state["batchnorm1.mean"], mean, rtol=1e-3)
    assert net.state["batchnorm1.mean"].dtype == np.float32


def test_population_statistics_leave_out_dropout_and_frozen_layers(world):
    frozen = dl.BatchNorm(name="still", trainable=False)
    layers = dl.Dropout(0.5), dl.Conv2D(3, 2, name="second"), dl.BatchNorm(name="other"), frozen
    net, _ = trained(world, small(*layers))
    twin = small(*(layer for layer in layers if not isinstance(layer, dl.Dropout)))
    assert net.state["still.mean"].tobytes() == twin.state["still.mean"].tobytes()
    twin.parameters, twin.state = net.parameters, dict(net.state)
    from mpidl.training.batchnorm_population import population_state

    queue = dl.MinibatchQueue(pictures(100), 40, world=world, shuffle="never")
    for network in (twin, net):
        counts_of_images = []
        state = population_state(network, queue, world, progress=counts_of_images.append)
        assert counts_of_images == [40, 80, 100]
        for name, value in state.items():
            assert value.tobytes() == net.state[name].tobytes(), name


# ---- worker loads ----


def test_loads_change_no_weight(world):
    expected, _ = trained(world)
    loads = [n % 3 for n in range(1, world.size + 1)]  # every third rank is idle
    for load in ("measured", ",".join(map(str, loads)), ",".join(["0.5"] * world.size)):
        net, _ = trained(world, worker_load=load, epochs=2)
        assert weights_sha256(net) == weights_sha256(expected), load


def test_wrong_loads_are_refused(world):
    for text, message in (
        (",".join(["1"] * (world.size + 1)), "expected a number for each of"),
        (",".join(["0"] * world.size), "expected a number above 0"),
    ):
        with pytest.raises(UserError, match=message):
            trained(world, worker_load=text)


class FakeWorld:
    """A world of several ranks with given speeds."""

    def __init__(self, speeds, rank):
        self.speeds, self.rank, self.size = speeds, rank, len(speeds)
        self.transport = self
        self.wait_seconds = 0.0

    def gop(self, operation, speeds):
        assert operation == "max" and speeds[self.rank] == self.speeds[self.rank]
        return np.array(self.speeds)


def test_measured_loads_leave_out_the_time_of_waits():
    world = FakeWorld([4.0, 0.0, 2.0, 1.0], 2)
    balancer = LoadBalancer(world)
    balancer.begin(10.0)
    world.wait_seconds += 3.0
    balancer.stop(15.0, 4)  # 4 blocks in 2 seconds without the wait
    assert balancer.load() == (1000, 583, 500, 250)
    world.speeds = [0.0] * 4
    assert balancer.load() is None


# ---- partitions ----


def test_each_rank_has_a_part_of_the_set():
    order, shares = np.arange(100)[::-1], [partition.image_shares(n, 3, None) for n in (40, 40, 20)]
    assert shares[0] == [(0, 16), (16, 32), (32, 40)] and shares[2] == [(0, 16), (16, 20), (20, 20)]
    orders = [partition.partition_order(order, shares, 0, epoch) for epoch in (None, 1, 2)]

    def part(indices, rank):
        batches = zip((0, 40, 80), shares, strict=True)
        return {i for start, s in batches for i in indices[start:][slice(*s[rank])]}

    assert all(sorted(indices) == list(range(100)) for indices in orders)
    parts = [[part(indices, rank) for rank in range(3)] for indices in orders]
    assert parts[0] == parts[1] == parts[2]
    assert list(orders[0][:16]) == list(range(99, 83, -1))
    assert not np.array_equal(orders[1], orders[2])


def test_sampling_by_partitions(world):
    for shuffle in ("never", "once", "every-epoch"):
        queue = dl.MinibatchQueue(
            pictures(100), 40, world=world, shuffle=shuffle, sampling="partition"
        )
        first, second = (
            {i for images, _ in queue.epoch(epoch) for i in images.batch.indices.tolist()}
            for epoch in (1, 2)
        )
        assert first == second and sorted(queue.order(1)) == list(range(100))
        parts = world.gather(sorted(first))
        if parts:
            assert sorted(sum(parts, [])) == list(range(100))
    with pytest.raises(
        UserError, match="sampling must be one of global, balanced, partition, got part"
    ):
        dl.MinibatchQueue(pictures(3), 3, sampling="part")


def test_one_rank_has_the_whole_set_as_its_part():
    queue = dl.MinibatchQueue(pictures(50), 40, shuffle="once", sampling="partition")
    plain = dl.MinibatchQueue(pictures(50), 40, shuffle="once")
    assert np.array_equal(queue.order(3), plain.order(3)) and LANES == 16


# ---- sources of option values ----


def test_a_recipe_belongs_to_its_solver_and_its_rate():
    options = configuration.resolve({}).options
    assert (options.solver, options.learning_rate) == ("sgdm", 0.01)
    options, _, sources = configuration.resolve({"solver": "adam"})
    assert (options.learning_rate, options.epochs) == (0.001, 20)
    assert (sources["learning_rate"], sources["epochs"]) == ("default", "recipe digits")
    assert dl.TrainingOptions.from_recipe("digits", solver="rmsprop").learning_rate == 0.001
    options = configuration.resolve({"network": "cifar", "batch_size": 512}).options
    assert (options.learning_rate, options.scale_rate) == (0.1, 256)
    options = configuration.resolve({"network": "cifar", "learning_rate": 0.3}).options
    assert (options.learning_rate, options.scale_rate) == (0.3, None)


def test_epochs_end_a_cosine():
    saved = {"options": dl.TrainingOptions(epochs=5, learn_rate_schedule="cosine").as_dict()}
    saved |= {"network": [], "fingerprint": ""}
    now = {**saved, "options": {**saved["options"], "epochs": 6}}
    with pytest.raises(
        UserError, match="was 5, is 6; it cannot increase with --learn-rate-schedule cosine"
    ):
        resume_changes.refuse_changes(saved, now)
