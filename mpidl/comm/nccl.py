"""Exchange nodes of the reduction tree between the GPUs of the ranks.

A node is the sum over a range of blocks of 16 images. `make_mover(world)` chooses a mover, an
object that sends nodes between ranks with NCCL or a CUDA-aware MPI. Without a mover, the world
exchanges the nodes through pinned host memory. In all cases, the nodes are added up along the same
tree, so the sums do not depend on the choice. `backends.gpu.sums` decides what the ranks send.

No mover has run on several real GPUs yet. The choice of a mover is tested with simulated ranks. The
messages are tested with host memory, those of `NcclMover` through a replacement for NCCL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpidl.errors import UserError

if TYPE_CHECKING:
    from mpidl.backends.gpu.array import Array
    from mpidl.backends.gpu.cuda_device import CudaDevice
    from mpidl.comm.world import World

TRANSPORTS = ("nccl", "mpi", "host")
VARIABLE = "MPIDL_TRANSPORT"


class Capabilities(NamedTuple):
    """The methods with which a rank can transfer device memory."""

    host: str
    identity: str
    """Identity of the rank's physical GPU."""
    nccl: int
    """Version of NCCL, such as 22707; 0 if the rank has no NCCL."""
    aware: bool | None
    """Whether the MPI library is CUDA-aware (accepts device memory); None if unknown."""


def make_mover(world: World) -> NcclMover | MpiMover | None:
    """Create the object that sends nodes between the GPUs of the ranks.

    Collective. Call this function once per world.

    Parameters
    ----------
    world : World
        The ranks. `world.device` must be set.

    Returns
    -------
    NcclMover, MpiMover or None
        The mover; None if nodes are exchanged through host memory. A mover has the methods of
        `MpiMover`, and an attribute `captured`, which is true if a CUDA graph can contain its
        messages.

    Raises
    ------
    UserError
        If the environment variable MPIDL_TRANSPORT of rank 0 names a transport that cannot be used.
    """
    request = world.broadcast(os.environ.get(VARIABLE))
    ranks = world.allgather(
        Capabilities(world.host, _device_of(world).identity, version(), cuda_aware())
    )
    transport = choose_transport(ranks, request)
    if transport == "host":
        return None
    return NcclMover(world, tuple(ranks)) if transport == "nccl" else MpiMover(world)


def choose_transport(ranks: Sequence[Capabilities], request: str | None = None) -> str:
    """Return the requested transport or, by default, the best transport that all ranks can use.

    Raises
    ------
    UserError
        If the requested transport is unknown or cannot be used.
    """
    if request is not None and request not in TRANSPORTS:
        raise UserError(f"{VARIABLE} must be {', '.join(TRANSPORTS[:-1])} or host, found {request}")
    if len(ranks) == 1:
        return "host"  # a single rank exchanges nothing
    first_ranks: dict[tuple[str, str], int] = {}
    shared = []
    for rank, capabilities in enumerate(ranks):
        gpu = capabilities.host, capabilities.identity
        first = first_ranks.setdefault(gpu, rank)
        if first != rank:
            shared.append((first, rank))
    lacking = [r for r, a in enumerate(ranks) if not a.nccl]
    refusing = [r for r, a in enumerate(ranks) if a.aware is False]
    problem = ""
    if request == "nccl" and shared:
        problem = "ranks {} and {} share one GPU, which NCCL does not support".format(*shared[0])
    elif request == "nccl" and lacking:
        problem = f"rank {lacking[0]} on {ranks[lacking[0]].host} finds no NCCL that CuPy can load"
    elif request == "nccl" and len({a.nccl for a in ranks}) > 1:
        problem = "the ranks have different versions of NCCL"
    elif request == "mpi" and refusing:
        problem = f"the MPI of rank {refusing[0]} on {ranks[refusing[0]].host} is not CUDA-aware"
    if problem:
        raise UserError(f"{VARIABLE}={request}: {problem}")
    if request is not None:
        return request
    if shared:
        return "host"
    if not lacking and len({a.nccl for a in ranks}) == 1:
        return "nccl"
    return "mpi" if all(a.aware for a in ranks) else "host"


