"""Compare all ranks of a job: a table, and warnings about causes of slow training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpidl.backends.cpu import builds
from mpidl.backends.discovery import Gpu
from mpidl.cli import start
from mpidl.cli.device_probe import RankReport
from mpidl.ranks import devices, thread_budget
from mpidl.text import aligned, grouped, host_list, ranges
from mpidl.training.options.training_options import TrainingOptions

ROWS = 16  # a job with more ranks gets a row per kind of rank
MAX_KINDS = 32  # maximum number of rows in the table
SLOW_BYTES = 100e6  # bytes per second; a slower host is busy or swaps
IN_MEMORY = {"tmpfs", "ramfs", ""}  # kinds of file systems that are not on a disk
GB = 10**9


class Report(NamedTuple):
    """A comparison of the ranks of a job."""

    ranks: list[RankReport]
    threads: list[int]
    """Number of threads of each rank."""
    sharers: list[int]
    """Number of ranks that may use the cores of each rank, including the rank itself."""
    gpus: list[Gpu | None]
    """GPU of each rank."""
    warnings: list[str]

    def is_bound(self, rank: int) -> bool:
        """Return whether a rank shares no core, and may use only some cores of its host."""
        report = self.ranks[rank]
        return self.sharers[rank] == 1 and len(report.cores.allowed) < report.host_cores


def compare(
    ranks: Sequence[RankReport], count: int = 0, binding: Callable[[int], str] | None = None
) -> Report:
    """Compare the ranks of a job.

    Parameters
    ----------
    ranks : sequence of RankReport
        The reports of all ranks, in order.
    count : int
        Number of threads per rank; 0 divides the cores among the ranks.
    binding : callable, optional
        ``binding(threads)`` returns the command that binds each rank to `threads` cores.
    """
    pairs = [(report.host, report.cores) for report in ranks]
    threads, warnings = thread_budget.assign_threads(pairs, count)
    by_host, users = thread_budget.ranks_by_host(pairs), thread_budget.users_of_cores(pairs)
    sharers = [max(users[host, core] for core in cores.allowed) for host, cores in pairs]
    assignment = devices.assign_gpus([report.gpus for report in ranks], "auto")
    gpus: list[Gpu | None] = [*(assignment.gpus or [])] or [None] * len(ranks)
    report = Report(list(ranks), threads, sharers, gpus, warnings)
    warnings += _unbound(report, by_host, binding or binding_command)
    warnings += _mixed(report) + _shared_memory(report, by_host) + assignment.lines
    return report


def binding_command(threads: int, mpi: str = "MPICH", slurm: bool = False) -> str:
    """Return the command that binds each rank to as many cores as it has threads.

    Parameters
    ----------
    threads : int
        Number of cores per rank.
    mpi : str
        Name and version of the MPI library.
    slurm : bool
        Whether the job runs under Slurm.
    """
    if slurm:
        return f"srun --cpu-bind=cores --cpus-per-task={threads}"
    if "open mpi" in mpi.lower():
        return f"mpirun --use-hwthread-cpus --map-by slot:PE={threads}"
    return f"mpirun -bind-to hwthread:{threads}"


def _unbound(report, by_host, binding):
    """Warn about ranks that share cores, unless the host has too few cores for all ranks."""
    hosts, unbound = [], []
    for host, members in by_host.items():
        usable = thread_budget.usable_cores([report.ranks[rank].cores for rank in members])
        shared = [rank for rank in members if report.sharers[rank] > 1]
        if shared and sum(report.threads[rank] for rank in members) <= usable:
            hosts.append(host)
            unbound += shared
    if not unbound:
        return []
    return [
        f"warning: {len(unbound)} ranks on {host_list(hosts)} are not bound to separate cores, so "
        "their threads may move or share a core: "
        f"{binding(max(report.threads[rank] for rank in unbound))}"
    ]


def _mixed(report):
    """Warn about different CPUs and versions."""
    lines = []
    mix = start.mixture((r.host, f"{r.cpu} ({r.host_cores} cores)") for r in report.ranks)
    if mix and not any(report.gpus):
        lines.append(
            "warning: the ranks have different CPUs, and each step waits for the slowest rank: "
            f"{mix}; request nodes of one kind (sbatch --constraint), or balance the load "
            "(--worker-load measured)"
        )
    for name in ("versions", "mpi"):
        if mix := start.mixture((rank.host, getattr(rank, name)) for rank in report.ranks):
            lines.append(
                f"warning: the ranks run different software: {mix}; install the same environment "
                "on all hosts"
            )
    return lines


def _shared_memory(report, by_host):
    """Warn about a slow, small or missing /dev/shm on hosts with several ranks."""
    cache_bytes = TrainingOptions.cache_mb * 10**6
    problems = []
    for host, members in by_host.items():
        memory = report.ranks[members[0]].shared_memory
        if len(members) == 1:
            continue
        problem = ""
        if not memory.total:
            problem = "there is no /dev/shm on {}: mount -t tmpfs tmpfs /dev/shm"
        elif memory.kind not in IN_MEMORY:
            problem = (
                f"/dev/shm on {{}} is on a disk ({memory.kind}), and MPI messages go through it: "
                "mount -t tmpfs tmpfs /dev/shm"
            )
        elif memory.speed is not None and memory.speed < SLOW_BYTES:
            problem = (
                f"/dev/shm on {{}} writes less than {SLOW_BYTES / 1e6:.0f} MB/s, and MPI messages "
                "go through it: check with free and top whether the host swaps or is busy"
            )
        elif memory.free < cache_bytes:
            advice = "docker run --shm-size=2g, or mount -o remount,size=2G /dev/shm"
            if memory.total > 2 * cache_bytes:
                advice = "remove the remaining files of ended programs"
            problem = (
                f"/dev/shm on {{}} has less than the {TrainingOptions.cache_mb} MB free that the "
                f"images of --cache-mb need: {advice}"
            )
        if problem:
            problems.append((problem, host))
    hosts = grouped(problems)
    return [f"warning: {text.format(host_list(names))}" for text, names in hosts.items()]


def table(report: Report) -> list[str]:
    """Return the lines of the table.

    A job of at most `ROWS` ranks has a row per rank. A larger job has a row per kind of rank, with
    the smallest free memory among these ranks.
    """
    is_large = len(report.ranks) > ROWS
    kinds = grouped(
        (_kind(report, rank) if is_large else rank, rank) for rank in range(len(report.ranks))
    )
    rows = [["ranks", "hosts", "cores", "threads", "kernels", "GB free", "GPU"]]
    for members in list(kinds.values())[:MAX_KINDS]:
        probed, gpu = report.ranks[members[0]], report.gpus[members[0]]
        cores = str(len(probed.cores.allowed)) if is_large else ranges(probed.cores.allowed)
        rows.append(
            [
                ranges(members),
                host_list(report.ranks[rank].host for rank in members),
                f"{cores} of {_binding(report, members[0])}",
                str(report.threads[members[0]]),
                probed.build,
                _free_memory([report.ranks[rank].memory for rank in members]),
                "none" if gpu is None else f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB",
            ]
        )
    lines = aligned(rows, len(rows[0]))
    if len(kinds) > MAX_KINDS:
        lines.append(f"and {len(kinds) - MAX_KINDS} more kinds of ranks: see --json")
    return lines


def _kind(report, rank):
    """Return the properties that all ranks in a row of the table share."""
    probed, gpu = report.ranks[rank], report.gpus[rank]
    return (
        (len(probed.cores.allowed), _binding(report, rank), report.threads[rank], probed.build),
        (probed.cpu, _gigabytes(probed.memory.total), probed.memory.limit),
        None if gpu is None else (gpu.name, gpu.memory),
    )


def _binding(report, rank):
    """Describe how many cores a host has, and whether a rank shares its cores."""
    probed, text = report.ranks[rank], ""
    if report.sharers[rank] > 1:
        text = f", shared by {report.sharers[rank]}"
    elif report.is_bound(rank):
        text = ", bound"
    quota = "" if probed.cores.quota is None else f", quota {probed.cores.quota}"
    return f"{probed.host_cores}{text}{quota}"


def _free_memory(memories):
    """Describe the smallest free memory of hosts with equal memory, and the memory limit."""
    available = [memory.available for memory in memories if memory.available is not None]
    text = f"{_gigabytes(min(available, default=None))} of {_gigabytes(memories[0].total)}"
    limit = memories[0].limit
    return text if limit is None else f"{text}, limit {_gigabytes(limit)}"


def facts(report: Report) -> dict[str, str]:
    """Return properties of the ranks. A property that differs is listed by host."""
    values = {
        "CPU": [f"{rank.cpu}, {rank.host_cores} cores" for rank in report.ranks],
        "MPI": [rank.mpi for rank in report.ranks],
        "fabric": [rank.fabric for rank in report.ranks],
        "GPU driver": [rank.driver or "none" for rank in report.ranks],
        "/dev/shm": [_shared_memory_size(rank.shared_memory) for rank in report.ranks],
    }
    hosts = [rank.host for rank in report.ranks]
    return {
        name: start.mixture(zip(hosts, kinds, strict=True)) or kinds[0]
        for name, kinds in values.items()
    }


def as_json(report: Report) -> dict[str, Any]:
    """Return the ranks and the warnings as values that JSON can hold. Sizes are in bytes."""
    ranks = []
    for rank, probed in enumerate(report.ranks):
        gpu = report.gpus[rank]
        ranks.append(
            {
                "rank": rank,
                "host": probed.host,
                "cores": list(probed.cores.allowed),
                "core_quota": probed.cores.quota,
                "host_cores": probed.host_cores,
                "bound": report.is_bound(rank),
                "ranks_on_these_cores": report.sharers[rank],
                "threads": report.threads[rank],
                "cpu": probed.cpu,
                "kernels": probed.build,
                "best_kernels": probed.best_build,
                "native_bf16": builds.has_native_bf16(probed.build),
                "kernel_sources": probed.sources,
                "memory": probed.memory._asdict(),
                "shared_memory": probed.shared_memory._asdict(),
                "gpu": None if gpu is None else gpu._asdict(),
                "gpu_reason": probed.gpus.reason,
                "gpu_driver": probed.driver,
                "versions": probed.versions,
                "mpi": probed.mpi,
                "fabric": probed.fabric,
            }
        )
    return {"ranks": ranks, "warnings": report.warnings}


def _gigabytes(size):
    return "?" if size is None else f"{size / GB:.1f}" if size < 100 * GB else f"{size / GB:.0f}"


def _shared_memory_size(memory):
    """Describe /dev/shm without its speed, which only one rank of a host measures."""
    if not memory.total:
        return "none"
    return f"{_gigabytes(memory.total)} GB" + (f", {memory.kind}" if memory.kind else "")
