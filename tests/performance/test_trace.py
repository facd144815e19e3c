"""Test that the exchanges traced on one rank are the exchanges that several ranks make."""

import numpy as np
import pytest
from cpu_builds import needs_kernels

import mpidl as dl
from mpidl.backends.cpu import builds
from mpidl.backends.cpu.program import Program
from mpidl.backends.cpu.recorder import Recorder
from mpidl.core import fold
from mpidl.core.blocks import blocks_of
from mpidl.core.fold import merge_moments
from mpidl.performance import links
from mpidl.performance.trace import AGREE, BUCKET, SUM, Event, StepClock, TracingWorld
from mpidl.ranks.world import World

LEARNABLES = 123_090


@pytest.fixture
def subject():
    images = np.zeros((128, 1, 28, 28), np.uint8)
    net = dl.nn.zoo.digits((1, 28, 28), 10, seed=0)
    return net, dl.ArrayDatastore(images, np.arange(128) % 10)


OPTIONS = {"batch_size": 32, "verbose": "off", "plots": "none", "learning_rate": 1e-4}


def trace(world, net, images, **options):
    solo = TracingWorld(world.transport.MPI.COMM_SELF)
    clock = StepClock(32, 0, solo, at_least=2)
    settings = dl.TrainingOptions(epochs=4, device="cpu", **OPTIONS | options)
    dl.train(net, images, settings, world=solo, hooks=[clock])
    return clock


def test_the_digits_network_sends_what_the_document_lists(world, subject):
    """Compare with docs/communication.md: 3 normalizations of 20 channels, gradients, the loss."""
    clock = trace(world, *subject)
    times = clock.times()
    sums = [event[1:] for event in times.events if event.kind == SUM]
    assert sums == [(41, 8, "moments")] * 3 + [(40, 8, "add")] * 3 + [(2, 8, "add")]
    buckets = [event for event in times.events if event.kind == BUCKET]
    normalized = 3 * 2 * 20  # backward waits for the sums of their gradients
    assert sum(event.width for event in buckets) == LEARNABLES - normalized
    assert all(event.itemsize == 4 for event in buckets) and len(buckets) == 2
    assert len(times.places) == len(times.events)
    assert (np.diff(times.places) >= 0).all() and 0 < times.places[0] < times.places[-1] < 1
    assert times.segments.shape == (len(times.segments), 8)  # one per wait: agreement, 7 sums
    step_seconds = [end - start for start, end, _ in clock.steps]
    assert times.segments.sum(axis=1) == pytest.approx(step_seconds)
    assert (times.segments > 0).all() and times.input >= 0


@needs_kernels
def test_a_replay_notes_the_exchanges_of_an_eager_step(world, subject, monkeypatch):
    """The clock must measure replays and ignore the first steps, which are recorded and checked."""
    net, images = subject
    replays, run = [], Program.run

    def count(self, *parts):
        replays.append(parts)
        return run(self, *parts)

    monkeypatch.setattr(Program, "run", count)
    eager = trace(world, net, images, graphs="off")
    assert not replays and not eager.world.replays_steps
    replayed = trace(world, net, images)
    assert replayed.world.replays_steps
    # a gradient and an update in the check, then each measured step
    assert replays == [(0,), (1,), *[(0, 1)] * len(replayed.steps)] and len(replayed.steps) >= 2
    times, expected = replayed.times(), eager.times()
    assert times.events == expected.events and times.events.count(Event(AGREE, 1, 8)) == 1
    assert times.segments.shape[1] == expected.segments.shape[1] == 8
    assert (np.diff(times.places) >= 0).all() and 0 < times.places[0] < times.places[-1] < 1
    # forward and backward are between the sums of statistics, not after the last sum
    assert times.places[-1] - times.places[0] > 0.3


@needs_kernels
def test_a_recorded_sum_is_the_sum_of_a_step(world):
    for event in (Event(SUM, 41, 8, "moments"), Event(SUM, 40, 8), Event(BUCKET, 90_000, 4)):
        tree, matrix, combine = links._arguments(world, event, blocks_of(80))
        matrix[...] = 1 + np.arange(len(matrix))[:, None]
        term = fold.Term(tree, list(matrix), combine, matrix.dtype)
        partial = fold.Partial([term], None, (event.width,), matrix.dtype)
        expected = world.gplus(partial)
        replay = links.recorded_sum(world, partial)
        for _ in range(3):
            total = replay()
            assert total.tobytes() == expected.tobytes()
            if world.size > 1:
                total[...] = 0  # the next replay computes it again


@needs_kernels
def test_a_sum_that_one_rank_cannot_record_is_an_error_of_all_ranks(world, monkeypatch):
    finish = Recorder.finish

    def refuse_on_last_rank(recorder):
        if world.rank == world.size - 1:
            recorder.refuse("a reason of the last rank")
        return finish(recorder)

    tree, matrix, combine = links._arguments(world, Event(BUCKET, 40, 4), blocks_of(80))
    term = fold.Term(tree, list(matrix), combine, matrix.dtype)
    partial = fold.Partial([term], None, (40,), matrix.dtype)
    monkeypatch.setattr(Recorder, "finish", refuse_on_last_rank)
    with pytest.raises(dl.Fault, match="cannot be replayed: a reason of the last rank"):
        links.recorded_sum(world, partial)


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
        if builds.recorder() is None:
            started.append((sum(size for size, _ in pieces), dtype.itemsize, operation))
        return start_sum(self, tree, pieces, combine, dtype, *arguments)

    monkeypatch.setattr(World, "start_sum", spy)
    statistics = {"batchnorm_statistics": "moving"}
    options = dl.TrainingOptions(max_iterations=1, device="cpu", **statistics, **OPTIONS)
    dl.train(net, images, options, world=world)
    assert started == (expected if world.size > 1 else [])  # one rank exchanges nothing


def test_smaller_mini_batches_and_first_steps_are_left_out(world, subject):
    net, _ = subject
    images = dl.ArrayDatastore(np.zeros((72, 1, 28, 28), np.uint8), np.arange(72) % 10)
    clock = trace(world, net, images)
    # Each epoch has two mini-batches of 32 images and one of 8. Both full mini-batches of the first
    # epoch, and the first mini-batch of each other epoch, are not measured.
    assert {len(clock.steps)} == {2}
    assert clock.times().segments.shape[0] == 2


def test_steps_that_differ_are_an_error(world, subject):
    clock = trace(world, *subject)
    clock.steps[0][2].pop()
    with pytest.raises(dl.UserError, match="expected the same sums in every training step"):
        clock.times()