def _device_of(world: World) -> CudaDevice:
    assert world.device is not None
    return world.device


def version() -> int:
    """Return the version of NCCL that CuPy can load, such as 22707; 0 if CuPy finds no NCCL."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hide CuPy's instructions for installing NCCL
            from cupy.cuda import nccl
    except ImportError:
        return 0
    return nccl.get_version() if nccl.available else 0


def cuda_aware(
    libraries: Iterable[str] | None = None, environ: Mapping[str, str] = os.environ
) -> bool | None:
    """Return whether the MPI library is CUDA-aware (accepts device memory); None if unknown.

    Parameters
    ----------
    libraries : iterable of str, optional
        Paths of MPI libraries. The default is the libraries that this process has loaded.
    environ : mapping, optional
        Environment variables.
    """
    for path in loaded_libraries() if libraries is None else libraries:
        if "cray" in os.path.basename(path) and environ.get("MPICH_GPU_SUPPORT_ENABLED") != "1":
            return False  # Cray's library would report support, but then abort the job
        with contextlib.suppress(OSError, AttributeError):  # Open MPI, MPICH
            return bool(ctypes.CDLL(path).MPIX_Query_cuda_support())
        with contextlib.suppress(OSError, AttributeError):  # MPICH and its derivatives
            support = ctypes.c_int()
            error = ctypes.CDLL(path).MPIX_GPU_query_support(0, ctypes.byref(support))
            return error == 0 and bool(support.value)
    return None


def loaded_libraries() -> list[str]:
    """Return the paths of the MPI libraries that this process has loaded."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file}
        return sorted(p for p in paths if re.match(r"libmpi[^/]*\.so", os.path.basename(p)))
    return []


Message = tuple[int, "Array"]  # the other rank, and an Array in C order

communicators: dict[
    tuple[Capabilities, ...], list[Any]
] = {}  # {Capabilities of the ranks: NCCL's communicators}
WARM_BYTES = 256, 1 << 20  # sizes of the first messages: NCCL treats small and large ones apart


