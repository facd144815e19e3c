"""Assign a GPU to each rank according to the rank's position among the ranks on its host."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpidl.backends.discovery import Gpu, visible
from mpidl.errors import UserError
from mpidl.text import grouped

if TYPE_CHECKING:
    from mpidl.backends.gpu.cuda_device import CudaDevice
    from mpidl.ranks.world import World


class RankGpus(NamedTuple):
    """The GPUs that a rank may use, as reported to the other ranks."""

    host: str
    gpus: tuple[Gpu, ...]
    reason: str = ""
    """Why the rank has no GPUs; "" if it has GPUs."""
    driver_count: int = 0
    """Number of GPUs that the driver reports, even if the rank cannot use them."""
    note: str = ""
    """A warning to print; "" if there is none."""


class Assignment(NamedTuple):
    """The GPUs assigned to the ranks."""

    gpus: list[Gpu] | None
    """GPU of each rank; None if all ranks compute on CPUs."""
    lines: list[str]
    """Messages to print."""


def choose_device(
    world: World, device: str, gpus: str | None = None
) -> tuple[Gpu | None, list[str]]:
    """Choose this rank's GPU; collective.

    Parameters
    ----------
    world : World
        The ranks.
    device : {"auto", "cpu", "gpu"}
        "auto" chooses GPUs if every rank has one, and CPUs otherwise.
    gpus : str, optional
        Indices of the GPUs to use, in order, such as "0,2". The default is all GPUs.

    Returns
    -------
    gpu : Gpu or None
        GPU of this rank; None if the rank computes on the CPU.
    lines : list of str
        Messages to print.

    Raises
    ------
    UserError
        On all ranks, if GPUs are requested and a rank has none.
    """
    if device == "cpu":
        if gpus is not None:
            raise UserError(f"--gpus {gpus}: expected --device gpu, found --device cpu")
        return None, []
    if device == "gpu":
        importlib.import_module("mpidl.backends.gpu")  # a wing, which may be missing
    if world.neighbours is None:
        ranks, position = world.allgather(find_gpus(world.host)), world.rank
    else:  # other groups of the job use the same GPUs
        ranks, position = world.neighbours.gpus, world.neighbours.first + world.rank
    assignment = assign_gpus(ranks, device, gpus)
    gpu = None if assignment.gpus is None else assignment.gpus[position]
    return gpu, assignment.lines


def use_gpu(world: World, gpu: Gpu | None) -> None:
    """Make this process compute on a GPU or on the CPU; collective.

    The function sets the attributes `device`, `mover` and `counts` of the world. If every rank
    already uses its GPU, nothing changes, and arrays on the GPUs stay valid.

    Parameters
    ----------
    world : World
        The ranks.
    gpu : Gpu or None
        GPU of this rank; None to compute on the CPU.

    Raises
    ------
    UserError
        On all ranks, if a rank cannot use its GPU.
    """
    if gpu is None and world.device is None:
        world.gop("and", False)  # other ranks may open or close GPUs
        return
    from mpidl.backends.gpu import launching
    from mpidl.backends.gpu.sums import Counts

    is_open = gpu is not None and world.device is not None and world.device.identity == gpu.identity
    # Another world may have reopened the GPU in the meantime.
    is_open = is_open and getattr(launching.sink(), "device", None) is world.device
    if world.gop("and", is_open):
        return
    if world.device is not None:
        launching.open(None)
        world.device.close()
        world.device = world.mover = world.counts = None
    if gpu is None:
        return
    from mpidl.comm import nccl

    device = error = None
    try:
        device = open_gpu(gpu)
    except UserError as problem:
        error = UserError(f"{problem} (rank {world.rank} on {world.host})")
    world.raise_if_any(error)
    world.device, world.counts = launching.open(device), Counts()
    assert device is not None  # otherwise all ranks have raised the error
    device.sharers = world.allgather((world.host, gpu.identity)).count((world.host, gpu.identity))
    if world.neighbours is not None:
        gpus = [report.gpus for report in world.neighbours.gpus if report.host == world.host]
        device.sharers = max(device.sharers, -(-len(gpus) // len(gpus[0])))
    world.mover = nccl.make_mover(world)
    if world.mover is not None and world.mover.captured:
        device.until = world.transport.wait_until  # a time-out names the ranks that do not respond


def open_gpu(gpu: Gpu) -> CudaDevice:
    """Open a GPU and return it as a `CudaDevice`."""
    from mpidl.backends.gpu.cuda_device import CudaDevice

    return CudaDevice(gpu.index)


def find_gpus(host: str, environ: Mapping[str, str] = os.environ) -> RankGpus:
    """Return the GPUs that this process may use.

    These are the GPUs that CUDA sees and, under Slurm, that belong to this job. If no installed
    NVRTC can compile for one of the GPUs, the result contains no GPUs, and its `reason` says why.
    """
    visible_gpus = visible()
    gpus, note = slurm_gpus(visible_gpus.gpus, host, environ)
    usable = RankGpus(host, gpus, visible_gpus.reason, visible_gpus.driver_count, note)
    if not gpus:
        return usable
    from mpidl.backends.gpu import nvrtc

    try:
        for architecture in sorted({gpu.architecture for gpu in gpus}):
            nvrtc.find(architecture)
    except UserError as error:
        return RankGpus(host, (), str(error), visible_gpus.driver_count)
    return usable


def slurm_gpus(
    gpus: tuple[Gpu, ...], host: str, environ: Mapping[str, str]
) -> tuple[tuple[Gpu, ...], str]:
    """Select the visible GPUs that Slurm gave to this job.

    Slurm may set CUDA_VISIBLE_DEVICES, which CUDA obeys, or hide the GPUs of other jobs with a
    cgroup. On some clusters, it does neither and only lists the indices of the job's GPUs.

    Parameters
    ----------
    gpus : tuple of Gpu
        Visible GPUs.
    host : str
        Host name for messages.
    environ : mapping
        Environment variables.

    Returns
    -------
    gpus : tuple of Gpu
        The selected GPUs.
    note : str
        A warning to print; "" if there is none.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        return gpus, ""
    text = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or ""
    try:
        numbers = parse_ranges(text)
    except ValueError:
        numbers = []
    if numbers:
        listed = tuple(gpu for gpu in gpus if gpu.index in numbers)
        # If the listed GPUs are not a proper subset of the visible GPUs, a cgroup hides the GPUs of
        # other jobs, and CUDA has renumbered the visible GPUs.
        is_subset = len(numbers) < len(gpus) and len(listed) == len(numbers)
        return (listed if is_subset else gpus), ""
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit() and int(count) < len(gpus):
        return gpus, (
            f"warning: Slurm gave this job {count} of the {len(gpus)} GPUs that are visible on "
            f"{host}, but does not say which ones: name them with --gpus"
        )
    return gpus, ""


