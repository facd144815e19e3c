"""Check the memory of a recorded step against the values that its backward pass reads."""

import numpy as np
import pytest
from cpu_builds import needs_kernels
from single_rank import numbers

import mpidl as dl
from mpidl.backends import memory_plan
from mpidl.backends.cpu import arenas
from mpidl.data import MinibatchQueue
from mpidl.training.replayed_step import ReplayedStep
from mpidl.training.steps import StepInfo

pytestmark = needs_kernels
SIDE, LANE_BYTES = 32, 64  # bytes of a pixel in a block of 16 images


@pytest.fixture(autouse=True)
def small_regions(monkeypatch):
    """Let arenas grow only by what an array needs, so that small networks show differences."""
    monkeypatch.setattr(arenas, "REGION", arenas.HUGE)


def bottlenecks():
    """Return a network like ResNet-50, with fewer and narrower blocks."""

    def block(name, before, width, stride):
        yield dl.Conv2D(1, width, bias=False, name=f"{name}_conv1", after=before)
        yield from (dl.BatchNorm(name=f"{name}_bn1"), dl.ReLU(name=f"{name}_relu1"))
        yield dl.Conv2D(3, width, stride=stride, padding=1, bias=False, name=f"{name}_conv2")
        yield from (dl.BatchNorm(name=f"{name}_bn2"), dl.ReLU(name=f"{name}_relu2"))
        yield dl.Conv2D(1, 4 * width, bias=False, name=f"{name}_conv3")
        yield dl.BatchNorm(name=f"{name}_bn3")
        shortcut = before
        if name.endswith("0"):
            shortcut = f"{name}_shortcut"
            yield dl.Conv2D(
                1, 4 * width, stride=stride, bias=False, name=f"{name}_conv", after=before
            )
            yield dl.BatchNorm(name=shortcut)
        yield dl.Add(inputs=[f"{name}_bn3", shortcut], name=f"{name}_add")
        yield dl.ReLU(name=name)

    def layers():
        yield dl.Conv2D(3, 16, padding=1, bias=False)
        yield from (dl.BatchNorm(), dl.ReLU(name="stem"))
        before = "stem"
        for stage in range(3):
            for i in range(2):
                name = f"stage{stage}_{i}"
                yield from block(name, before, 16 << stage, 2 if stage and not i else 1)
                before = name
        yield from (dl.GlobalAveragePool2D(), dl.Dense(3))

    return dl.Network(layers(), (3, SIDE, SIDE), seed=1)


def bound(net, blocks):
    """Return the bytes of the values that backward reads, and a bound on the bytes of a step.

    Backward reads the outputs of the convolutions and of the additions with ReLU. The bound adds
    the gradients of the learnables, and two cotangents of the largest output.
    """
    sizes = [
        int(np.prod(shape)) * LANE_BYTES * blocks
        for layer, shape in zip(net.layers, net.output_shapes, strict=True)
        if isinstance(layer, dl.Conv2D | dl.Add)
    ]
    gradients = sum(array.nbytes for array in net.parameters.values())
    return sum(sizes), sum(sizes) + gradients + 2 * max(sizes)


def trained_step(world, iterations=3):
    """Run steps with 2 blocks per rank, and then a step with smaller shares. Return the step."""
    net, count = bottlenecks(), 32 * world.size
    images = numbers("memory", count * iterations + 16, 3, SIDE, SIDE, high=200).astype(np.uint8)
    store = dl.ArrayDatastore(images, np.arange(len(images)) % 3)
    step = ReplayedStep(net, dl.SGDM(0.01), "crossentropy", world, 1, None, lambda rate: "")
    sizes = []
    for i, (images, labels) in enumerate(MinibatchQueue(store, count, 0, world).epoch(1), 1):
        step.submit(images, labels, StepInfo(1, i, images.batch.count, 0.01, 0.0))
        sizes.append(step.largest.memory.bytes)
    assert sizes == [sizes[0]] * (iterations + 1)  # later steps need no more memory
    return step


def test_a_step_needs_little_more_memory_than_backward_reads(world):
    step = trained_step(world)
    stored_bytes, limit = bound(step.net, blocks=2)
    assert stored_bytes < step.largest.memory.bytes <= limit + arenas.HUGE


def side_by_side(lives):
    """Give each array a place of its own."""
    sizes = [size for size, *_ in lives]
    return [sum(sizes[:i]) for i in range(len(sizes))], sum(sizes)


def test_without_a_plan_a_step_needs_more_memory(world, monkeypatch):
    monkeypatch.setattr(memory_plan, "place", side_by_side)
    step = trained_step(world)
    assert step.largest.memory.bytes > bound(step.net, blocks=2)[1] + arenas.HUGE
