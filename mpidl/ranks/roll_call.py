"""Ask other ranks over MPI what they wait for, and end the job if they wait in vain.

A rank asks all ranks if its own wait has timed out, or if it has ended its program (`departure`).
A rank that is waiting answers. A rank that computes, hangs or is stopped is silent. After a
time-out, another rank on the same host examines the process of each silent rank.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpidl.ranks import acts
from mpidl.ranks.hang_report import Hang, Peer

if TYPE_CHECKING:
    from mpidl.comm.transport import Transport

# Tags on the control communicator: a question, which says whether its sender has timed out, and the
# answer.
QUESTION, ANSWER = 1, 2
LOOK, SIGHTINGS = 9, 10  # tags: a request to examine silent ranks on the same host, and the reply
ANSWER_SECONDS = 0.8  # time for the other ranks to answer
LOOK_SECONDS = 0.8  # time for ranks on other hosts to examine the silent ranks on those hosts
NEIGHBOUR_SECONDS = 1.0  # time between two checks of the next rank on this host
ELSEWHERE = "all ranks on this host wait in MPI, so the cause is on another host"


class RollCall:
    """Asks other ranks what they wait for, and answers such questions for this rank.

    Parameters
    ----------
    transport : Transport
        The connection to the other ranks, which also stores the activity of this rank.
    peers : sequence of Peer
        Host and process of each rank.
    """

    def __init__(self, transport: Transport, peers: Sequence[Peer]) -> None:
        self.transport, self.peers = transport, peers
        self._neighbour = self._next_rank_of_host()
        self._look_time, self._stopped_since = 0.0, math.inf
        self._sent: list[Any] = []  # requests of sent messages that MPI may still read

    def neighbour_is_stopped(self, now: float) -> bool:
        """Return whether the next rank on this host has been stopped for longer than the time-out.

        A wait without a limit, such as the wait at the end of the program, never times out. In such
        a wait, each rank therefore checks the next rank on its host.

        Parameters
        ----------
        now : float
            The current time, from `time.monotonic`.
        """
        if self._neighbour is None or now - self._look_time < NEIGHBOUR_SECONDS:
            return False
        self._look_time = now
        if acts.state_of(self.peers[self._neighbour].address) not in acts.STOPPED:
            self._stopped_since = math.inf
        else:
            self._stopped_since = min(self._stopped_since, now)
        return now - self._stopped_since > self.transport.timeout

    def answer(self, operation: str) -> list[int]:
        """Answer the pending questions of other ranks, and return which of them have timed out.

        Parameters
        ----------
        operation : str
            The operation for which this rank waits.
        """
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

    def end_job(self, operation: str, problem: str) -> None:
        """Report what all ranks are doing, and abort the job.

        If several ranks time out at the same time, only the lowest of these ranks reports. On the
        other ranks, this method returns.

        Parameters
        ----------
        operation : str
            The operation for which this rank waits.
        problem : str
            Description of the failure.
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

        Parameters
        ----------
        operation : str
            Name of the operation.
        limit : float
            Time limit for the operation, in seconds.
        """
        transport, own_rank = self.transport, self.transport.rank
        ranks = self._ranks_of_host(transport.hosts[own_rank])
        ranks = [rank for rank in ranks if rank != own_rank]
        sightings = self._look_at(ranks, stacks=False)
        answers = {own_rank: f"{transport.activity}: MPI does not return from {operation}"}
        for rank, sighting in sightings.items():
            is_stopped = sighting.state in (*acts.STOPPED, *acts.ENDED)
            if not is_stopped and f"waits for {operation}" in sighting.act:
                answers[rank] = sighting.act
        silent = [rank for rank in ranks if rank not in answers]
        summary = f"{transport.activity}: {operation} did not complete within {limit:g} s"
        hang = Hang(self.peers, summary, answers, self._look_at(silent), ELSEWHERE)
        return hang.report(transport.report_folder)

    def _next_rank_of_host(self):
        """Return the next rank on this host in cyclic order; None if the host has no other rank."""
        own_rank = self.transport.rank
        ranks = self._ranks_of_host(self.transport.hosts[own_rank])
        following = ranks[(ranks.index(own_rank) + 1) % len(ranks)]
        return None if following == own_rank else following

    def _ranks_of_host(self, host):
        return [rank for rank, name in enumerate(self.transport.hosts) if name == host]

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
            rivals.update(self.answer(operation))
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
            ranks = self._ranks_of_host(host)
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
