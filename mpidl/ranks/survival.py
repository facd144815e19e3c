"""Let a job continue on the remaining ranks after some ranks were lost.

A rank that detects a loss revokes the communicators, which interrupts the waits of all other ranks.
The remaining ranks then agree on the loss, create a communicator without the lost ranks, and repeat
the task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mpidl.backends.cpu import builds
from mpidl.comm.transport import START_SECONDS
from mpidl.ranks import failure, ulfm
from mpidl.ranks.job_guard import JobTransport

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidl.ranks.world import World

T = TypeVar("T")

OPERATION = "the agreement on lost ranks"


def attempt(world: World, task: Callable[[], T], recover: Callable[[], object]) -> T:
    """Call a task, and repeat it after each loss of ranks, until all remaining ranks complete it.

    Collective. After a loss, `world` continues with the remaining ranks.

    Parameters
    ----------
    world : World
        The ranks. If `world.outlives_ranks` is false, the task is called once.
    task : callable
        Function without arguments.
    recover : callable
        Function without arguments that is called after each loss, before the task is repeated. If
        more ranks are lost during this call, the call is repeated too.

    Returns
    -------
    object
        The result of the task.
    """
    is_recovered = True
    while world.outlives_ranks and world.size > 1:
        is_agreed = False
        try:
            if not is_recovered:
                recover()
            is_recovered = True
            result = task()
            world.gop("and", True)  # unlike `ulfm.agree`, this wait has a time-out
            is_agreed = True
            with world.transport.blocking(OPERATION):
                if ulfm.agree(world.transport.comm, True):
                    return result
        except Exception as error:
            if not ulfm.is_loss(error, world.transport.comm):
                raise
        is_recovered = False
        shrink(world, is_agreed)
    if not is_recovered:
        recover()
    return task()


def shrink(world: World, is_agreed: bool = False) -> None:
    """Shrink a world to the remaining ranks. Collective over the remaining ranks.

    Parameters
    ----------
    world : World
        The world.
    is_agreed : bool
        Whether this rank detected the loss in `ulfm.agree`. All ranks must call `ulfm.agree` the
        same number of times.
    """
    with contextlib.suppress(Exception):  # a kernel's hook may have stored the same error
        builds.watch(None)
    old = world.transport
    with old.blocking(OPERATION, old.timeout + START_SECONDS):
        old.comm.Revoke()
        old.control.Revoke()
        if not is_agreed:
            ulfm.agree(old.comm, False)
        comm, transport = old.comm, None
        while transport is None:
            comm = comm.Shrink()
            comm.Set_errhandler(old.MPI.ERRORS_RETURN)
            transport = _new_transport(comm, old)
            if not ulfm.agree(comm, transport is not None):
                transport = None
        members = comm.Get_group()
        survivors = members.Translate_ranks(range(members.size), old.comm.Get_group())
    world.continue_with(transport, list(survivors))
    failure.replace_transport(old, transport)


def _new_transport(comm: MPI.Comm, old: JobTransport) -> JobTransport | None:
    """Return a transport with the settings of the old transport; None if more ranks are lost."""
    try:
        transport = JobTransport(comm, old.timeout)
    except Exception as error:
        if not ulfm.is_loss(error, comm):
            raise
        comm.Revoke()
        return None
    transport.report_folder, transport.activity = old.report_folder, old.activity
    return transport
