"""The exchanges that one rank traces are those that several ranks make."""

import numpy as np
import pytest

import mpidl as dl
from mpidl.comm import World
from mpidl.fold import merge_moments
from mpidl.performance.trace import BUCKET, SUM, StepClock, TracingWorld

LEARNABLES = 123_090


@pytest.fixture
def subject():
    images = np.zeros((32, 1, 28, 28), np.uint8)
    net = dl.nn.zoo.digits((1, 28, 28), 10, seed=0)
    return net, dl.ArrayDatastore(images, np.arange(32) % 10)


OPTIONS = {"batch_size": 32, "verbose": "off", "plots": "none", "learning_rate": 1e-4}


def trace(world, net, images, epochs=4):
    solo = TracingWorld(world.transport.MPI.COMM_SELF)
    clock = StepClock(32, 0, solo, skip=1, at_least=2)
    clock.epoch = lambda *_: None  # every step is the first of its epoch
    options = dl.TrainingOptions(epochs=epochs, device="cpu", **OPTIONS)
    dl.train(net, images, options, world=solo, hooks=[clock])
    return clock


def test_the_digits_network_sends_what_the_document_lists(world, subject):
    """docs/communication.md: three batch normalizations of 20 channels, all gradients, the loss."""
    clock = trace(world, *subject)
    times = clock.times()
    sums = [event[1:] for event in times.events if event.kind == SUM]
    assert sums == [(41, 8, "moments")] * 3 + [(40, 8, "add")] * 3 + [(2, 8, "add")]
    buckets = [event for event in times.events if event.kind == BUCKET]
    normalized = 3 * 2 * 20  # their gradients are sums that backward waits for
    assert sum(event.width for event in buckets) == LEARNABLES - normalized
    assert all(event.itemsize == 4 for event in buckets) and len(buckets) == 2
    assert len(times.places) == len(times.events)
    assert (np.diff(times.places) >= 0).all() and 0 < times.places[0] < times.places[-1] < 1
    assert times.segments.shape == (len(times.segments), 8)  # between agreement and 7 sums
    step_seconds = [end - start for start, end, _ in clock.steps]
    assert times.segments.sum(axis=1) == pytest.approx(step_seconds)
    assert (times.segments > 0).all() and times.input >= 0


def test_several_ranks_exchange_what_one_rank_traces(world, subject, monkeypatch):
    net, images = subject
    expected = [
        (event.width, event.itemsize, event.operation)
        for event in trace(world, net, images).times().events
        if event.kind in (SUM, BUCKET)
    ]
    started, start_sum = [], World.start_sum

    def spy(self, tree, pieces, combine, dtype, *arguments):
        operation = "moments" if combine is merge_moments else "add"
        started.append((sum(size for size, _ in pieces), dtype.itemsize, operation))
        return start_sum(self, tree, pieces, combine, dtype, *arguments)

    monkeypatch.setattr(World, "start_sum", spy)
    statistics = {"batchnorm_statistics": "moving"}
    options = dl.TrainingOptions(max_iterations=1, device="cpu", **statistics, **OPTIONS)
    dl.train(net, images, options, world=world)
    assert started == (expected if world.size > 1 else [])  # one rank exchanges nothing


def test_smaller_mini_batches_and_first_steps_are_left_out(world, subject):
    net, _ = subject
    images = dl.ArrayDatastore(np.zeros((40, 1, 28, 28), np.uint8), np.arange(40) % 10)
    clock = trace(world, net, images)
    # Each epoch has a mini-batch of 32 and one of 8 images; the first step is not measured.
    assert {len(clock.steps)} == {2}
    assert clock.times().segments.shape[0] == 2


def test_steps_that_differ_are_an_error(world, subject):
    clock = trace(world, *subject)
    clock.steps[0][2].pop()
    with pytest.raises(dl.UserError, match="expected the same sums in every training step"):
        clock.times()
