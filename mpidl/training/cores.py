"""How many threads a rank runs, by the cores that it and its neighbours may use."""

import os

from mpidl import backends


def settle(world, options):
    """Set this process's threads and its Winograd policy as the options say. Collective.

    Returns (threads of each rank, on every rank; lines to show of what may surprise).
    """
    mine = (world.host, cores())
    ranks = world.broadcast(world.gather(mine))
    threads, lines = deal(ranks, options.threads)
    backends.configure(threads=threads[world.rank], winograd=options.winograd)
    return threads, lines


def cores():
    """The cores this process may use, and how many of them at a time (a container's quota)."""
    allowed = sorted(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        most = len(allowed) if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        most = len(allowed)
    return allowed, min(most, len(allowed))


def deal(ranks, wanted):
    """Threads of each rank, and warnings, for ranks = [(host, (cores, how many at a time)), ...].

    wanted: threads a rank; 0: each core is divided among the ranks that may use it, at least one
    thread a rank.
    """
    by_host = {}
    for rank, (host, _) in enumerate(ranks):
        by_host.setdefault(host, []).append(rank)
    threads, lines = [wanted] * len(ranks), []
    for host, here in by_host.items():
        sharing = {}  # by core: how many ranks may use it
        for rank in here:
            for core in ranks[rank][1][0]:
                sharing[core] = sharing.get(core, 0) + 1
        # a quota holds for all processes of the container together
        usable = min(len(sharing), max(ranks[rank][1][1] for rank in here))
        if len(sharing) > len(ranks[here[0]][1][0]):  # ranks are bound to cores of their own
            usable = len(sharing)
        for rank in here:
            if wanted == 0:
                part = sum(1 / sharing[core] for core in ranks[rank][1][0])
                threads[rank] = max(1, int(part * usable / len(sharing) + 1e-9))
        started = sum(threads[rank] for rank in here)
        each = "/".join(map(str, sorted({threads[rank] for rank in here})))
        narrow = [rank for rank in here if threads[rank] > len(ranks[rank][1][0])]
        if started > usable:
            lines.append(
                f"warning: {len(here)} rank(s) x {each} thread(s) on {host} share {usable} "
                "core(s), which slows all of them"
            )
        elif narrow:
            lines.append(
                f"warning: rank {narrow[0]} on {host} runs {threads[narrow[0]]} threads but may "
                f"use {len(ranks[narrow[0]][1][0])} core(s) alone: see mpirun's binding of ranks"
            )
    return threads, lines
