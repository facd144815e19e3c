"""`python -m benchmarks timeline`: measure the cost of a timeline, and the coverage of its spans.

One training run consists of turns, which are runs of consecutive steps. Turns of the kind "on"
record spans. Turns of the kinds "off" and "again" record no spans, and their difference shows the
noise. Under mpirun, all ranks train together.
"""

import argparse
import time

import numpy as np

from benchmarks import machine, report, subject, turns
from mpidl import phases
from mpidl.data import ArrayDatastore
from mpidl.phases import SPAN, Seconds
from mpidl.ranks.world import World
from mpidl.report import Console, timeline_table
from mpidl.report.trace_file import RankSpans
from mpidl.training.options import configuration
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.train import train
from mpidl.training.trainer import Trainer

KINDS = ("off", "on", "again")  # only "on" records spans
BATCHES = 4  # mini-batches per epoch
CAPACITY = 1 << 20  # largest number of spans per turn
OPTIONS = ("network", "batch_size", "threads", "rounds", "iterations")


class Turns:
    """A hook that measures steps in turns, with and without spans.

    Attributes
    ----------
    seconds : dict
        {kind: seconds per step of each turn}
    coverage : list of float
        Fraction of the iterations' time that this rank's spans cover, for each turn with spans.
    spans_per_step : float
        Number of spans of this rank per step.
    """

    def __init__(self, world: World, rounds: int, iterations: int) -> None:
        self.world, self.iterations = world, iterations
        self.kinds = [kind for _, kind in turns.alternate(KINDS, rounds)]
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.coverage: list[float] = []
        self.spans_per_step = 0.0
        self.turn = self.steps = 0

    def step(self, run: Trainer) -> None:
        """If a step was the last step of its turn, end the turn and begin the next turn."""
        phases.iteration_ends(run.position.iteration)
        kind = self.kinds[self.turn]
        if self.steps == 0:  # the first step of a turn is not measured
            self.world.barrier()
            if kind == "on":
                phases.store_spans(CAPACITY)
            phases.iteration_ends()
            self.start = time.perf_counter()
        elif self.steps == self.iterations:
            self.world.barrier()
            self.seconds[kind].append((time.perf_counter() - self.start) / self.iterations)
            stored = phases.take_spans()
            if stored is not None:
                self._measure(stored)
            self.steps, self.turn = -1, self.turn + 1
        self.steps += 1
        if self.turn == len(self.kinds):
            run.stop()

    def _measure(self, stored):
        spans, labels = stored.array(), list(stored.labels)
        rank = RankSpans("", "", spans, labels, Seconds(*[0.0] * 5), self.iterations, False)
        self.coverage.append(timeline_table.coverage(rank))
        self.spans_per_step = len(spans) / self.iterations


def main(options: argparse.Namespace) -> dict | None:
    """Run the benchmark; on rank 0, return its results for the JSON file."""
    subject.configure(options)
    world = World(timeout=options.timeout, threads=options.threads)
    net = subject.network(options.network, options.image, options.seed)
    images, labels = subject.mini_batch(net.input_shape, BATCHES * options.batch_size)
    store = ArrayDatastore((255 * images).astype(np.uint8), labels)
    hook = Turns(world, options.rounds, options.iterations)
    settings = TrainingOptions(
        epochs=10**6,
        batch_size=options.batch_size,
        winograd=options.winograd,
        threads=options.threads,
        batchnorm_statistics="moving",
        device="cpu",
        plots="none",
    )
    console = Console(world.rank, progress=False)
    train(net, store, settings, world=world, console=console, hooks=[hook])
    results = world.gather((hook.coverage, hook.spans_per_step))
    if results is None:
        return None
    coverage = [report.median(values) for values, _ in results]
    per_step = max(count for _, count in results)
    return _report(options, world, hook.seconds, coverage, per_step)


def seconds_per_span(count: int = 100_000) -> float:
    """Return the cost in seconds of storing a span of a layer."""
    phases.store_spans(count)

    def spans():
        for _ in range(count):
            with phases.layer("layer"):
                pass

    duration = turns.seconds(spans)
    phases.take_spans()
    return duration / count


def _report(options, world, seconds, coverage, per_step):
    times = {kind: np.array(values) for kind, values in seconds.items()}
    overhead, control = times["on"] / times["off"] - 1, times["again"] / times["off"] - 1
    span = min(seconds_per_span() for _ in range(5))
    share = per_step * span / report.median(times["off"])
    ranks = f"{world.size} rank(s), {machine.arithmetic()}"
    text = f"{options.rounds} rounds of {options.iterations} steps, in turns"
    subject.print_head(options, f"{ranks}, {text}")
    rows = [
        ("  step, timeline off", report.spread(times["off"], 1e3), "ms"),
        ("  step, timeline on", report.spread(times["on"], 1e3), "ms"),
        ("  overhead, on against off", report.spread(overhead, 100), "%"),
        ("  off again, against off", report.spread(control, 100), "%"),
        ("  spans per step", f"{per_step:.0f} of {SPAN.itemsize} bytes", "on the busiest rank"),
        ("  their own cost", f"{span * 1e6:.2f} us each, {share * 100:.2f}", "% of a step"),
        ("  covered by spans", f"{100 * min(coverage):.2f}", "% of the iterations, lowest rank"),
    ]
    report.print_table(rows, left=3)
    versions = configuration.versions_of(world.transport.MPI.Get_library_version())
    return report.header(options, versions, *OPTIONS) | {
        "ranks": world.size,
        "ms": {kind: report.summary(values, 1e3) for kind, values in times.items()},
        "overhead": report.median(overhead),
        "control": report.median(control),
        "spans_per_step": per_step,
        "span_microseconds": span * 1e6,
        "span_share": share,
        "coverage": coverage,
    }
