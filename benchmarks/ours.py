"""Our side of a comparison, a rank of it: `python -m benchmarks.ours WHAT ADDRESS`."""

import argparse
import json
import os
import sys

from benchmarks import machine, subject, turns
from mpidl.cli import verify
from mpidl.comm import World, failure
from mpidl.training.options import configuration


def main(argv=None):
    """Take part until the other end hangs up; argv: what to run, as JSON, and the address."""
    text, address = sys.argv[1:] if argv is None else argv
    what = json.loads(text)
    chosen = argparse.Namespace(**what)
    os.sched_setaffinity(0, what["cores"][failure.launched_rank()])
    subject.configure(chosen)
    world = World(timeout=what["timeout"], plain=what["plain"])
    net = subject.network(what["network"], what["image"], what["seed"], dropout=False)
    batch = subject.mini_batch(net.input_shape, what["batch_size"], what["seed"])
    step = subject.Step(net, batch, world, what["batchnorm"])

    def about():
        versions = configuration.versions_of(world.transport.MPI.Get_library_version())
        return {"versions": versions, "arithmetic": machine.arithmetic()}

    def losses(count):
        """Of the first steps, by statistics of each rank's share, as others have them."""
        step.reset("local" if world.size > 1 else what["batchnorm"])
        found = [step() for _ in range(count)]
        step.reset(what["batchnorm"])
        return found

    def memory(count):
        """Bytes above what this process held before its first step."""
        before = machine.start_of_peak()
        for _ in range(count):
            step()
        return machine.peak() - before

    def steps(count):
        return turns.timed_steps(step, count, world.barrier)

    turns.serve(address, world.rank, {f.__name__: f for f in (about, losses, memory, steps)})
    return 0


def side(name, chosen, folder, *, ranks, plain=False, environment=None, cores=None):
    """A Side of our ranks; chosen: the command's arguments."""
    what = {
        "network": chosen.network,
        "image": chosen.image,
        "batch_size": chosen.batch_size,
        "seed": chosen.seed,
        "threads": chosen.threads,
        "winograd": chosen.winograd,
        "batchnorm": chosen.batchnorm,
        "timeout": chosen.timeout,
        "cores": cores or machine.cores_of(ranks, chosen.threads),
        "plain": plain,
    }
    launcher = verify.launcher(ranks) if ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "benchmarks.ours", json.dumps(what)]
    environment = verify.environment() | (environment or {})
    return turns.Side(name, [command], ranks, environment, folder, chosen.timeout)


if __name__ == "__main__":
    failure.run(main)
