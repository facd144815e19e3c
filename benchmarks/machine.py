"""Describe the machine that runs a benchmark: its cores, their load, and the memory in use."""

import ctypes
import os
from collections.abc import Callable

from mpidl.backends.cpu import builds
from mpidl.errors import UserError
from mpidl.ranks import failure


def arithmetic() -> str:
    """Describe the kernels in this process, such as "C kernels for x86-64-v3" or "NumPy"."""
    library = builds.kernels()
    return "NumPy" if library is None else f"C kernels for {library.build}"


def cores_of(ranks: int, threads: int) -> list[list[int]]:
    """Choose the cores for each rank. If there are too few, ranks share cores."""
    cores = sorted(os.sched_getaffinity(0))
    return [[cores[(r * threads + t) % len(cores)] for t in range(threads)] for r in range(ranks)]


def is_launched() -> bool:
    """Return whether mpirun or srun started this process as one of its ranks."""
    counts = {name: int(os.environ.get(name) or 0) for name in failure.LAUNCHERS}
    return any(n > 1 or (n and not name.startswith("SLURM_")) for name, n in counts.items())


def refuse_launcher(command: str) -> None:
    """Raise UserError if mpirun started this command, which measures one process."""
    if is_launched():
        raise UserError(f"{command} measures one process: run it without mpirun")


def start_of_peak() -> int:
    """Return the resident bytes of this process and reset the peak that `peak` returns.

    First, let malloc return unused memory to the system, as far as possible.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        pass  # the C library is not glibc
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS:")


def peak() -> int:
    """Return the peak of resident bytes of this process since `start_of_peak`."""
    return _status("VmHWM:")


def peak_of_steps(step: Callable[[], object], count: int) -> int:
    """Return the largest increase of resident bytes during `count` steps."""
    before = start_of_peak()
    for _ in range(count):
        step()
    return peak() - before


def _status(name):
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1]) << 10
    raise UserError(f"/proc/self/status: no {name}, so memory cannot be measured here")
