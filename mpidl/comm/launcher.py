"""The command line and the environment that start ranks from a process that is not a rank."""

import os
import shutil
import sys

from mpidl.errors import UserError

LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "PMI2_", "OMPI_", "PRTE_", "MPI_", "HYDRA_", "HYDI_")


def launcher(ranks: int) -> list[str]:
    """Return the command line that starts this many ranks.

    It runs the mpirun beside this Python, or else the first one on PATH.

    Raises
    ------
    UserError
        If there is no mpirun.
    """
    mpirun = os.path.join(os.path.dirname(sys.executable), "mpirun")
    path = mpirun if os.access(mpirun, os.X_OK) else shutil.which("mpirun")
    if path is None:
        raise UserError("no mpirun beside this Python or on PATH: run/install puts one there")
    return [path, "-n", str(ranks)]


def environment() -> dict[str, str]:
    """Return this process's environment for ranks that it starts.

    It lacks the variables of an MPI launcher and allows more ranks than cores. This Python comes
    first on PATH; otherwise mpirun would start another one.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    variables["PATH"] = os.path.dirname(sys.executable) + os.pathsep + variables.get("PATH", "")
    variables |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return variables
