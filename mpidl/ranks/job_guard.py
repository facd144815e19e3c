"""Guard the waits of a job: find ranks that hang, are stopped or are lost, and end the job."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from typing import TYPE_CHECKING, Any

from mpidl.comm.guard import Guard
from mpidl.comm.transport import Transport
from mpidl.ranks import acts, serial, thread_budget, ulfm, watchdog
from mpidl.ranks.hang_report import Peer
from mpidl.ranks.roll_call import RollCall

if TYPE_CHECKING:
    from mpi4py import MPI


class JobGuard(Guard):
    """The guard of a job of MPI ranks; see `Guard` for the methods.

    Attributes
    ----------
    peers : list of Peer
        Host and process of each rank.
    roll_call : RollCall
        Asks other ranks what they wait for, and answers such questions.
    """

    peers: list[Peer]
    roll_call: RollCall

    def __init__(self) -> None:
        self._acts = acts.record()
        self.card = self._acts.address, thread_budget.available_cores()

    def meet(self, transport: Transport, cards: list[Any]) -> bool:
        self._transport = transport
        hosts, rank = transport.hosts, transport.rank
        self.peers = [Peer(host, card[0]) for host, card in zip(hosts, cards, strict=True)]
        self.roll_call = RollCall(transport, self.peers)
        if transport.size > 1:
            watchdog.start(rank, self.roll_call.describe_block)
        cores = [card[1] for host, card in zip(hosts, cards, strict=True) if host == hosts[rank]]
        return len(cores) > thread_budget.usable_cores(cores)

    def name_activity(self, text: str) -> None:
        self._acts.activity(text)

    def begin(self, operation: str, limit: float) -> tuple[str | None, float]:
        return self._acts.begin(operation, limit)

    def renew(self, operation: str, timeout: float) -> bool:
        self._acts.renew()
        transport = self._transport
        if transport.size > 1:
            ulfm.raise_if_lost(transport.MPI, transport.comm)
        is_reported = bool(self.roll_call.answer(operation))
        # A wait without a limit never times out, so it looks at another rank.
        if timeout == math.inf and self.roll_call.neighbour_is_stopped(time.monotonic()):
            problem = f"{operation} waits for a process that has been stopped for "
            self.timed_out(operation, f"{problem}{transport.timeout:g} s (--timeout).")
        return is_reported

    def end(self, outer: tuple[str | None, float]) -> None:
        self._acts.end(outer)

    def timed_out(self, operation: str, problem: str) -> None:
        self.roll_call.end_job(operation, problem)


class JobTransport(Transport):
    """The transport of a job of MPI ranks, with its guard. Loads and initializes MPI.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Communicator to duplicate.
    timeout : float
        Longest wait in seconds. After this time, the transport prints which ranks do not respond,
        and aborts the job.

    Attributes
    ----------
    has_left : bool
        Whether this rank knows that all ranks have reached the end of the program.
    """

    guard: JobGuard

    def __init__(self, comm: MPI.Comm, timeout: float) -> None:
        self.has_left = False
        super().__init__(serial.load(timeout), comm, timeout, JobGuard())

    def finalize(self) -> None:
        """Finalize MPI, after which this process cannot use MPI. Collective."""
        with self.blocking("the end of MPI"):
            # Call MPI_Finalize directly: mpi4py would hold the interpreter's lock, and the watchdog
            # thread could not run. If this fails, mpi4py calls MPI_Finalize at exit.
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(self.MPI.__file__).MPI_Finalize()
