"""`python -m benchmarks input --memory`: what training on a large packed set takes of memory.

`python -m mpidl.train` runs on a packed file of some gigabytes (whole) and on one mini-batch of it
(cut), where none is made ahead, with the same `--cache-mb`. Compared are the peaks of what all
ranks hold at once: anonymous memory (RssAnon) and shared, of which each page counts once, whoever
maps it (the sum of Pss_Shmem). The whole set beyond the cut one is what `--cache-mb` is to bound:
all memory for data but for the mini-batch in use; less the cut set's pixels, which both keep.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np

from benchmarks import machine, subject
from mpidl import keyed
from mpidl.comm import failure
from mpidl.comm.launcher import environment, launcher
from mpidl.data.datastore import Datastore
from mpidl.data.formats import packing
from mpidl.errors import Fault
from mpidl.training.options import configuration

PERIOD = 0.02  # seconds from one look at the ranks to the next
PATTERNS = 64  # images that differ
CLASSES = 4
CUT = 16  # mini-batches at least, on a set of one: after them nothing grows
MIB = 1 << 20


class Held(NamedTuple):
    """Bytes that processes hold: anonymous, and shared, each page once."""

    anonymous: int = 0
    shared: int = 0

    @property
    def both(self):
        return self.anonymous + self.shared


def run(chosen):
    """The result of the sub-command: memory in MiB by number of ranks."""
    store = Repeated(chosen.side, images_in(chosen.gigabytes * 10**9, chosen.side))
    counts = {"whole": len(store), "cut": min(chosen.batch_size, len(store))}
    rows = {}
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        paths = {name: os.path.join(folder, f"{name}.h5") for name in counts}
        test = store.subset(np.arange(counts["cut"]))
        for name, path in paths.items():
            train = store.subset(np.arange(counts[name]))
            packing.pack({"train": train, "test": test}, path, threads=chosen.threads)
        size = os.path.getsize(paths["whole"])
        print(
            f"{len(store)} images of 3x{chosen.side}x{chosen.side} in {size / 1e9:.2f} GB (whole), "
            f"{counts['cut']} of them, one mini-batch (cut); {chosen.threads} thread(s) a rank, "
            f"--cache-mb {chosen.cache_mb}; MiB of memory: anonymous + shared",
            flush=True,
        )
        for ranks in chosen.ranks:
            peaks = {}
            for name, path in paths.items():
                steps = max(CUT, -(-counts[name] // chosen.batch_size))
                peaks[name] = training(chosen, ranks, path, steps, folder)
            beyond = peaks["whole"].both - peaks["cut"].both
            rows[str(ranks)] = {
                name: {"anonymous": peak.anonymous / MIB, "shared": peak.shared / MIB}
                for name, peak in peaks.items()
            } | {"beyond": beyond / MIB}
            texts = (f"{name} {words(peak)}" for name, peak in peaks.items())
            print(
                f"{ranks} rank(s): {', '.join(texts)}: beyond it {beyond / MIB:.1f} MiB, "
                f"{beyond / 1e6:.1f} MB",
                flush=True,
            )
    versions = configuration.versions_of("as started")
    about = ("side", "batch_size", "threads", "gigabytes", "cache_mb")
    return machine.facts(chosen, versions) | {k: getattr(chosen, k) for k in about} | {"mib": rows}


def images_in(nbytes, side):
    """How many RGB images of uint8 take so many bytes, nearly; one at least."""
    return max(1, round(nbytes / (3 * side * side)))


def words(held):
    return f"{held.both / MIB:.1f} ({held.anonymous / MIB:.1f} + {held.shared / MIB:.1f})"


class Repeated(Datastore):
    """As many images as are wanted, of which few differ, so that making them takes no time."""

    dtype = np.dtype(np.uint8)
    targets_shape = targets_dtype = None

    def __init__(self, side, count):
        self.image_shape, self.count = (3, side, side), count
        drawn = keyed.uniform(0, "bench memory", PATTERNS * 3 * side * side) * 256
        self.patterns = drawn.astype(np.uint8).reshape(PATTERNS, 3, side, side)
        self.labels = np.arange(count) % CLASSES
        self.classes = [f"class{i}" for i in range(CLASSES)]

    def __len__(self):
        return self.count

    def read(self, indices):
        return self.patterns[np.asarray(indices) % PATTERNS]


def training(chosen, ranks, data, steps, folder):
    """The Held, at its peak, of a training run of so many mini-batches. Raises Fault."""
    command = [*launcher(ranks), sys.executable, "-m", "mpidl.train", "--data", data]
    command += ["--network", f"{subject.__file__}:light", "--overwrite"]
    command += ["--out", os.path.join(folder, "out")]  # the runs' one after the other
    given = {"epochs": steps, "max-iterations": steps}
    given |= {"cache-mb": chosen.cache_mb, "batch-size": chosen.batch_size}
    given |= {"threads": chosen.threads, "learning-rate": 1e-6, "verbose": "off", "plots": "none"}
    command += [text for name, value in given.items() for text in (f"--{name}", str(value))]
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
            lines = log.read().strip().splitlines() or ["no message"]
            text = next((line for line in lines if line.startswith("mpidl: ")), lines[-1])
            raise Fault(f"training on {ranks} ranks ended with {job.returncode}: {text}")
    return peak


def peak_of(job, ranks):
    """The largest Held, of both kinds together, of a job's ranks until it ends."""
    found, peak = [], Held()
    while job.poll() is None:
        began = time.monotonic()
        if len(found) < ranks:
            found = ranks_below(job.pid)
        peak = max(peak, held(found), key=lambda held: held.both)
        time.sleep(max(0.0, PERIOD - (time.monotonic() - began)))
    return peak


def ranks_below(pid):
    """The process ids of the ranks that a launcher has started so far."""
    children, ranks = {}, {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(process))
    found = list(children.get(pid, ()))
    for process in found:  # parents before children, which have their variables
        found.extend(children.get(process, ()))
        with contextlib.suppress(OSError), open(f"/proc/{process}/environ", "rb") as file:
            variables = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
            names = (variables.get(name.encode()) for name in failure.LAUNCHERS.values())
            rank = next((value for value in names if value is not None), None)
            if rank is not None:
                ranks.setdefault(rank, process)
    return list(ranks.values())


def held(processes):
    """The Held of these processes now; of those that have ended, nothing."""
    anonymous = shared = 0
    for process in processes:
        with contextlib.suppress(OSError):
            anonymous += _kilobytes(f"/proc/{process}/status", "RssAnon:") << 10
            shared += _kilobytes(f"/proc/{process}/smaps_rollup", "Pss_Shmem:") << 10
    return Held(anonymous, shared)


def _kilobytes(path, name):
    """What a file of /proc says of `name`, 0 where it says nothing, as of a process that ends."""
    with open(path) as file:
        found = (line.split()[1] for line in file if line.startswith(name))
        return int(next(found, 0))
