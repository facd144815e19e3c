"""`python -m benchmarks logging`: measure the cost of metrics, event files and the monitor.

The sides take turns to train one epoch of the digits network. One side writes no records, and the
other sides add metrics.jsonl, then event files for TensorBoard, then `mpidl.monitor`. The time of
an epoch begins after the first mini-batch and ends when all records are written. It does not
include drawing the gallery and starting the monitor. Under mpirun, the launched ranks train
together.
"""

import argparse
import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np

from benchmarks import report, turns
from mpidl import data
from mpidl.errors import Fault
from mpidl.launcher import environment
from mpidl.nn import zoo
from mpidl.ranks.world import World
from mpidl.report import Metrics
from mpidl.trackers.tensorboard import TensorBoardHook
from mpidl.training.files.model_file import weights_sha256
from mpidl.training.options import configuration
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.train import train

SILENT, METRICS = "no records", "metrics"
TENSORBOARD, MONITOR = "metrics, tensorboard", "metrics, tensorboard, monitor"
NEEDS = {TENSORBOARD: "tensorboardX", MONITOR: "mpidl.monitor"}


def main(options: argparse.Namespace) -> dict | None:
    """Run the benchmark; on rank 0, return its results for the JSON file.

    Raises
    ------
    Fault
        If the sides give different weights.
    """
    world = World()
    images, _ = data.digits(world).split(0.9, seed=0)
    sides = [side for side in (SILENT, METRICS, TENSORBOARD, MONITOR) if _is_available(side)]
    times: dict[str, list[float]] = {side: [] for side in sides}
    hashes = set()
    folder = world.broadcast(tempfile.mkdtemp(prefix="mpidl-bench-") if not world.rank else None)
    try:
        train_epoch(SILENT, images, world, os.path.join(folder, "warm-up"), options.seed)
        for number, side in turns.alternate(sides, options.rounds):
            out = os.path.join(folder, f"{number}-{sides.index(side)}")
            seconds, digest = train_epoch(side, images, world, out, options.seed)
            times[side].append(seconds)
            hashes.add(digest)
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if len(hashes) > 1:
        raise Fault("the sides computed different weights")
    if world.rank:
        return None
    left_out = [f"{side} ({NEEDS[side]} is missing)" for side in NEEDS if side not in sides]
    print(f"an epoch of digits, {world.size} rank(s), {options.rounds} rounds, the same weights")
    if left_out:
        print(f"not measured: {', '.join(left_out)}")
    ratios = {side: np.divide(times[side], times[SILENT]) for side in sides[1:]}
    rows = [["", "s per epoch", f"/ {SILENT}"]]
    for side in sides:
        ratio = report.spread(ratios[side], digits=4) if side in ratios else ""
        rows.append([side, report.spread(times[side], digits=3), ratio])
    report.print_table(rows)
    for side, ratio in ratios.items():
        print(f"{side}: {100 * (report.median(ratio) - 1):+.2f} % of an epoch")
    versions = configuration.versions_of(world.transport.MPI.Get_library_version())
    record = report.header(options, versions, "rounds", "seed") | {"ranks": world.size}
    summaries = {side: report.summary(ratio) for side, ratio in ratios.items()}
    return record | {"seconds": times, "ratios": summaries}


def _is_available(side):
    return side not in NEEDS or importlib.util.find_spec(NEEDS[side]) is not None


class Timer:
    """A hook that times an epoch, from the second mini-batch to the end of all earlier hooks."""

    def __init__(self, is_silent: bool):
        self.is_silent, self.start_time, self.seconds = is_silent, 0.0, 0.0

    def start(self, trainer):
        if self.is_silent and trainer.writer.metrics is not None:
            trainer.writer.metrics.close()
            trainer.writer.metrics = Metrics(trainer.writer.metrics.path, rank=1)  # writes nothing

    def step(self, trainer):
        if trainer.position.iteration == 1:
            trainer.world.barrier()
            self.start_time = time.perf_counter()

    def epoch(self, trainer, summary):
        self.seconds = trainer.world.gop("max", time.perf_counter() - self.start_time)


def train_epoch(side: str, images: data.Datastore, world: World, out: str, seed: int):
    """Train one epoch; return its seconds, and the hash of the weights."""
    net = zoo.digits(images.image_shape, len(images.classes), seed=seed)
    options = TrainingOptions.from_recipe(
        "digits", epochs=1, seed=seed, plots="none", verbose="off", verbose_every=0
    )
    timer = Timer(side == SILENT)
    hooks = [TensorBoardHook()] if side in (TENSORBOARD, MONITOR) else []
    with _monitor(out) if side == MONITOR and not world.rank else contextlib.nullcontext():
        train(net, images, options, world=world, out=out, hooks=[*hooks, timer])
    return timer.seconds, weights_sha256(net)


@contextlib.contextmanager
def _monitor(out):
    """Start the monitor of a run that is about to begin, and end it after the run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mpidl.monitor", out],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = ""
        while "Press Ctrl-C" not in output:  # the last line before the monitor serves
            line = process.stdout.readline()
            if not line:
                raise Fault(f"mpidl.monitor ended: {turns.last_message(output)}")
            output += line
        yield
    finally:
        process.terminate()
        process.wait()
