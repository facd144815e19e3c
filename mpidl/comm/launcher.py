"""Build the command line and the environment with which a process starts ranks."""

import os
import shutil
import sys

from mpidl.errors import UserError

LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "PMI2_", "OMPI_", "PRTE_", "MPI_", "HYDRA_", "HYDI_")


def launcher(ranks: int) -> list[str]:
    """Return the command line that starts this many ranks.

    The command is the mpirun in the folder of this Python, or else the first one on PATH.

    Raises
    ------
    UserError
        If no mpirun is found.
    """
    mpirun = os.path.join(os.path.dirname(sys.executable), "mpirun")
    path = mpirun if os.access(mpirun, os.X_OK) else shutil.which("mpirun")
    if path is None:
        raise UserError("no mpirun beside this Python or on PATH: run/install installs one")
    return [path, "-n", str(ranks)]


def environment() -> dict[str, str]:
    """Return a copy of this process's environment for the ranks that it starts.

    Variables of MPI launchers are removed, and Open MPI is allowed to start more ranks than cores
    and to run as root. The folder of this Python comes first on PATH, because mpirun would
    otherwise start another Python.
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
