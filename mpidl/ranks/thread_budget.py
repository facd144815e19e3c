"""Set the number of threads of each rank, given the cores that the ranks may use."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpidl import backends, startup
from mpidl.text import grouped, host_list

if TYPE_CHECKING:
    from mpidl.ranks.world import World

CGROUP_FOLDER = "/sys/fs/cgroup"
STATISTICS = "/proc/stat"
# Errors if the kernel's file is missing or has another format, or without sched_getaffinity.
UNKNOWN_TIMES = (AttributeError, OSError, ValueError, IndexError)
BUSY_SHARE = 0.1  # load of the cores from which times of other programs are unreliable
SHARED_CORES = "which slows all of them"  # text in the warning about more threads than cores


class Cores(NamedTuple):
    """The CPU cores that a process may use."""

    allowed: tuple[int, ...]
    """Numbers of the cores in the affinity mask of the process."""
    quota: int | None = None
    """Number of cores that the process's container may use at a time; None without a limit."""


def set_threads(world: World, count: int) -> tuple[list[int], list[str]]:
    """Set the number of threads of this process; collective.

    Parameters
    ----------
    world : World
        The ranks.
    count : int
        Number of threads of each rank. If 0, `assign_threads` computes the number.

    Returns
    -------
    threads : list of int
        Number of threads of each rank. The list is the same on all ranks.
    lines : list of str
        Warnings to print.
    """
    if world.neighbours is None:
        threads, lines = assign_threads(world.allgather((world.host, available_cores())), count)
    else:  # other groups of the job use the same cores
        threads, lines = assign_threads(world.neighbours.cores, count)
        threads = threads[world.neighbours.first :][: world.size]
    backends.configure(threads=threads[world.rank])
    return threads, lines


def available_cores(cgroup_folder: str | os.PathLike = CGROUP_FOLDER) -> Cores:
    """Return the cores that this process may use.

    Parameters
    ----------
    cgroup_folder : path
        Mount point of the container's control groups, version 1 or 2.
    """
    return Cores(tuple(sorted(os.sched_getaffinity(0))), _quota(cgroup_folder))


