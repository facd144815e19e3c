"""Which GPU each rank takes, by its place among the ranks of its host and what it may use there."""

import os
from typing import Any, NamedTuple

from mpidl.backends.gpu import nvrtc
from mpidl.backends.gpu.discovery import visible
from mpidl.comm import nccl
from mpidl.errors import UserError


class Seen(NamedTuple):
    """What a rank tells the others.

    gpus: those it may use; why: in words, where there are none; there: how many the driver counts,
    which it may not be able to use; note: a line to show, or "".
    """

    host: str
    gpus: tuple
    why: str = ""
    there: int = 0
    note: str = ""


class Dealt(NamedTuple):
    """The Gpu of each rank, or None where all compute on CPUs; lines to show."""

    gpus: Any
    lines: list


def settle(world, wanted, gpus=None):
    """This rank's `visible.Gpu`, or None for the CPU; and the lines to show. Collective.

    wanted: "auto", "cpu" or "gpu"; gpus: numbers such as "0,2", to restrict them and their order.
    Raises UserError on all ranks where a GPU is asked for and some rank has none.
    """
    if wanted == "cpu":
        if gpus is not None:
            raise UserError(f"--gpus {gpus}: expected --device gpu with it, found --device cpu")
        return None, []
    dealt = deal(world.broadcast(world.gather(look(world.host))), wanted, gpus)
    return (None if dealt.gpus is None else dealt.gpus[world.rank]), dealt.lines


def take(world, gpu):
    """Have this process compute on a `visible.Gpu`, or where it is None on the CPU. Collective.

    Sets the world's `device`, `mover` and `counts`; where every rank has its GPU already, they stay
    as they are, and with them what lies there. UserError, on all ranks, where one of them cannot
    use its GPU.
    """
    from mpidl.backends.gpu import launching
    from mpidl.backends.gpu.sums import Counts

    has = gpu is not None and world.device is not None and world.device.identity == gpu.identity
    # (another world may have opened it anew meanwhile)
    if world.gop("and", has and getattr(launching.sink(), "device", None) is world.device):
        return
    if world.device is not None:
        launching.open(None)
        world.device.close()
        world.device = world.mover = world.counts = None
    if gpu is None:
        return
    device = error = None
    try:
        device = opened(gpu)
    except UserError as problem:
        error = UserError(f"{problem} (rank {world.rank} on {world.host})")
    world.together(error)
    world.device, world.counts = launching.open(device), Counts()
    taken = world.broadcast(world.gather((world.host, gpu.identity)))
    device.sharers = taken.count((world.host, gpu.identity))
    world.mover = nccl.mover(world)
    if world.mover is not None and world.mover.captured:
        device.until = world.net.until  # which names a rank that no longer answers


def opened(gpu):
    """The Device of a `visible.Gpu`."""
    from mpidl.backends.gpu.cuda_device import CudaDevice

    return CudaDevice(gpu.index)


def look(host, environ=os.environ):
    """What this process may use: what CUDA shows of what Slurm gave."""
    found = visible()
    gpus, note = given(found.gpus, host, environ)
    try:
        for architecture in sorted({gpu.architecture for gpu in gpus}):
            nvrtc.find(architecture)
    except UserError as error:
        return Seen(host, (), str(error), found.driver_count)
    return Seen(host, gpus, found.reason, found.driver_count, note)


