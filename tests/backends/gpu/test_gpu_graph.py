"""Test GPU steps of networks with branches and frozen layers, recorded and eager."""

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl import losses
from mpidl.training.files.model_file import weights_sha256

SHAPE, CLASSES = (1, 8, 8), 3


def residual():
    layers = [
        dl.Conv2D(3, 4, padding=1),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.Conv2D(3, 4, padding=1),
        dl.BatchNorm(),
        dl.Add(inputs=("relu1", "batchnorm2")),
        dl.ReLU(name="both"),
        dl.Conv2D(3, 6, stride=2, padding=1),
        dl.BatchNorm(),
        dl.Conv2D(1, 6, stride=2, name="shortcut", after="both"),
        dl.Add(inputs=("batchnorm3", "shortcut")),
        dl.Dense(CLASSES),
    ]
    return dl.Network(layers, SHAPE, seed=2)


FROZEN = {
    "nothing": (),
    "below": ("conv1", "batchnorm1"),
    "within": ("conv2", "batchnorm2", "batchnorm3"),
    "all but the last": ("conv1", "batchnorm1", "conv2", "batchnorm2", "conv3", "batchnorm3")
    + ("shortcut",),
}


def pictures(count=50):
    images = numbers("gpu pictures", count, *SHAPE, low=0, high=256)
    return dl.ArrayDatastore(images.astype(np.uint8), np.arange(count) % CLASSES)


def trained(world, net, **options):
    settings = {"epochs": 1, "batch_size": 32, "verbose_every": 0, "learning_rate": 0.1}
    settings["batchnorm_statistics"] = "moving"  # keep the statistics that the steps compute
    dl.train(net, pictures(), dl.TrainingOptions(**settings | options), world=world)
    return net


@pytest.mark.parametrize("names", FROZEN.values(), ids=FROZEN)
def test_a_step_agrees_with_the_cpu(world, names):
    steps = []
    for rank in (world, dl.World(threads=1)):
        net = residual().freeze(*names)
        start = {**net.parameters, **net.state}
        trained(rank, net, max_iterations=1, l2=0.0)
        now = {**net.parameters, **net.state}
        steps.append({name: now[name].astype(np.float64) - start[name] for name in start})
    for name, expected in steps[1].items():
        step, layer = steps[0][name], name.split(".")[0]
        if layer in names:
            assert not expected.any() and not step.any(), name
        elif not (name.startswith("conv") and name.endswith("bias")):  # its gradient is noise
            error = np.linalg.norm(step - expected) / np.linalg.norm(expected)
            assert error < 2e-5, name


RECORDED = [
    pytest.param(names, id=case, marks=[pytest.mark.slow("gpu")] * (case != "all but the last"))
    for case, names in FROZEN.items()
]


@pytest.mark.parametrize("names", RECORDED)
def test_recorded_and_eager_steps_give_the_same_bytes(world, names):
    recorded = trained(world, residual().freeze(*names), shuffle="never", l2=0.001, epochs=2)
    net = residual().freeze(*names).to(world.device)
    queue = dl.MinibatchQueue(pictures(), 32, world=world, shuffle="never")
    sgdm = dl.SGDM(0.1, l2=0.001, **net.factors)
    for epoch in range(2):
        for images, labels in queue.epoch(epoch):
            _, gradients, net.state = dl.value_and_grad(losses.cross_entropy)(net, images, labels)
            net.parameters = sgdm(net.parameters, world.gplus(gradients))
    assert weights_sha256(net.to(None)) == weights_sha256(recorded)


def test_fused_layers_agree_with_the_separate_ones(world):
    """The bytes differ, because convolutions compute the moments of their results by tiles."""
    nets = [residual(), residual()]
    nets[1].fuse = False
    for net in nets:
        trained(world, net)
    start = residual().parameters
    names = [name for name in start if name not in ("conv1.bias", "conv2.bias", "conv3.bias")]
    for name in names:  # the gradients of these biases are 0 but for rounding
        change, other = (net.parameters[name] - start[name] for net in nets)
        assert np.linalg.norm(change - other) <= 1e-4 * np.linalg.norm(change), name
