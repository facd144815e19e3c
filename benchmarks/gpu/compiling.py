"""Compile the kernels of a computation on all cores, before the computation runs on the GPU.

A kernel that has been compiled before is read from its cache file (see `cubins`). The first run
therefore measures compiling, and later runs measure reading.
"""

import collections
import concurrent.futures
import contextlib
import multiprocessing
import os
import time

import numpy as np

from mpidl.backends.gpu import kernels, launching, nvrtc

WORKERS = 16


class Addresses:
    """A device without memory. It gives out addresses, and copies and computes nothing.

    `architecture`, such as "sm_90", and `processors` are properties of the GPU that it stands for.
    """

    name, memory, shared, sharers = "a GPU without memory", 1 << 40, 232448, 1
    specialize = True  # as a CudaDevice
    synchronous = is_aside = False

    def __init__(self, architecture, processors):
        self.architecture, self.processors = architecture, processors
        self._next = 1 << 20

    def allocate(self, nbytes):
        address, self._next = self._next, self._next + -(-nbytes // 256) * 256
        return launching.Block(address, nbytes)

    def pinned(self, nbytes):
        return np.zeros(nbytes, np.uint8)

    def free_memory(self):
        return self.memory

    def upload(self, address, array):
        pass

    def copy(self, destination, source, nbytes):
        pass

    def synchronize(self):
        pass

    def aside(self):
        pass

    def back(self):
        pass

    def join(self, token):
        pass


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

    def download(self, array, address):
        array[...] = np.zeros((), array.dtype)  # no kernel has computed a value


@contextlib.contextmanager
def collected(world):
    """Launch no kernels within the `with` block. Yield {Unit: True} of the kernels it needs."""
    device, collector = world.device, Collector(world.device)
    world.device = launching.open(collector)
    try:
        yield collector.units
    finally:
        world.device = launching.open(device)


def check_all(report, world, units=(), compile=None):
    """Compile these Units, and one of each family that has none among them.

    Parameters
    ----------
    report : Report
        Receives the check.
    world : World
        A world of one rank on a GPU.
    units : sequence of Unit
        The Units.
    compile : callable or None
        Compiles a unit for an architecture. None means `seconds_of`.
    """
    architecture = world.device.architecture
    number = int("".join(filter(str.isdigit, architecture)))
    families = {f for f in kernels.families() if kernels.NEEDS.get(f, 0) <= number}
    families -= {unit.family for unit in units}
    check(report, [*map(kernels.Unit, sorted(families)), *units], architecture, compile)


def check(report, units, architecture, compile=None):
    """Compile Units on all cores, and report errors and the time."""
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
