"""Guard the waits of a job: find ranks that hang, are stopped or are lost, and end the job.

A rank asks all ranks over MPI what they wait for if its own wait has timed out, or if it has ended
its program (`departure`). A rank that is waiting answers. A rank that computes, hangs or is stopped
is silent. After a time-out, another rank on the same host examines the process of each silent rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpidl.comm.guard import Guard
from mpidl.comm.transport import Transport
from mpidl.ranks import acts, serial, thread_budget, ulfm, watchdog
from mpidl.ranks.hang_report import Hang, Peer

if TYPE_CHECKING:
    from mpi4py import MPI

# Tags on the control communicator: a question, which says whether its sender has timed out, and the
# answer.
QUESTION, ANSWER = 1, 2
LOOK, SIGHTINGS = 9, 10  # tags: a request to examine silent ranks on the same host, and the reply
ANSWER_SECONDS = 0.8  # time for the other ranks to answer
LOOK_SECONDS = 0.8  # time for ranks on other hosts to examine the silent ranks on those hosts
NEIGHBOUR_SECONDS = 1.0  # time between two checks of the next rank on this host
ELSEWHERE = "all ranks on this host wait in MPI, so the cause is on another host"


class JobGuard(Guard):
    """The guard of a job of MPI ranks; see `Guard` for the methods.

    Attributes
    ----------
    transport : JobTransport
        The connection to the other ranks, which also stores the activity of this rank.
    peers : list of Peer
        Host and process of each rank.
    """

    transport: JobTransport
    peers: list[Peer]

    def __init__(self) -> None:
        self._acts = acts.record()
        self.card = self._acts.address, thread_budget.available_cores()
        self._look_time, self._stopped_since = 0.0, math.inf
        self._sent: list[Any] = []  # requests of sent messages that MPI may still read

    def meet(self, transport: Any, cards: list[Any]) -> bool:
        self.transport, hosts, rank = transport, transport.hosts, transport.rank
        self.peers = [Peer(host, card[0]) for host, card in zip(hosts, cards, strict=True)]
        if transport.size > 1:
            watchdog.start(rank, self.describe_block)
        cores = [cards[peer][1] for peer in transport.ranks_of_host(hosts[rank])]
        return len(cores) > thread_budget.usable_cores(cores)

    def name_activity(self, text: str) -> None:
        self._acts.activity(text)

    def begin(self, operation: str, limit: float) -> tuple[str | None, float]:
        return self._acts.begin(operation, limit)

    def end(self, outer: tuple[str | None, float]) -> None:
        self._acts.end(outer)

    def renew(self, operation: str, timeout: float) -> bool:
        self._acts.renew()
        transport = self.transport
        if transport.size > 1:
            ulfm.raise_if_lost(transport.MPI, transport.comm)
        is_reported = bool(self._answer(operation))
        # A wait without a limit never times out, so it looks at another rank.
        if timeout == math.inf and self._neighbour_is_stopped():
            problem = f"{operation} waits for a process that has been stopped for "
            self.timed_out(operation, f"{problem}{transport.timeout:g} s (--timeout).")
        return is_reported

    def _answer(self, operation):
        """Answer the pending questions of other ranks, and return which of them have timed out."""
        control, ranks = self.transport.control, []
        while control.Iprobe(tag=QUESTION):
            source, has_timed_out = self._receive(QUESTION)
            if has_timed_out:
                ranks.append(source)
            self._send(self._own_act(operation), source, ANSWER)
        while control.Iprobe(tag=LOOK):
            source, silent = self._receive(LOOK)
            self._send(self._look_at(silent), source, SIGHTINGS)
        return ranks

    def ask(self, rank: int, has_timed_out: bool = False) -> None:
        """Ask a rank what it waits for. The rank answers once it is waiting."""
        self._send(has_timed_out, rank, QUESTION)

    def answers(self) -> dict[int, str]:
        """Return the answers received since the last call, {rank: what the rank waits for}."""
        acts_of_ranks = {}
        while self.transport.control.Iprobe(tag=ANSWER):
            source, act = self._receive(ANSWER)
            acts_of_ranks[source] = act
        return acts_of_ranks

    def timed_out(self, operation: str, problem: str) -> None:
        """Report what all ranks are doing, and abort the job.

        If several ranks time out at the same time, only the lowest of these ranks reports. On the
        other ranks, this method returns.
        """
        transport = self.transport
        other_ranks = [rank for rank in range(transport.size) if rank != transport.rank]
        for rank in other_ranks:
            self.ask(rank, has_timed_out=True)
        answers: dict[int, str] = {}
        rivals = self._collect(operation, ANSWER, answers, ANSWER_SECONDS, len(other_ranks))
        if any(rank < transport.rank for rank in rivals):
            return
        answers[transport.rank] = self._own_act(operation)
        sightings = self._look_at_silent(operation, answers)
        hang = Hang(self.peers, f"{transport.activity}: {problem}", answers, sightings)
        print(hang.report(transport.report_folder), file=sys.stderr, flush=True)
        transport.abort(1)

    def describe_block(self, operation: str, limit: float) -> str:
        """Return the message about an operation in which MPI has blocked.

        The watchdog thread calls this method. The method cannot use MPI, so it examines only the
        ranks on this host.
        """
        transport, own_rank = self.transport, self.transport.rank
        ranks = transport.ranks_of_host(transport.hosts[own_rank])
        ranks = [rank for rank in ranks if rank != own_rank]
        sightings = self._look_at(ranks, stacks=False)
        answers = {own_rank: f"{transport.activity}: MPI does not return from {operation}"}
        for rank, sighting in sightings.items():
            is_stopped = sighting.state in (*acts.STOPPED_STATES, *acts.ENDED_STATES)
            if not is_stopped and f"waits for {operation}" in sighting.act:
                answers[rank] = sighting.act
        silent = [rank for rank in ranks if rank not in answers]
        summary = f"{transport.activity}: {operation} did not complete within {limit:g} s"
        hang = Hang(self.peers, summary, answers, self._look_at(silent), ELSEWHERE)
        return hang.report(transport.report_folder)

    def _neighbour_is_stopped(self):
        """Return whether the next rank on this host has been stopped for longer than the time-out.

        A wait without a limit, such as the wait at the end of the program, never times out. In such
        a wait, each rank therefore checks the next rank on its host.
        """
        now, transport = time.monotonic(), self.transport
        if now - self._look_time < NEIGHBOUR_SECONDS:
            return False
        self._look_time = now
        ranks = transport.ranks_of_host(transport.hosts[transport.rank])
        neighbour = ranks[(ranks.index(transport.rank) + 1) % len(ranks)]  # perhaps this rank
        if acts.state_of(self.peers[neighbour].address) not in acts.STOPPED_STATES:
            self._stopped_since = math.inf
        else:
            self._stopped_since = min(self._stopped_since, now)
        return now - self._stopped_since > transport.timeout

    def _own_act(self, operation):
        return f"{self.transport.activity}: waits for {operation}"

    def _send(self, message, rank, tag):
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self.transport.control.isend(message, rank, tag))

    def _receive(self, tag):
        status = self.transport.MPI.Status()
        message = self.transport.control.recv(tag=tag, status=status)
        return status.source, message

    def _collect(self, operation, tag, messages: dict[int, Any], seconds, count):
        """Receive up to `count` messages into `messages`; return other ranks that timed out."""
        deadline, rivals = time.monotonic() + seconds, set()
        while time.monotonic() < deadline and len(messages) < count:
            while self.transport.control.Iprobe(tag=tag):
                source, message = self._receive(tag)
                messages[source] = message
            rivals.update(self._answer(operation))
            time.sleep(0.001)
        return rivals

    def _look_at(self, ranks: Sequence[int], stacks=True):
        addresses = [self.peers[rank].address for rank in ranks]
        return dict(zip(ranks, acts.look_at(addresses, stacks), strict=True))

    def _look_at_silent(self, operation, answers):
        """Return {rank: Sighting} of the ranks that do not answer.

        Only a rank on the same host can examine a process. If no rank on that host answers, the
        value is None.
        """
        transport = self.transport
        silent = [rank for rank in range(transport.size) if rank not in answers]
        sightings, helpers = dict.fromkeys(silent), []
        for host in sorted({transport.hosts[rank] for rank in silent}):
            ranks = transport.ranks_of_host(host)
            helper = next((rank for rank in ranks if rank in answers), None)
            if helper is not None and host != transport.hosts[transport.rank]:
                helpers.append(helper)
                self._send([rank for rank in ranks if rank in sightings], helper, LOOK)
        host = transport.hosts[transport.rank]
        sightings |= self._look_at([rank for rank in silent if transport.hosts[rank] == host])
        replies: dict[int, dict[int, acts.Sighting]] = {}
        self._collect(operation, SIGHTINGS, replies, LOOK_SECONDS, len(helpers))
        for reply in replies.values():
            sightings |= reply
        return sightings


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

    def ranks_of_host(self, host: str) -> list[int]:
        """Return the ranks on a host, in order."""
        return [rank for rank, name in enumerate(self.hosts) if name == host]

    def name_of(self, rank: int) -> str:
        """Return the name of a rank in messages, such as "rank 3 on host n1"."""
        return f"rank {rank} on host {self.hosts[rank]}"

    def finalize(self) -> None:
        """Finalize MPI, after which this process cannot use MPI. Collective."""
        with self.blocking("the end of MPI"):
            # Call MPI_Finalize directly: mpi4py would hold the interpreter's lock, and the watchdog
            # thread could not run. If this fails, mpi4py calls MPI_Finalize at exit.
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(self.MPI.__file__).MPI_Finalize()
