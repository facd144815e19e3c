"""Compile the kernels of the networks' training steps on all cores, and report the time.

A kernel that has been compiled before is read from its cache file (see `cubins`). The first run
therefore measures compiling, and later runs measure reading.
"""

import collections
import concurrent.futures
import multiprocessing
import os
import time

from benchmarks.mpidl_step import RecordedStep
from mpidl.backends.gpu import kernels, launching, nvrtc

BATCHES = {"digits": (128, 1024), "cifar": (256, 1024)}
WORKERS = 16


class Collector:
    """A device that only collects the requested Units, in order, in `units`."""

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
    """Record a training step without running it. Return the Units that the step needs."""
    device, collector = world.device, Collector(world.device)
    world.device = launching.open(collector)
    try:
        RecordedStep(world, network, batch, precision, graphs=False, **options)
    finally:
        world.device = launching.open(device)
    return list(collector.units)


def check_all(report, world, batches=None, compile=None):
    """Compile the kernels of the networks' training steps, in fp32 and tf32.

    Parameters
    ----------
    report : Report
        Receives the check.
    world : World
        A world of one rank on a GPU.
    batches : dict or None
        Batch sizes by network. None means BATCHES.
    compile : callable or None
        Compiles a unit for an architecture. None means `seconds_of`.
    """
    step_units, architecture = {}, world.device.architecture
    for network, sizes in (BATCHES if batches is None else batches).items():
        for batch in sizes:
            for precision in ("fp32", "tf32"):
                for unit in units_of(world, network, batch, precision):
                    step_units[unit] = True
    number = int("".join(filter(str.isdigit, architecture)))
    families = [f for f in kernels.families() if kernels.NEEDS.get(f, 0) <= number]
    families = {f for f in families if not any(unit.family == f for unit in step_units)}
    units = [*map(kernels.Unit, sorted(families)), *step_units]
    start = time.monotonic()
    failed = compile_all(units, architecture, compile or seconds_of)
    report.check(
        "kernels compile",
        not failed,
        f"{len(units)} units of {len({u.family for u in units})} families for {architecture} in "
        f"{time.monotonic() - start:.1f} s" + "".join(f"; {text}" for text in failed[:3]),
    )


def compile_all(units, architecture, compile):
    """Compile units in parallel; return the error messages of those that fail."""
    workers = min(WORKERS, len(os.sched_getaffinity(0)), max(len(units), 1))
    context = multiprocessing.get_context("spawn")  # CUDA does not work after a fork
    failed = []
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        waiting = {pool.submit(compile, unit, architecture): unit for unit in units}
        for future in concurrent.futures.as_completed(waiting):
            if future.exception() is not None:
                failed.append(f"{waiting[future].family}: {future.exception()}")
    return failed


def seconds_of(unit, architecture):
    """Compile a Unit, or read it from its cache file. Return the elapsed seconds."""
    start = time.monotonic()
    nvrtc.cubin(unit, architecture)
    return time.monotonic() - start
