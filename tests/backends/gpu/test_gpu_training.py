"""Options of training on the emulated GPU: solvers, rates and clipping in a recorded step."""

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl import losses
from mpidl.errors import UserError
from mpidl.training import trainer
from mpidl.training.files.model_file import weights_sha256
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


def small():
    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(CLASSES)]
    return dl.Network(layers, (1, SIDE, SIDE), seed=1)


def pictures(count, name="pictures"):
    images = numbers(f"gpu options {name}", count, 1, SIDE, SIDE, low=0, high=200)
    labels = np.arange(count) * 7 % CLASSES
    images[np.arange(count), 0, labels, :] = 255
    return dl.ArrayDatastore(images.astype(np.uint8), labels)


def options(**more):
    base = {"epochs": 2, "batch_size": 40, "verbose_every": 0, "batchnorm_statistics": "moving"}
    return dl.TrainingOptions(**base | more)


def trained(world, **more):
    net = small()
    return net, trainer.train(net, pictures(80), options(**more), world=world)


@pytest.mark.parametrize(
    "chosen",
    [ADAM, ADAMW, RMSPROP, SGDM, NESTEROV],
    ids=["adam", "adamw", "rmsprop", "sgdm", "nesterov"],
)
def test_recorded_or_not_the_bytes_are_the_same(world, chosen):
    """A replayed step takes this step's rate and count; near the CPU's."""
    recorded, _ = trained(world, **chosen)
    net, known = small().to(world.device), options(**chosen)
    optimizer, iteration = of_options(known, **net.factors), 0
    queue = dl.MinibatchQueue(pictures(80), 40, world=world, shuffle="once")
    for epoch in (1, 2):
        for images, labels in queue.epoch(epoch):
            iteration += 1
            optimizer.learning_rate = rate_of(known, epoch, iteration, 2)
            step = dl.value_and_grad(losses.cross_entropy)(net, images, labels)
            (_, _), gradients, net.state = step
            net.parameters = optimizer(net.parameters, world.gplus(gradients))
    assert weights_sha256(net.to(None)) == weights_sha256(recorded)
    host, _ = trained(dl.World(threads=1), **chosen)
    for name in ("dense1.weight", "conv1.weight"):
        start = small().parameters[name]
        found, expected = (n.parameters[name] - start for n in (recorded, host))
        assert np.linalg.norm(found - expected) < 1e-2 * np.linalg.norm(expected), name


def test_graphs_and_their_absence(world):
    found = [weights_sha256(trained(world, graphs=how, **ADAM)[0]) for how in ("auto", "off")]
    assert found[0] == found[1]


@pytest.mark.parametrize("chosen", [ADAM, ADAMW, NESTEROV], ids=["adam", "adamw", "nesterov"])
def test_going_on_from_a_checkpoint(world, tmp_path, chosen):
    whole, _ = trained(world, **chosen)
    first = small()
    known = options(**chosen, max_iterations=3)
    trainer.train(first, pictures(80), known, world=world, out=str(tmp_path))
    from mpidl.training.files import checkpoint

    again = small()
    known = options(**chosen)
    trainer.train(again, pictures(80), known, world=world, resume=checkpoint.load(str(tmp_path)))
    assert weights_sha256(again) == weights_sha256(whole)


def test_validation_and_output_functions(world):
    """Steps run ahead of what is told; validation is of the iteration that it is due at."""
    seen = []
    how = {"validation": pictures(20, "others"), "validation_frequency": 1}
    net, result = trained(world, output_functions=seen.append, **how)
    losses = {i.iteration: i.validation_loss for i in seen if i.state == "epoch"}
    assert [i.iteration for i in seen if i.state == "iteration"] == [1, 2, 3, 4]
    found = dl.evaluate(net, how["validation"], world=world)
    assert found.loss == losses[4] and result.best_iteration in (1, 2, 3, 4)
    best, result = trained(world, output_network="best-validation", **how)
    until, _ = trained(world, max_iterations=result.best_iteration)
    assert weights_sha256(best) == weights_sha256(until)


def test_population_statistics_are_the_cpus(world):
    found, _ = trained(world, batchnorm_statistics="population")
    host = small()
    host.parameters = found.parameters
    from mpidl.training.batchnorm_population import population_state

    alone = dl.World(threads=1)
    queue = dl.MinibatchQueue(pictures(80), 40, world=alone, shuffle="never")
    for name, value in population_state(host, queue, alone).items():
        np.testing.assert_allclose(found.state[name], value, rtol=1e-5)
        assert isinstance(found.state[name], np.ndarray)


def test_loads(world):
    one, _ = trained(world, worker_load="2")
    other, _ = trained(world)
    assert weights_sha256(one) == weights_sha256(other)
    with pytest.raises(UserError, match="--worker-load measured: on GPUs shares stay"):
        trained(world, worker_load="measured")
