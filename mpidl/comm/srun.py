"""Find the option --mpi of srun with which an MPI library starts as one job."""

import subprocess

SECONDS = 10  # limit of srun --mpi=list, which only reads the files of Slurm
# {start of the library's version string: types that it works with, the best one first}
TYPES = {"MPICH": ("pmi2", "pmix"), "Open MPI": ("pmix",), "Intel": ("pmi2",), "MVAPICH": ("pmi2",)}


def offered_types() -> list[str]:
    """Return the values of --mpi that this Slurm offers; an empty list if srun does not say."""
    try:
        listing = subprocess.run(
            ["srun", "--mpi=list"], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_types(listing.stdout + listing.stderr)


def parse_types(listing: str) -> list[str]:
    """Return the types in the output of `srun --mpi=list`.

    The output is a heading and one type per line, which older versions start with "srun: ". A line
    about the versions of a plugin may follow; its types are the words after the colon.
    """
    lines = [line.removeprefix("srun:") for line in listing.splitlines()]
    words = [line.rpartition(":")[2].replace(",", " ").split() for line in lines[1:]]
    return [word for line in words for word in line]


def advice(library: str) -> str:
    """Return the command to use instead, for an error message.

    Parameters
    ----------
    library : str
        First line of the version string of the MPI library.

    Returns
    -------
    str
        Such as "srun --mpi=pmi2 (srun --mpi=list: none, pmi2)".
    """
    offered = offered_types()
    listing = f" (srun --mpi=list: {', '.join(offered)})" if offered else ""
    suitable_types = next((types for name, types in TYPES.items() if library.startswith(name)), ())
    for kind in suitable_types:
        if kind in offered or not offered:
            return f"srun --mpi={kind}{listing}"
    return f"srun with the --mpi that works with {library}{listing}, or its mpirun"
