"""How many threads a rank runs, by the cores that it and its neighbours may use."""

import os
from typing import NamedTuple

from mpidl import backends


class Cores(NamedTuple):
    """What a rank may use: the cores' numbers, and how many at a time its container may (None: all
    of them)."""

    allowed: tuple
    quota: int | None = None


def settle(world, wanted):
    """Set this process's threads, `wanted` or as `deal` finds. Collective.

    Returns (threads of each rank, on every rank; lines to show of what may surprise).
    """
    ranks = world.broadcast(world.gather((world.host, cores())))
    threads, lines = deal(ranks, wanted)
    backends.configure(threads=threads[world.rank])
    return threads, lines


def cores():
    """The Cores of this process."""
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return Cores(allowed, None if quota == "max" else max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        return Cores(allowed)


def deal(ranks, wanted):
    """Threads of each rank, and warnings, for ranks = [(host, Cores), ...].

    wanted: threads a rank; 0: each core is divided among the ranks that may use it, at least one
    thread a rank. A quota holds for all ranks of its host together.
    """
    by_host = {}
    for rank, (host, _) in enumerate(ranks):
        by_host.setdefault(host, []).append(rank)
    threads, lines = [wanted] * len(ranks), []
    for host, here in by_host.items():
        sharing = {}  # by core: how many ranks may use it
        for rank in here:
            for core in ranks[rank][1].allowed:
                sharing[core] = sharing.get(core, 0) + 1
        quotas = [ranks[rank][1].quota for rank in here if ranks[rank][1].quota is not None]
        usable = min([len(sharing), *quotas])
        for rank in here:
            if wanted == 0:
                part = sum(1 / sharing[core] for core in ranks[rank][1].allowed)
                threads[rank] = max(1, int(part * usable / len(sharing) + 1e-9))
        started = sum(threads[rank] for rank in here)
        each = "/".join(map(str, sorted({threads[rank] for rank in here})))
        narrow = [rank for rank in here if threads[rank] > len(ranks[rank][1].allowed)]
        if started > usable:
            lines.append(
                f"warning: {len(here)} rank(s) x {each} thread(s) on {host} share {usable} "
                "core(s), which slows all of them"
            )
        elif narrow:
            own = len(ranks[narrow[0]][1].allowed)
            lines.append(
                f"warning: rank {narrow[0]} on {host} runs {threads[narrow[0]]} threads but may "
                f"use {own} core(s) alone: see mpirun's binding of ranks"
            )
    return threads, lines
