"""Define what a transport says to the guard of a job, which it receives, and what it asks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidl.comm.transport import Transport


class Guard:
    """A guard that watches nothing; its methods are the interface of one that does.

    A transport knows when it waits, for what, and since when. What follows from that for a job,
    such as a report about a rank that hangs, is the business of a guard (`ranks.job_guard`).

    Attributes
    ----------
    card : object
        What this rank tells the other ranks when they meet; an object that can be pickled.
    """

    card: Any = None

    def meet(self, transport: Transport, cards: list[Any]) -> bool:
        """Learn the cards of all ranks; return whether the ranks of this host share cores."""
        return False

    def name_activity(self, text: str) -> None:
        """Note what the rank is doing, such as "epoch 3, iteration 17"."""

    def begin(self, operation: str, limit: float) -> Any:
        """Note that a wait or an MPI call begins; return what `end` must receive.

        Until `end`, at most `limit` seconds may pass between two calls to `renew`.
        """

    def renew(self, operation: str, timeout: float) -> bool:
        """Look after the job during a wait; return whether another rank reports that it hangs.

        A transport calls this method repeatedly in a long wait of at most `timeout` seconds. If the
        result is true, it waits longer, so that the other rank can complete its report.
        """
        return False

    def end(self, outer: Any) -> None:
        """Note that the wait or call has ended; `outer` is the value that `begin` returned."""

    def timed_out(self, operation: str, problem: str) -> None:
        """End the job, or this rank, because a wait has exceeded its time-out.

        If the method returns, the transport waits longer, because another rank ends the job.
        """
        raise TimeoutError(problem)
