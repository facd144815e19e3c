"""Refuse launchers whose ranks MPI does not connect, and name the right launcher.

The ranks of an unsuitable launcher are jobs of one rank each, or MPI_Init fails or hangs.
"""

from __future__ import annotations

import os
import subprocess
import sys

from mpidl.errors import UserError
from mpidl.ranks import failure

MPICH, OPEN_MPI = "MPICH", "Open MPI"
# For each MPI library from pip: a program in the folder of the Python interpreter that identifies
# the library, and the environment variables of launchers that can start its ranks.
PROGRAMS = {MPICH: "mpiexec.hydra", OPEN_MPI: "prterun"}
INTERFACES = {MPICH: ("PMI_FD", "PMI_PORT"), OPEN_MPI: ("PMIX_NAMESPACE",)}
LIST_SECONDS = 10  # time limit for `srun --mpi=list`, which only reads Slurm's files
# {start of the library's version string: values of --mpi that work, the best value first}
SRUN_TYPES = {
    "MPICH": ("pmi2", "pmix"),
    "Open MPI": ("pmix",),
    "Intel": ("pmi2",),
    "MVAPICH": ("pmi2",),
}


def refuse(vendor: str) -> None:
    """Raise UserError if the launcher of this process cannot start ranks of an MPI library.

    This function is called before MPI_Init, and refuses only launchers that are known to fail.
    `refuse_single_ranks` detects other launchers after MPI_Init.

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
    summary, launcher = _summary(*started), _launcher()
    if (vendor, launcher) in ((OPEN_MPI, MPICH), (MPICH, OPEN_MPI)):
        raise UserError(
            f"{summary} with mpirun of {launcher}, but mpi4py uses {vendor}; start the ranks with "
            f"{right_mpirun(vendor)}"
        )
    if launcher == "srun" and _is_from_pip(vendor):
        if not any(name in os.environ for name in INTERFACES[vendor]):
            # Only rank 0 prints the advice. Other ranks avoid running srun.
            advice = srun_advice(vendor) if failure.launched_rank() == 0 else "another --mpi"
            raise UserError(f"{summary}: this srun cannot start {vendor}; expected {advice}")


def refuse_single_ranks(size: int, library: str) -> None:
    """Raise UserError if MPI sees one rank although the launcher started several.

    This happens with the `mpirun` of another MPI library, which starts N jobs of one rank instead
    of one job of N ranks. `size` is the number of ranks that MPI sees, and `library` the version
    string of the MPI library.
    """
    started = failure.launched_ranks()
    if size != 1 or started is None:
        return
    library = library.split(",")[0].splitlines()[0].strip()
    expected = f"the launcher of {library}, such as {_beside_python('mpirun')}"
    if started[0] == "SLURM_STEP_NUM_TASKS" and failure.launched_rank() == 0:  # only rank 0 prints
        expected = srun_advice(library)
    raise UserError(f"{_summary(*started)}, but MPI sees one rank: expected {expected}")


def _summary(variable, tasks):
    return f"the launcher started {tasks} tasks ({variable}={tasks})"


def _beside_python(program):
    return os.path.join(os.path.dirname(sys.executable), program)


def right_mpirun(vendor: str) -> str:
    """Return the mpirun of an MPI library: its path in the folder of Python, or a description."""
    return _beside_python("mpirun") if _is_from_pip(vendor) else f"the mpirun of {vendor}"


def _launcher():
    """Return the launcher that set this process's variables: MPICH, OPEN_MPI, "srun" or None."""
    if "MPI_LOCALNRANKS" in os.environ and "PMI_SIZE" in os.environ:
        return MPICH
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return OPEN_MPI
    return "srun" if "SLURM_STEP_NUM_TASKS" in os.environ else None


def _is_from_pip(vendor):
    return vendor in PROGRAMS and os.path.exists(_beside_python(PROGRAMS[vendor]))


def offered_srun_types() -> list[str]:
    """Return the values of --mpi that this Slurm offers; an empty list if they are unknown."""
    try:
        listing = subprocess.run(
            ["srun", "--mpi=list"],
            capture_output=True,
            text=True,
            timeout=LIST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_srun_types(listing.stdout + listing.stderr)


def parse_srun_types(listing: str) -> list[str]:
    """Return the values of --mpi that the output of `srun --mpi=list` contains.

    The output consists of a heading and one value per line. In older versions, each line starts
    with "srun: ". A line about the versions of a plugin may follow; the words after its colon are
    also values.
    """
    lines = [line.removeprefix("srun:") for line in listing.splitlines()]
    words = [line.rpartition(":")[2].replace(",", " ").split() for line in lines[1:]]
    return [word for line in words for word in line]


def srun_advice(library: str) -> str:
    """Return the recommended srun command for an MPI library, for an error message.

    Parameters
    ----------
    library : str
        First line of the version string of the MPI library.

    Returns
    -------
    str
        The command, such as "srun --mpi=pmi2 (srun --mpi=list: none, pmi2)".
    """
    offered = offered_srun_types()
    listing = f" (srun --mpi=list: {', '.join(offered)})" if offered else ""
    suitable_types = next(
        (types for name, types in SRUN_TYPES.items() if library.startswith(name)), ()
    )
    for kind in suitable_types:
        if kind in offered or not offered:
            return f"srun --mpi={kind}{listing}"
    return f"srun with a value of --mpi that works with {library}{listing}, or its mpirun"