class NcclMover:
    """A mover that uses NCCL. Each rank needs a GPU that no other rank uses.

    There are two communicators, because NCCL runs the operations of one communicator one after
    another: one for the stream for computing, and one for the stream for sums. Worlds with the same
    ranks share them. The first messages open connections, which is not allowed inside a CUDA graph,
    so the constructor sends the first messages. If a rank dies, the other ranks wait in NCCL until
    the launcher ends them; --timeout has no effect in NCCL.

    Parameters
    ----------
    world : World
        The ranks.
    ranks : tuple of Capabilities
        Capabilities of each rank. The communicators are stored under this key.
    """

    captured = True

    def __init__(self, world: World, ranks: tuple[Capabilities, ...]) -> None:
        from cupy.cuda import nccl

        self.device, self.rank, self.size = _device_of(world), world.rank, world.size
        self.nccl = nccl
        if ranks not in communicators:
            communicators[ranks] = []
            for _ in ("computing", "sums"):
                key = world.broadcast(nccl.get_unique_id() if world.rank == 0 else None)
                communicator = nccl.NcclCommunicator(world.size, key, world.rank)
                communicators[ranks].append(communicator)
                # Keep the communicator until the process ends. Its destructor would wait for the
                # other ranks, and for the destruction of all graphs that contain its messages.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
        self.communicators = communicators[ranks]
        buffer = self.device.allocate((world.size + 1) * max(WARM_BYTES))
        places = [Bytes(buffer.address + r * max(WARM_BYTES), 0) for r in range(world.size + 1)]
        for communicator in self.communicators:
            for nbytes in WARM_BYTES:
                places = [Bytes(place.address, nbytes) for place in places]
                self._gather(communicator, places[-1], places[0])
                peers = list(enumerate(places[:-1]))
                self._exchange(communicator, [(r, places[-1]) for r, _ in peers], peers)
        self.device.synchronize()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive Arrays, in the device's stream; see `MpiMover.exchange`."""
        self._exchange(self.communicators[self.device.is_aside], sends, receives)

    def allgather(self, source: Array, target: Array) -> None:
        """Gather equal parts, in the device's stream; see `MpiMover.allgather`."""
        self._gather(self.communicators[self.device.is_aside], source, target)

    def wait(self, requests: None) -> None:
        """Do nothing, because messages run in a stream of the device."""

    def _exchange(self, communicator: Any, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        stream, kind = self.device.stream, self.nccl.NCCL_INT8
        _copy_own(self, sends, receives)
        self.nccl.groupStart()
        try:
            for rank, array in sends:
                if rank != self.rank:
                    communicator.send(array.address, array.nbytes, kind, rank, stream)
            for rank, array in receives:
                if rank != self.rank:
                    communicator.recv(array.address, array.nbytes, kind, rank, stream)
        finally:
            self.nccl.groupEnd()

    def _gather(self, communicator: Any, source: Any, target: Any) -> None:
        kind, stream = self.nccl.NCCL_INT8, self.device.stream
        communicator.allGather(source.address, target.address, source.nbytes, kind, stream)


class MpiMover:
    """A mover that uses MPI messages from device memory to device memory.

    The caller must wait for the device before it starts messages.
    """

    captured = False

    def __init__(self, world: World) -> None:
        self.world, self.device = world, _device_of(world)
        self.rank, self.size = world.rank, world.size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
        """Start to send and receive Arrays, and return what `wait` needs.

        A rank receives the Arrays of each other rank in the order in which that rank lists them. An
        Array that a rank sends to itself is copied.

        Parameters
        ----------
        sends, receives : sequence of (int, Array)
            The other rank of each message, and an Array in C order. No Array may be empty.
        """
        _copy_own(self, sends, receives)
        return self.world.start_messages(self._buffers(sends), self._buffers(receives))

    def allgather(self, source: Array, target: Array) -> list[Any]:
        """Start to gather Arrays of equal size from all ranks, and return what `wait` needs.

        Parameters
        ----------
        source : Array
            Part of this rank, in C order.
        target : Array
            Receives the parts of all ranks one after another, in the order of the ranks.
        """
        nbytes = source.nbytes
        parts = [Bytes(target.address + r * nbytes, nbytes) for r in range(self.size)]
        self.device.copy(parts[self.rank].address, source.address, nbytes)
        peers = [(rank, part) for rank, part in enumerate(parts) if rank != self.rank]
        sends = self._buffers([(rank, source) for rank, _ in peers])
        return self.world.start_messages(sends, self._buffers(peers))

    def wait(self, requests: Sequence[Any]) -> None:
        """Wait for the messages of `exchange` or `allgather`."""
        self.world.wait_for(requests, "nodes of the other ranks' GPUs")

    def _buffers(self, messages: Sequence[Any]) -> list[tuple[int, DeviceBytes]]:
        return [
            (rank, DeviceBytes(array.address, array.nbytes))
            for rank, array in messages
            if rank != self.rank
        ]


class Bytes(NamedTuple):
    """A range of device memory."""

    address: int
    nbytes: int


def _copy_own(mover: Any, sends: Sequence[Any], receives: Sequence[Any]) -> None:
    """Copy the Arrays that a rank sends to itself, in the device's stream."""
    sources = [array for rank, array in sends if rank == mover.rank]
    targets = [array for rank, array in receives if rank == mover.rank]
    for source, target in zip(sources, targets, strict=True):
        mover.device.copy(target.address, source.address, source.nbytes)


class DeviceBytes:
    """A buffer in device memory with the CUDA array interface, which mpi4py accepts."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