def given(gpus, host, environ):
    """(Those of the visible GPUs that Slurm gave to this job, a line to show or "").

    Slurm says it by CUDA_VISIBLE_DEVICES, which CUDA respects, by a cgroup, which hides the others,
    or, on clusters that constrain nothing, by a list of numbers alone.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        return gpus, ""
    text = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or ""
    try:
        mine = numbers(text)
    except ValueError:
        mine = []
    if mine:
        listed = tuple(gpu for gpu in gpus if gpu.index in mine)
        # as many as there are, or other numbers: a cgroup hides the others, and CUDA counts anew
        return (listed if len(mine) < len(gpus) and len(listed) == len(mine) else gpus), ""
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit() and int(count) < len(gpus):
        return gpus, (
            f"warning: Slurm gave this job {count} of the {len(gpus)} GPUs that are visible on "
            f"{host}, and does not say which: name them by --gpus"
        )
    return gpus, ""


def numbers(text):
    """[0, 1, 2, 5] of "0-2,5"; ValueError where it is none such."""
    found = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def deal(ranks, wanted, gpus=None):
    """The Dealt of ranks = [Seen, ...], for "auto" or "gpu" and --gpus. The same on all ranks.

    The ranks of a host that see the same GPUs take one each; where they are more, consecutive ones
    share a GPU. A rank that sees other ones than its neighbours (srun --gpus-per-task) takes of
    those. GPUs are told apart by what they are, not by their number.
    """
    without = [r for r, seen in enumerate(ranks) if not seen.gpus]
    if without and (wanted == "gpu" or gpus is not None):
        option = "--device gpu" if gpus is None else f"--gpus {gpus}"
        raise UserError(
            f"{option}: expected a GPU that mpidl can train on, found none on "
            f"{_by_host((ranks[r].host, ranks[r].why) for r in without)}"
        )
    if without:
        return Dealt(None, _why_cpu(ranks, without))
    order = None if gpus is None else chosen(gpus)
    lists = [_restricted(r, seen, order, gpus) for r, seen in enumerate(ranks)]
    groups: dict = {}  # ranks that choose among the same GPUs
    for rank, seen in enumerate(ranks):
        same = frozenset(gpu.identity for gpu in lists[rank])
        groups.setdefault((seen.host, same), []).append(rank)
    taken: list = [None] * len(ranks)
    for members in groups.values():
        pool = lists[members[0]]
        for place, rank in enumerate(members):
            if len(members) > len(pool):
                place = place * len(pool) // len(members)
            taken[rank] = next(g for g in lists[rank] if g.identity == pool[place].identity)
    lines = list(dict.fromkeys(seen.note for seen in ranks if seen.note and gpus is None))
    lines += _about_sharing(ranks, taken, gpus)
    return Dealt(taken, lines + _about_kinds(ranks, taken))


def chosen(text):
    """The numbers that --gpus names, in its order. Raises UserError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [-1]
    if min(found) < 0 or len(set(found)) < len(found):
        raise UserError(f"--gpus must be numbers of GPUs such as 0,2, each once, found {text}")
    return found


def _restricted(rank, seen, order, text):
    """The GPUs that a rank may choose from, in order."""
    if order is None:
        return seen.gpus
    by_number = {gpu.index: gpu for gpu in seen.gpus}
    missing = [number for number in order if number not in by_number]
    if missing:
        raise UserError(
            f"--gpus {text}: expected numbers among {', '.join(map(str, by_number))}, which rank "
            f"{rank} on {seen.host} sees, found {missing[0]}"
        )
    return tuple(by_number[number] for number in order)


def _why_cpu(ranks, without):
    """The line to show where not all ranks have a GPU, and some have, or could have."""
    lacking = _by_host((ranks[r].host, ranks[r].why) for r in without)
    if len(without) < len(ranks):
        have = ", ".join(dict.fromkeys(seen.host for seen in ranks if seen.gpus))
        return [f"note: all ranks compute on CPUs: there are GPUs on {have}, none on {lacking}"]
    unused = any(seen.there for seen in ranks)
    return [f"note: computes on CPUs: no GPU that can be used on {lacking}"] if unused else []


def _about_sharing(ranks, taken, gpus):
    """Lines about ranks that share a GPU, and GPUs that nobody takes."""
    crowded, idle = {}, {}
    for host in dict.fromkeys(seen.host for seen in ranks):
        here = [r for r, seen in enumerate(ranks) if seen.host == host]
        used = {taken[r].identity for r in here}
        there = {gpu.identity for r in here for gpu in ranks[r].gpus}
        if len(used) < len(here):
            crowded.setdefault((len(here), len(used)), []).append(host)
        elif used < there:
            idle.setdefault((len(used), len(there)), []).append(host)
    lines = [
        f"warning: {n} ranks share {k} GPU(s) on {', '.join(hosts)}: one rank a GPU is faster"
        for (n, k), hosts in crowded.items()
    ]
    if gpus is None:
        lines += [
            f"note: {k} of {n} GPUs are used on {', '.join(hosts)}, one by each rank"
            for (k, n), hosts in idle.items()
        ]
    return lines


def _about_kinds(ranks, taken):
    """A line where the GPUs are not all of one kind."""
    kinds = [f"{gpu.name} ({gpu.architecture}, {gpu.processors} processors)" for gpu in taken]
    if len(set(kinds)) == 1:
        return []
    mix = _by_host((seen.host, kind) for seen, kind in zip(ranks, kinds, strict=True))
    return [
        "warning: the ranks run different GPUs, so that the weights depend on who computes what: "
        f"{mix}"
    ]


def _by_host(pairs):
    """[(host, what), ...] as "host, host (what); host (what)"."""
    hosts: dict = {}
    for host, what in pairs:
        hosts.setdefault(what, {})[host] = None
    return "; ".join(f"{', '.join(found)} ({what})" for what, found in hosts.items())
