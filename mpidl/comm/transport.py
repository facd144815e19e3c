"""Send messages over an MPI communicator, and wait for them with a time-out.

Every wait is a loop of tests. Signals are therefore handled and pending exchanges advance during a
wait. If a rank stops responding, the wait for this rank ends with a message that names it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpidl import phases
from mpidl.comm import serial, thread_budget

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike

PING, PONG = 1, 2  # tags of the control communicator
CANCEL = 5  # tag of the message that ends the waits of other ranks
QUESTION, ANSWER = 7, 8  # tags of the messages of `departure`
CANCELLED = "another rank failed"


class Cancelled(Exception):
    """Raised in a wait on a rank that `Transport.cancel_others` of another rank cancels."""


class Transport:
    """Point-to-point transfer of arrays over a communicator, and waits with a time-out.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Communicator. It is duplicated twice: once for arrays and once for control messages.
    timeout : float
        Longest wait in seconds. After this time, the transport prints the ranks that do not respond
        and aborts the job.

    Attributes
    ----------
    MPI : module
        `mpi4py.MPI`, or its substitute for one rank (`comm.serial`).
    comm, control : mpi4py.MPI.Comm
        `comm` transfers arrays; `control` transfers pickled objects and pings.
    rank, size : int
        Rank of this process, and number of ranks.
    hosts : list of str
        Host name of each rank.
    timeout : float
        Longest wait in seconds. It may be changed.
    oversubscribed : bool
        Whether this host has more ranks than cores that they may use together. Waits then leave the
        cores to other ranks.
    activity : str
        Current activity of this rank, for error messages.
    wait_seconds : float
        Total time in seconds that this rank has waited for other ranks.
    has_left : bool
        Whether this rank has met all other ranks at the end of the program.
    """

    def __init__(self, comm: MPI.Comm, timeout: float) -> None:
        self.MPI: ModuleType = serial.load(timeout)
        self.comm, self.timeout = comm.Dup(), timeout
        self.control = comm.Dup()
        self.rank: int = comm.rank
        self.size: int = comm.size
        ranks = comm.allgather((self.MPI.Get_processor_name(), thread_budget.available_cores()))
        self.hosts: list[str] = [host for host, _ in ranks]
        host_cores = [cores for host, cores in ranks if host == ranks[self.rank][0]]
        self.oversubscribed = len(host_cores) > thread_budget.usable_cores(host_cores)
        self._is_cancelled = False
        self.wait_seconds = 0.0
        self.has_left = False
        self.activity = "starting"

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
            Condition, called repeatedly.
        operation : str
            Name of the awaited operation, for messages about a time-out.
        progress : callable, optional
            Function to call between tests.
        timeout : float, optional
            Longest wait in seconds, by default `self.timeout`. After this time, the method prints
            the ranks that do not respond and aborts the job.
        """
        start = time.monotonic()
        with phases.Phase(phases.WAIT, operation):
            self._poll(is_ready, operation, progress, self.timeout if timeout is None else timeout)
        self.wait_seconds += time.monotonic() - start

    def _poll(self, is_ready, operation, progress, timeout):
        """Call `is_ready` until it returns true, with increasing pauses."""
        if self._is_cancelled:  # code that handles the first `Cancelled` may wait again
            raise Cancelled(CANCELLED)
        polls, start, deadline, previous = 0, None, None, None
        while not is_ready():
            polls += 1
            if progress:
                progress()
            if self.oversubscribed and polls > 20:
                # Sleep: sched_yield would return at once although other ranks need the core.
                time.sleep(5e-5 if polls < 200 else 5e-4)
            elif self.oversubscribed or polls > 1000:
                os.sched_yield()
            if polls % 256:
                continue
            now = time.monotonic()
            if start is None:
                start, deadline, previous = now, now + timeout, now
            if now - previous > 1:  # all processes were suspended for a while
                deadline += now - previous
            previous = now
            if now - start > 0.02:
                time.sleep(0.0005)  # in a long wait, leave the core to other processes
            if self.control.Iprobe(tag=CANCEL):
                self._is_cancelled = True
                raise Cancelled(CANCELLED)
            self._answer_question(operation)
            if self._answer_ping(operation):
                deadline = max(deadline, now + 30)  # another rank has timed out
            if now > deadline:
                self._abort_naming_the_missing(operation)

    def cancel_others(self) -> None:
        """Make all other ranks raise `Cancelled` in their current or next wait.

        Their operations stay incomplete, so nobody may use this transport afterwards, and the
        memory of their messages must stay allocated.
        """
        for rank in range(self.size):
            if rank != self.rank:
                self.control.isend("", rank, CANCEL)

    def _answer_ping(self, operation):
        """Answer a ping of another rank; return whether a ping had arrived."""
        if not self.control.Iprobe(tag=PING):
            return False
        status = self.MPI.Status()
        self.control.recv(tag=PING, status=status)
        self.control.isend(f"{self.activity}: waits for {operation}", status.source, PONG)
        return True

    def _abort_naming_the_missing(self, operation):
        """Ping all ranks, print which of them do not answer within 5 s, and abort the job."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        for rank in peers:
            self.control.isend("", rank, PING)
        answers: dict[int, str] = {}
        self._collect_answers(operation, answers, 5.0, lambda: len(answers) == len(peers))
        # If several ranks time out at once, the lowest prints its message and aborts the job.
        pause = 0.3 * min(sum(rank < self.rank for rank in answers), 10)
        self._collect_answers(operation, answers, pause)
        lines = [
            f"mpidl: {self.activity}: {operation} did not complete within {self.timeout:g} s "
            "(--timeout)."
        ]
        for rank in peers:
            if rank not in answers:
                lines.append(f"  rank {rank} on host {self.hosts[rank]} does not respond")
        if len(lines) == 1:
            lines.append("  all ranks respond, but they wait for different operations:")
            answers[self.rank] = f"{self.activity}: waits for {operation}"
            lines += [f"  rank {rank}, {answers[rank]}" for rank in sorted(answers)]
        print("\n".join(lines), file=sys.stderr, flush=True)
        self.abort(1)

    def _collect_answers(self, operation, answers, seconds, is_complete=lambda: False):
        """Collect answers to pings in `answers`, {rank: text}, and answer other ranks' pings."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not is_complete():
            if self.control.Iprobe(tag=PONG):
                status = self.MPI.Status()
                answer = self.control.recv(tag=PONG, status=status)
                answers[status.source] = answer
            self._answer_ping(operation)
            time.sleep(0.001)

    def ask(self, rank: int) -> None:
        """Ask a rank what it waits for; `take_answer` returns its answer once it waits."""
        self.control.isend("", rank, QUESTION)

    def take_answer(self) -> tuple[int, str] | None:
        """Return (rank, activity) for an answer to `ask` that has arrived, or None."""
        if not self.control.Iprobe(tag=ANSWER):
            return None
        status = self.MPI.Status()
        text = self.control.recv(tag=ANSWER, status=status)
        return status.source, text

    def _answer_question(self, operation):
        """Answer a question of another rank, if one has arrived."""
        if self.control.Iprobe(tag=QUESTION):
            status = self.MPI.Status()
            self.control.recv(tag=QUESTION, status=status)
            self.control.isend(f"{self.activity}: waits for {operation}", status.source, ANSWER)

    def close(self) -> None:
        """Free the communicators. Collective; the transport cannot be used afterwards."""
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

    Return the array and its MPI window, which is None on one rank.
    """
    shape = tuple(int(n) for n in shape)
    count = int(np.prod(shape))
    if transport.size == 1:
        return np.zeros(shape, dtype), None
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
    host_comm.Free()  # the window keeps what it needs
    return array, window
