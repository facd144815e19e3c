"""Continue on the ranks that are left after some were lost.

A rank that notices a loss revokes the communicators, so that all other ranks notice the loss in
whatever they wait for. The remaining ranks then agree, make a communicator without the lost ranks,
and repeat the task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mpidl.backends.cpu import builds
from mpidl.comm import failure, ulfm, watchdog
from mpidl.comm.transport import START_SECONDS, Transport

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidl.comm.world import World

T = TypeVar("T")

OPERATION = "the agreement on lost ranks"


def attempt(world: World, task: Callable[[], T], recover: Callable[[], object]) -> T:
    """Call a task until all remaining ranks complete it; a loss of ranks repeats it. Collective.

    After a loss, `world` continues with the ranks that are left.

    Parameters
    ----------
    world : World
        The ranks. Unless its `outlives_ranks` is set, the task is called once.
    task : callable
        The task.
    recover : callable
        Function to call after each loss, before the task. Further ranks may be lost meanwhile; it
        is then called again.

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
            world.gop("and", True)  # unlike the agreement, this wait times out if a rank is missing
            is_agreed = True
            with watchdog.guard(OPERATION, world.transport.timeout):
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
    """Let a world continue with the remaining ranks. Collective over them.

    Parameters
    ----------
    world : World
        The world.
    is_agreed : bool
        Whether this rank has met the loss in `ulfm.agree`, to which all other ranks must come as
        well.
    """
    with contextlib.suppress(Exception):  # the loss that a kernel's hook has met
        builds.watch(None)
    old = world.transport
    with watchdog.guard(OPERATION, old.timeout + START_SECONDS):
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


def _new_transport(comm: MPI.Comm, old: Transport) -> Transport | None:
    """Return a transport like the old one; None if more ranks are lost meanwhile."""
    try:
        transport = Transport(comm, old.timeout)
    except Exception as error:
        if not ulfm.is_loss(error, comm):
            raise
        comm.Revoke()
        return None
    transport.report_folder, transport.activity = old.report_folder, old.activity
    return transport
