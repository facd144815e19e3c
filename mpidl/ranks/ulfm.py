"""Use ULFM (User Level Failure Mitigation), an MPI extension that lets a job survive lost ranks.

Open MPI 5 provides ULFM if mpirun is called with the option ``--with-ft ulfm``. Communication with
a rank that has ended then raises an error, and the job continues.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

SWITCH = "OMPI_MCA_mpi_ft_enable"  # environment variable that mpirun sets for its ranks
COMMAND = "mpirun --with-ft ulfm -n {} python -m mpidl.train ..."
CLASSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")


def is_enabled() -> bool:
    """Return whether mpirun was called with ULFM enabled."""
    # srun may pass the variable on, but ends the job when a rank ends.
    return os.environ.get(SWITCH) == "1" and "slurm" not in os.environ.get("PMIX_NAMESPACE", "")


def prepare() -> None:
    """Set the environment variable that MPI reads when it starts, if ULFM is enabled."""
    if is_enabled():
        # On several hosts, Open MPI's component "han" returns wrong results after a loss of ranks.
        os.environ.setdefault("OMPI_MCA_coll", "^han")


def refusal(mpi: Any, size: int) -> str | None:
    """Return why the job cannot survive the loss of ranks, or None if it can.

    Parameters
    ----------
    mpi : module
        `mpi4py.MPI`, or its substitute for one rank (`ranks.serial`).
    size : int
        Number of ranks.

    Returns
    -------
    str or None
        Text that names the required launch command and the actual launcher. None if the job can
        survive the loss of ranks, or if it has only one rank.
    """
    if size == 1:
        return None
    expected = f"expected Open MPI 5 and {COMMAND.format(size)}"
    name, version = mpi.get_vendor()
    if name != "Open MPI" or version < (5,):
        number = ".".join(map(str, version))
        return f"{expected}, found {name} {number} (MPIDL_MPI=openmpi run/install)"
    if "slurm" in os.environ.get("PMIX_NAMESPACE", ""):
        return f"{expected}, found srun, which ends the job when a rank ends"
    if not is_enabled():
        return f"{expected}, found mpirun without --with-ft ulfm"
    try:
        mpi.COMM_SELF.Is_revoked()
    except NotImplementedError:  # mpi4py raises this for functions that the MPI library lacks
        return f"{expected}, found an Open MPI that was compiled without ULFM"
    return None


def is_loss(error: BaseException, comm: MPI.Comm) -> bool:
    """Return whether an operation on a communicator failed because a rank has ended.

    Parameters
    ----------
    error : BaseException
        The error that the operation raised.
    comm : mpi4py.MPI.Comm
        The communicator.
    """
    if not is_enabled() or not hasattr(error, "Get_error_class"):
        return False
    from mpi4py import MPI

    if error.Get_error_class() in [getattr(MPI, name) for name in CLASSES]:
        return True
    # An operation on several requests reports only that one of the requests has failed.
    in_status = error.Get_error_class() == MPI.ERR_IN_STATUS
    return in_status and (comm.Is_revoked() or comm.Get_failed().size > 0)


def agree(comm: MPI.Comm, flag: bool) -> bool:
    """Return whether no rank is lost and the flag is true on all ranks. Collective.

    All remaining ranks return the same value, even if ranks are lost during the call.
    """
    try:
        return comm.Agree(int(flag)) == 1
    except Exception as error:
        if is_loss(error, comm):
            return False
        raise


def lost_ranks(comm: MPI.Comm) -> list[int]:
    """Return the ranks of a communicator that this rank knows to have ended.

    The list is empty if ULFM is not enabled.
    """
    if not is_enabled():
        return []
    failed = comm.Get_failed()
    return failed.Translate_ranks(range(failed.size), comm.Get_group())


def raise_if_lost(mpi: Any, comm: MPI.Comm) -> None:
    """Raise an MPI error if this rank knows that a rank of a communicator has ended.

    Code that waits on shared memory must call this function, because such a wait sends no message
    that could fail.

    Parameters
    ----------
    mpi : module
        `mpi4py.MPI`.
    comm : mpi4py.MPI.Comm
        The communicator.
    """
    if is_enabled():
        if comm.Is_revoked():
            raise mpi.Exception(mpi.ERR_REVOKED)
        if comm.Get_failed().size > 0:
            raise mpi.Exception(mpi.ERR_PROC_FAILED)
