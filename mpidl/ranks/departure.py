"""Let a rank that has ended its program wait for the other ranks, so that all exit together."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

from mpidl import side_process
from mpidl.ranks import acts, exit_guard

if TYPE_CHECKING:
    from mpidl.ranks.job_guard import JobTransport

LEAVING = "leaving"  # activity of a rank that has ended its program and waits for other ranks
OPERATION = "the end of the program on all ranks"
LOOK_SECONDS = 0.7  # time between two rounds of questions


class Departure:
    """Asks other ranks what they are doing while this rank waits at the end of its program.

    Other ranks may have work to finish, so a leaving rank waits for them without a time-out. But if
    this rank has called ``sys.exit()``, a rank that waits for a sum or a broadcast would wait
    forever. The leaving rank therefore repeatedly asks the lowest rank that has not left. Only a
    waiting rank answers; a computing rank does not. If that rank gives the same answer twice, the
    leaving rank asks all other ranks. If all of them answer, they all wait in vain, and the leaving
    rank ends the job.

    Parameters
    ----------
    transport : JobTransport
        The transport of all ranks of the job.
    """

    def __init__(self, transport: JobTransport) -> None:
        self.transport = transport
        self._look_time = time.monotonic() + LOOK_SECONDS
        self._left: set[int] = {transport.rank}
        self._unanswered: set[int] = set()  # ranks that have not answered yet
        self._answers: dict[int, str] = {}  # {rank: its last answer}
        self._all_asked = False

    def look(self) -> None:
        """At most once per `LOOK_SECONDS`, read the answers, and ask again or end the job."""
        if time.monotonic() < self._look_time:
            return
        self._look_time = time.monotonic() + LOOK_SECONDS
        is_waiting = self._read_answers()
        remaining = set(range(self.transport.size)) - self._left
        if self._all_asked and remaining and not self._unanswered:
            self._end_the_job()
        self._all_asked = is_waiting
        asked_ranks = remaining if is_waiting else sorted(remaining)[:1]
        for rank in set(asked_ranks) - self._unanswered:
            self.transport.guard.ask(rank)
            self._unanswered.add(rank)

    def _read_answers(self):
        """Read the answers that have arrived; return whether a rank repeated its last answer."""
        answers = self.transport.guard.answers()
        self._unanswered -= answers.keys()
        self._left |= {rank for rank, act in answers.items() if act.startswith(f"{LEAVING}:")}
        is_waiting = any(
            rank not in self._left and self._answers.get(rank) == act
            for rank, act in answers.items()
        )
        self._answers |= answers
        return is_waiting

    def _end_the_job(self):
        transport = self.transport
        # If several ranks have left, let the lowest of these ranks print its message and end the
        # job.
        time.sleep(0.3 * min(sum(rank < transport.rank for rank in self._left), 10))
        head = (
            f"mpidl: {transport.name_of(transport.rank)} has ended its program, but other ranks "
            "wait for it:"
        )
        waiting = sorted(self._answers.keys() - self._left)
        lines = [f"  rank {rank}, {self._answers[rank]}" for rank in waiting]
        print("\n".join([head, *lines]), file=sys.stderr, flush=True)
        transport.abort(1)


def start_exit_guard(transport: JobTransport) -> None:
    """On the first rank of each host, start the exit guard, which watches the ranks of the host.

    All ranks must be about to call MPI_Finalize, in which they wait for each other.
    """
    ranks = transport.ranks_of_host(transport.hosts[transport.rank])
    if transport.size == 1 or transport.rank != ranks[0] or not sys.executable:
        return
    words = [sys.executable, "-I", "-S", exit_guard.__file__, str(transport.timeout)]
    for rank in ranks:
        address = transport.guard.peers[rank].address
        if acts.state_of(address) != acts.HIDDEN:
            tick = exit_guard.start_tick(address.pid)
            name = f"{transport.name_of(rank)} (process {address.pid})"
            words.append(f"{address.pid} {tick} {name}")
    with contextlib.suppress(OSError):  # if the process cannot be started, continue without it
        os.posix_spawn(words[0], words, side_process.environment())
