"""Test the timelines and the `ranks` records of short training runs."""

import contextlib
import io
import itertools
import json
import time

import numpy as np
import pytest
import trace_events
from short_training import pictures, small
from single_rank import numbers

import mpidl as dl
from mpidl import phases
from mpidl.core import spans
from mpidl.errors import UserError
from mpidl.nn import zoo
from mpidl.report import Console
from mpidl.training.files.model_file import weights_sha256

pytestmark = pytest.mark.usefixtures("without_plots")
BATCHES = 3  # mini-batches per epoch: 40, 40 and 20 images


def train(world, out, console=None, hooks=(), store=None, **options):
    """Train for two epochs with files in the folder `out`. Return the network."""
    options = {"epochs": 2, "batch_size": 40, "verbose_every": 0} | options
    net, store = small(), pictures(100) if store is None else store
    options = dl.TrainingOptions(**options)
    dl.train(net, store, options, world=world, out=out, console=console, hooks=hooks)
    return net


@pytest.fixture
def out(world, tmp_path):
    return world.broadcast(str(tmp_path / "run"))


def timeline_of(out):
    return trace_events.read(f"{out}/timeline.json.gz")


def test_a_timeline_has_the_iterations_of_all_ranks(world, out):
    stream = io.StringIO()
    train(world, out, Console(world.rank, stream=stream), timeline=4)
    assert phases.spans() is None
    if world.rank == 0:
        trace = timeline_of(out)
        facts = trace["otherData"]
        assert (facts["ranks"], facts["cut"]) == (world.size, False)
        assert (facts["first_iteration"], facts["last_iteration"]) == (1, 4)
        assert len(facts["clock_error_microseconds"]) == world.size
        assert {e["pid"] for e in trace["traceEvents"]} == set(range(world.size))
        for rank in range(world.size):
            steps = trace_events.complete(trace, rank, "iteration")
            assert [e["args"]["iteration"] for e in steps] == [1, 2, 3, 4]
            layers = {e["name"] for e in trace_events.complete(trace, rank, "layer")}
            assert {"conv1+batchnorm1+relu1", "dense1"} <= layers
            names = {e["name"] for e in trace_events.complete(trace, rank, "span")}
            assert {"forward", "backward", "update", "CheckpointHook"} <= names
            assert trace_events.complete(trace, rank, "input")
        sums = {e["name"] for e in trace["traceEvents"] if e["ph"] == "b"}
        if world.size > 1:
            assert "forward / conv1+batchnorm1+relu1" in sums
            assert any("dense1.weight" in name for name in sums)
        text = stream.getvalue()
        assert "Timeline of 4 iterations" in text and "timeline.json.gz" in text
        assert ("Slowest rank:" in text) == ("Largest wait:" in text) == (world.size > 1)


@pytest.mark.slow_on_ranks
def test_the_weights_have_the_same_bytes_with_and_without(world, out):
    nets = [train(world, f"{out}{count}", timeline=count) for count in (0, 2, float("inf"))]
    assert len({weights_sha256(net) for net in nets}) == 1
    if world.rank == 0:
        with pytest.raises(FileNotFoundError):
            timeline_of(f"{out}0")
        last = [timeline_of(f"{out}{n}")["otherData"]["last_iteration"] for n in ("2", "inf")]
        assert last == [2, 2 * BATCHES]


def coverage_of_digits(world, out):
    """Train the digits network on 128 images per rank. Return the coverages on rank 0."""
    size = 128 * world.size
    images = numbers("timeline", 3 * size, 1, 28, 28, low=0, high=200).astype(np.uint8)
    store, options = dl.ArrayDatastore(images, np.arange(3 * size) % 10), {"verbose_every": 0}
    options = dl.TrainingOptions(epochs=1, batch_size=size, timeline=3, **options)
    dl.train(zoo.digits(), store, options, world=world, out=out)
    return timeline_of(out)["otherData"]["coverage"] if world.rank == 0 else [1.0]