def parse_ranges(text: str) -> list[int]:
    """Parse ranges: "0-2,5" gives [0, 1, 2, 5]. Raise ValueError if the string is malformed."""
    numbers: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def parse_gpus(text: str) -> list[int]:
    """Convert the value of --gpus to a list of GPU indices.

    Raise UserError if the value is malformed.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise UserError(f"--gpus must be distinct GPU numbers such as 0,2, found {text}")
    return numbers


def assign_gpus(ranks: Sequence[RankGpus], device: str, gpus: str | None = None) -> Assignment:
    """Assign a GPU to each rank; the result is the same on all ranks.

    Each rank gets one of the GPUs that it sees. Ranks on a host that see the same GPUs get
    different GPUs. If there are more such ranks than GPUs, consecutive ranks share a GPU. With
    `srun --gpus-per-task`, the ranks on a host see different GPUs, which may have the same index.
    GPUs are therefore distinguished by identity, not by index.

    Parameters
    ----------
    ranks : sequence of RankGpus
        The usable GPUs of each rank.
    device : {"auto", "gpu"}
        "auto" chooses CPUs if a rank has no GPU.
    gpus : str, optional
        Value of --gpus. By default, all GPUs are used.

    Returns
    -------
    Assignment
        The GPU of each rank, and messages to print.

    Raises
    ------
    UserError
        If GPUs are requested and a rank has none, or does not see one of the requested GPUs.
    """
    lacking = [r for r, report in enumerate(ranks) if not report.gpus]
    if lacking and (device == "gpu" or gpus is not None):
        option = "--device gpu" if gpus is None else f"--gpus {gpus}"
        raise UserError(
            f"{option}: expected a GPU that mpidl can train on, found none on "
            f"{_by_host((ranks[r].host, ranks[r].reason) for r in lacking)}"
        )
    if lacking:
        return Assignment(None, _lines_about_cpus(ranks, lacking))
    order = None if gpus is None else parse_gpus(gpus)
    candidates = [_candidates(rank, report, order, gpus) for rank, report in enumerate(ranks)]
    # {(host, GPU identities): ranks that choose among them}
    groups = grouped(
        ((report.host, frozenset(gpu.identity for gpu in candidates[rank])), rank)
        for rank, report in enumerate(ranks)
    )
    assigned: list = [None] * len(ranks)
    for members in groups.values():
        pool = candidates[members[0]]
        for place, rank in enumerate(members):
            if len(members) > len(pool):
                place = place * len(pool) // len(members)
            identity = pool[place].identity
            assigned[rank] = next(gpu for gpu in candidates[rank] if gpu.identity == identity)
    lines = list(dict.fromkeys(report.note for report in ranks if report.note and gpus is None))
    lines += _lines_about_sharing(ranks, assigned, gpus)
    return Assignment(assigned, lines + _lines_about_kinds(ranks, assigned))


def _candidates(rank, report, order, text):
    """Return the GPUs that a rank may choose from, in the order given by --gpus.

    `order` is the parsed value of --gpus, and `text` is the value as the user typed it.
    """
    if order is None:
        return report.gpus
    by_number = {gpu.index: gpu for gpu in report.gpus}
    missing = [number for number in order if number not in by_number]
    if missing:
        raise UserError(
            f"--gpus {text}: expected numbers among {', '.join(map(str, by_number))}, which rank "
            f"{rank} on {report.host} sees, found {missing[0]}"
        )
    return tuple(by_number[number] for number in order)


def _lines_about_cpus(ranks, lacking):
    """Return a note if only some ranks have a GPU, or if there are GPUs that cannot be used."""
    reasons = _by_host((ranks[r].host, ranks[r].reason) for r in lacking)
    if len(lacking) < len(ranks):
        hosts = ", ".join(dict.fromkeys(report.host for report in ranks if report.gpus))
        return [f"note: all ranks compute on CPUs: found GPUs on {hosts}, but none on {reasons}"]
    is_unusable = any(report.driver_count for report in ranks)
    return [f"note: computing on CPUs: no usable GPU on {reasons}"] if is_unusable else []


def _lines_about_sharing(ranks, assigned, gpus):
    """Return messages about ranks that share a GPU and about GPUs that no rank uses."""
    crowded, idle = [], []  # (text, host)
    by_host = grouped((report.host, rank) for rank, report in enumerate(ranks))
    for host, members in by_host.items():
        used = {assigned[r].identity for r in members}
        usable = {gpu.identity for r in members for gpu in ranks[r].gpus}
        if len(used) < len(members):
            text = f"warning: {len(members)} ranks share {len(used)} GPU(s) on {{}}: "
            crowded.append((f"{text}one rank per GPU is faster", host))
        elif used < usable and gpus is None:
            text = f"note: {len(used)} of {len(usable)} GPUs are used on {{}}, one per rank"
            idle.append((text, host))
    return [text.format(", ".join(hosts)) for text, hosts in grouped(crowded + idle).items()]


def _lines_about_kinds(ranks, assigned):
    """Return a warning if the ranks use different kinds of GPUs."""
    kinds = [f"{gpu.name} ({gpu.architecture}, {gpu.processors} processors)" for gpu in assigned]
    if len(set(kinds)) == 1:
        return []
    mix = _by_host((report.host, kind) for report, kind in zip(ranks, kinds, strict=True))
    return [
        "warning: the ranks use different GPUs, so the weights depend on which rank computes "
        f"which images: {mix}"
    ]


def _by_host(pairs: Iterable[tuple[str, str]]) -> str:
    """Format [(host, text), ...] as "host, host (text); host (text)"."""
    hosts_by_text = grouped((text, host) for host, text in dict.fromkeys(pairs))
    return "; ".join(f"{', '.join(hosts)} ({text})" for text, hosts in hosts_by_text.items())