def _quota(cgroup_folder):
    """Return the CPU quota in whole cores, at least 1; None if there is no quota."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            words = " ".join(_read(os.path.join(cgroup_folder, name)) for name in names).split()
            quota, period = (-1 if word == "max" else int(word) for word in words)
        except (OSError, ValueError):
            continue  # this version of control groups has no such file
        return None if quota < 0 or period <= 0 else max(1, quota // period)
    return None


def _read(path):
    with open(path) as file:
        return file.read()


def busy_share(seconds: float = 0.5, statistics: str = STATISTICS) -> float:
    """Return the load of the cores that this process may use, from 0 to 1.

    Parameters
    ----------
    seconds : float
        Duration of the measurement, during which this process sleeps.
    statistics : str
        The Linux kernel's file with the times of each core.

    Returns
    -------
    float
        The share of these seconds in which the cores were not idle, or 0 if it is unknown.
    """
    try:
        before = _times_of_cores(statistics)
        time.sleep(seconds)
        return _load(before, _times_of_cores(statistics))
    except UNKNOWN_TIMES:
        return 0.0


class OtherLoad:
    """Measures how much other programs use this process's cores while its children compute.

    Parameters
    ----------
    statistics : str
        The Linux kernel's file with the times of each core.
    """

    def __init__(self, statistics: str = STATISTICS) -> None:
        self.statistics = statistics
        self._start, self._seconds = self._read()

    def _read(self):
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            times = _times_of_cores(self.statistics)
        except UNKNOWN_TIMES:
            times = 0, 0
        return times, used.ru_utime + used.ru_stime

    def share(self) -> float:
        """Return the share of the time since the start, from 0 to 1, or 0 if it is unknown.

        The time of children counts as own only once they and their children have been waited for.
        The result includes the time that a hypervisor gave to other machines.
        """
        (total, idle), seconds = self._read()
        child_ticks = (seconds - self._seconds) * os.sysconf("SC_CLK_TCK")
        return _load(self._start, (total, idle + child_ticks))


def _load(before, after):
    """Return the share of busy time between two measurements of (total, idle) time."""
    total, idle = (b - a for a, b in zip(before, after, strict=True))
    return min(max(1 - idle / total, 0.0), 1.0) if total > 0 else 0.0


def _times_of_cores(statistics):
    """Return the total time of the cores that this process may use, and the idle part of it."""
    total = idle = 0
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    for line in _read(statistics).splitlines():
        name, *words = line.split()
        if name in names:
            ticks = [int(word) for word in words[:8]]  # the times of guests are part of others
            total += sum(ticks)
            idle += ticks[3] + ticks[4]  # idle, and waiting for disks
    return total, idle


def assign_threads(ranks: Sequence[tuple[str, Cores]], count: int) -> tuple[list[int], list[str]]:
    """Compute the number of threads of each rank.

    Parameters
    ----------
    ranks : sequence of (str, Cores)
        Host and cores of each rank.
    count : int
        Number of threads of each rank. If 0, each core is divided equally among the ranks that may
        use the core, and each rank gets at least one thread. All ranks on a host share the quota of
        their container.

    Returns
    -------
    threads : list of int
        Number of threads of each rank.
    lines : list of str
        Warnings about hosts with more threads than cores, and about ranks with more threads than
        the cores to which they are bound.
    """
    threads = [count] * len(ranks)
    crowded: dict[tuple[int, str, int], list[str]] = {}  # {(ranks, threads, cores): hosts}
    narrow: list[int] = []
    by_host, users = ranks_by_host(ranks), users_of_cores(ranks)
    for host, host_ranks in by_host.items():
        usable = usable_cores([ranks[rank][1] for rank in host_ranks])
        core_count = len({core for rank in host_ranks for core in ranks[rank][1].allowed})
        for rank in host_ranks:
            if count == 0:
                part = sum(1 / users[host, core] for core in ranks[rank][1].allowed)
                threads[rank] = max(1, int(part * usable / core_count + 1e-9))
        counts = "/".join(map(str, sorted({threads[rank] for rank in host_ranks})))
        if sum(threads[rank] for rank in host_ranks) > usable:
            crowded.setdefault((len(host_ranks), counts, usable), []).append(host)
        else:
            narrow += [r for r in host_ranks if threads[r] > len(ranks[r][1].allowed)]
    lines = []
    for (size, counts, usable), hosts in crowded.items():
        advice = f"use --threads {usable // size}"
        if usable < size:
            total = usable * len(by_host)
            advice = (
                f"start at most {usable} per host (mpirun -n {total}, srun "
                f"--ntasks-per-node={usable})"
            )
        lines.append(
            f"warning: {size} rank(s) x {counts} thread(s) on {host_list(hosts)} share {usable} "
            f"core(s), {SHARED_CORES}: {advice}"
        )
    if narrow:
        first = narrow[0]
        core_count = len(ranks[first][1].allowed)
        rest = f" ({len(narrow) - 1} other rank(s) too)" if len(narrow) > 1 else ""
        lines.append(
            f"warning: rank {first} on {ranks[first][0]} runs {threads[first]} threads but may use "
            f"only {core_count} core(s){rest}: use "
            f"--threads {core_count}, or see the binding options of mpirun and srun"
        )
    return threads, lines


def ignored_variable(threads: int) -> list[str]:
    """Return a note if OMP_NUM_THREADS differs from the number of threads that the ranks use.

    Many clusters set the variable to 1 by default, so the value 1 causes no note.

    Parameters
    ----------
    threads : int
        Number of threads of this rank, as computed by `assign_threads`.
    """
    typed = startup.omp_num_threads
    if not typed.isdigit() or int(typed) in (0, 1, threads):
        return []
    return [
        f"note: OMP_NUM_THREADS={typed} has no effect, each rank computes on {threads} thread(s): "
        f"use --threads {typed} (in Python: dl.World(threads={typed}))"
    ]


def ranks_by_host(ranks: Sequence[tuple[str, Cores]]) -> dict[str, list[int]]:
    """Return {host: ranks on this host}, given the host and cores of each rank."""
    return grouped((host, rank) for rank, (host, _) in enumerate(ranks))


def users_of_cores(ranks: Sequence[tuple[str, Cores]]) -> Counter[tuple[str, int]]:
    """Return {(host, core): number of ranks that may use it}, given each rank's host and cores."""
    return Counter((host, core) for host, cores in ranks for core in cores.allowed)


def usable_cores(cores: Sequence[Cores]) -> int:
    """Return the number of cores that the ranks of a host may use at the same time."""
    quotas = [rank.quota for rank in cores if rank.quota is not None]
    return min([len({core for rank in cores for core in rank.allowed}), *quotas])