@pytest.mark.slow_on_ranks
def test_the_spans_cover_the_iterations(world, out, monkeypatch):
    """At least 98 % of each iteration is inside spans.

    The test measures CPU time, which excludes the pauses of a busy machine.
    """
    for module in (phases, spans):
        monkeypatch.setattr(module, "now", time.thread_time_ns)
    assert min(coverage_of_digits(world, out)) >= 0.98
    for module, name in itertools.product((phases, spans), ("span", "layer")):
        monkeypatch.setattr(module, name, lambda _: contextlib.nullcontext())
    if world.rank == 0:
        assert max(coverage_of_digits(world, f"{out}-without")) < 0.9
    else:
        coverage_of_digits(world, f"{out}-without")


@pytest.mark.slow_on_ranks
def test_the_recording_ends_when_its_memory_is_full(world, out, monkeypatch):
    stream = io.StringIO()
    store_spans = phases.store_spans
    monkeypatch.setattr(phases, "store_spans", lambda capacity: store_spans(60))
    train(world, out, Console(world.rank, stream=stream), timeline=float("inf"))
    if world.rank == 0:
        facts = timeline_of(out)["otherData"]
        assert facts["cut"] and facts["last_iteration"] < BATCHES
        assert facts["cut_reason"] == "--timeline-mb 32"
        assert f"was cut after iteration {facts['last_iteration']}" in stream.getvalue()


def test_memory_is_divided_among_the_ranks(world, out, monkeypatch):
    capacities, store_spans = [], phases.store_spans
    monkeypatch.setattr(
        phases, "store_spans", lambda n: (capacities.append(n), store_spans(n)) and None
    )
    train(world, out, timeline=1, timeline_mb=3)
    assert capacities == [3 * 2**20 // 24 // world.size]


def test_a_run_without_a_folder_has_no_timeline(world):
    with pytest.raises(UserError, match="timeline: expected a folder"):
        train(world, None, timeline=2)
    assert phases.spans() is None


def test_a_file_that_cannot_be_written_does_not_end_the_run(world, out, monkeypatch):
    def fail(*_):
        raise UserError("timeline.json.gz: cannot be written: disk full")

    stream = io.StringIO()
    monkeypatch.setattr("mpidl.report.trace_file.write_timeline", fail)
    train(world, out, Console(world.rank, stream=stream), timeline=2)
    assert world.rank or "warning: no timeline: timeline.json.gz: cannot" in stream.getvalue()


def test_a_failed_run_stops_the_recording(world, out):
    class Failing:
        def step(self, trainer):
            raise UserError("planned")

    with pytest.raises(UserError, match="planned"):
        train(world, out, hooks=[Failing()], timeline=5)
    assert phases.spans() is None


@pytest.mark.parametrize("images", [100, 16])
def test_metrics_tell_what_the_ranks_spend_their_time_on(world, out, images, monkeypatch):
    """The times of each rank add up to the duration, even on ranks without images.

    With 16 images, only one rank has images.
    """

    class Clock:
        first = 0.0

        def step(self, trainer):
            self.first = self.first or time.monotonic()

        def epoch(self, trainer, summary):
            self.last = time.monotonic()

    monkeypatch.setattr("mpidl.training.rank_times.SECONDS", 0.0)
    clock, begin = Clock(), time.monotonic()
    train(world, out, store=pictures(images), hooks=[clock])
    duration = time.monotonic() - begin
    if world.rank == 0:
        with open(f"{out}/metrics.jsonl") as file:
            records = [json.loads(line) for line in file]
        ranks = [r for r in records if r["kind"] == "ranks"]
        count = -(-images // 40)
        assert [r["iteration"] for r in ranks][-1] == 2 * count
        assert {r["epoch"] for r in ranks if r["iteration"] % count == 0} == {1, 2}
        for record in ranks:
            spent = [record[kind] for kind in phases.KINDS]
            for times in spent:
                assert len(times) == world.size and min(times) >= 0
            assert min(record["compute"]) > 0
            assert all(0 < nbytes < 2**40 for nbytes in record["memory"])
            assert record["device"] == ["cpu, 1 thread"] * world.size
        total = sum(r[kind][0] for r in ranks for kind in phases.KINDS)
        rounding = 1e-6 * len(ranks) * len(phases.KINDS)
        # No time is counted twice, and every iteration is counted.
        assert clock.last - clock.first - rounding <= total <= duration + rounding
