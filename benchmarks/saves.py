"""`python -m benchmarks saves`: measure the cost of checkpoints and plots in a run.

One training run consists of turns, which are sequences of steps. In every second turn, a
checkpoint and progress.png are written, as at the end of an epoch. A turn ends when its files are
written, so it contains the whole cost of the files: the time that the ranks wait, and the processor
time of the writing process. The cost is the difference between neighbouring turns. Under mpirun,
the launched ranks train together.
"""

import argparse
import math
import os
import shutil
import tempfile
import time

import numpy as np

from benchmarks import machine, report, turns
from benchmarks.input_memory import RepeatedImages
from mpidl.errors import Fault
from mpidl.nn import zoo
from mpidl.ranks.world import World
from mpidl.report import Console
from mpidl.training.options import configuration
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.train import train
from mpidl.training.trainer import Trainer

PLAIN, SAVING = "without files", "with files"
CLASSES, SIDE = 1000, {"alexnet": 227}
EPOCHS = {"ImageNet": 1_281_167, "10,000 images": 10_000}  # images per epoch
OPTIONS = ("network", "batch_size", "threads", "rounds", "iterations")


class Turns:
    """A hook that measures turns of steps, with and without files.

    Attributes
    ----------
    seconds : dict
        {kind: seconds of each turn}
    stalls : list of float
        Seconds that the ranks wait at each checkpoint and plot.
    processor_seconds : list of float
        Processor time of the writing process next to rank 0, in each turn with files.
    """

    def __init__(self, rounds: int, iterations: int) -> None:
        self.iterations = iterations
        self.kinds = [kind for _, kind in turns.alternate((PLAIN, SAVING), rounds)]
        self.seconds: dict[str, list[float]] = {PLAIN: [], SAVING: []}
        self.stalls: list[float] = []
        self.processor_seconds: list[float] = []
        self.start_time = self.used_before = 0.0

    def step(self, run: Trainer) -> None:
        """If a step was the last step of its turn, end the turn and begin the next turn."""
        turn, steps = divmod(run.position.iteration - 1, self.iterations)
        if steps:
            return
        if turn == 0:
            self._save(run)  # starts the process; this turn is not measured
        run.writer.wait()
        run.world.barrier()
        now, used = time.perf_counter(), _processor_seconds(run.writer.background.process)
        if turn:
            self.seconds[self.kinds[turn - 1]].append(now - self.start_time)
            if self.kinds[turn - 1] == SAVING:
                self.processor_seconds.append(used - self.used_before)
        self.start_time, self.used_before = now, used
        if turn < len(self.kinds) and self.kinds[turn] == SAVING:
            self._save(run)
            run.world.barrier()
            self.stalls.append(time.perf_counter() - now)

    def _save(self, run):
        run.save(wait=False)
        run.writer.plot_time = -math.inf
        run.writer.plot()


def _processor_seconds(process):
    """Return the processor time of a process so far, or 0.0 on ranks without such a process."""
    if process is None:
        return 0.0
    with open(f"/proc/{process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(options: argparse.Namespace) -> dict | None:
    """Run the benchmark; on rank 0, return its results for the JSON file."""
    world = World(timeout=options.timeout, threads=options.threads)
    side = SIDE.get(options.network, 32)
    net = zoo.NETWORKS[options.network]((3, side, side), CLASSES, seed=options.seed)
    steps = 2 * options.rounds * options.iterations + 1
    hook = Turns(options.rounds, options.iterations)
    settings = TrainingOptions(
        epochs=1,
        max_iterations=steps,
        batch_size=options.batch_size,
        learning_rate=1e-6,
        threads=options.threads,
        batchnorm_statistics="moving",
        device="cpu",
        plots="none",  # the hook draws them
    )
    folder = world.broadcast(tempfile.mkdtemp(prefix="mpidl-bench-") if not world.rank else None)
    store = RepeatedImages(side, max(steps * options.batch_size, CLASSES), CLASSES)
    console = Console(world.rank, progress=False)
    try:
        train(net, store, settings, world=world, console=console, out=folder, hooks=[hook])
        world.barrier()
        nbytes = os.path.getsize(os.path.join(folder, "checkpoint.h5"))
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return _report(options, world, hook, nbytes) if world.rank == 0 else None


def _report(options, world, hook, nbytes):
    rounds = min(map(len, hook.seconds.values()))  # fewer if the training was stopped
    if not rounds:
        raise Fault("saves: the training was stopped before the end of the first round")
    plain_seconds, saving_seconds = (np.array(hook.seconds[k][:rounds]) for k in (PLAIN, SAVING))
    cost = saving_seconds - plain_seconds
    step = report.median(plain_seconds) / options.iterations
    print(
        f"{options.network}, a checkpoint of {nbytes / 1e6:.0f} MB and a plot, batch "
        f"{options.batch_size}, {world.size} rank(s), {machine.arithmetic()}, {rounds} "
        f"rounds of {options.iterations} steps"
    )
    rows = [
        ("  step", report.spread(plain_seconds / options.iterations, 1e3), "ms"),
        ("  the ranks wait", report.spread(hook.stalls, 1e3), "ms"),
        ("  processor time beside", report.spread(hook.processor_seconds, 1e3), "ms"),
        ("  cost of a turn", report.spread(cost, 1e3), "ms"),
    ]
    shares = {}
    for name, images in EPOCHS.items():
        shares[name] = report.median(cost) / (step * images / options.batch_size)
        rows.append((f"  cost, epoch of {name}", f"{100 * shares[name]:.4f}", "%"))
    report.print_table(rows, left=3)
    versions = configuration.versions_of(world.transport.MPI.Get_library_version())
    return report.header(options, versions, *OPTIONS) | {
        "ranks": world.size,
        "bytes": nbytes,
        "seconds": hook.seconds,
        "wait_ms": report.summary(hook.stalls, 1e3),
        "processor_ms": report.summary(hook.processor_seconds, 1e3),
        "cost_ms": report.summary(cost, 1e3),
        "share_of_epoch": shares,
    }
