"""Refuse the launcher of another MPI before MPI_Init, which may fail or hang under it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from mpidl.comm import failure
from mpidl.errors import UserError

MPICH, OPEN_MPI = "MPICH", "Open MPI"
# A program of the MPI from pip, in the folder of its Python, and its value of srun's option --mpi.
PROGRAMS = {MPICH: "mpiexec.hydra", OPEN_MPI: "prterun"}
SLURM_PLUGINS = {MPICH: "pmi2", OPEN_MPI: "pmix"}


def refuse(vendor: str) -> None:
    """Raise UserError if the launcher of this process cannot start ranks of this MPI.

    Only launchers that are known not to work are refused. `failure.refuse_foreign_launcher` finds
    others after MPI_Init.

    Parameters
    ----------
    vendor : str
        The MPI library, as in `mpi4py.MPI.get_vendor`.

    Raises
    ------
    UserError
        If several ranks were started by the launcher of another MPI, or by an srun whose option
        --mpi does not fit.
    """
    started = failure.launched_ranks()
    if started is None:
        return
    variable, tasks = started
    launcher = _launcher()
    found = f"the launcher started {tasks} tasks ({variable}={tasks})"
    if (vendor, launcher) in ((OPEN_MPI, MPICH), (MPICH, OPEN_MPI)):
        raise UserError(
            f"{found}: mpirun of {launcher}, but mpi4py uses {vendor}; start the ranks with "
            f"{right_mpirun(vendor)}"
        )
    if launcher == "srun" and _is_from_pip(vendor) and not _has_interface(vendor):
        raise UserError(f"{found}: srun without the interface of {vendor}; {_right_srun(vendor)}")


def right_mpirun(vendor: str) -> str:
    """Return the mpirun of an MPI library: that of this Python if it belongs to this library."""
    folder = os.path.dirname(sys.executable)
    if _is_from_pip(vendor):
        return os.path.join(folder, "mpirun")
    return f"the mpirun of {vendor}"


def slurm_plugins() -> list[str]:
    """Return what `srun --mpi=list` offers, or [] if it cannot be run."""
    try:
        result = subprocess.run(
            ["srun", "--mpi=list"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = (result.stdout + result.stderr).splitlines()
    words = (re.fullmatch(r"(?:srun:)?\s*([a-z]\w*)", line) for line in lines)
    return sorted({word[1] for word in words if word})


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


def _has_interface(vendor):
    """Return whether srun offers an interface through which this MPI can start."""
    names = ("PMI_FD", "PMI_PORT", "PMIX_NAMESPACE") if vendor == MPICH else ("PMIX_NAMESPACE",)
    return any(name in os.environ for name in names)


def _right_srun(vendor):
    plugin = SLURM_PLUGINS[vendor]
    offered = slurm_plugins() if failure.launched_rank() == 0 else []
    if offered and not any(name.startswith(plugin) for name in offered):
        return (
            f"this Slurm offers no {plugin} (srun --mpi=list: {', '.join(offered)}): start the "
            f"ranks with {right_mpirun(vendor)} inside the allocation"
        )
    return f"start the ranks with srun --mpi={plugin}"
