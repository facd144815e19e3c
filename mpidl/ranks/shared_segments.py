"""Check the free space for MPI's shared memory, and remove segments that dead jobs left behind.

MPI libraries keep the messages between the ranks of a host in files (segments) in /dev/shm. If
there is too little space, a bus error kills the process in MPI_Init. A job that is killed leaves
its files behind.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time

from mpidl.errors import UserError
from mpidl.ranks.exit_guard import start_tick

FOLDER = "/dev/shm"
# Prefixes of the segments of MPICH, Open MPI, and the library UCX, which MPICH and Open MPI use.
# UCX may map segments of other ranks long after their creation.
PREFIXES = ("mpich_shm_", "mpich_vci_", "mpich_shar_tmp", "sm_segment.", "vader_segment.")
LATE_PREFIXES = ("ucx_shm_posix_",)
BYTES_PER_RANK = {"MPICH": 1_080_000}  # bytes that MPI_Init allocates for each rank
INITIAL_NAMESPACE = 4026531836  # inode number of Linux's first PID namespace
YOUNG_SECONDS = 2.0  # longest time from the creation of a segment until its creator maps it
UNSEEN_SECONDS = 60.0  # longest time from the creation of a segment until all ranks have mapped it


def make_room(vendor: str, folder: str = FOLDER) -> None:
    """Remove segments of this user's dead jobs, and check that MPI_Init has enough free space.

    Parameters
    ----------
    vendor : str
        The MPI library, as in `mpi4py.MPI.get_vendor`.
    folder : path
        Folder of the segments.

    Raises
    ------
    UserError
        If there is too little free space for the ranks that the launcher starts on this host.
    """
    local_rank, ranks = local_ranks()
    try:
        if local_rank == 0:
            remove_dead(folder)
        status = os.statvfs(folder)
    except OSError:
        return  # no such folder: MPI uses other memory
    required = BYTES_PER_RANK.get(vendor, 0) * ranks
    room = status.f_bavail * status.f_frsize
    if room < required:
        # Other ranks of this host may already have created their segments.
        room += _bytes_since(_start_time(), folder)
    if room < required:
        raise UserError(
            f"{folder} on host {platform.node()}: expected {required / 2**20:.1f} MB free for the "
            f"messages between {ranks} rank(s), found {room / 2**20:.1f}; enlarge it (docker run "
            "--shm-size=2g), or remove files from it"
        )


def remove_dead(folder: str = FOLDER) -> list[str]:
    """Remove this user's segments that no process has mapped, and return their names.

    In a PID namespace, such as a container, processes in other namespaces are invisible but may use
    segments. In such a namespace, the function keeps all UCX segments and all segments of the last
    minute. The jobs of older segments no longer need the names of the files.
    """
    sees_all = _sees_all_processes()
    youngest = time.time() - (YOUNG_SECONDS if sees_all else UNSEEN_SECONDS)
    segments = _segments(folder, PREFIXES + (LATE_PREFIXES if sees_all else ()))
    candidates = {path for path, status in segments.items() if status.st_mtime <= youngest}
    dead = sorted(candidates - _used(candidates, folder)) if candidates else []
    for path in dead:
        with contextlib.suppress(OSError):  # another job may remove the segment at the same time
            os.unlink(path)
    return [os.path.basename(path) for path in dead]


def local_ranks() -> tuple[int, int]:
    """Return this process's number among the ranks of its host, and the number of these ranks.

    Both numbers come from the launcher's environment variables. Without these variables, the result
    is (0, 1).
    """
    for rank, size in (
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    if "SLURM_LOCALID" in os.environ and "PMI_SIZE" in os.environ:
        return int(os.environ["SLURM_LOCALID"]), _tasks_of_node()
    return 0, 1


def _tasks_of_node():
    """Return the number of tasks on this node, from SLURM_STEP_TASKS_PER_NODE such as 4(x2),1."""
    counts = []
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = int(os.environ.get("SLURM_NODEID", 0))
    return counts[node] if node < len(counts) else 1


def _sees_all_processes():
    try:
        return os.stat("/proc/self/ns/pid").st_ino == INITIAL_NAMESPACE
    except OSError:
        return False


def _used(paths: set[str], folder: str) -> set[str]:
    """Return the paths that a process of this user has mapped."""
    used = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as lines:
            for line in lines:
                if folder in line:
                    used |= paths & {line.split(maxsplit=5)[-1].strip()}
    return used


def _start_time():
    """Return when this process started, in seconds since the epoch."""
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    return time.time() - uptime + int(start_tick(os.getpid())) / os.sysconf("SC_CLK_TCK")


def _bytes_since(start_time, folder):
    """Return the total size in bytes of this user's segments that were created after a time."""
    segments = _segments(folder, PREFIXES + LATE_PREFIXES).values()
    return sum(x.st_blocks * 512 for x in segments if x.st_mtime >= start_time - 1)


def _segments(folder, prefixes):
    """Return {path: status} of this user's segments with names that begin with a given prefix."""
    segments = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefixes):
                with contextlib.suppress(OSError):  # removed in the meantime
                    segments[entry.path] = entry.stat(follow_symlinks=False)
    return {path: status for path, status in segments.items() if status.st_uid == os.geteuid()}
