"""Run a rank of mpidl's side of a comparison: `python -m benchmarks.ours TASK ADDRESS`."""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import machine, prediction, subject, turns
from benchmarks.mpidl_step import TrainStep
from mpidl.comm import World, failure
from mpidl.comm.launcher import environment, launcher
from mpidl.training.options import configuration


def main(argv=None):
    """Answer questions until the other end closes the connection.

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
        """Return the first losses; batch statistics are local to each rank, as in PyTorch."""
        step.reset("local" if world.size > 1 else job.batchnorm)
        values = [step() for _ in range(count)]
        step.reset(job.batchnorm)
        return values

    def memory(count):
        return machine.peak_of_steps(step, count)

    def steps(count):
        return turns.timed_steps(step, count, world.barrier)

    turns.serve(address, world.rank, describe, losses, memory, steps)
    return 0


def side(
    name: str,
    options: argparse.Namespace,
    folder: str,
    *,
    ranks: int,
    plain: bool = False,
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
    plain : bool
        Whether MPI_Allreduce computes the sums instead of the fold.
    variables : dict or None
        Environment variables to add.
    """
    names = ("winograd", "batchnorm", "timeout")
    entries = {name: getattr(options, name) for name in names}
    entries |= {"plain": plain, "predict": getattr(options, "predict", False)}
    task = subject.task(options, machine.cores_of(ranks, options.threads), **entries)
    command = [*(launcher(ranks) if ranks > 1 else []), sys.executable, "-m", "benchmarks.ours"]
    variables = environment() | (variables or {})
    return turns.Side(name, [[*command, task]], ranks, variables, folder, options.timeout)


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
