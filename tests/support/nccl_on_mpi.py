"""Stand in for CuPy's module of NCCL: the messages of emulated GPUs are sent by MPI.

Operations run in the streams of emulated devices, which are functions (`EmulatedDevice.stream`).
"""

import contextlib
import ctypes
import sys
from types import ModuleType
from unittest import mock

from mpidl.comm import nccl

NCCL_INT8, available = 0, True
_group = None  # [(communicator, function, arguments, stream)] of the group that has begun


def get_version():
    return 22707


def get_unique_id():
    return (0,)


def groupStart():
    global _group
    assert _group is None
    _group = []


def groupEnd():
    """Start all messages of the group, and wait for them, as one operation of the stream."""
    global _group
    group, _group = _group, None
    if group:
        (stream,) = {stream for *_, stream in group}
        stream(_run, [message for message, _ in group])


def _run(messages):
    from mpi4py import MPI

    MPI.Request.Waitall([start(*arguments) for start, *arguments in messages])


def _buffer(address, nbytes):
    return (ctypes.c_ubyte * nbytes).from_address(address)


class NcclCommunicator:
    """The ranks, in an order of messages of their own."""

    def __init__(self, size, key, rank):
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD.Dup()
        assert (self.comm.size, self.comm.rank, key) == (size, rank, get_unique_id())

    def send(self, address, nbytes, kind, rank, stream):
        _group.append(((self._start, self.comm.Isend, address, nbytes, rank), stream))

    def recv(self, address, nbytes, kind, rank, stream):
        _group.append(((self._start, self.comm.Irecv, address, nbytes, rank), stream))

    @staticmethod
    def _start(start, address, nbytes, rank):
        return start(_buffer(address, nbytes), rank)

    def allGather(self, source, target, nbytes, kind, stream):
        assert _group is None
        stream(self._allgather, source, target, nbytes)

    def _allgather(self, source, target, nbytes):
        parts = _buffer(target, nbytes * self.comm.size)
        self.comm.Allgather(_buffer(source, nbytes), parts)


@contextlib.contextmanager
def installed():
    """Let `comm.nccl` find this module as `cupy.cuda.nccl`, without earlier communicators."""
    modules = {name: ModuleType(name) for name in ("cupy", "cupy.cuda")}
    modules["cupy.cuda"].nccl = sys.modules[__name__]
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        with mock.patch.object(nccl, "communicators", {}):
            yield
    finally:
        for name, module in before.items():  # keep other modules that were imported meanwhile
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
