"""Compiles what the networks' steps need, on all cores at once, and says how long it takes.

A kernel that was compiled before is read from its file (`cubins`), here as everywhere: what is
measured the first time is compiling, and after that reading.
"""

import collections
import concurrent.futures
import multiprocessing
import os
import time

from benchmarks.gpu import ours
from mpidl.backends.gpu import kernels, launching, nvrtc

BATCHES = {"digits": (128, 1024), "cifar": (256, 1024)}
WORKERS = 16


class Collector:
    """A device on which nothing is compiled or launched; `units`: what was asked for, in order."""

    def __init__(self, device):
        self.device, self.units = device, {}

    def __getattr__(self, name):
        return getattr(self.device, name)

    def load(self, unit):
        self.units[unit] = True
        return collections.defaultdict(lambda: None)

    def launch(self, handle, launch):
        pass


def units_of(world, network, batch, precision, **options):
    """The Units that a training step takes: it is recorded, and not run."""
    device, collector = world.device, Collector(world.device)
    world.device = launching.open(collector)
    try:
        ours.Step(world, network, batch, precision, graphs=False, **options)
    finally:
        world.device = launching.open(device)
    return list(collector.units)


def check_all(report, world, batches=None, compile=None):
    """Compile what the training steps of {network: batches} need, in fp32 and tf32.

    compile: a function of (unit, architecture) that does it.
    """
    needed, architecture = {}, world.device.architecture
    for network, sizes in (BATCHES if batches is None else batches).items():
        for batch in sizes:
            for precision in ("fp32", "tf32"):
                for unit in units_of(world, network, batch, precision):
                    needed[unit] = True
    number = int("".join(filter(str.isdigit, architecture)))
    families = [f for f in kernels.families() if kernels.NEEDS.get(f, 0) <= number]
    families = {f for f in families if not any(unit.family == f for unit in needed)}
    units = [*map(kernels.Unit, sorted(families)), *needed]
    began = time.monotonic()
    failed = compiled(units, architecture, compile or seconds_of)
    report.check(
        "kernels compile",
        not failed,
        f"{len(units)} units of {len({u.family for u in units})} families for {architecture} in "
        f"{time.monotonic() - began:.1f} s" + "".join(f"; {text}" for text in failed[:3]),
    )


def compiled(units, architecture, compile):
    """What was said of those that do not compile."""
    workers = min(WORKERS, len(os.sched_getaffinity(0)), max(len(units), 1))
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    failed = []
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        waiting = {pool.submit(compile, unit, architecture): unit for unit in units}
        for done in concurrent.futures.as_completed(waiting):
            if done.exception() is not None:
                failed.append(f"{waiting[done].family}: {done.exception()}")
    return failed


def seconds_of(unit, architecture):
    """How long a Unit takes to compile, or to be read."""
    began = time.monotonic()
    nvrtc.cubin(unit, architecture)
    return time.monotonic() - began
