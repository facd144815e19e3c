"""Find the value of srun's option --mpi with which the ranks of an MPI library form one job."""

import subprocess

SECONDS = 10  # time limit for `srun --mpi=list`, which only reads Slurm's files
# {start of the library's version string: values of --mpi that work, the best value first}
TYPES = {"MPICH": ("pmi2", "pmix"), "Open MPI": ("pmix",), "Intel": ("pmi2",), "MVAPICH": ("pmi2",)}


def offered_types() -> list[str]:
    """Return the values of --mpi that this Slurm offers; an empty list if they are unknown."""
    try:
        listing = subprocess.run(
            ["srun", "--mpi=list"], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_types(listing.stdout + listing.stderr)


def parse_types(listing: str) -> list[str]:
    """Return the values of --mpi that the output of `srun --mpi=list` contains.

    The output consists of a heading and one value per line. In older versions, each line starts
    with "srun: ". A line about the versions of a plugin may follow; the words after its colon are
    also values.
    """
    lines = [line.removeprefix("srun:") for line in listing.splitlines()]
    words = [line.rpartition(":")[2].replace(",", " ").split() for line in lines[1:]]
    return [word for line in words for word in line]


def advice(library: str) -> str:
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
    offered = offered_types()
    listing = f" (srun --mpi=list: {', '.join(offered)})" if offered else ""
    suitable_types = next((types for name, types in TYPES.items() if library.startswith(name)), ())
    for kind in suitable_types:
        if kind in offered or not offered:
            return f"srun --mpi={kind}{listing}"
    return f"srun with a value of --mpi that works with {library}{listing}, or its mpirun"
