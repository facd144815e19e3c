"""Test training options in recorded steps on the emulated GPU."""

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl import losses
from mpidl.data.datastore import Derived
from mpidl.data.loading import device_queue
from mpidl.errors import UserError
from mpidl.training.batchnorm_population import population_state
from mpidl.training.files import checkpoint
from mpidl.training.files.model_file import weights_sha256
from mpidl.training.gpu_step import GPUStep
from mpidl.training.optimizers import of_options
from mpidl.training.schedules import rate_of

SIDE, CLASSES = 6, 3
ADAM = {
    "solver": "adam",
    "learning_rate": 0.02,
    "learn_rate_schedule": "cosine",
    "warmup_iterations": 2,
    "gradient_threshold": 0.3,
    "gradient_threshold_method": "global-l2norm",
}
ADAMW = ADAM | {"solver": "adamw", "l2": 0.5, "epsilon": 0.01}
RMSPROP = {
    "solver": "rmsprop",
    "gradient_threshold": 0.01,
    "gradient_threshold_method": "absolute-value",
    "learn_rate_schedule": "piecewise",
    "learn_rate_drop_period": 1,
}
SGDM = {"gradient_threshold": 0.1, "learn_rate_schedule": "polynomial", "l2": 0.01}
NESTEROV = SGDM | {"nesterov": True, "learn_rate_schedule": "cosine"}
LARS = {"solver": "lars", "l2": 0.01, "trust_coefficient": 0.01, "linear_scaling": 10}
LAMB = ADAM | {"solver": "lamb", "l2": 0.5, "epsilon": 0.01, "decay_exclude": "none"}
SOLVERS = {"adam": ADAM, "adamw": ADAMW, "rmsprop": RMSPROP, "sgdm": SGDM, "nesterov": NESTEROV}
SOLVERS |= {"lars": LARS, "lamb": LAMB}


def small():
    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(CLASSES)]
    return dl.Network(layers, (1, SIDE, SIDE), seed=1)


def pictures(count, name="pictures"):
    images = numbers(f"gpu options {name}", count, 1, SIDE, SIDE, low=0, high=200)
    labels = np.arange(count) * 7 % CLASSES
    images[np.arange(count), 0, labels, :] = 255
    return dl.ArrayDatastore(images.astype(np.uint8), labels)


def training_options(**changes):
    base = {"epochs": 2, "batch_size": 40, "verbose_every": 0, "batchnorm_statistics": "moving"}
    return dl.TrainingOptions(**base | changes)


def trained(world, **changes):
    net = small()
    return net, dl.train(net, pictures(80), training_options(**changes), world=world)


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(
            solver, id=name, marks=[pytest.mark.slow("gpu")] * (name not in ("adam", "sgdm"))
        )
        for name, solver in SOLVERS.items()
    ],
)
def test_recorded_and_eager_steps_give_the_same_bytes(world, solver):
    """A replay uses the current learning rate and step number, and weights agree with the CPU."""
    recorded, _ = trained(world, **solver)
    net, options = small().to(world.device), training_options(**solver)
    optimizer, iteration = of_options(options, **net.factors), 0
    queue = dl.MinibatchQueue(pictures(80), 40, world=world, shuffle="once")
    for epoch in (1, 2):
        for images, labels in queue.epoch(epoch):
            iteration += 1
            optimizer.learning_rate = rate_of(options, epoch, iteration, 2)
            step = dl.value_and_grad(losses.cross_entropy)(net, images, labels)
            (_, _), gradients, net.state = step
            net.parameters = optimizer(net.parameters, world.gplus(gradients))
    assert weights_sha256(net.to(None)) == weights_sha256(recorded)
    host, _ = trained(dl.World(threads=1), **solver)
    for name in ("dense1.weight", "conv1.weight"):
        start = small().parameters[name]
        change, expected = (n.parameters[name] - start for n in (recorded, host))
        assert np.linalg.norm(change - expected) < 1e-2 * np.linalg.norm(expected), name


@pytest.mark.parametrize(
    "average",
    [
        pytest.param({"average": "ema", "average_decay": 0.5}, id="ema"),
        pytest.param(
            {"average": "swa", "average_start": 1}, id="swa", marks=pytest.mark.slow("gpu")
        ),
    ],
)
def test_averages_of_recorded_steps(world, tmp_path, average):
    """The average is close to the CPU's, and an interrupted and a full run have the same bytes."""
    options = average | {"learning_rate": 0.05, "validation": pictures(20, "others")}
    averaged, result = trained(world, **options)
    host, expected = trained(dl.World(threads=1), **options)
    raw, _ = trained(world, **options | {"average_use": "raw"})
    for name, weight in host.parameters.items():
        np.testing.assert_allclose(averaged.parameters[name], weight, rtol=1e-3, atol=1e-4)
    change = raw.parameters["dense1.weight"] - averaged.parameters["dense1.weight"]
    assert np.abs(change).max() > 1e-3
    assert result.validation_loss == pytest.approx(expected.validation_loss, rel=1e-3)
    stopped = training_options(**options, max_iterations=3)
    dl.train(small(), pictures(80), stopped, world=world, out=str(tmp_path))
    resumed, start = small(), checkpoint.load(str(tmp_path))
    dl.train(resumed, pictures(80), training_options(**options), world=world, resume=start)
    assert weights_sha256(resumed) == weights_sha256(averaged)


