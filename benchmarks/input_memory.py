"""`python -m benchmarks input --memory`: measure the memory for training on a large packed set.

The benchmark runs `python -m mpidl.train` twice with the same `--cache-mb`: on a packed file of
several gigabytes ("whole") and on one mini-batch of it ("cut"). The run on the cut set prefetches
nothing. The benchmark compares the peak memory of all ranks together, which is anonymous memory
(RssAnon) plus shared memory (Pss_Shmem, which counts a page once even if several processes map
it). The difference between the two peaks is all memory for data except the mini-batch in use and
the pixels of the cut set, which both runs keep. `--cache-mb` bounds this difference.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np

from benchmarks import report, subject, turns
from mpidl.core import keyed
from mpidl.data.datastore import Datastore
from mpidl.data.formats import packing
from mpidl.errors import Fault
from mpidl.launcher import environment, launcher
from mpidl.ranks import failure
from mpidl.training.options import configuration

PERIOD = 0.02  # seconds between two measurements of the ranks
PATTERNS = 64  # number of distinct images
CLASSES = 4
CUT_STEPS = 16  # steps on a set of one mini-batch, after which memory stops growing
MIB = 1 << 20


class MemoryUse(NamedTuple):
    """Bytes of memory in use by processes. Each shared page counts once."""

    anonymous: int = 0
    shared: int = 0

    @property
    def total(self):
        """Sum of anonymous and shared bytes."""
        return self.anonymous + self.shared

    def __str__(self):
        parts = (self.total, self.anonymous, self.shared)
        return "{:.1f} ({:.1f} + {:.1f})".format(*(nbytes / MIB for nbytes in parts))


def run(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file, in MiB by number of ranks."""
    count = images_in(options.gigabytes * 10**9, options.side)
    store = RepeatedImages(options.side, count)
    counts = {"whole": len(store), "cut": min(options.batch_size, len(store))}
    mib = {}
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        paths = {name: os.path.join(folder, f"{name}.h5") for name in counts}
        test = store.subset(np.arange(counts["cut"]))
        for name, path in paths.items():
            train = store.subset(np.arange(counts[name]))
            packing.pack({"train": train, "test": test}, path, threads=options.threads)
        size = os.path.getsize(paths["whole"])
        print(
            f"{len(store)} images of 3x{options.side}x{options.side} in {size / 1e9:.2f} GB "
            f"(whole), one mini-batch of {counts['cut']} images (cut); {options.threads} "
            f"thread(s) per rank, --cache-mb {options.cache_mb}; memory in MiB: anonymous + "
            "shared",
            flush=True,
        )
        for ranks in options.ranks:
            peaks = {}
            for name, path in paths.items():
                steps = max(CUT_STEPS, -(-counts[name] // options.batch_size))
                peaks[name] = train_peak(options, ranks, path, steps, folder)
            beyond = peaks["whole"].total - peaks["cut"].total
            mib[str(ranks)] = {
                name: {"anonymous": peak.anonymous / MIB, "shared": peak.shared / MIB}
                for name, peak in peaks.items()
            } | {"beyond": beyond / MIB}
            texts = (f"{name} {peak}" for name, peak in peaks.items())
            print(
                f"{ranks} rank(s): {', '.join(texts)}: difference {beyond / MIB:.1f} MiB, "
                f"{beyond / 1e6:.1f} MB",
                flush=True,
            )
    names = ("side", "batch_size", "threads", "gigabytes", "cache_mb")
    return report.header(options, configuration.versions_of("as started"), *names) | {"mib": mib}


def images_in(nbytes: int, side: int) -> int:
    """Return how many uint8 RGB images occupy about `nbytes` bytes, at least 1."""
    return max(1, round(nbytes / (3 * side * side)))


class RepeatedImages(Datastore):
    """Any number of images that repeat a few patterns, so creating them takes no time."""

    dtype = np.dtype(np.uint8)
    targets_shape = targets_dtype = None

    def __init__(self, side, count, classes=CLASSES):
        self.image_shape, self.count = (3, side, side), count
        pixels = keyed.uniform(0, "bench memory", PATTERNS * 3 * side * side) * 256
        self.patterns = pixels.astype(np.uint8).reshape(PATTERNS, 3, side, side)
        self.labels = np.arange(count) % classes
        self.classes = [f"class{i}" for i in range(classes)]

    def __len__(self):
        return self.count

    def read(self, indices):
        return self.patterns[np.asarray(indices) % PATTERNS]


def train_peak(options, ranks, data, steps, folder):
    """Train on a packed file and return the peak MemoryUse of all ranks together.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed command line of the sub-command.
    ranks : int
        Number of ranks to start.
    data : str
        Path of the packed file.
    steps : int
        Number of mini-batches to train on.
    folder : str
        Folder for the files of the run. The next run overwrites them.

    Raises
    ------
    Fault
        If the training fails.
    """
    flags = {"data": data, "network": f"{subject.__file__}:light", "learning-rate": 1e-6}
    flags |= {"out": os.path.join(folder, "out"), "verbose": "off", "plots": "none"}
    flags |= {"epochs": steps, "max-iterations": steps, "threads": options.threads}
    flags |= {"cache-mb": options.cache_mb, "batch-size": options.batch_size}
    command = [*launcher(ranks), sys.executable, "-m", "mpidl.train", "--overwrite"]
    command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    with open(os.path.join(folder, "log"), "w+") as log:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()
        )
        try:
            peak = peak_of(job, ranks)
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()
        if job.returncode:
            log.seek(0)
            message = turns.last_message(log.read())
            raise Fault(f"training on {ranks} ranks ended with {job.returncode}: {message}")
    return peak


def peak_of(job: subprocess.Popen, ranks: int) -> MemoryUse:
    """Watch a job until it ends. Return the largest MemoryUse of its ranks, by total."""
    processes, peak = [], MemoryUse()
    while job.poll() is None:
        start = time.monotonic()
        if len(processes) < ranks:
            processes = ranks_below(job.pid)
        peak = max(peak, memory_of(processes), key=lambda use: use.total)
        time.sleep(max(0.0, PERIOD - (time.monotonic() - start)))
    return peak


def ranks_below(pid: int) -> list[int]:
    """Return the process ids of the ranks that a launcher has started so far."""
    children, ranks = {}, {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(process))
    descendants = list(children.get(pid, ()))
    for process in descendants:  # parents come first, because children inherit their variables
        descendants.extend(children.get(process, ()))
        with contextlib.suppress(OSError), open(f"/proc/{process}/environ", "rb") as file:
            variables = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
            values = (variables.get(name.encode()) for name in failure.LAUNCHERS.values())
            rank = next((value for value in values if value is not None), None)
            if rank is not None:
                ranks.setdefault(rank, process)
    return list(ranks.values())


def memory_of(processes: list[int]) -> MemoryUse:
    """Return the current MemoryUse of processes. Processes that have ended add nothing."""
    anonymous = shared = 0
    for process in processes:
        with contextlib.suppress(OSError):
            anonymous += _kilobytes(f"/proc/{process}/status", "RssAnon:") << 10
            shared += _kilobytes(f"/proc/{process}/smaps_rollup", "Pss_Shmem:") << 10
    return MemoryUse(anonymous, shared)


def _kilobytes(path, name):
    """Read the entry `name` of a file in /proc. Return 0 if missing, as while a process ends."""
    with open(path) as file:
        values = (line.split()[1] for line in file if line.startswith(name))
        return int(next(values, 0))
