"""Collect facts about one rank and its host for `mpidl.cli.device_report`."""

from __future__ import annotations

import glob
import os
import platform
import tempfile
import time
from typing import NamedTuple

import numpy as np

from mpidl import numerics
from mpidl.backends import discovery
from mpidl.backends.cpu import builds
from mpidl.ranks import devices, thread_budget
from mpidl.ranks.devices import RankGpus
from mpidl.ranks.thread_budget import CGROUP_FOLDER, Cores
from mpidl.ranks.world import World
from mpidl.training.options import configuration

SHARED_MEMORY = "/dev/shm"
PROBE_BYTES, PROBES = 1 << 20, 8  # bytes per write and number of writes to measure /dev/shm
MPI_SETTINGS = ("FI_PROVIDER", "UCX_TLS", "MPICH_CH4_NETMOD", "OMPI_MCA_pml", "OMPI_MCA_btl")
# {folder in /sys/class: kind of network}
NETWORKS = {"infiniband": "InfiniBand", "cxi": "Slingshot", "hfi1": "Omni-Path"}


class Memory(NamedTuple):
    """Amounts of memory in bytes; None if unknown."""

    total: int | None = None
    """Memory of the host."""
    available: int | None = None
    """Memory that programs can still allocate on the host."""
    limit: int | None = None
    """Limit of the container or job; None if there is no limit."""


class SharedMemory(NamedTuple):
    """The file system in which MPI libraries allocate the shared memory of a host."""

    kind: str = ""
    """Kind of file system, such as "tmpfs", or "" if it is not known."""
    total: int = 0
    """Size in bytes; 0 if there is no such file system."""
    free: int = 0
    """Free bytes."""
    speed: float | None = None
    """Write speed in bytes per second; None if it was not measured."""


class RankReport(NamedTuple):
    """The facts about one rank."""

    host: str
    cores: Cores
    host_cores: int
    """Number of cores of the host."""
    cpu: str
    build: str
    """Build of the kernels in use: the best build that all ranks support."""
    best_build: str
    """Best build of the kernels that this rank supports."""
    sources: str
    """First digits of the hash of the kernels' sources; "NumPy" without kernels."""
    memory: Memory
    shared_memory: SharedMemory
    gpus: RankGpus
    driver: str
    """Version of the GPU driver, or ""."""
    versions: str
    """Versions of mpidl, Python and NumPy."""
    mpi: str
    """Name and version of the MPI library."""
    fabric: str


def probe(world: World) -> RankReport:
    """Return the report of this rank. The first rank of each host measures the shared memory."""
    library, kernels = world.transport.MPI.Get_library_version(), builds.kernels()
    is_first = world.hosts.index(world.host) == world.rank
    return RankReport(
        host=world.host,
        cores=thread_budget.available_cores(),
        host_cores=os.cpu_count() or 1,
        cpu=cpu_model(),
        build=builds.running(),
        best_build=builds.choose()[0],
        sources=kernels.provenance["sources"][:12] if kernels else "NumPy",
        memory=find_memory(),
        shared_memory=find_shared_memory(measured=is_first),
        gpus=devices.find_gpus(world.host),
        driver=gpu_driver(),
        versions=f"mpidl {configuration.version_of('mpidl')}, numerics {numerics.VERSION}, "
        f"Python {platform.python_version()}, NumPy {np.__version__}",
        mpi=" ".join(library.replace("\0", "").strip().partition("\n")[0].split()),
        fabric=fabric(library),
    )


def cpu_model() -> str:
    """Return the name of the CPU from /proc/cpuinfo, or else from the platform module."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def find_memory(proc: str = "/proc", cgroup_folder: str = CGROUP_FOLDER) -> Memory:
    """Return the memory of this host and the limit of this process's control groups.

    Parameters
    ----------
    proc, cgroup_folder : str
        Mount points of the kernel's process information and control groups.
    """
    sizes: dict[str, int] = {}
    for line in _lines(f"{proc}/meminfo"):
        name, _, size = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            sizes[name] = int(size.split()[0]) << 10
    total, limits = sizes.get("MemTotal"), []
    for line in _lines(f"{proc}/self/cgroup"):
        _, controllers, path = line.strip().split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = cgroup_folder, "memory.max"
        if controllers:  # version 1 of control groups
            root, name = f"{cgroup_folder}/memory", "memory.limit_in_bytes"
        while True:  # a limit applies to all nested groups; the root may be the container's group
            words = _lines(f"{root}{path.rstrip('/')}/{name}")
            limits += [int(word) for word in words if word.strip().isdigit()]
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
    limit = min(limits, default=None)
    if limit is not None and total is not None and limit >= total:
        limit = None
    return Memory(total, sizes.get("MemAvailable"), limit)


def find_shared_memory(
    folder: str = SHARED_MEMORY, measured: bool = True, mounts: str = "/proc/self/mounts"
) -> SharedMemory:
    """Return the kind and size of the folder for shared memory and, if `measured`, its speed.

    `mounts` is the path of the Linux kernel's list of mounted file systems.
    """
    try:
        status = os.statvfs(folder)
    except OSError:
        return SharedMemory()
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    speed = None
    if measured and free > 4 * PROBE_BYTES:
        speed = _writing_speed(folder)
    kinds = {}  # {mount point: kind}; a later mount hides an earlier one
    for line in _lines(mounts):
        _, point, kind, *_ = line.split(" ")
        if os.path.join(folder, "").startswith(os.path.join(point, "")):
            kinds[point] = kind
    kind = kinds[max(kinds, key=len)] if kinds else ""
    return SharedMemory(kind, total, free, speed)


def _writing_speed(folder):
    """Return the speed of the fastest of several writes in bytes per second, or None."""
    content, seconds = bytes(PROBE_BYTES), []
    try:
        for _ in range(PROBES):
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                start = time.perf_counter()
                file.write(content)
                seconds.append(time.perf_counter() - start)
    except OSError:
        return None
    return PROBE_BYTES / min(seconds)


def gpu_driver() -> str:
    """Return the version of the GPU driver and of the newest CUDA that it supports, or ""."""
    newest = discovery.driver_version()
    if not newest:
        return ""
    number = next(iter(_lines("/sys/module/nvidia/version")), "").strip()
    cuda = f"CUDA {discovery.in_words(newest)}"
    return f"{number} ({cuda})" if number else cuda


def fabric(library: str, kernel: str = "/sys/class") -> str:
    """Describe the network for MPI: the adapters, and the MPI library's devices and settings.

    Parameters
    ----------
    library : str
        Version text of the MPI library.
    kernel : str
        Folder in which the Linux kernel lists devices by kind.
    """
    parts = []
    for kind, name in NETWORKS.items():
        for path in sorted(glob.glob(f"{kernel}/{kind}/*")):
            rates = sorted(
                {
                    line.strip()
                    for rate in glob.glob(f"{path}/ports/*/rate")
                    for line in _lines(rate)
                }
            )
            rate = f" {', '.join(rates)}" if rates else ""
            parts.append(f"{os.path.basename(path)} ({name}{rate})")
    for line in library.splitlines():
        name, _, device = line.partition(":")
        if "device" in name.lower():
            parts.append(" ".join(device.split()))
    parts += [f"{name}={os.environ[name]}" for name in MPI_SETTINGS if name in os.environ]
    return ", ".join(parts) or "the MPI library's own choice"


def _lines(path):
    """Return the lines of a file of the Linux kernel, or [] if the file cannot be read."""
    try:
        with open(path) as file:
            return file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
