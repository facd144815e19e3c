"""Detect the launcher of another MPI library before MPI_Init, which could fail or hang."""

from __future__ import annotations

import os
import sys

from mpidl.errors import UserError
from mpidl.ranks import failure, srun

MPICH, OPEN_MPI = "MPICH", "Open MPI"
# For each MPI library from pip: a program in the folder of the Python interpreter that identifies
# the library, and the environment variables of launchers that can start its ranks.
PROGRAMS = {MPICH: "mpiexec.hydra", OPEN_MPI: "prterun"}
INTERFACES = {MPICH: ("PMI_FD", "PMI_PORT"), OPEN_MPI: ("PMIX_NAMESPACE",)}


def refuse(vendor: str) -> None:
    """Raise UserError if the launcher of this process cannot start ranks of an MPI library.

    Only launchers that are known to fail are refused. `failure.refuse_foreign_launcher` detects
    other launchers after MPI_Init.

    Parameters
    ----------
    vendor : str
        The MPI library, as in `mpi4py.MPI.get_vendor`.

    Raises
    ------
    UserError
        If several ranks were started by the launcher of another MPI library, or by srun with an
        unsuitable option --mpi.
    """
    started = failure.launched_ranks()
    if started is None:
        return
    variable, tasks = started
    launcher = _launcher()
    summary = f"the launcher started {tasks} tasks ({variable}={tasks})"
    if (vendor, launcher) in ((OPEN_MPI, MPICH), (MPICH, OPEN_MPI)):
        raise UserError(
            f"{summary} with mpirun of {launcher}, but mpi4py uses {vendor}; start the ranks with "
            f"{right_mpirun(vendor)}"
        )
    if launcher == "srun" and _is_from_pip(vendor):
        if not any(name in os.environ for name in INTERFACES[vendor]):
            # Only rank 0 prints the advice. Other ranks avoid running srun.
            advice = srun.advice(vendor) if failure.launched_rank() == 0 else "another --mpi"
            raise UserError(f"{summary}: this srun cannot start {vendor}; expected {advice}")


def right_mpirun(vendor: str) -> str:
    """Return the mpirun of an MPI library: its path in the folder of Python, or a description."""
    folder = os.path.dirname(sys.executable)
    if _is_from_pip(vendor):
        return os.path.join(folder, "mpirun")
    return f"the mpirun of {vendor}"


def _launcher():
    """Return the launcher that set this process's variables: MPICH, OPEN_MPI, "srun" or None."""
    if "MPI_LOCALNRANKS" in os.environ and "PMI_SIZE" in os.environ:
        return MPICH
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return OPEN_MPI
    return "srun" if "SLURM_STEP_NUM_TASKS" in os.environ else None


def _is_from_pip(vendor):
    program = PROGRAMS.get(vendor)
    folder = os.path.dirname(sys.executable)
    return program is not None and os.path.exists(os.path.join(folder, program))
