"""Run a rank of mpidl's side of a comparison: `python -m benchmarks.ours TASK ADDRESS`."""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks import machine, prediction, subject, turns
from benchmarks.mpidl_step import TrainStep
from mpidl.data import ArrayDatastore
from mpidl.launcher import environment, launcher
from mpidl.ranks import failure
from mpidl.ranks.world import World
from mpidl.training.options import configuration
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.train import train

WARM_UP = 4  # untimed steps; the first step is recorded, and the second checks the recording


def main(argv=None):
    """Serve the requests of the benchmark (see `turns`) until it closes the connection.

    `argv` holds the task, as JSON, and the address of the socket.
    """
    job, address = subject.join(argv, failure.launched_rank())
    subject.configure(job)
    world = World(timeout=job.timeout, plain=job.plain)
    net, *arrays = subject.prepare(job)
    images, labels = arrays

    def describe():
        versions = configuration.versions_of(world.transport.MPI.Get_library_version())
        return {"versions": versions, "arithmetic": machine.arithmetic()}

    if job.predict:
        prediction.serve(address, prediction.our_pass(net, images, world), labels, describe)
        return 0
    step = TrainStep(net, arrays, world, job.batchnorm)

    def losses(count):
        """Return the first losses. Batch statistics are local to each rank, as in PyTorch."""
        step.reset("local" if world.size > 1 else job.batchnorm)
        values = [step() for _ in range(count)]
        step.reset(job.batchnorm)
        return values

    def memory(count):
        return machine.peak_of_steps(step, count)

    def steps(count):
        return turns.timed_steps(step, count, world.barrier)

    def training(count):
        """Return the seconds of each of the last `count` steps of a training run."""
        return training_step_seconds(job, world, images, labels, count)

    turns.serve(address, world.rank, describe, losses, memory, steps, training)
    return 0


def training_step_seconds(job, world, images, labels, count):
    """Run `dl.train` on copies of a mini-batch; return the seconds of each timed step."""
    times = []

    class Clock:
        def step(self, trainer):
            times.append(time.perf_counter())

    store = ArrayDatastore(np.tile(images, (8, 1, 1, 1)), np.tile(labels, 8))
    options = TrainingOptions(
        batch_size=len(images),
        epochs=count + WARM_UP,
        max_iterations=count + WARM_UP,
        precision=job.precision,
        plots="none",
        verbose="off",
    )
    net = subject.network(job.network, job.image, job.seed)
    train(net, store, options, world=world, hooks=[Clock()])
    return np.diff(times[-count - 1 :]).tolist()


def side(
    name: str,
    options: argparse.Namespace,
    folder: str,
    *,
    ranks: int,
    threads: int | None = None,
    plain: bool = False,
    precision: str | None = None,
    variables: dict[str, str] | None = None,
) -> turns.Side:
    """Start ranks of mpidl and return their Side.

    Parameters
    ----------
    name : str
        Name of the side.
    options : argparse.Namespace
        Parsed command line of the sub-command.
    folder : str
        Folder for the socket and the log.
    ranks : int
        Number of ranks to start.
    threads : int or None
        Threads of each rank. None means the option --threads.
    plain : bool
        Whether to compute the sums with MPI_Allreduce instead of the fold.
    precision : str or None
        Precision of the side. None means the option --precision.
    variables : dict or None
        Environment variables to add.
    """
    replaced = {"threads": threads, "precision": precision}
    replaced = {key: value for key, value in replaced.items() if value is not None}
    options = argparse.Namespace(**vars(options) | replaced)
    names = ("winograd", "batchnorm", "timeout")
    entries = {name: getattr(options, name) for name in names}
    entries |= {"plain": plain, "predict": getattr(options, "predict", False)}
    task = subject.task(options, machine.cores_of(ranks, options.threads), **entries)
    command = [*(launcher(ranks) if ranks > 1 else []), sys.executable, "-m", "benchmarks.ours"]
    variables = environment() | (variables or {})
    patience = max(options.timeout, turns.PATIENCE)
    return turns.Side(name, [[*command, task]], ranks, variables, folder, patience)


@contextlib.contextmanager
def sides(
    options: argparse.Namespace, keywords: Mapping[Any, dict]
) -> Iterator[dict[Any, turns.Side]]:
    """Start several sides and yield them by name.

    `keywords` maps each name to the keyword arguments of `side`.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mpidl-bench-"))
        yield {
            name: stack.enter_context(side(str(name), options, folder, **words))
            for name, words in keywords.items()
        }


if __name__ == "__main__":
    failure.run(main)