def test_graphs_do_not_change_a_byte_of_adam(world):
    hashes = {weights_sha256(trained(world, graphs=g, **ADAM)[0]) for g in ("auto", "off")}
    assert len(hashes) == 1


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(ADAM, id="adam"),
        pytest.param(ADAMW, id="adamw", marks=pytest.mark.slow("gpu")),
        pytest.param(NESTEROV, id="nesterov", marks=pytest.mark.slow("gpu")),
    ],
)
def test_a_resumed_run_has_the_bytes_of_an_uninterrupted_one(world, tmp_path, solver):
    uninterrupted, _ = trained(world, **solver)
    options = training_options(**solver, max_iterations=3)
    dl.train(small(), pictures(80), options, world=world, out=str(tmp_path))
    resumed, start = small(), checkpoint.load(str(tmp_path))
    dl.train(resumed, pictures(80), training_options(**solver), world=world, resume=start)
    assert weights_sha256(resumed) == weights_sha256(uninterrupted)


def test_validation_and_output_functions_see_their_iteration(world):
    """Although steps run ahead, a validation uses the weights of its iteration."""
    infos = []
    options = {"validation": pictures(20, "others"), "validation_frequency": 1}
    net, result = trained(world, output_functions=infos.append, **options)
    losses = {i.iteration: i.validation_loss for i in infos if i.state == "epoch"}
    assert [i.iteration for i in infos if i.state == "iteration"] == [1, 2, 3, 4]
    evaluation = dl.evaluate(net, options["validation"], world=world)
    assert evaluation.loss == losses[4] and result.best_iteration in (1, 2, 3, 4)
    best, result = trained(world, output_network="best-validation", **options)
    stopped, _ = trained(world, max_iterations=result.best_iteration)
    assert weights_sha256(best) == weights_sha256(stopped)


def test_population_statistics_agree_with_the_cpu(world):
    net, _ = trained(world, batchnorm_statistics="population")
    host_net, host = small(), dl.World(threads=1)
    host_net.parameters = net.parameters
    queue = dl.MinibatchQueue(pictures(80), 40, world=host, shuffle="never")
    for name, value in population_state(host_net, queue, host).items():
        np.testing.assert_allclose(net.state[name], value, rtol=1e-5)
        assert isinstance(net.state[name], np.ndarray)


def test_worker_loads_do_not_change_a_byte(world):
    hashes = {weights_sha256(trained(world, worker_load=load)[0]) for load in ("2", None)}
    assert len(hashes) == 1
    with pytest.raises(UserError, match="--worker-load measured: on GPUs, the shares are fixed"):
        trained(world, worker_load="measured")


def test_a_rollback_records_the_step_again(world, monkeypatch):
    """The run continues from the end of the first epoch with half the learning rate."""
    finish, count = GPUStep.finish, []

    def spoiled(self, handle):
        loss, *counts = finish(self, handle)
        count.append(1)
        return (np.nan if len(count) == 3 else loss, *counts)

    monkeypatch.setattr(GPUStep, "finish", spoiled)
    net, result = trained(world, on_nan="rollback", learning_rate=0.1)
    assert (result.rollbacks, result.iterations) == (1, 4) and len(count) == 5
    expected, _ = trained(world, learn_rate_schedule=lambda _, i: 0.1 if i <= 2 else 0.05)
    assert weights_sha256(net) == weights_sha256(expected)


def test_images_that_cannot_be_read_are_skipped(world):
    """Skipping an image makes its mini-batch smaller, like the last mini-batch of an epoch."""

    class Damaged(Derived):
        def read(self, indices):
            for i in indices:
                if i in (3, 40):
                    raise UserError(f"{self.located(int(i))}: damaged")
            return self.parent.read(indices)

    options = {"batch_size": 80, "shuffle": "never", "on_bad_image": "skip"}
    weights = {}
    usable = pictures(80).subset(np.setdiff1d(np.arange(80), [3, 40]))
    for name, store in {"skipped": Damaged(pictures(80)), "usable": usable}.items():
        net = small()
        result = dl.train(net, store, training_options(**options), world=world)
        weights[name] = weights_sha256(net)
        assert result.skipped_images == (2 if name == "skipped" else 0)
    assert weights["skipped"] == weights["usable"] != weights_sha256(trained(world)[0])


@pytest.mark.parametrize("resident", [True, False])
def test_balanced_sampling_reads_the_images_of_the_eager_step(world, resident, monkeypatch):
    """Copies of an image have different sample numbers, so dropout and augmentation differ too."""
    monkeypatch.setattr(device_queue, "RESIDENT", 0.5 if resident else 0)
    labels = np.repeat(np.arange(CLASSES), (50, 25, 5))
    images = numbers("gpu balanced", 80, 1, SIDE, SIDE, low=0, high=255).astype(np.uint8)
    store = dl.ArrayDatastore(images, labels)
    changes = {"sampling": "balanced", "shuffle": "every-epoch", "translate": 1, "epochs": 1}
    weights = {}
    for graphs in ("auto", "off"):
        layers = [dl.Conv2D(3, 4), dl.ReLU(), dl.Dropout(0.5), dl.Dense(CLASSES)]
        net = dl.Network(layers, (1, SIDE, SIDE), seed=1)
        dl.train(net, store, training_options(graphs=graphs, **changes), world=world)
        weights[graphs] = weights_sha256(net)
        host_net = dl.Network(layers, (1, SIDE, SIDE), seed=1)
        host = dl.World(threads=1)
        dl.train(host_net, store, training_options(**changes), world=host)
        for name, value in host_net.parameters.items():
            np.testing.assert_allclose(net.parameters[name], value, rtol=1e-3, atol=1e-4)
    assert weights["auto"] == weights["off"]
