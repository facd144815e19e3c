"""Build the command line and the environment for starting ranks."""

import os
import shutil
import sys

from mpidl.errors import UserError
from mpidl.side_process import LAUNCHERS


def launcher(ranks: int, uses_srun: bool = False) -> list[str]:
    """Return the command line that starts a number of ranks.

    The command is the mpirun in the folder of this Python interpreter or, if there is none, the
    first mpirun on PATH. If `uses_srun` is true, the command is srun, and the ranks fill one node
    of the allocation after another.

    Raises
    ------
    UserError
        If the command is not found.
    """
    if uses_srun:
        return _srun(ranks)
    mpirun = os.path.join(os.path.dirname(sys.executable), "mpirun")
    path = mpirun if os.access(mpirun, os.X_OK) else shutil.which("mpirun")
    if path is None:
        raise UserError("no mpirun next to this Python or on PATH: run/install installs one")
    return [path, "-n", str(ranks)]


def _srun(ranks):
    srun = shutil.which("srun")
    if srun is None:
        raise UserError("--srun: expected srun on PATH, found none")
    words = [srun, "-K", f"--ntasks={ranks}"]
    per_node = _slurm_ranks_per_node()
    if per_node:
        words += [f"--nodes={-(-ranks // per_node)}", f"--ntasks-per-node={min(ranks, per_node)}"]
    if os.environ.get("SLURM_CPUS_PER_TASK"):
        words.append(f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}")
    if os.environ.get("MPIDL_SRUN_MPI"):
        words.append(f"--mpi={os.environ['MPIDL_SRUN_MPI']}")
    return words


def _slurm_ranks_per_node():
    """Return the number of tasks per node of the Slurm allocation; 0 without an allocation."""
    text = os.environ.get("SLURM_NTASKS_PER_NODE", "")
    if text.isdigit():
        return int(text)
    tasks, nodes = (os.environ.get(f"SLURM_{name}", "") for name in ("NTASKS", "NNODES"))
    return -(-int(tasks) // int(nodes)) if tasks.isdigit() and nodes.isdigit() else 0


def environment() -> dict[str, str]:
    """Return a copy of this process's environment variables for the ranks that it starts.

    The variables of MPI launchers are removed, and Open MPI is allowed to start more ranks than
    cores and to run as root. The folder of this Python interpreter comes first on PATH, because
    mpirun might otherwise start another interpreter.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    variables["PATH"] = os.path.dirname(sys.executable) + os.pathsep + variables.get("PATH", "")
    variables |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return variables
