"""What a measurement was made on, how much memory it took, and the file it goes to."""

import ctypes
import json
import os
import platform
import time

import numpy as np

from mpidl.backends.cpu import builds
from mpidl.cli.info import cpu_model
from mpidl.comm import failure
from mpidl.errors import UserError
from mpidl.training.files import model_file


def facts(chosen, versions):
    """What every result says of itself; versions: {"numpy": "2.4.6", ...}."""
    return {
        "command": chosen.what,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "arithmetic": arithmetic(),
        "busy_before": chosen.busy,
        "versions": versions,
        "platform": platform.platform(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def arithmetic():
    """Which kernels run in this process."""
    library = builds.kernels()
    return "NumPy" if library is None else f"C kernels for {library.build}"


def busy(seconds=0.5):
    """The share of all cores' time that somebody uses at the moment, 0 to 1; 0 where unknown."""

    def clock():
        with open("/proc/stat") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]  # all, idle

    try:
        before = clock()
        time.sleep(seconds)
        total, idle = (b - a for a, b in zip(before, clock(), strict=True))
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1 - idle / total if total else 0.0


def prepare_json(path):
    """Refuse at the start a --json that could not be written at the end."""
    folder = os.path.dirname(os.path.abspath(path)) if path else None
    if path and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise UserError(f"--json {path}: expected a file in a folder that can be written to")


def write_json(path, result):
    """Write a result where --json asked for it."""
    if path:
        text = json.dumps(result, indent=1, default=_plain)
        model_file.write_whole(path, f"{text}\n".encode())


def _plain(value):
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else str(value)


def cores_of(ranks, threads):
    """Of each rank, the cores it is held to; the ranks share them where there are too few."""
    mine = sorted(os.sched_getaffinity(0))
    return [[mine[(r * threads + t) % len(mine)] for t in range(threads)] for r in range(ranks)]


def _status(name):
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1]) << 10
    raise UserError(f"/proc/self/status: no {name}, so memory cannot be measured here")


def launched():
    """Whether mpirun or srun started this process, as one of its ranks."""
    counts = {name: int(os.environ.get(name) or 0) for name in failure.LAUNCHERS}
    return any(n > 1 or (n and not name.startswith("SLURM_")) for name, n in counts.items())


def start_of_peak():
    """Bytes of memory this process holds now, what malloc keeps but does not use given back to the
    system as far as it can; `peak` counts from here on."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        pass  # another C library than glibc
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS:")


def peak():
    """The most bytes of memory this process has held since `start_of_peak`."""
    return _status("VmHWM:")


def median(values):
    return float(np.median(values))


def spread(values, scale=1.0, digits=2):
    """ "13.02 (min 12.9, max 14.1)" of values times scale."""
    values = np.asarray(values) * scale
    low, middle, high = values.min(), np.median(values), values.max()
    return f"{middle:.{digits}f} (min {low:.{digits}f}, max {high:.{digits}f})"


def summary(values, scale=1.0):
    """The same as {"median", "min", "max"}."""
    values = np.asarray(values, float) * scale
    return {
        "median": float(np.median(values)),
        "min": float(values.min()),
        "max": float(values.max()),
    }
