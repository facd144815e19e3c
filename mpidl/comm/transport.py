"""Send messages over an MPI communicator, and wait for messages with a time-out.

Every wait is a polling loop, so signals are handled and pending exchanges advance during a wait.
The guard of the transport is told about each wait, and about each call that may block inside MPI.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpidl import phases
from mpidl.comm.guard import Guard

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike

CANCEL = 5  # tag of the message that ends the waits of other ranks
CANCELLED = "another rank failed"
YIELD_SECONDS = 30.0  # extra time to wait while another rank that has timed out reports the hang
START_SECONDS = 20.0  # extra time for the first exchange of the ranks


class Cancelled(Exception):
    """Raised in a wait that another rank has cancelled with `Transport.cancel_others`."""


class Transport:
    """Point-to-point transfer of arrays over a communicator, and waits with a time-out.

    Parameters
    ----------
    mpi : module
        `mpi4py.MPI`, or its substitute for one rank (`ranks.serial`).
    comm : mpi4py.MPI.Comm
        Communicator to duplicate: once for arrays, and once for control messages.
    timeout : float
        Longest wait in seconds. After this time, the guard ends the job.
    guard : Guard, optional
        The guard of the job. By default, a wait that takes too long raises TimeoutError.

    Attributes
    ----------
    MPI : module
        The argument `mpi`.
    comm, control : mpi4py.MPI.Comm
        `comm` transfers arrays; `control` transfers pickled objects and control messages.
    rank, size : int
        Rank of this process, and number of ranks.
    hosts : list of str
        Host name of each rank.
    timeout : float
        Longest wait in seconds. This value may be changed.
    oversubscribed : bool
        Whether this host has more ranks than cores that the ranks may use. If so, waiting ranks
        yield the cores to other ranks.
    report_folder : str or None
        Folder of the run, in which the guard writes a report if it ends the job.
    wait_seconds : float
        Total time in seconds that this rank has waited for other ranks.
    """

    def __init__(
        self,
        mpi: ModuleType | SimpleNamespace,
        comm: MPI.Comm,
        timeout: float,
        guard: Guard | None = None,
    ) -> None:
        self.MPI, self.timeout = mpi, timeout
        self.guard = Guard() if guard is None else guard
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.report_folder: str | None = None
        self.activity = "starting"
        self._is_cancelled = False
        self.wait_seconds = 0.0
        with self.blocking("the start of a world", timeout + START_SECONDS):
            ranks = comm.allgather((mpi.Get_processor_name(), self.guard.card))
            self.comm, self.control = comm.Dup(), comm.Dup()
        self.hosts: list[str] = [host for host, _ in ranks]
        self.oversubscribed = self.guard.meet(self, [card for _, card in ranks])

    @property
    def activity(self) -> str:
        """Current activity of this rank, such as "epoch 3, iteration 17", for error messages."""
        return self._activity

    @activity.setter
    def activity(self, text: str) -> None:
        self._activity = text
        self.guard.name_activity(text)

    def isend(self, array: Any, dest: int, tag: int) -> MPI.Request:
        """Start sending an array to rank `dest`; return the MPI request."""
        return self.comm.Isend(array, dest, tag)

    def irecv(self, array: Any, source: int, tag: int) -> MPI.Request:
        """Start receiving into an array from rank `source`; return the MPI request."""
        return self.comm.Irecv(array, source, tag)

    def iallreduce(self, array: np.ndarray, out: np.ndarray) -> MPI.Request:
        """Start summing an array over the ranks into `out`; return the MPI request."""
        return self.comm.Iallreduce(array, out, self.MPI.SUM)

    def wait(
        self,
        requests: Sequence[MPI.Request],
        operation: str,
        progress: Callable[[], None] | None = None,
    ) -> None:
        """Wait for all requests; see `wait_until` for the parameters."""
        testall = self.MPI.Request.Testall
        self.wait_until(lambda: testall(requests), operation, progress)

    def wait_until(
        self,
        is_ready: Callable[[], bool],
        operation: str,
        progress: Callable[[], None] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Wait until `is_ready()` is true.

        Parameters
        ----------
        is_ready : callable
            Function without arguments that is called repeatedly.
        operation : str
            Name of the awaited operation, for messages about a time-out.
        progress : callable, optional
            Function to call between two calls to `is_ready`.
        timeout : float, optional
            Longest wait in seconds. The default is `self.timeout`. After this time, the guard ends
            the job.
        """
        start = time.monotonic()
        outer = self.guard.begin(operation, self.timeout)
        try:
            with phases.Phase(phases.WAIT, operation):
                limit = self.timeout if timeout is None else timeout
                self._poll(is_ready, operation, progress, limit)
        finally:
            self.guard.end(outer)
        self.wait_seconds += time.monotonic() - start

    def _poll(
        self,
        is_ready: Callable[[], bool],
        operation: str,
        progress: Callable[[], None] | None,
        timeout: float,
    ) -> None:
        """Call `is_ready` until it returns true, with increasing pauses."""
        if self._is_cancelled:  # handlers of the first `Cancelled` may start another wait
            raise Cancelled(CANCELLED)
        polls, start, deadline, previous = 0, 0.0, math.inf, 0.0
        while not is_ready():
            polls += 1
            if progress:
                progress()
            if self.oversubscribed and polls > 20:
                # Sleep: sched_yield would return at once even if other ranks need the core.
                time.sleep(5e-5 if polls < 200 else 5e-4)
            elif self.oversubscribed or polls > 1000:
                os.sched_yield()
            if polls % 256:
                continue
            now = time.monotonic()
            if polls == 256:  # the first look at the clock
                start, deadline, previous = now, now + timeout, now
            if now - previous > 1:  # all processes were suspended, so do not count this time
                deadline += now - previous
            previous = now
            if now - start > 0.02:
                time.sleep(0.0005)  # in a long wait, leave the core to other processes
            if self.control.Iprobe(tag=CANCEL):
                self._is_cancelled = True
                raise Cancelled(CANCELLED)
            if self.guard.renew(operation, timeout):
                deadline = max(deadline, now + YIELD_SECONDS)
            if now > deadline:
                problem = f"{operation} did not complete within {timeout:g} s (--timeout)."
                self.guard.timed_out(operation, problem)
                deadline = time.monotonic() + YIELD_SECONDS

    @contextlib.contextmanager
    def blocking(self, operation: str, seconds: float | None = None) -> Iterator[None]:
        """Let the guard end the process if the MPI calls in the `with` block do not return in time.

        Parameters
        ----------
        operation : str
            Name of the operation, for the message.
        seconds : float, optional
            Longest time that the block may take. The default is `self.timeout`.
        """
        outer = self.guard.begin(operation, self.timeout if seconds is None else seconds)
        try:
            yield
        finally:
            self.guard.end(outer)

    def cancel_others(self) -> None:
        """Make all other ranks raise `Cancelled` in their current or next wait.

        The operations of the other ranks stay incomplete. No rank may therefore use this transport
        afterwards, and the memory of the messages must stay allocated.
        """
        for rank in range(self.size):
            if rank != self.rank:
                self.control.isend("", rank, CANCEL)

    def close(self) -> None:
        """Free the communicators, after which the transport cannot be used. Collective."""
        with self.blocking("the end of a world"):
            self.comm.Free()
            self.control.Free()

    def abort(self, code: int) -> NoReturn:
        """End the job on all ranks with this exit code."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.comm.Abort(code)


def free_shared_bytes(transport: Transport) -> int:
    """Return the number of bytes that `allocate_shared` can still allocate on this host.

    MPI libraries keep shared memory in files in /dev/shm, whose default size in a container is
    64 MB. If /dev/shm is full, a process that touches a new page is killed.
    """
    if transport.size == 1:
        return sys.maxsize
    try:
        filesystem = os.statvfs("/dev/shm")
    except OSError:
        return sys.maxsize
    return filesystem.f_bavail * filesystem.f_frsize


def allocate_shared(
    transport: Transport, shape: Sequence[int], dtype: DTypeLike
) -> tuple[np.ndarray, MPI.Win | None]:
    """Allocate a zeroed array that the ranks of this host share; collective.

    Return the array and its MPI window. The window is None if there is only one rank.
    """
    shape = tuple(int(n) for n in shape)
    count = int(np.prod(shape))
    if transport.size == 1:
        return np.zeros(shape, dtype), None
    with transport.blocking("shared memory"):
        host_comm = transport.comm.Split_type(transport.MPI.COMM_TYPE_SHARED)
        nbytes = max(count * np.dtype(dtype).itemsize, 1)
        window = transport.MPI.Win.Allocate_shared(
            nbytes if host_comm.rank == 0 else 0, 1, comm=host_comm
        )
        memory, _ = window.Shared_query(0)
        array = np.frombuffer(memory, dtype, count).reshape(shape)
        if host_comm.rank == 0:
            array[...] = 0
        host_comm.Barrier()
        host_comm.Free()  # the window keeps its own reference
    return array, window
