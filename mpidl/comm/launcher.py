"""The command line and the environment that start ranks from a process that is none."""

import os
import shutil
import sys

from mpidl.errors import UserError

LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "PMI2_", "OMPI_", "PRTE_", "MPI_", "HYDRA_", "HYDI_")


def launcher(ranks):
    """The command line that starts so many ranks: the mpirun beside this Python, else on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    found = beside if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if found is None:
        raise UserError("no mpirun beside this Python or on PATH: run/install puts one there")
    return [found, "-n", str(ranks)]


def environment():
    """This process's environment without an MPI launcher's variables, more ranks than cores
    allowed, and this Python first on PATH (mpirun would start another one)."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    kept["PATH"] = os.path.dirname(sys.executable) + os.pathsep + kept.get("PATH", "")
    kept |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return kept
