"""Moves nodes of sums from GPU to GPU: by NCCL, or by an MPI that reads device memory.

`mover(world)` picks one, or None: then nodes go through pinned host memory and the world's own
exchange. A mover only gathers bytes; who adds them up is the fold, so the sums are the same.

None of this has run on real GPUs yet: the choice is tested with made-up ranks, and the messages of
`Messages` with host memory.
"""

import contextlib
import ctypes
import os
import re
import warnings
from typing import Any, NamedTuple

from mpidl.errors import UserError

TRANSPORTS = ("nccl", "mpi", "host")
VARIABLE = "MPIDL_TRANSPORT"


class Able(NamedTuple):
    """What a rank has for it.

    identity: of its physical GPU; nccl: NCCL's version, 0 without; aware: whether its MPI reads
    device memory, None where it does not say.
    """

    host: str
    identity: str
    nccl: int
    aware: Any


def mover(world):
    """What moves nodes between the GPUs of this world's ranks, made once for a world. Collective.

    It has `captured`, whether its messages can be part of a captured graph, and
    `allgather(source, target)`: source (nodes, width), of the same shape on all ranks, target
    (ranks, nodes, width), Arrays in C order; in the order of the device's stream. None where nodes
    go through the host. MPIDL_TRANSPORT, as rank 0 has it, forces one; UserError where that cannot
    be.
    """
    wanted = world.broadcast(os.environ.get(VARIABLE))
    found = world.gather(Able(world.host, world.device.identity, version(), cuda_aware()))
    ranks = world.broadcast(found)
    transport = choose(ranks, wanted)
    if transport == "host":
        return None
    return Nccl(world, tuple(ranks)) if transport == "nccl" else Messages(world)


def choose(ranks, wanted=None):
    """The transport for ranks = [Able, ...]: the one that is wanted, or else the best."""
    if wanted is not None and wanted not in TRANSPORTS:
        raise UserError(f"{VARIABLE} must be {', '.join(TRANSPORTS[:-1])} or host, found {wanted}")
    if len(ranks) == 1:
        return "host"  # there is nothing to move
    own, shared = {}, []
    for rank, able in enumerate(ranks):
        first = own.setdefault((able.host, able.identity), rank)
        if first != rank:
            shared.append((first, rank))
    lacking = [r for r, a in enumerate(ranks) if not a.nccl]
    refusing = [r for r, a in enumerate(ranks) if a.aware is False]
    problem = ""
    if wanted == "nccl" and shared:
        problem = "ranks {} and {} are on one GPU, which NCCL refuses".format(*shared[0])
    elif wanted == "nccl" and lacking:
        problem = f"rank {lacking[0]} on {ranks[lacking[0]].host} finds no NCCL that CuPy can load"
    elif wanted == "nccl" and len({a.nccl for a in ranks}) > 1:
        problem = "the ranks have different versions of NCCL"
    elif wanted == "mpi" and refusing:
        problem = f"the MPI of rank {refusing[0]} on {ranks[refusing[0]].host} is not CUDA-aware"
    if problem:
        raise UserError(f"{VARIABLE}={wanted}: {problem}")
    if wanted is not None:
        return wanted
    if shared:
        return "host"
    if not lacking and len({a.nccl for a in ranks}) == 1:
        return "nccl"
    return "mpi" if all(a.aware for a in ranks) else "host"


def version():
    """The version of the NCCL that CuPy can load, such as 22707; 0 without."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy tells at length how to install it
            from cupy.cuda import nccl
    except ImportError:
        return 0
    return nccl.get_version() if nccl.available else 0


def cuda_aware(libraries=None, environ=os.environ):
    """Whether MPI reads device memory, as its library says: True or False, None where it does not.

    libraries: paths of the MPI libraries of this process, those it has loaded by default.
    """
    for path in loaded() if libraries is None else libraries:
        if "cray" in os.path.basename(path) and environ.get("MPICH_GPU_SUPPORT_ENABLED") != "1":
            return False  # Cray's own says yes all the same, and ends the job
        with contextlib.suppress(OSError, AttributeError):  # Open MPI, MPICH
            return bool(ctypes.CDLL(path).MPIX_Query_cuda_support())
        with contextlib.suppress(OSError, AttributeError):  # MPICH and its kin
            found = ctypes.c_int()
            error = ctypes.CDLL(path).MPIX_GPU_query_support(0, ctypes.byref(found))
            return error == 0 and bool(found.value)
    return None


def loaded():
    """Paths of the MPI libraries that this process has loaded."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file}
        return sorted(p for p in paths if re.match(r"libmpi[^/]*\.so", os.path.basename(p)))
    return []


_communicators: dict = {}  # {the Ables of the ranks: NCCL's communicator}


class Nccl:
    """By NCCL, each rank on a GPU of its own; worlds of the same ranks share a communicator.

    Its first messages are made here, outside of any graph, as they open connections. A rank that
    dies leaves the others waiting in NCCL: the launcher ends them, --timeout does not reach there.
    """

    captured = True

    def __init__(self, world, ranks):
        from cupy.cuda import nccl

        self.device = world.device
        self._bytes = nccl.NCCL_INT8
        if ranks not in _communicators:
            key = world.broadcast(nccl.get_unique_id() if world.rank == 0 else None)
            made = _communicators[ranks] = nccl.NcclCommunicator(world.size, key, world.rank)
            # never destroyed but by the end of the process: that waits for every graph which holds
            # its messages to be gone, and for the other ranks, wherever the last reference goes
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        self._ranks = _communicators[ranks]
        first = self.device.allocate(256 * (world.size + 1))
        self._gather(first.address, first.address + 256, 256)
        self.device.synchronize()

    def allgather(self, source, target):
        self._gather(source.address, target.address, source.nbytes)

    def _gather(self, source, target, nbytes):
        if nbytes:
            self._ranks.allGather(source, target, nbytes, self._bytes, self.device.stream)


class Messages:
    """By MPI's messages from device memory to device memory: the host waits for the device, then
    for the messages."""

    captured = False

    def __init__(self, world):
        self.world, self.device = world, world.device

    def allgather(self, source, target):
        world, nbytes = self.world, source.nbytes
        if not nbytes:
            return
        self.device.copy(target.address + world.rank * nbytes, source.address, nbytes)
        self.device.synchronize()  # what is sent is there, and nobody reads the target any more
        rows = [InMemory(target.address + r * nbytes, nbytes) for r in range(world.size)]
        world.swap(InMemory(source.address, nbytes), rows, "nodes of the other ranks' GPUs")


class InMemory:
    """Bytes at an address, as MPI takes them: by the CUDA array interface."""

    def __init__(self, address, nbytes):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
