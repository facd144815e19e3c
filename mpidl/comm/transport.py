"""Send messages over an MPI communicator, and wait for messages with a time-out.

Every wait is a polling loop, so signals are handled and pending exchanges advance during a wait. If
a rank stops responding, the job ends with a message that names that rank. The watchdog thread
guards calls that may block inside MPI.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpidl.comm import acts, serial, thread_budget, ulfm, watchdog
from mpidl.comm.hang_report import Peer
from mpidl.comm.roll_call import RollCall
from mpidl.core import phases

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
    comm : mpi4py.MPI.Comm
        Communicator to duplicate: once for arrays, and once for control messages.
    timeout : float
        Longest wait in seconds. After this time, the transport prints which ranks do not respond,
        and aborts the job.

    Attributes
    ----------
    MPI : module
        `mpi4py.MPI`, or its substitute for one rank (`comm.serial`).
    comm, control : mpi4py.MPI.Comm
        `comm` transfers arrays; `control` transfers pickled objects and control messages.
    rank, size : int
        Rank of this process, and number of ranks.
    peers : list of Peer
        Host and process of each rank.
    hosts : list of str
        Host name of each rank.
    timeout : float
        Longest wait in seconds. This value may be changed.
    oversubscribed : bool
        Whether this host has more ranks than cores that the ranks may use. If so, waiting ranks
        yield the cores to other ranks.
    report_folder : str or None
        Folder in which a rank that times out writes a report about all ranks.
    wait_seconds : float
        Total time in seconds that this rank has waited for other ranks.
    has_left : bool
        Whether this rank knows that all ranks have reached the end of the program.
    roll_call : RollCall
        Asks other ranks what they wait for, and answers such questions.
    """

    def __init__(self, comm: MPI.Comm, timeout: float) -> None:
        self.MPI: ModuleType = serial.load(timeout)
        self.timeout = timeout
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.report_folder: str | None = None
        self._acts = acts.record()
        self.activity = "starting"
        self.oversubscribed = self._is_cancelled = self.has_left = False
        self.wait_seconds = 0.0
        with watchdog.guard("the start of a world", timeout + START_SECONDS):
            host = self.MPI.Get_processor_name()
            ranks = comm.allgather(
                (Peer(host, self._acts.address), thread_budget.available_cores())
            )
            self.comm, self.control = comm.Dup(), comm.Dup()
        self.peers: list[Peer] = [peer for peer, _ in ranks]
        self.hosts: list[str] = [peer.host for peer in self.peers]
        host_cores = [cores for peer, cores in ranks if peer.host == host]
        self.oversubscribed = len(host_cores) > thread_budget.usable_cores(host_cores)
        self.roll_call = RollCall(self)
        if self.size > 1:
            watchdog.start(self.rank, self.roll_call.describe_block)

    @property
    def activity(self) -> str:
        """Current activity of this rank, such as "epoch 3, iteration 17", for error messages."""
        return self._activity

    @activity.setter
    def activity(self, text: str) -> None:
        self._activity = text
        self._acts.activity(text)

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
            Longest wait in seconds. The default is `self.timeout`. After this time, the method
            prints which ranks do not respond, and aborts the job.
        """
        start = time.monotonic()
        outer = self._acts.begin(operation, self.timeout)
        try:
            with phases.Phase(phases.WAIT, operation):
                limit = self.timeout if timeout is None else timeout
                self._poll(is_ready, operation, progress, limit)
        finally:
            self._acts.end(outer)
        self.wait_seconds += time.monotonic() - start

    def _poll(self, is_ready, operation, progress, timeout):
        """Call `is_ready` until it returns true, with increasing pauses."""
        if self._is_cancelled:  # handlers of the first `Cancelled` may start another wait
            raise Cancelled(CANCELLED)
        polls, start, deadline, previous = 0, None, None, None
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
            if start is None:
                start, deadline, previous = now, now + timeout, now
            if now - previous > 1:  # all processes were suspended, so do not count this time
                deadline += now - previous
            previous = now
            if now - start > 0.02:
                time.sleep(0.0005)  # in a long wait, leave the core to other processes
            self._acts.renew()
            if self.size > 1:
                ulfm.raise_if_lost(self.MPI, self.comm)
            if self.control.Iprobe(tag=CANCEL):
                self._is_cancelled = True
                raise Cancelled(CANCELLED)
            if self.roll_call.answer(operation):
                deadline = max(deadline, now + YIELD_SECONDS)
            if now > deadline:
                problem = f"{operation} did not complete within {timeout:g} s (--timeout)."
                self.roll_call.end_job(operation, problem)
                deadline = time.monotonic() + YIELD_SECONDS
            elif timeout == math.inf and self.roll_call.neighbour_is_stopped(now):
                problem = f"{operation} waits for a process that has been stopped for "
                problem += f"{self.timeout:g} s (--timeout)."
                self.roll_call.end_job(operation, problem)

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
        with watchdog.guard("the end of a world", self.timeout):
            self.comm.Free()
            self.control.Free()

    def finalize(self) -> None:
        """Finalize MPI, after which this process cannot use MPI. Collective."""
        with watchdog.guard("the end of MPI", self.timeout):
            # Call MPI_Finalize directly: mpi4py would hold the interpreter's lock, and the watchdog
            # thread could not run. If this fails, mpi4py calls MPI_Finalize at exit.
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(self.MPI.__file__).MPI_Finalize()

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
    with watchdog.guard("shared memory", transport.timeout):
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
