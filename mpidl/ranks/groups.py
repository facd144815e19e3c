"""Split the ranks of a job into groups that work independently of each other."""

from __future__ import annotations

import math
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpidl.comm.messaging import Messaging
from mpidl.comm.transport import Cancelled
from mpidl.errors import Fault, UserError, describe
from mpidl.ranks.devices import RankGpus, find_gpus
from mpidl.ranks.job_guard import JobTransport
from mpidl.ranks.thread_budget import Cores, available_cores
from mpidl.ranks.world import World

T = TypeVar("T")

GRACE = 1.0  # seconds for other ranks to raise the same error before their waits are cancelled
PAUSE = 0.02  # seconds between two tests while waiting for other groups, possibly for hours


class Neighbours(NamedTuple):
    """The ranks of all groups of a job, which share the cores and the GPUs of their hosts."""

    first: int
    """Rank in the job of this group's rank 0."""
    cores: list[tuple[str, Cores]]
    """Host and cores of each rank of the job."""
    gpus: list[RankGpus]
    """GPUs that each rank of the job may use."""


class Outcome(NamedTuple):
    """The outcome of a group's task, the same on all ranks of the group."""

    value: Any
    """The value that the task returned on rank 0 of the group; None if the task failed."""
    error: Exception | None
    """The exception of the lowest rank that failed; a Fault if the exception cannot be pickled."""


class Group:
    """Consecutive ranks of a job that work together. All groups of a job have the same size.

    The constructor is collective over the job. The other methods, except for `wait_for_job`, are
    collective over the group.

    Parameters
    ----------
    job : World
        All ranks of the job.
    size : int
        Number of ranks per group.
    spelled : str
        Name of the argument `size` in the error message.

    Attributes
    ----------
    job : World
        All ranks of the job.
    index, count : int
        Number of this group, from 0, and number of groups.
    ranks : Messaging
        The ranks of this group, for messages outside of tasks.
    is_leader : bool
        Whether this rank is rank 0 of its group.

    Raises
    ------
    UserError
        If the job's ranks cannot be divided into groups of this size.
    """

    def __init__(self, job: World, size: int, spelled: str = "ranks_per_model") -> None:
        if size < 1 or job.size % size:
            divisors = [n for n in range(1, job.size + 1) if job.size % n == 0]
            raise UserError(
                f"{spelled} {size}: expected a divisor of the number of ranks, {job.size}: "
                f"{', '.join(map(str, divisors))}"
            )
        self.job, self.index, self.count = job, job.rank // size, job.size // size
        # The worlds of tasks are created from this communicator.
        with job.transport.blocking("the start of a group"):
            self._comm = job.transport.comm.Split(self.index, job.rank)
        self.ranks = Messaging(JobTransport(self._comm, job.transport.timeout))
        self.ranks.transport.oversubscribed = job.transport.oversubscribed
        self.is_leader = self.ranks.rank == 0
        cores = job.allgather((job.host, available_cores()))
        gpus = job.allgather(find_gpus(job.host))
        self._neighbours = Neighbours(self.index * size, cores, gpus)
        self._abandoned: list[object] = []

    def attempt(
        self, task: Callable[[World], object], record: Callable[[Exception], object]
    ) -> Outcome:
        """Call `task(world)` on all ranks of the group, and return the outcome on all of them.

        `world` consists of the ranks of the group. During the call, `World()` returns a world of
        the same ranks. If some ranks raise an exception while other ranks wait for them, the waits
        are cancelled, and the group continues with new communicators.

        Parameters
        ----------
        task : callable
            Function that receives the group's world.
        record : callable
            Function that one rank calls with the exception if the group cannot continue after a
            failure. The job then ends with exit code 1. A group cannot continue if a rank does not
            end its task within the job's time-out, or if sums are pending on GPUs.
        """
        timeout = self.job.transport.timeout
        world = World(self._comm, timeout=timeout, threads=None, neighbours=self._neighbours)
        world.transport.oversubscribed = self.job.transport.oversubscribed
        value = error = None
        World.default_group, default = (self._comm, self._neighbours), World.default_group
        try:
            value = task(world)
        except Exception as problem:
            error = problem
        except SystemExit as end:  # ends the task, not the job
            error = Fault(describe(end))
            error.__cause__ = end
        finally:
            World.default_group = default
        return self._end(world, value, error, record)

    def _end(self, world, value, error, record):
        """Agree on a task's outcome. Close the task's world, or keep it if sums are pending."""
        transport, size = self.ranks.transport, self.ranks.size
        is_origin = error is not None and not isinstance(error, Cancelled)
        is_pending = isinstance(error, Cancelled) or world.is_exchanging
        facts = np.array([is_pending, (size - self.ranks.rank) * is_origin], int)
        agreed = np.empty_like(facts)
        request = transport.comm.Iallreduce(facts, agreed, transport.MPI.MAX)
        if is_origin and not self._is_complete(request, GRACE):
            world.transport.cancel_others()
            if not self._is_complete(request, transport.timeout):
                self._end_job(error, record)
        transport.wait_until(request.Test, "the end of a task", timeout=math.inf)
        pending, origin = bool(agreed[0]), size - int(agreed[1])
        if pending and world.device is not None:  # the GPU's stream may wait for a rank that failed
            if self.ranks.rank == origin:
                self._end_job(error, record)
            transport.wait_until(lambda: False, "the end of the job", timeout=math.inf)
        if pending:
            # MPI may still access the memory of messages that are never received. The world and the
            # frames of the traceback own this memory, so keep both.
            world.leave_memory()
            self._abandoned.append((world, error))
        else:
            world.close()
        if origin < size:
            return Outcome(None, self.ranks.broadcast(_portable(error), origin))
        return Outcome(self.ranks.broadcast(value), None)

    def _end_job(self, error, record):
        """Record the error and end the job on all ranks."""
        record(error)
        print(f"mpidl: rank {self.job.rank} failed: {error}", file=sys.stderr, flush=True)
        self.job.transport.abort(1)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank of the group."""
        return any(self.ranks.allgather(flag))

    def wait_for_job(self) -> None:
        """Wait until all groups have called this method, without occupying a core.

        Collective over the job.
        """
        transport = self.job.transport
        request = transport.comm.Ibarrier()

        def is_over():
            if not request.Test():
                time.sleep(PAUSE)
                return False
            return True

        transport.activity = "waiting for other groups"
        transport.wait_until(is_over, "the other groups", timeout=math.inf)

    def close(self) -> None:
        """Free the communicators of the group. Collective over the group."""
        self.ranks.transport.close()
        with self.job.transport.blocking("the end of a group"):
            self._comm.Free()

    @staticmethod
    def _is_complete(request, seconds):
        """Wait at most `seconds` for a request; return whether the request is complete."""
        deadline = time.monotonic() + seconds
        while not (complete := request.Test()) and time.monotonic() < deadline:
            time.sleep(PAUSE / 10)
        return complete


def _portable(error):
    """Return the error itself or, if it cannot be pickled, a Fault with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return Fault(describe(error))
