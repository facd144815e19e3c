"""User Level Failure Mitigation, the part of MPI 5 that lets a job outlive some of its ranks.

Open MPI 5 offers this part if mpirun gets the option ``--with-ft ulfm``: an operation with a rank
that has ended then raises an error, and the job goes on.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

SWITCH = "OMPI_MCA_mpi_ft_enable"  # set by mpirun for its ranks
COMMAND = "mpirun --with-ft ulfm -n {} python -m mpidl.train ..."
CLASSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")


def is_enabled() -> bool:
    """Return whether mpirun was told to let the job outlive its ranks."""
    # Slurm's srun passes the variable on, but ends the job when a rank ends.
    return os.environ.get(SWITCH) == "1" and "slurm" not in os.environ.get("PMIX_NAMESPACE", "")


def prepare() -> None:
    """Set the environment variable that MPI must read at its start."""
    if is_enabled():
        # On several hosts, the component "han" returns wrong results after the loss of a rank.
        os.environ.setdefault("OMPI_MCA_coll", "^han")


def refusal(mpi: Any, size: int) -> str | None:
    """Return why the job cannot outlive its ranks, or None if it can.

    Parameters
    ----------
    mpi : module
        `mpi4py.MPI`, or its substitute.
    size : int
        Number of ranks.

    Returns
    -------
    str or None
        The expected launcher with the right command, and the actual launcher. None if the job can
        outlive its ranks, or has only one rank.
    """
    if size == 1:
        return None
    expected = f"expected Open MPI 5 and {COMMAND.format(size)}"
    name, version = mpi.get_vendor()
    if name != "Open MPI" or version < (5,):
        number = ".".join(map(str, version))
        return f"{expected}, found {name} {number} (MPIDL_MPI=openmpi run/install)"
    if "slurm" in os.environ.get("PMIX_NAMESPACE", ""):
        return f"{expected}, found srun, which ends the job with its first rank"
    if not is_enabled():
        return f"{expected}, found mpirun without --with-ft ulfm"
    try:
        mpi.COMM_SELF.Is_revoked()
    except NotImplementedError:  # mpi4py raises this for functions that the MPI library lacks
        return f"{expected}, found an Open MPI that was compiled without ULFM"
    return None


def is_loss(error: BaseException, comm: MPI.Comm) -> bool:
    """Return whether an operation of a communicator failed because a rank has ended.

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
    # An operation on several requests only reports that some request has failed.
    in_status = error.Get_error_class() == MPI.ERR_IN_STATUS
    return in_status and (comm.Is_revoked() or comm.Get_failed().size > 0)


def agree(comm: MPI.Comm, flag: bool) -> bool:
    """Return whether no rank is lost and the flag is true on all ranks. Collective.

    All remaining ranks get the same answer, even if ranks are lost meanwhile.
    """
    try:
        return comm.Agree(int(flag)) == 1
    except Exception as error:
        if is_loss(error, comm):
            return False
        raise


def lost_ranks(comm: MPI.Comm) -> list[int]:
    """Return which ranks of a communicator have ended, as far as this rank knows.

    The list is empty without ULFM.
    """
    if not is_enabled():
        return []
    failed = comm.Get_failed()
    return failed.Translate_ranks(range(failed.size), comm.Get_group())


def raise_if_lost(mpi: Any, comm: MPI.Comm) -> None:
    """Raise an error of MPI if a rank of a communicator is known to have ended.

    A wait for ranks that share memory sends no message whose operation would raise this error.

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
